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
//   initial_state     [B, G, H, N]   as last_state: the state before the first step in scan order, else 0; of causal
//                                    methods alone
//   reset             [B, L]         bool: where true no state passes between steps t - 1 and t, in either direction
//   reverse           [G]            not 0: that group is scanned from the last step to the first
//   out               [B, G, H, L]   dtype of u
//   last_state        [B, G, H, N]   float32 or float64, or the complex type of that precision
//   edges             what backward takes of forward's states, as the backend likes it
//
// The operators of the fast block (CUDA only) have K directions, one scan each, and P sets of
// parameters: K of them, or 1 that the directions share. R is the rank of the step sizes, W the
// number of taps. Activations are float32, float16 or bfloat16, parameters any float, all contiguous.
//
// SPDX-License-Identifier: Apache-2.0
#include <Python.h>
#include <torch/csrc/stable/library.h>

#include <string>

#ifndef VIM_MM_CUDA_ARCHITECTURES
#define VIM_MM_CUDA_ARCHITECTURES ""
#endif

// std::shared_ptr asks glibc's variable of this name, which came with 2.32, whether it may count without
// atomics. It takes this hidden one instead, which says no: the binary runs with the glibc of PyTorch's wheels, 2.28.
extern "C" {
[[gnu::visibility("hidden")]] char __libc_single_threaded = 0;
}

namespace {

// Kept as bytes of the library, where the audit of a wheel reads it: of a short string a compiler
// makes an instruction.
[[gnu::used]] const char BUILD_INFO[] = "cuda=" VIM_MM_CUDA_ARCHITECTURES;

std::string build_info() { return BUILD_INFO; }

}  // namespace

STABLE_TORCH_LIBRARY(vim_mm, m) {
  m.def(
      "selective_scan_fwd(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, "
      "Tensor? z, Tensor? delta_bias, Tensor? initial_state, Tensor? reset, bool delta_softplus, "
      "int method, int[] reverse) -> (Tensor out, Tensor last_state, Tensor edges)");
  // Gradients of all tensors above but reset, in their order; an empty tensor where there is no input.
  m.def(
      "selective_scan_bwd(Tensor? grad_out, Tensor? grad_last_state, Tensor edges, Tensor u, "
      "Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, "
      "Tensor? initial_state, Tensor? reset, bool delta_softplus, int method, int[] reverse) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  // On CUDA, what forward and backward of such a scan run, a line for each kernel that a row of the table chooses:
  // the row (cuda/dispatch/configurations.cuh), the blocks, and what was measured for it.
  m.def(
      "selective_scan_kernels(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, "
      "Tensor? z, Tensor? delta_bias, Tensor? initial_state, Tensor? reset, bool delta_softplus, "
      "int method, int[] reverse) -> str");
  // Elementwise on tensors of one shape: a_bar, beta, d a_bar/d dt, d a_bar/d a, d beta/d dt,
  // d beta/d a, stacked in front.
  m.def("discretize(Tensor delta, Tensor A, int method) -> Tensor");
  m.def("cpu_capability() -> str");
  // What setup.py built: "cuda=8.0;9.0;12.0+PTX", the architectures as TORCH_CUDA_ARCH_LIST names them,
  // or "cuda=" for a library of the CPU alone.
  m.def("build_info() -> str");

  // normed = rms_norm(sum) in `dtype`, sum = residual + update in residual's dtype; without an update
  // the sum is empty, and is residual. residual and normed [.., C], residual and weight [C] float32 or
  // `dtype`, update `dtype`; rstd [..] is 1 / rms, float32.
  m.def(
      "add_rms_norm_fwd(Tensor residual, Tensor? update, Tensor weight, float eps, "
      "ScalarType dtype) -> (Tensor normed, Tensor sum, Tensor rstd)");
  // The gradient of update is that of residual in the dtype of grad_normed; empty if not asked for.
  m.def(
      "add_rms_norm_bwd(Tensor grad_normed, Tensor? grad_sum, Tensor sum, Tensor rstd, "
      "Tensor weight, bool with_update) "
      "-> (Tensor grad_residual, Tensor grad_update, Tensor grad_weight)");
  // The mixer of a block, of x or, with the weight of a norm, of rms_norm(sum), sum = x + update, as above
  // (x is residual then); `dtype` is that of activations. x, out [B, L, C]; parameters in this order, those
  // with a question mark may be missing: in_proj [2H, C], in_bias? [2H], out_proj [C, H], out_bias? [C]; P
  // times conv [H, 1, W], W <= 8, conv_bias? [H], x_proj [R + 2N, H], dt_proj [H, R], dt_bias [H], D [H]; K
  // times A_log [H, N]. A flag for each direction; their sum counts `scale`. Without an update the sum is
  // empty. If `keep`, `saved` is what backward needs, as bytes: the workspace "saved" of mixer_workspace.
  // Else it is empty. `reset` [B, L] as of a scan; convolutions have no taps across it either.
  m.def(
      "mixer_fwd(Tensor x, Tensor? update, Tensor? norm, float eps, ScalarType dtype, "
      "Tensor?[] parameters, int method, int[] reverse, float scale, bool keep, "
      "Tensor? reset=None) "
      "-> (Tensor out, Tensor sum, Tensor[] saved)");
  // Gradients of x, update, norm and all parameters, in their order; an empty tensor where there is none.
  // With a norm x is the sum. `sizes` are H, N, R and W; `types` has of each parameter its dtype as a number
  // of Storage (cuda/common/scan_arguments.h), -1 for none.
  m.def(
      "mixer_bwd(Tensor grad_out, Tensor? grad_sum, Tensor x, Tensor? norm, Tensor[] saved, "
      "int[] sizes, int[] types, bool with_update, int method, int[] reverse, float scale, "
      "Tensor? reset=None) -> Tensor[]");
  // Memory of a mixer for x [batch, steps, outer], which needs no GPU. `part`: "saved" by forward for backward,
  // or scratch memory of "forward" or "backward"; `sizes` and `types` as above. Of each buffer its name (separated by
  // spaces), where it begins, its bytes, and the number of the buffer in whose memory it lies, or -1. All are
  // one allocation in which each begins at a multiple of `alignment`; 0: each is an allocation of its own.
  m.def(
      "mixer_workspace(str part, int batch, int steps, int outer, int[] sizes, int[] types, "
      "ScalarType dtype, bool normed, int method, int directions) "
      "-> (int alignment, str names, int[] offsets, int[] bytes, int[] replaced)");
}

STABLE_TORCH_LIBRARY_IMPL(vim_mm, CompositeExplicitAutograd, m) {
  m.impl("build_info", TORCH_BOX(&build_info));
}

// Importing the module is loading the library; it has nothing of its own.
PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
