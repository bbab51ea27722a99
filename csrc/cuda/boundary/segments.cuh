// A scan that keeps only what crosses the edges of chunks: the adjoint of the states for backward,
// or the states of poly's other direction for a forward by segments. With these, chunks are independent.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../common/arrival.cuh"
#include "../general/forward.cuh"

namespace vim_mm {

// What enters each chunk, [B, G, H, chunks, N]: the adjoint against the scan order, or, for a forward by segments
// of a method that is not causal, the states of its other direction. Of the adjoint of such a method `other_edges`
// gets what enters in scan order.
struct EdgesArguments {
  ScanArguments scan;
  View grad_out, grad_last_state;  // either may be missing
  void *edges, *other_edges;
  int64_t chunks;
  uint32_t* counts;          // [B, G, chunks], set to zero on the way; or null
  float* step_sums;          // room for [B, G, H, chunks], where there are other edges or splits
  const uint64_t* cuts;      // of Bounds
  void* grad_initial_state;  // contiguous [B, G, H, N]: what leaves the first step; or null
  float* ends;  // contiguous [B, G, H, splits, N], where time is split (boundary/splits.cuh)
  Splits splits;
};

inline namespace VIM_MM_ISA {

template <class E, class Shape>
struct SegmentSweepShared {
  RowTile<Shape> dt, drive;
  StateTile<E, Shape> matrix;
  float bias[Shape::channels];
};

// What enters each chunk, in edges [B, G, H, chunks, N]. `Adjoint`: h of
// h <- conj(A_bar) (h + conj(C) grad_y), else x of x <- A_bar x + beta B u. `Ascending`: in scan
// order, entering a chunk at its first step, else against it, entering at the last step.
template <class Method, class E, class Shape, Layout layout, bool Adjoint, bool Ascending,
          bool Bounded>
__global__ void __launch_bounds__(Shape::threads, Shape::min_blocks)
    segment_sweep_kernel(const __grid_constant__ EdgesArguments p) {
  constexpr int steps = Shape::steps, segments = Shape::segments;
  constexpr bool fast = layout != Layout::any;
  constexpr float weight = output_weight<Method, E>();
  static_assert(Shape::window % kChunk == 0, "a window has whole chunks");
  static_assert(!Bounded || (Shape::window == kChunk && !fast), "a window has one word of cuts");
  using States = CarriedStates<E, Shape, layout>;
  using Steps = Recurrence<Method, accuracy_of(layout), E>;
  using Places = Slots<Shape::channels, Shape, layout>;
  constexpr int count = Places::count, width = Places::width;
  extern __shared__ float4 memory[];
  auto& shared = *reinterpret_cast<SegmentSweepShared<E, Shape>*>(memory);
  const ScanArguments& scan = p.scan;
  const int states = int(scan.states);
  let_next_begin();
  wait_for_previous();
  clear_counts(p.counts, scan.batch * scan.groups * p.chunks, threadIdx.x, Shape::threads);

  const Work work = work_of_block<Shape>(scan);
  const int warp = threadIdx.x / 32;
  const int channel = channel_of_lane<Shape>(0), segment = segment_of_lane<Shape>();
  if (threadIdx.x < Shape::channels)
    shared.bias[threadIdx.x] =
        channel_value(scan.delta_bias, scan, work.g, work.first_channel + threadIdx.x);
  States carried(scan, work, &shared + 1);
  carried.begin(p.grad_last_state, work);
  const Cuts<Bounded> cuts({{}, p.cuts}, work, p.chunks);
  __syncthreads();

  const View& driving = Adjoint ? p.grad_out : scan.u;
  const View& matrix_view = Adjoint ? scan.C : scan.B;
  constexpr int stride = Ascending ? 1 : -1;
  const int64_t first_window = Ascending ? 0 : work.windows - 1;
  const Places slots(scan.u, work);
  Stream<float, Shape::channels, Shape, layout> drive, delta, z;
  drive.begin(driving, work.at(driving), slots, work, first_window);
  delta.begin(scan.delta, work.at(scan.delta), slots, work, first_window);
  z.begin(scan.z, work.at(scan.z), slots, work, first_window);
  StateMatrix<E, Shape, layout> matrix(matrix_view, Adjoint ? scan.constant_C : scan.constant_B,
                                       work);
  matrix.begin(work, first_window);
  const bool can_be_whole =
      fast && scan.aligned && work.channels == Shape::channels && states == kStateTile;
  // Starts the loads of a window that has so many steps.
  const auto load_window = [&](int left) {
    const auto load_rows = [&](auto how) {
      constexpr Loads loads = decltype(how)::value;
      drive.template load<loads>(driving, slots, work.channels, left);
      delta.template load<loads>(scan.delta, slots, work.channels, left);
      if (Adjoint && scan.gated) z.template load<loads>(scan.z, slots, work.channels, left);
    };
    using std::integral_constant;
    if (fast && can_be_whole && left == Shape::window) {
      load_rows(integral_constant<Loads, Loads::whole>());
      matrix.load_whole();
    } else {
      load_rows(integral_constant<Loads, Loads::apart>());
      matrix.load(0, states, left);
    }
  };
  load_window(work.steps_from(first_window, Shape::window));

#pragma unroll 1
  for (int64_t i_window = 0; i_window < work.windows; ++i_window) {
    const int64_t window = Ascending ? i_window : work.windows - 1 - i_window;
    const int left = work.steps_from(window, Shape::window);
    specialize<layout>(scan.u.storage, work.reverse, [&](auto format) {
      using Format = decltype(format);
#pragma unroll
      for (int k = 0; k < count; ++k) {
        float dt[width], value[width], gate[width];
        drive.template values<Format>(driving, k, value);
        delta.template values<Format>(scan.delta, k, dt);
        if (Adjoint) z.template values<Format>(scan.z, k, gate);
        const float bias = shared.bias[slots.row(k)];
#pragma unroll
        for (int i = 0; i < width; ++i) {
          dt[i] = step_size<accuracy_of(layout)>(dt[i], bias, scan.delta_softplus);
          if (slots.step(k) + i >= left) dt[i] = 0.0f;
          if (Adjoint) {
            if (scan.gated) value[i] *= gate[i] * sigmoid(gate[i]);
            value[i] *= weight;
          } else {
            value[i] = Steps::drive(dt[i], value[i]);
          }
        }
        put(shared.dt, slots, k, dt);
        put(shared.drive, slots, k, value);
      }
      matrix.template commit<Format>(shared.matrix);
    });

    // Of the chunk that this lane's segment begins, in the direction of the scan, where it does.
    const int64_t step = window * Shape::window + segment * steps, chunk = step / kChunk;
    const bool keeps_edge = (Ascending ? step : step + steps) % kChunk == 0 && chunk < p.chunks &&
                            channel < work.channels;
    E* const edges =
        static_cast<E*>(p.edges) + (work.row(scan, channel) * p.chunks + chunk) * states;
    // A_bar takes states of the other direction from the step behind.
    const CutsOfSegment<Bounded, Shape> cuts_of_lane(Adjoint == Ascending ? cuts.behind(window)
                                                                          : cuts.before(window));
    Driving<Shape> driven;
#pragma unroll 1
    for (int first = 0; first < (fast ? 1 : states); first += kStateTile) {
      if (first > 0) matrix.template commit<Unknown>(shared.matrix);
      __syncthreads();
      if (first == 0) driven.load(shared.dt, shared.drive);
      const bool last_tile = fast || first + kStateTile >= states;
      if (!last_tile) {
        matrix.load(first + kStateTile, states, left);
      } else if (i_window + 1 < work.windows) {
        const int next_left = work.steps_from(window + stride, Shape::window);
        drive.next(stride * Shape::window * slots.to_step(driving));
        delta.next(stride * Shape::window * slots.to_step(scan.delta));
        z.next(stride * Shape::window * slots.to_step(scan.z));
        matrix.next(stride);
        load_window(next_left);
      }
#pragma unroll(fast ? States::of_warp : 1)
      for (int m = 0; m < States::of_warp; ++m) {
        const int in_tile = warp * States::of_warp + m, n = first + in_tile;
        if (!fast && n >= states) break;
        const E a = carried.a(m, n);
        const Steps recurrence(a);
        const auto matrix_of = matrix.segment(shared.matrix, work, channel, segment, in_tile, n);
        E x = E(0.0f), transition = E(1.0f);
#pragma unroll
        for (int quad = 0; quad < steps; quad += kQuad) {
          const int i = Ascending ? quad : steps - kQuad - quad;
          E entry[kQuad];
          matrix_of.quad(i, entry);
#pragma unroll
          for (int jj = 0; jj < kQuad; ++jj) {
            const int j = Ascending ? jj : kQuad - 1 - jj;
            const Coefficients<E> k = recurrence.coefficients(driven.dt[i + j]);
            if constexpr (Adjoint) x = conj(k.a_bar) * (x + driven.drive[i + j] * conj(entry[j]));
            else x = fma(k.a_bar, x, Steps::input(driven.drive[i + j], k, entry[j]));
            if (cuts_of_lane.at(i + j)) {  // 0 times what comes may be NaN
              if constexpr (Adjoint) x = E(0.0f);
              else x = Steps::input(driven.drive[i + j], k, entry[j]);
            }
            if (!Method::exponential) transition = transition * k.a_bar;
          }
        }
        if (Method::exponential) transition = exp_of_product(driven.total_dt, a);
        if (Adjoint) transition = conj(transition);
        const E entering =
            enter_segments<Ascending, Shape>(transition, x, carried.x(m, n), cuts_of_lane);
        if (keeps_edge && n < states) edges[n] = entering;
        carried.carry(m, n, x, Ascending ? segments - 1 : 0);
      }
      __syncthreads();
    }
  }
  if constexpr (Bounded && Adjoint && !Ascending) {
    if (p.grad_initial_state) carried.write(static_cast<E*>(p.grad_initial_state), scan, work);
  }
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
