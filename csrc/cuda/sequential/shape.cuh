// The shapes of blocks that scan sequentially: a lane has one channel and few states and takes one step
// after the other, while producer warps of its block load and convert what it needs and store what it
// found, windows of time ahead and behind.
//
// Of a warp that scans, every four neighbouring lanes share a channel and have different states:
// then the sum over states, with C, is what a tensor core computes of the states of eight steps.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../common/tile_stream.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

constexpr int kStride = 8;  // steps that are loaded, and summed over states, together

// `States`: of a lane, 1 or 2. `Warps`: those with different channels, eight each. `Stages`: windows in
// shared memory. `Groups`, of `ProducerWarps` warps each, load and store rows, one window in turn each:
// the more there are, the longer may a window take them. `MinBlocks`: per multiprocessor, a bound on
// registers. `Strides`: of how many a lane of the causal forward scan has the inputs at once. `Straight`: whole
// windows are one piece of code, in which strides interleave. That is for so few rows that a scheduler has few
// warps, or one; it takes registers.
template <int States, int Warps, int Stages, int Groups, int ProducerWarps, int MinBlocks,
          int Strides, bool Straight = false>
struct SequentialShape {
  static constexpr bool sequential = true, straight = Straight;
  static constexpr int states = States, min_blocks = MinBlocks, strides = Strides;
  static constexpr int stages = Stages, groups = Groups;
  static constexpr int parts = kStateTile / (4 * States);  // of the states; a warp has one
  static constexpr int channels = 8 * Warps, window = kChunk;
  static constexpr int threads = 32 * ProducerWarps;         // of a group
  static constexpr int producer_threads = Groups * threads;  // they come first
  static constexpr int scan_threads = 32 * parts * Warps;
  static constexpr int all_threads = producer_threads + scan_threads;
  static_assert(Stages % Groups == 0, "each stage has its group");
  static_assert(window % (kStride * Strides) == 0, "strides end with the window");
  static_assert(!Straight || (States == 1 && Strides <= 2),
                "what interleaved strides are written for");

  static constexpr bool mixed = false;
  static constexpr int entries_of_C = States;  // that a lane needs of a stride

  // What a warp does. Those that load and store rows come first.
  static __device__ __forceinline__ bool is_producer() { return threadIdx.x < producer_threads; }
  static __device__ __forceinline__ bool is_idle() { return false; }
  static __device__ __forceinline__ int group() { return int(threadIdx.x / threads); }
  static __device__ __forceinline__ int scan_thread() {
    return int(threadIdx.x) - producer_threads;
  }
};

// For blocks that have a multiprocessor each: six channels, with three warps that scan. Every fourth warp of
// a block is on the same scheduler. Three schedulers have one each that scans and, beside it, warps that do
// nothing; the fourth has all that load and store rows. Of the 16 states there are four parts, but three warps,
// with eight channels' lanes each (`mixed`):
//
//   row_of_warp   channel        part
//   0 to 5        all six        0, 1 or 2: the warp's own
//   6 and 7       two of six     3
//
// Three stages for three groups of one producer warp.
template <int Strides>
struct SixChannelShape : SequentialShape<1, 1, 3, 3, 1, 1, Strides, true> {
  static constexpr int schedulers = 4, scanning = 3, channels = 6;
  static constexpr int scan_threads = 32 * scanning, all_threads = 32 * schedulers * 3;
  static constexpr bool mixed = true;
  static constexpr int entries_of_C = 2;  // one for each half of a stride: see OutputSums

  static __device__ __forceinline__ int warp() { return int(threadIdx.x / 32); }
  static __device__ __forceinline__ bool is_producer() { return warp() % schedulers == scanning; }
  static __device__ __forceinline__ bool is_idle() { return warp() > scanning && !is_producer(); }
  static __device__ __forceinline__ int group() { return warp() / schedulers; }
  static __device__ __forceinline__ int scan_thread() { return int(threadIdx.x); }
};

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
