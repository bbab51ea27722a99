// What a lane of a sequential scan has: its channel, its states, and how it moves them on.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "window.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// Which channel and states a lane has that scans.
template <class Shape>
struct LaneMap {
  static constexpr int states = Shape::states, last_part = Shape::parts - 1;
  int row_of_warp, column, channel, part;
  int row, state_row;  // where its channel and its first state begin in a tile, in entries

  __device__ __forceinline__ LaneMap() {
    const int warp = Shape::scan_thread() / 32;
    row_of_warp = threadIdx.x % 32 / 4, column = threadIdx.x % 4;
    channel = warp / Shape::parts * 8 + row_of_warp, part = warp % Shape::parts;
    if constexpr (Shape::mixed) {
      const int beyond = row_of_warp - Shape::channels;
      if (beyond >= 0) channel = 2 * warp + beyond, part = last_part;
      // So that rows 4 and 5 of this warp read what 6 and 7 do: they would meet on banks.
      else if (warp == 0) channel = (row_of_warp + 2) % Shape::channels;
    }
    row = channel * kPitch, state_row = state(0) * kPitch;
    if constexpr (Shape::straight) settle(row), settle(state_row);
  }
  __device__ __forceinline__ int state(int m) const { return 4 * (part * states + m) + column; }
};

template <class Method, Layout layout>
using LaneRecurrence = typename Method::template Forward<accuracy_of(layout)>;

// A lane's states, and A.
template <class Shape>
struct LaneStates {
  static constexpr int count = Shape::states;
  const LaneMap<Shape>& lane;
  const int channels, states;
  float a[count], x[count];

  // `begin`: the states at first, or nothing.
  __device__ __forceinline__ LaneStates(const ScanArguments& scan, const Work& work,
                                        const LaneMap<Shape>& lane_, const View& begin)
      : lane(lane_), channels(work.channels), states(int(scan.states)) {
    const auto entry = [&](const View& v, int n) {
      if (!v.data || lane.channel >= channels || n >= states) return 0.0f;
      return load_real(work.at(v) + lane.channel * v.row + n * v.last, v.storage);
    };
#pragma unroll
    for (int m = 0; m < count; ++m)
      a[m] = entry(scan.A, lane.state(m)), x[m] = entry(begin, lane.state(m));
  }
  // Reads values of the same kind from a row of [.., N].
  __device__ __forceinline__ void load(const float* row, float (&values)[count]) const {
    if (lane.channel >= channels) return;
#pragma unroll
    for (int m = 0; m < count; ++m)
      if (lane.state(m) < states) values[m] = row[lane.state(m)];
  }
  // Writes them there.
  __device__ __forceinline__ void store(float* row) const { store(row, x); }
  __device__ __forceinline__ void store(float* row, const float (&values)[count]) const {
    if (lane.channel >= channels) return;
#pragma unroll
    for (int m = 0; m < count; ++m)
      if (lane.state(m) < states) row[lane.state(m)] = values[m];
  }
};

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
