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
// The operators of the fast block (CUDA only) know K directions, in front, and P sets of parameters:
// K of them, or 1 that the directions share. Channels are rows, [K, H, B, L] or flat [K, H, B L],
// contiguous but where it says otherwise; R is the rank of the step sizes, W the number of taps.
// What a block saves is float32, float16 or bfloat16, one dtype for all; parameters any float.
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

  // normed = rms_norm(sum) in `dtype`, sum = residual + update in residual's dtype; without an update
  // the sum is empty, and is residual. [.., C], contiguous; rstd [..] is 1 / rms, float32.
  m.def(
      "add_rms_norm_fwd(Tensor residual, Tensor? update, Tensor weight, float eps, "
      "ScalarType dtype) -> (Tensor normed, Tensor sum, Tensor rstd)");
  // The gradient of update is that of residual in update's dtype; empty where that is not given.
  m.def(
      "add_rms_norm_bwd(Tensor grad_normed, Tensor? grad_sum, Tensor sum, Tensor rstd, "
      "Tensor weight, ScalarType? update_dtype) "
      "-> (Tensor grad_residual, Tensor grad_update, Tensor grad_weight)");
  // in_proj [E, C] and out_proj as they are, x_proj [P, R + 2N, H] and dt_proj [P, H, R] stacked, all
  // in `dtype`; A [K, H, N] = -exp(A_log), D [P, H] and dt_bias [P, H] stacked, in float32.
  m.def(
      "pack_parameters(Tensor in_proj, Tensor out_proj, Tensor[] x_proj, Tensor[] dt_proj, "
      "Tensor[] A_log, Tensor[] D, Tensor[] dt_bias, ScalarType dtype) -> (Tensor in_proj, "
      "Tensor out_proj, Tensor x_proj, Tensor dt_proj, Tensor A, Tensor D, Tensor dt_bias)");
  // u [P, H, B, L] = silu(conv1d(x)), x [H, B, L] with any stride of H; P weights [H, 1, W], W <= 8,
  // P biases [H] or none, P flags.
  m.def("conv1d_silu_fwd(Tensor x, Tensor[] weight, Tensor[] bias, int[] reverse) -> Tensor u");
  // Of all directions: grad_x like x, grad_weight [P, H, W] and grad_bias [P, H] in float32.
  m.def(
      "conv1d_silu_bwd(Tensor grad_u, Tensor x, Tensor[] weight, Tensor[] bias, int[] reverse, "
      "Tensor(a!) grad_x) -> (Tensor grad_weight, Tensor grad_bias)");
  // The scan of all directions: u [P, H, B, L], delta [P, H, B L], dt_B_C [P, R + 2N, B L], of which
  // it reads B and C, A [K, H, N], D and dt_bias [P, H]; y [K, H, B, L], edges flat.
  m.def(
      "directional_scan_fwd(Tensor u, Tensor delta, Tensor dt_B_C, Tensor A, Tensor D, "
      "Tensor dt_bias, int method, int[] reverse) -> (Tensor y, Tensor edges)");
  // grad_y [H, B, L] as gate_bwd gives it. All gradients are per direction, K in front; those of B and
  // C go to the last rows of grad_dt_B_C [K, R + 2N, B L].
  m.def(
      "directional_scan_bwd(Tensor grad_y, Tensor edges, Tensor u, Tensor delta, Tensor dt_B_C, "
      "Tensor A, Tensor D, Tensor dt_bias, int method, int[] reverse, Tensor(a!) grad_dt_B_C) "
      "-> (Tensor grad_u, Tensor grad_delta, Tensor grad_A, Tensor grad_D, Tensor grad_dt_bias)");
  // out = silu(z) * sum, [H, B, L], sum = scale times that of y over directions, [H, B, L], which is
  // empty unless it is to be kept.
  m.def(
      "gate_fwd(Tensor y, Tensor z, float scale, bool keep_sum) -> (Tensor out, Tensor sum)");
  // grad_y [H, B, L] is that of every direction. Gives out once more: cheaper to compute than to keep.
  m.def(
      "gate_bwd(Tensor grad_out, Tensor sum, Tensor z, float scale, Tensor(a!) grad_z) "
      "-> (Tensor grad_y, Tensor out)");
}

// Importing the module is loading the library; it has nothing of its own.
PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
