// The adjoint at the edges of chunks, by marching: see edges.cuh.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "march.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

template <class Shape, Layout layout>
struct EdgesMarchShared {
  Handover<Shape> handover;
  MarchInputs<Shape, layout, 1> inputs[Shape::stages];
};

template <class Method, class Shape, Layout layout, class Format, bool Aligned, bool Ascending>
__device__ __forceinline__ void edges_rows(const EdgesArguments& p, const Work& work,
                                           EdgesMarchShared<Shape, layout>& shared) {
  constexpr float weight = output_weight<Method, float>();
  const ScanArguments& scan = p.scan;
  using Rows = MarchRows<Shape, layout, Format, Aligned, 1>;
  const View* const matrices[] = {&scan.C};
  const int windows = int(work.windows), group = Shape::group();
  const auto window_of = [&](int i) { return Ascending ? i : windows - 1 - i; };
  Rows rows(scan, work, p.grad_out, matrices, scan.gated);
  typename Rows::Raw raw;
  wait_for_previous();
  rows.load(window_of(group), raw);
  rows.load_bias();
  shared.handover.meet();
#pragma unroll 1
  for (int i = group; i < windows; i += Shape::groups) {
    const int stage = Handover<Shape>::stage_of(i);
    if (i >= Shape::stages) shared.handover.wait_scanned(i - Shape::stages);
    rows.fill(shared.inputs[stage], window_of(i), raw, [&](float, float value, float z) {
      if (scan.gated) value *= z * sigmoid(z);
      return weight * value;
    });
    shared.handover.signal_filled(i);
    rows.load(window_of(i + Shape::groups), raw);
  }
}

// What enters each chunk: see edges_kernel.
template <class Method, class Shape, Layout layout, bool Ascending>
__global__ void __launch_bounds__(Shape::all_threads, Shape::min_blocks)
    edges_march_kernel(const __grid_constant__ EdgesArguments p) {
  extern __shared__ float4 memory[];
  auto& shared = *reinterpret_cast<EdgesMarchShared<Shape, layout>*>(memory);
  let_next_begin();
  const Work work = work_of_block<Shape>(p.scan);
  shared.handover.begin();
  if (Shape::has_rows()) {
    specialize<layout>(p.scan.u.storage, work.reverse, [&](auto format) {
      using Format = decltype(format);
      specialize_alignment<Shape>(p.scan, [&](auto aligned) VIM_MM_INLINED {
        edges_rows<Method, Shape, layout, Format, decltype(aligned)::value, Ascending>(p, work,
                                                                                       shared);
      });
    });
    return;
  }
  if (Shape::is_idle()) return shared.handover.meet();
  wait_for_previous();
  clear_counts(p.counts, p.scan.batch * p.scan.groups * p.chunks, Shape::scan_thread(),
               Shape::scan_threads);
  const MarchLane<Shape> lane;
  MarchStates<Shape> of(p.scan, work, lane, p.grad_last_state);
  using Steps = MarchRecurrence<Method, layout>;
  Steps recurrence[Shape::states];
#pragma unroll
  for (int m = 0; m < Shape::states; ++m) recurrence[m] = Steps(of.a[m]);
  const int64_t row = work.row(p.scan, lane.channel), states = p.scan.states;
  const int windows = int(work.windows);
  shared.handover.meet();
  float* edges =
      static_cast<float*>(p.edges) + (row * p.chunks + (Ascending ? 0 : windows - 1)) * states;
  // The adjoint is A_bar times the gradient of the state: `factor` is the A_bar that is due.
  float factor[Shape::states];
  const auto scan_stride = [&](const auto& in, int step) VIM_MM_INLINED {
    const auto& matrix = in.matrix[0];
    float dt[kStride], drive[kStride];
    load_stride<false>(in.dt, in.dt.values[0] + lane.row + in.dt.place(step), dt);
    load_stride<false>(in.drive, in.drive.values[0] + lane.row + in.drive.place(step), drive);
#pragma unroll
    for (int m = 0; m < Shape::states; ++m) {
      float entry[kStride];
      load_stride<false>(
          matrix, matrix.values[0] + lane.state_row + 4 * m * kPitch + matrix.place(step), entry);
#pragma unroll
      for (int j = 0; j < kStride; ++j) {
        const int i = Ascending ? j : kStride - 1 - j;
        of.x[m] = fma(factor[m], of.x[m], drive[i] * entry[i]);
        factor[m] = recurrence[m].coefficients(dt[i]).a_bar;
      }
    }
  };
#pragma unroll 1
  for (int i_window = 0; i_window < windows; ++i_window) {
    const int steps = work.steps_from(Ascending ? i_window : windows - 1 - i_window, kChunk);
    const auto& in = shared.inputs[Handover<Shape>::stage_of(i_window)];
    of.store(edges);
    edges += Ascending ? states : -states;
#pragma unroll
    for (int m = 0; m < Shape::states; ++m) factor[m] = 1.0f;
    shared.handover.wait_filled(i_window);
    if (steps == kChunk) {  // in one piece, whose places are constants
#pragma unroll
      for (int step = 0; step < kChunk; step += kStride)
        scan_stride(in, Ascending ? step : kChunk - kStride - step);
    } else {
      const int end = (steps + kStride - 1) / kStride * kStride;
#pragma unroll 1
      for (int step = 0; step < end; step += kStride)
        scan_stride(in, Ascending ? step : end - kStride - step);
    }
#pragma unroll
    for (int m = 0; m < Shape::states; ++m) of.x[m] *= factor[m];
    shared.handover.signal_scanned(i_window);
  }
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
