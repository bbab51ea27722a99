// The adjoint at the edges of chunks, by a sequential scan; boundary/segments.cuh has it by segments.
//
// It goes against the scan order. The adjoint of a method that is not causal also goes along it, with the same
// A_bar: of that direction a lane notes what each chunk adds, and has what enters in the end, by sums of step
// sizes that producer warps make of every window.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../sequential/lane.cuh"
#include "../sequential/loader.cuh"
#include "segments.cuh"
#include "splits.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

template <class Shape, Layout layout>
struct SweepShared {
  Pipeline<Shape> pipeline;
  WindowInputs<Shape, layout, 1> inputs[Shape::stages];
};

template <class Method, class Shape, Layout layout, class Format, bool Aligned, bool Bounded>
__device__ __forceinline__ void load_sweep(const EdgesArguments& p, const Work& work,
                                           SweepShared<Shape, layout>& shared) {
  constexpr float weight = output_weight<Method, float>();
  const ScanArguments& scan = p.scan;
  using Rows = WindowLoader<Shape, layout, Format, Aligned, 1, false, Bounded>;
  using Places = typename Rows::Places;
  const View* const matrices[] = {&scan.C};
  constexpr bool sums_steps = !Method::causal || is_split<Shape>;
  const int windows = int(work.windows), group = Shape::group();
  const auto window_of = [&](int i) { return windows - 1 - i; };
  Rows rows(scan, work, p.grad_out, matrices, scan.gated);
  typename Rows::Raw raw;
  wait_for_previous();
  rows.load(window_of(group), raw);
  rows.load_bias();
#pragma unroll 1
  for (int i = group; i < windows; i += Shape::groups) {
    const int stage = Pipeline<Shape>::stage_of(i);
    if (i >= Shape::stages) shared.pipeline.producer_acquire(i - Shape::stages);
    float sum_of_dt[Rows::count] = {};
    int entry = 0;
    rows.fill(shared.inputs[stage], window_of(i), raw, [&](float dt, float value, float z) {
      if constexpr (sums_steps) sum_of_dt[entry++ / Rows::width] += dt;
      if (scan.gated) value *= z * sigmoid(z);
      return weight * value;
    });
    if constexpr (sums_steps) {
      const int64_t chunk = first_chunk<Shape>(work, p) + window_of(i);
#pragma unroll
      for (int k = 0; k < Rows::count; ++k) {
        float sum = sum_of_dt[k];
#pragma unroll
        for (int bit = 1; bit < Places::per_row; bit *= 2) sum += shuffle_xor(sum, bit);
        const int row = rows.slots.row(k);
        if (rows.slots.step(k) == 0 && row < work.channels)
          p.step_sums[work.row(scan, row) * p.chunks + chunk] = sum;
      }
    }
    shared.pipeline.producer_commit(i);
    rows.load(window_of(i + Shape::groups), raw);
  }
}

// Of so many windows in scan order: in `edges` is what each of them adds, and then what enters it. `sums`: of
// their step sizes.
template <class Shape>
__device__ __forceinline__ void enter_in_order(const LaneStates<Shape>& of, float* edges,
                                               const float* sums, int windows, int64_t states) {
  constexpr int ahead = 4;  // loaded together
  if (of.lane.channel >= of.channels) return;
  float entering[Shape::states] = {};
#pragma unroll 1
  for (int first = 0; first < windows; first += ahead) {
    float added[ahead][Shape::states] = {}, sum[ahead];
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      if (first + i >= windows) continue;
      of.load(edges + i * states, added[i]);
      sum[i] = sums[first + i];
    }
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      if (first + i >= windows) continue;
      of.store(edges + i * states, entering);
#pragma unroll
      for (int m = 0; m < Shape::states; ++m)
        entering[m] = fma(exp_of_product(sum[i], of.a[m]), entering[m], added[i][m]);
    }
    edges += ahead * states;
  }
}

