// How a scan of few rows and many steps is split in time, so that all multiprocessors have work: each split has blocks of
// its own.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "shape.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// For blocks that have but a split.
template <class Whole>
struct SplitShape : Whole {};
template <class Shape>
constexpr bool is_split = false;
template <class Whole>
constexpr bool is_split<SplitShape<Whole>> = true;

// Every split but the last one has so many steps, or a multiple of it.
constexpr int kSplitUnit = 256;

// The channels and the steps of a block that has a split; all blocks of a split are neighbours.
template <class Shape>
__device__ __forceinline__ Work work_of_split(const ScanArguments& scan, const Splits& splits) {
  const uint32_t sets = (scan.channels + Shape::channels - 1) / Shape::channels;
  const uint32_t blocks = uint32_t(scan.batch * scan.groups) * sets;
  const uint32_t block = blockIdx.x % blocks;
  Work work(scan, block / sets, Shape::window);
  work.set_channels(scan, block % sets * Shape::channels, Shape::channels);
  work.split = blockIdx.x / blocks;
  const int64_t first = work.split * splits.chunks * kChunk, left = scan.steps - first;
  work.steps = left < splits.chunks * kChunk ? left : splits.chunks * kChunk;
  work.windows = (work.steps + Shape::window - 1) / Shape::window;
  work.offset = (work.reverse ? left - work.steps : first) * item_of(Layout::half);
  return work;
}

// What is left of a state after steps of that sum. By two factors, because e^z may be infinite where its product with
// the state is not; and nothing where either is 0, or what overflowed would be NaN.
__device__ __forceinline__ float decayed(float x, float sum, float a) {
  const float root = exp_of_product(0.5f * sum, a);
  return x == 0.0f || root == 0.0f ? 0.0f : x * root * root;
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
