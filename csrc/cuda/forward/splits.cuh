// A forward scan of few rows and many steps, split in time so that all multiprocessors have work: each split has
// blocks of its own. A launch before the scan's finds with what state each split ends where zero enters, and the sum
// of its step sizes; from these a block of the scan has what enters its split.
//
// A block of that first launch goes against time, because then the weights of steps are known: e^z of the sum of all
// later step sizes. Each of its warps has a channel, each lane eight steps of a window and all states, so that no lane
// waits for another one. Of a state whose weight has become 0 the steps before are left out.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../common/dependent_launch.cuh"
#include "../common/state_matrix.cuh"
#include "../sequential/lane.cuh"
#include "../sequential/splits.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// What enters a block's split, from those before it in their order.
template <class Shape>
__device__ __forceinline__ void enter_split(const ForwardArguments& p, const Work& work,
                                            int64_t row, LaneStates<Shape>& of) {
  if (of.lane.channel >= of.channels) return;
  const float* const sums = p.step_sums + row * p.splits.count;
  const float* const ends = p.ends + row * p.splits.count * p.scan.states;
#pragma unroll 4
  for (int i = 0; i < int(work.split); ++i) {
    float end[Shape::states] = {};
    of.load(ends + i * p.scan.states, end);
    const float sum = sums[i];
#pragma unroll
    for (int m = 0; m < Shape::states; ++m) of.x[m] = decayed(of.x[m], sum, of.a[m]) + end[m];
  }
}

// Of the blocks that find the ends of splits.
using SplitEnds = Shape<32, 8, 8, 3, 8>;
static_assert(SplitEnds::window == kSplitUnit, "splits are whole windows");

template <class Shape>
struct SplitEndsShared {
  RowTile<Shape> dt, drive;
  StateTile<float, Shape> matrix;
  float a[Shape::channels][kStateTile], bias[Shape::channels];
};

// The end of every split but the last one, whose windows are whole.
template <class Method, class Shape, Layout layout>
__global__ void __launch_bounds__(Shape::threads, Shape::min_blocks)
    split_ends_kernel(const __grid_constant__ ForwardArguments p) {
  static_assert(Method::causal && Method::exponential, "weights are those of sums of step sizes");
  static_assert(Shape::channels == Shape::warps && Shape::segments == 32, "a warp has a channel");
  using Steps = LaneRecurrence<Method, layout>;
  using Places = Slots<Shape::channels, Shape, layout>;
  constexpr int count = Places::count, width = Places::width, steps = Shape::steps;
  extern __shared__ float4 memory[];
  auto& shared = *reinterpret_cast<SplitEndsShared<Shape>*>(memory);
  const ScanArguments& scan = p.scan;
  let_next_begin();
  const Work work = work_of_split<Shape>(scan, p.splits);
  const int states = int(scan.states), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool inside = warp < work.channels;
  wait_for_previous();
  if (lane < kStateTile)
    shared.a[warp][lane] =
        inside && lane < states
            ? load_real(work.at(scan.A) + warp * scan.A.row + lane * scan.A.last, scan.A.storage)
            : 0.0f;
  if (lane == 0)
    shared.bias[warp] = channel_value(scan.delta_bias, scan, work.g, work.first_channel + warp);
  __syncthreads();

  const int64_t last_window = work.windows - 1;
  const Places slots(scan.u, work);
  Stream<float, Shape::channels, Shape, layout> drive, delta;
  drive.begin(scan.u, work.at(scan.u) + work.offset, slots, work, last_window);
  delta.begin(scan.delta, work.at(scan.delta) + work.offset, slots, work, last_window);
  StateMatrix<float, Shape, layout> matrix(scan.B, false, work);
  matrix.begin(work, last_window);
  const bool whole = work.channels == Shape::channels && states == kStateTile;
  const auto load_window = [&] {
    if (whole) {
      drive.template load<Loads::whole>(scan.u, slots, work.channels, Shape::window);
      delta.template load<Loads::whole>(scan.delta, slots, work.channels, Shape::window);
      matrix.load_whole();
    } else {
      drive.template load<Loads::aligned>(scan.u, slots, work.channels, Shape::window);
      delta.template load<Loads::aligned>(scan.delta, slots, work.channels, Shape::window);
      matrix.load(0, states, Shape::window);
    }
  };
  load_window();

  float ends[kStateTile] = {};  // the lane's part
  float later = 0.0f;           // sum of the step sizes of all later windows
  // Whether any step before them has a weight: with softplus no step has one above that. What counts is e^z as it is
  // in float, of which the least that is not 0 is e^-103.3.
  const auto matters = [&](float a) {
    return !scan.delta_softplus || !(later * a < Precision<float>::exp_underflow);
  };
#pragma unroll 1
  for (int64_t window = last_window; window >= 0; --window) {
    specialize<layout>(scan.u.storage, work.reverse, [&](auto format) {
      using Format = decltype(format);
#pragma unroll
      for (int k = 0; k < count; ++k) {
        float dt[width], value[width];
        drive.template values<Format>(scan.u, k, value);
        delta.template values<Format>(scan.delta, k, dt);
        const float bias = shared.bias[slots.row(k)];
#pragma unroll
        for (int i = 0; i < width; ++i) {
          dt[i] = step_size<accuracy_of(layout)>(dt[i], bias, scan.delta_softplus);
          value[i] = Steps::drive(dt[i], value[i]);
        }
        put(shared.dt, slots, k, dt);
        put(shared.drive, slots, k, value);
      }
      matrix.template commit<Format>(shared.matrix);
    });
    __syncthreads();
    if (window > 0) {
      drive.next(-Shape::window * slots.to_step(scan.u));
      delta.next(-Shape::window * slots.to_step(scan.delta));
      matrix.next(-1);
      load_window();
    }
    float dt[steps], driven[steps];
    load_segment(shared.dt.segment_of_lane(warp), dt);
    load_segment(shared.drive.segment_of_lane(warp), driven);
    // Of the steps of this window behind the lane's, and then of all later ones.
    float from_lane = sum(dt);
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const float beyond = shuffle_down(from_lane, by);
      if (lane + by < 32) from_lane += beyond;
    }
    const float next = shuffle_down(from_lane, 1);
    const float behind = later + (lane < 31 ? next : 0.0f);
#pragma unroll
    for (int n = 0; n < kStateTile; ++n) {
      const float a = shared.a[warp][n];
      if (!matters(a)) continue;
      const Steps recurrence(a);
      float b[steps];
      load_segment(shared.matrix.segment(n, lane), b);
      float x = recurrence.move(dt[0], driven[0], b[0]).from_zero();
#pragma unroll
      for (int i = 1; i < steps; ++i) x = recurrence.move(dt[i], driven[i], b[i])(x);
      ends[n] += decayed(x, behind, a);
    }
    later += shuffle(from_lane, 0);
    bool any = false;
    if (inside)
      for (int n = 0; n < states; ++n) any = any || matters(shared.a[warp][n]);
    if (!__syncthreads_or(any)) break;
  }

#pragma unroll
  for (int n = 0; n < kStateTile; ++n) ends[n] = sum_over_segments<Shape>(ends[n]);
  if (!inside) return;
  const int64_t place = work.row(scan, warp) * p.splits.count + work.split;
  if (lane == 0) {
    p.step_sums[place] = later;
#pragma unroll
    for (int n = 0; n < kStateTile; ++n)
      if (n < states) p.ends[place * states + n] = ends[n];
  }
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
