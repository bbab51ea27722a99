// What kernels know of tensors when they are compiled, and which entries of a tile a thread has.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include "tile.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// What is known of u, delta, z, B, C and their gradients when a kernel is compiled. `any`: nothing;
// every stride and dtype is looked up, B and C may be constant in time, there may be many states.
// Else: real, B and C vary in time, no more than kStateTile states, all contiguous in time and of
// one dtype, of 16 bits or of 32.
enum class Layout { any, half, single };

constexpr __host__ __device__ int item_of(Layout layout) { return layout == Layout::half ? 2 : 4; }
constexpr __host__ __device__ Accuracy accuracy_of(Layout layout) {
  return layout == Layout::half ? Accuracy::half : Accuracy::full;
}

// What the conversions of such a dtype need to know. With Layout::any they look it up.
template <bool Bfloat, bool Reversed>
struct FormatOf {
  static constexpr bool bfloat = Bfloat, reversed = Reversed;
};
using Unknown = FormatOf<false, false>;

// Calls f with the format, as a constant.
template <Layout layout, class F>
__device__ __forceinline__ void specialize(Storage storage, bool reverse, const F& f) {
  if constexpr (layout == Layout::any) {
    f(Unknown());
  } else if (layout == Layout::half && storage == Storage::bfloat16) {
    if (reverse) f(FormatOf<true, true>());
    else f(FormatOf<true, false>());
  } else {
    if (reverse) f(FormatOf<false, true>());
    else f(FormatOf<false, false>());
  }
}

// How a tile is loaded: all of it, which lies in the tensor; by slots that are aligned and lie in the
// tensor or outside; all of it by slots that begin anywhere, as a Stream that is not `Shifted` loads
// apart; or each entry for itself.
enum class Loads { whole, aligned, shifted, apart };

// Which entries (row, step) of a tile a thread loads, converts and stores: `count` times `width`
// neighbours in time, which are quads, or with `any` single entries.
// Neighbouring threads are neighbours in time too, or with `any`, if rows are nearer in memory,
// neighbours in rows.
// Of small tiles only the first threads have any, the others rows that are not there.
template <int Rows, class Shape, Layout layout>
struct Slots {
  static constexpr int all = Rows * Shape::window;
  static constexpr int threads =
      layout != Layout::any && all < Shape::threads * kQuad ? all / kQuad : Shape::threads;
  static constexpr int entries = all / threads;
  static constexpr int width = layout == Layout::any ? 1 : kQuad;
  static constexpr int count = entries / width, per_row = Shape::window / width;
  static_assert(entries >= width && threads % per_row == 0, "uneven tiles");
  int thread;  // of those that share the tile
  bool along_rows, reverse;

  __device__ __forceinline__ Slots(const View& v, const Work& work)
      : thread(threadIdx.x % Shape::threads), along_rows(layout == Layout::any && v.row < v.last),
        reverse(work.reverse) {}
  __device__ __forceinline__ bool has_any() const {
    return threads == Shape::threads || thread < threads;
  }
  __device__ __forceinline__ int row(int k) const {
    if (along_rows) return (thread + k * Shape::threads) % Rows;
    return thread / per_row + k * Shape::threads / per_row;
  }
  __device__ __forceinline__ int step(int k) const {
    if (along_rows) return (thread + k * Shape::threads) / Rows;
    return thread % per_row * width;
  }
  // Bytes from one step to the next.
  __device__ __forceinline__ int64_t to_step(const View& v) const {
    const int64_t step = layout == Layout::any ? v.last : item_of(layout);
    return reverse ? -step : step;
  }
};

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
