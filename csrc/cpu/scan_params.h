// The plain structs between the operators (which know tensors) and the kernels (which do not).
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdint.h>

namespace vim_mm {

// One row of the scan: one batch entry b, one channel d, all N states, all L steps.
// S is the real scalar, E the state's element: S, or a complex of S. Rows are contiguous in time;
// states are padded with zeros to `states`, a multiple of the lane count.
template <class S, class E>
struct ScanRow {
  int64_t steps;          // L
  int64_t given, states;  // N, and N padded
  int method;
  bool reverse;  // scan from the last step to the first
  const S* dt;   // [L], after bias and softplus
  const S* u;    // [L]
  const E* a;    // [N]
  const E* B;    // [L, N], or [N] with step_B = 0
  const E* C;    // likewise
  int64_t step_B, step_C;
  const E* initial_state;  // [N], before the first step in scan order, or null for 0
};

template <class S, class E>
struct ScanRowOutput {
  S* y;           // [L]
  E* last_state;  // [N], or null
};

// Gradients are added to what is there, but for last_state's, which is an input, and initial_state's.
template <class S, class E>
struct ScanRowGradient {
  const S* y;           // [L], incoming
  const E* last_state;  // [N], incoming, or null
  S* recomputed_y;      // [L], or null where the caller has no use for y
  S* dt;                // [L]
  S* u;                 // [L]
  E* a;                 // [N]
  E* B;                 // [L, N], or [N] where step_B = 0
  E* C;
  E* initial_state;  // [N], or null
};

// The kernels of one instruction set for one element type.
template <class S, class E>
struct ScanKernels {
  int lanes;  // states are padded to a multiple of this
  int64_t (*scratch_bytes)(int64_t steps, int64_t states);
  void (*forward)(const ScanRow<S, E>&, const ScanRowOutput<S, E>&, void* scratch);
  void (*backward)(const ScanRow<S, E>&, const ScanRowGradient<S, E>&, void* scratch);
  // n elements of dt and a -> a_bar, beta, and their derivatives by dt and by a.
  void (*discretize)(int64_t n, int method, const S* dt, const E* a, E* const out[6]);
};

// Elementwise work on rows, n a multiple of `padding`.
template <class S>
struct ElementwiseKernels {
  void (*softplus)(int64_t n, const S* x, S* out);
  void (*sigmoid)(int64_t n, const S* x, S* out);
};

constexpr int64_t kRowPadding = 16;  // rows of scratch are padded to a multiple of this many

}  // namespace vim_mm
