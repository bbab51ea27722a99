// The producer warps of the forward scan: they fill windows, and finish and store those that were scanned.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../sequential/loader.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// How a block goes over windows, turn by turn: turn and window have one number, or of a method that is not
// causal all windows come from the last one back, in the turns from 0 on, and then forth (forward/averaged.cuh).
enum class Leg { only, back, forth };

template <Leg leg>
__device__ __forceinline__ int first_turn(const Work& work) {
  return leg == Leg::forth ? int(work.windows) : 0;
}
template <Leg leg>
__device__ __forceinline__ int window_of(const Work& work, int turn) {
  if constexpr (leg == Leg::back) return int(work.windows) - 1 - turn;
  else return leg == Leg::only ? turn : turn - int(work.windows);
}

// What the way back leaves for the way forth, in memory: a thread's quads of window after window.
template <class Shape, class Places>
class FirstSums {
 public:
  static constexpr int count = Places::entries / kQuad;

  __device__ __forceinline__ FirstSums(float* sums, const Work& work, const Places& slots)
      : sums_(sums), first_(blockIdx.x * work.windows * of_window + slots.thread) {}
  // The k-th quad of a window.
  __device__ __forceinline__ float* at(int window, int k) const {
    return sums_ + (first_ + int64_t(window) * of_window + k * Shape::threads) * kQuad;
  }

 private:
  static constexpr int of_window = count * Shape::threads;
  float* const sums_;
  const int64_t first_;
};

template <class Shape, Layout layout>
struct ForwardShared {
  Pipeline<Shape> pipeline;
  WindowInputs<Shape, layout, 2, MatrixTile<Shape, layout>> inputs[Shape::stages];
  WindowTile<Shape::channels> y[Shape::stages][Shape::parts];
};

// A group of producer warps: fills stages, and when one of its windows has been scanned, fills its stage
// with another one and finishes it: on the way back as far as u goes, on the way forth from there.
template <class Method, class Shape, Layout layout, class Format, bool Aligned, Leg leg,
          bool Bounded>