// What enters each chunk: see segment_sweep_kernel; of a method that is not causal from either side.
template <class Method, class Shape, Layout layout, bool Bounded>
__global__ void __launch_bounds__(Shape::all_threads, Shape::min_blocks)
    sweep_kernel(const __grid_constant__ EdgesArguments p) {
  static_assert(Method::causal || Method::exponential,
                "steps together have the sum of their sizes");
  static_assert(Method::causal || !Bounded, "the other direction knows of no cuts");
  extern __shared__ float4 memory[];
  auto& shared = *reinterpret_cast<SweepShared<Shape, layout>*>(memory);
  let_next_begin();
  const Work work = [&] {
    if constexpr (is_split<Shape>) return work_of_split<Shape>(p.scan, p.splits);
    else return work_of_block<Shape>(p.scan);
  }();
  shared.pipeline.begin();
  if (Shape::is_producer()) {
    specialize<layout>(p.scan.u.storage, work.reverse, [&](auto format) {
      using Format = decltype(format);
      specialize_alignment<Shape, Bounded>(p.scan, [&](auto aligned) VIM_MM_INLINED {
        constexpr bool Aligned = decltype(aligned)::value;
        load_sweep<Method, Shape, layout, Format, Aligned, Bounded>(p, work, shared);
      });
    });
    return;
  }
  if (Shape::is_idle()) return;
  wait_for_previous();
  clear_counts(p.counts, p.scan.batch * p.scan.groups * p.chunks, Shape::scan_thread(),
               Shape::scan_threads);
  const LaneMap<Shape> lane;
  LaneStates<Shape> of(p.scan, work, lane, p.grad_last_state);
  if constexpr (is_split<Shape>) {
    if (work.split + 1 < p.splits.count) {
#pragma unroll
      for (int m = 0; m < Shape::states; ++m) of.x[m] = 0.0f;
    }
  }
  using Steps = LaneRecurrence<Method, layout>;
  Steps recurrence[Shape::states];
#pragma unroll
  for (int m = 0; m < Shape::states; ++m) recurrence[m] = Steps(of.a[m]);
  const int64_t row = work.row(p.scan, lane.channel), states = p.scan.states;
  const int windows = int(work.windows);
  const int64_t last = (row * p.chunks + first_chunk<Shape>(work, p) + windows - 1) * states;
  float* edges = static_cast<float*>(p.edges) + last;
  float* other_edges = static_cast<float*>(p.other_edges) + (Method::causal ? 0 : last);
  // The adjoint is A_bar times the gradient of the state: `factor` is the A_bar that is due. Of the other
  // direction `added` is what the steps of a chunk till now leave it with, `decay` the product of their A_bar.
  float factor[Shape::states], added[Shape::states], decay[Shape::states];
  const Cuts<Bounded> all_cuts({{}, p.cuts}, work, p.chunks);
  const auto scan_stride = [&](const auto& in, int step, uint32_t cuts) VIM_MM_INLINED {
    const auto& matrix = in.matrix[0];
    float dt[kStride], drive[kStride];
    load_stride<false>(in.dt.values[0] + lane.row + step, dt);
    load_stride<false>(in.drive.values[0] + lane.row + step, drive);
#pragma unroll
    for (int m = 0; m < Shape::states; ++m) {
      float entry[kStride];
      load_stride<false>(matrix.values[0] + lane.state_row + 4 * m * kPitch + step, entry);
#pragma unroll
      for (int i = kStride - 1; i >= 0; --i) {
        const float from_y = drive[i] * entry[i];
        of.x[m] = fma(factor[m], of.x[m], from_y);
        factor[m] = recurrence[m].coefficients(dt[i]).a_bar;
        if constexpr (Bounded)
          if (cuts >> i & 1) of.x[m] = factor[m] = 0.0f;
        if constexpr (!Method::causal) {
          decay[m] *= factor[m];
          added[m] = fma(decay[m], from_y, added[m]);
        }
      }
    }
  };
#pragma unroll 1
  for (int i_window = 0; i_window < windows; ++i_window) {
    const int steps = work.steps_from(windows - 1 - i_window, kChunk);
    const auto& in = shared.inputs[Pipeline<Shape>::stage_of(i_window)];
    of.store(edges);
    edges -= states;
#pragma unroll
    for (int m = 0; m < Shape::states; ++m) factor[m] = decay[m] = 1.0f, added[m] = 0.0f;
    const uint64_t cuts = all_cuts.before(windows - 1 - i_window);
    shared.pipeline.consumer_wait(i_window);
    if (!Bounded && steps == kChunk) {  // in one piece, whose places are constants
#pragma unroll
      for (int step = kChunk - kStride; step >= 0; step -= kStride) scan_stride(in, step, 0);
    } else {
      const int end = (steps + kStride - 1) / kStride * kStride;
#pragma unroll 1
      for (int step = end - kStride; step >= 0; step -= kStride)
        scan_stride(in, step, uint32_t(cuts >> step));
    }
#pragma unroll
    for (int m = 0; m < Shape::states; ++m) of.x[m] *= factor[m];
    if constexpr (!Method::causal) {
      of.store(other_edges, added);
      other_edges -= states;
    }
    shared.pipeline.consumer_release(i_window);
  }
  if constexpr (Bounded)
    if (p.grad_initial_state) of.store(static_cast<float*>(p.grad_initial_state) + row * states);
  if constexpr (is_split<Shape>) of.store(p.ends + (row * p.splits.count + work.split) * states);
  if constexpr (!Method::causal)
    enter_in_order(of, other_edges + states, p.step_sums + row * p.chunks, windows, states);
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
