// The operators of vim_mm: their schemas, all of them, and the module that loads them.
// Implementations register themselves beside their code (cpu/, cuda/); fake kernels and autograd
// are in vim_mm/ops/library.py.
//
// Letters: B batch, G groups (a group has its own B, C and scan direction), H channels of a
// group, L steps, N states.
//
//   u, delta, z       [B, G, H, L]   float32, float16, bfloat16 in any mix, or all float64
//   A                 [G, H, N]      real or complex
//   B, C              [B, G, N, L], or constant in time and batch [G, H, N]; complex with A
//   D, delta_bias     [G, H]
//   reverse           [G]            not 0: that group is scanned from the last step to the first
//   out               [B, G, H, L]   dtype of u
//   last_state        [B, G, H, N]   float32 or float64, or the complex type of that precision
//   edges             what backward takes of forward's states, as the backend likes it
//
// SPDX-License-Identifier: Apache-2.0
#include <Python.h>
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(vim_mm, m) {
  m.def(
      "selective_scan_fwd(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, "
      "Tensor? z, Tensor? delta_bias, bool delta_softplus, int method, int[] reverse) "
      "-> (Tensor out, Tensor last_state, Tensor edges)");
  // Gradients of all tensors above, in their order; an empty tensor where there is no input.
  m.def(
      "selective_scan_bwd(Tensor? grad_out, Tensor? grad_last_state, Tensor edges, Tensor u, "
      "Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, "
      "bool delta_softplus, int method, int[] reverse) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  // Elementwise on tensors of one shape: a_bar, beta, d a_bar/d dt, d a_bar/d a, d beta/d dt,
  // d beta/d a, stacked in front.
  m.def("discretize(Tensor delta, Tensor A, int method) -> Tensor");
  m.def("cpu_capability() -> str");
}

// Importing the module is loading the library; it has nothing of its own.
PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