__device__ __forceinline__ void load_and_store(const ForwardArguments& p, const Work& work,
                                               ForwardShared<Shape, layout>& shared) {
  constexpr float weight =
      output_weight<Method, float>() * (layout == Layout::half && Format::bfloat ? kCutBack : 1.0f);
  const ScanArguments& scan = p.scan;
  // On the way forth step sizes and C are all that lanes want.
  constexpr int unread = leg == Leg::forth ? 1 : 0;
  const View* const matrices[] = {&scan.B, &scan.C};
  using Rows = WindowLoader<Shape, layout, Format, Aligned, 2 - unread, unread != 0, Bounded>;
  constexpr int count = Rows::count, width = Rows::width, groups = Shape::groups;
  const int begin = first_turn<leg>(work), end = begin + int(work.windows);
  const int first = begin + Shape::group();
  if (first >= end) {
    if (leg == Leg::forth) shared.pipeline.producers_meet();
    return;
  }
  Rows rows(scan, work, scan.u, matrices + unread, false);
  typename Rows::Raw raw;
  wait_for_previous();
  rows.load(window_of<leg>(work, first), raw);
  rows.load_bias();
  // Now that what it takes longest to get is on its way: what all producers have left on the way back is there.
  if (leg == Leg::forth) shared.pipeline.producers_meet();
  const auto fill = [&](int turn, bool whole) VIM_MM_INLINED {
    rows.fill(
        shared.inputs[shared.pipeline.stage_of(turn)], window_of<leg>(work, turn), raw,
        [](float dt, float u, float) { return LaneRecurrence<Method, layout>::drive(dt, u); },
        whole);
    shared.pipeline.producer_commit(turn);
    rows.load(window_of<leg>(work, turn + groups), raw, whole);
  };
  // What it takes to finish a window: u once more, which to keep would take registers.
  typename Rows::RowStream out;
  out.begin(p.out, work.at(p.out) + work.offset, rows.slots, work, rows.lowest);
  out.settle();
  using Sums = FirstSums<Shape, typename Rows::Places>;
  const Sums first_sums(p.first_sums, work, rows.slots);
  typename Rows::Held u_raw, z_raw;
  float sums[Sums::count][kQuad];
  float D[count];
#pragma unroll
  for (int k = 0; k < count; ++k)
    D[k] = channel_value(scan.D, scan, work.g, work.first_channel + rows.slots.row(k));
  const auto load = [&](int turn, bool whole) VIM_MM_INLINED {
    if (!whole && turn >= end) return;
    const int window = window_of<leg>(work, turn);
    if constexpr (leg == Leg::forth) {
#pragma unroll
      for (int k = 0; k < Sums::count; ++k) load_quad(first_sums.at(window, k), sums[k]);
    }
    const int steps = rows.steps_of(window);
    const int64_t offset = rows.offset_of(window);
    start_loads<Aligned, Bounded>(whole || window < rows.whole, [&](auto how) {
      constexpr Loads loads = decltype(how)::value;
      if constexpr (leg != Leg::forth)
        rows.drive.template load<loads>(scan.u, rows.slots, work.channels, steps, offset, u_raw);
      if (leg != Leg::back && scan.gated)
        rows.z.template load<loads>(scan.z, rows.slots, work.channels, steps, offset, z_raw);
    });
  };
  const auto finish = [&](int turn, float (&y)[count][width], bool whole) VIM_MM_INLINED {
    const int window = window_of<leg>(work, turn);
#pragma unroll
    for (int k = 0; k < count; ++k) {
      if constexpr (leg == Leg::forth) {
#pragma unroll
        for (int i = 0; i < width; ++i) {
          const int entry = k * width + i;
          y[k][i] = weight * y[k][i] + sums[entry / kQuad][entry % kQuad];
        }
      } else {
        float u_of[width];
        rows.drive.template values<Format>(scan.u, k, u_raw, u_of);
#pragma unroll
        for (int i = 0; i < width; ++i) y[k][i] = weight * y[k][i] + D[k] * u_of[i];
      }
      if constexpr (leg == Leg::back) {
#pragma unroll
        for (int i = 0; i < width; i += kQuad)
          store_segment(first_sums.at(window, (k * width + i) / kQuad),
                        reinterpret_cast<const float (&)[kQuad]>(y[k][i]));
        continue;
      }
      float z_of[width];
      if (scan.gated) {
        rows.z.template values<Format>(scan.z, k, z_raw, z_of);
#pragma unroll
        for (int i = 0; i < width; ++i) y[k][i] *= z_of[i] * sigmoid(z_of[i]);
      }
      const int steps = rows.steps_of(window);
      const int64_t offset = rows.offset_of(window);
      if constexpr (Aligned)
        out.template store_aligned<Format>(p.out, rows.slots, k, y[k], whole, work.channels, steps,
                                           offset);
      else
        out.template store<Format>(p.out, rows.slots, k, y[k], false, work.channels, steps, offset);
    }
  };
  const auto turn_over = [&](int turn, bool whole) VIM_MM_INLINED {
    const uint32_t stage = shared.pipeline.stage_of(turn);
    shared.pipeline.producer_acquire(turn);
    float y[count][width];
#pragma unroll
    for (int k = 0; k < count; ++k) get_sum(shared.y[stage], rows.slots, k, y[k]);
    if (whole || turn + Shape::stages < end) fill(turn + Shape::stages, whole);
    finish(turn, y, whole);
    load(turn + groups, whole);
  };

  if (leg != Leg::forth) load(first, false);
#pragma unroll 1
  for (int turn = first; turn < begin + Shape::stages && turn < end; turn += groups)
    fill(turn, false);
  if (leg == Leg::forth) load(first, false);
  int turn = first;
  // Most windows are whole, and so are those that are filled and loaded meanwhile: nobody asks. Not so
  // where lanes have two states: those that load wait little there, and code in one piece is faster.
  if constexpr (Aligned && Shape::states == 1 && !Bounded) {
    int ahead = rows.whole - groups;
    if (leg == Leg::forth) ahead += begin;
    if (leg == Leg::back && rows.whole > 0) {
      if (window_of<leg>(work, turn) >= rows.whole) turn_over(turn, false), turn += groups;
      ahead = end - groups;
    }
    const int whole_end = ahead < end ? ahead : end;
#pragma unroll 1
    for (; turn < whole_end - Shape::stages; turn += groups) turn_over(turn, true);
  }
#pragma unroll 1
  for (; turn < end; turn += groups) turn_over(turn, false);
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
