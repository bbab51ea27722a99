// The adjoint at the edges of chunks where time is split: every split is swept as if nothing entered it, side by side,
// and what enters decays on its way against time, by sums of step sizes, and is added to each edge.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../sequential/splits.cuh"
#include "segments.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// The first chunk of a block's split.
template <class Shape>
__device__ __forceinline__ int64_t first_chunk(const Work& work, const EdgesArguments& p) {
  return is_split<Shape> ? work.split * p.splits.chunks : 0;
}

constexpr int kEnterThreads = 256;

// A thread has a state of a row in a split, of all but the last one. What leaves each split is in `ends`.
template <class Method>
__global__ void __launch_bounds__(kEnterThreads)
    enter_splits_kernel(const __grid_constant__ EdgesArguments p) {
  static_assert(Method::exponential, "steps together have the sum of their sizes");
  const ScanArguments& scan = p.scan;
  let_next_begin();
  wait_for_previous();
  const int64_t states = scan.states, rows = scan.batch * scan.groups * scan.channels;
  const int64_t thread = int64_t(blockIdx.x) * kEnterThreads + threadIdx.x;
  const int64_t row = thread / states % rows, n = thread % states;
  const int split = int(thread / states / rows), last = int(p.splits.count) - 1;
  const int chunks = int(p.splits.chunks);
  if (split >= last) return;
  const int64_t h = row % scan.channels, g = row / scan.channels % scan.groups;
  const float a =
      load_real(scan.A.data + g * scan.A.group + h * scan.A.row + n * scan.A.last, scan.A.storage);
  const float* const sums = p.step_sums + row * p.chunks;
  const float* const ends = p.ends + row * p.splits.count * states + n;
  float entering = ends[last * states];
#pragma unroll 1
  for (int i = last - 1; i > split; --i) {
    float sum = 0.0f;
#pragma unroll 8
    for (int j = chunks - 1; j >= 0; --j) sum += sums[i * chunks + j];
    entering = decayed(entering, sum, a) + ends[i * states];
  }
  float* const edges =
      static_cast<float*>(p.edges) + (row * p.chunks + split * chunks) * states + n;
  float sum = 0.0f;
#pragma unroll 8
  for (int j = chunks - 1; j >= 0; --j) {
    edges[j * states] += decayed(entering, sum, a);
    sum += sums[split * chunks + j];
  }
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
