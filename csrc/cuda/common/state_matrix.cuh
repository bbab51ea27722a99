// B and C for scans by segments: tiles of states in shared memory, or constants.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tile_stream.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// A segment of B or C.
template <class E, Layout layout>
struct SegmentOf {
  const E* p;  // with `any` null: constant
  E value;

  __device__ __forceinline__ void quad(int first, E (&out)[kQuad]) const {
    if (layout != Layout::any || p) {
      load_quad(p + first, out);
    } else {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) out[i] = value;
    }
  }
  template <int Steps>
  __device__ __forceinline__ void load(E (&out)[Steps]) const {
#pragma unroll
    for (int first = 0; first < Steps; first += kQuad)
      quad(first, reinterpret_cast<E(&)[kQuad]>(out[first]));
  }
};

// B or C as a stream of state tiles; with `any` it may be constant in time: then each lane reads
// the constant of its channel.
template <class E, class Shape, Layout layout>
class StateMatrix {
 public:
  using Memory = StateTile<E, Shape>;

  __device__ __forceinline__ StateMatrix(const View& v, bool constant, const Work& work)
      : view_(v), slots_(v, work), constant_(layout == Layout::any && constant) {}
  __device__ __forceinline__ bool constant() const { return layout == Layout::any && constant_; }

  __device__ __forceinline__ void begin(const Work& work, int64_t window) {
    if (constant()) return;
    const char* const base = view_.data + work.b * view_.batch + work.g * view_.group + work.offset;
    stream_.begin(view_, base, slots_, work, window);
  }
  __device__ __forceinline__ void next(int windows) {
    if (!constant()) stream_.next(windows * Shape::window * slots_.to_step(view_));
  }
  // Starts the loads of all states in all steps of the window at hand, aligned.
  __device__ __forceinline__ void load_whole() {
    stream_.template load<Loads::whole>(view_, slots_, kStateTile, Shape::window);
  }
  // Starts the loads of states [first, first + kStateTile) of the window at hand, which has so many
  // steps.
  __device__ __forceinline__ void load(int first, int states, int steps) {
    if (!constant())
      stream_.template load<Loads::apart>(view_, slots_, states - first, steps, first * view_.row);
  }
  template <class Format>
  __device__ __forceinline__ void commit(Memory& to) const {
    if (constant()) return;
#pragma unroll
    for (int k = 0; k < Places::count; ++k) {
      E values[Places::width];
      stream_.template values<Format>(view_, k, values);
      if (slots_.has_any()) put(to, slots_, k, values);
    }
  }
  // State n, which is so far in its tile, in the segment of a lane.
  __device__ __forceinline__ SegmentOf<E, layout> segment(const Memory& tile, const Work& work,
                                                          int channel, int segment, int in_tile,
                                                          int n) const {
    if (!constant()) return {tile.segment(in_tile, segment), E(0.0f)};
    if (channel >= work.channels) return {nullptr, E(0.0f)};
    return {nullptr,
            load_element<E>(work.at(view_) + channel * view_.row + n * view_.last, view_.storage)};
  }

 private:
  using Places = Slots<kStateTile, Shape, layout>;
  const View& view_;
  const Places slots_;
  const bool constant_;
  Stream<E, kStateTile, Shape, layout> stream_;
};

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
