// The states of a forward scan that is not causal: the mean of both directions, whose coefficients are the same and
// computed once, on the way back, a piece of steps at a time (docs/kernels.md). To memory go the sums over both
// states and what the states along the scan order leave each piece with (`across`).
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "output_sums.cuh"
#include "producer.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

constexpr int kPiece = 16;                // steps
constexpr int kPieces = kChunk / kPiece;  // of a window

// A piece of one state, of which nothing but the states around it is missing: of the way back moves, of the way
// forth what is left of a state that entered a quad.
template <class Steps, class Shape, Operand operand, Leg leg>
struct PreparedPiece {
  static constexpr int strides = kPiece / kStride;
  using Inputs = StrideInputs<Shape>[strides];
  std::conditional_t<leg == Leg::back, Move<float>, float> steps[kPiece];
  float c[strides][Shape::entries_of_C];

  __device__ __forceinline__ void prepare(const Steps& recurrence, float a, const Inputs& from) {
#pragma unroll
    for (int j = 0; j < strides; ++j) {
#pragma unroll
      for (int i = 0; i < kStride; ++i) {
        auto& step = steps[j * kStride + i];
        if constexpr (leg == Leg::back)
          step = recurrence.move(from[j].dt[i], from[j].drive[i], from[j].b[0][i]);
        else step = exp_of_product(from[j].dt[i], a);
      }
#pragma unroll
      for (int i = 0; i < Shape::entries_of_C; ++i) c[j][i] = from[j].c[i];
    }
  }
  // Moves the state on, and gives the sums of each stride. `across`: what the states along the scan order that
  // began here leave the piece with, which the way back finds and the way forth is given.
  __device__ __forceinline__ void scan(float& state, float& across, float2 (&sums)[strides]) const {
    float x[strides][1][kStride];
    const auto at = [&](int i) -> float& { return x[i / kStride][0][i % kStride]; };
    if constexpr (leg == Leg::back) {
      // Both directions at once, or the lane would wait for itself: who comes second to a step adds.
      const auto add = [&](int i, float value, bool second) {
        at(i) = second ? at(i) + value : value;
      };
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        const int last = kPiece - 1 - i;
        across = i == 0 ? steps[0].input : steps[i](across);
        add(i, across, i > last);
        state = steps[last](state);
        add(last, state, i > last);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        at(i) = state * steps[i];
        if (i % kQuad == kQuad - 1) state = at(i);
      }
      state += across;
    }
#pragma unroll
    for (int j = 0; j < strides; ++j) sums[j] = OutputSums<operand, Shape>::of(x[j], c[j]);
  }
};

// The i-th becomes what the (i + by)-th was, in a ring.
__device__ __forceinline__ void rotate(float (&quad)[kQuad], int by) {
  const float before[] = {quad[0], quad[1], quad[2], quad[3]};
#pragma unroll
  for (int i = 0; i < kQuad; ++i) quad[i] = before[(i + by + kQuad) % kQuad];
}

template <class Method, class Shape, Layout layout, Operand operand, Leg leg>
__device__ __forceinline__ void scan_states_both_ways(const ForwardArguments& p, const Work& work,
                                                      ForwardShared<Shape, layout>& shared) {
  static_assert(Shape::states == 1, "a piece of one state takes all registers");
  static_assert(Method::exponential, "steps together have the sum of their sizes");
  const int begin = first_turn<leg>(work), end = begin + int(work.windows);
  const LaneMap<Shape> lane;
  wait_for_previous();
  LaneStates<Shape> of(p.scan, work, lane, View());
  float& state = of.x[0];
  const LaneRecurrence<Method, layout> recurrence(of.a[0]);
  const LanePlaces<Shape, operand> places(lane);
  const int64_t row = work.row(p.scan, lane.channel), states = p.scan.states;
  const bool inside = lane.channel < work.channels && lane.state(0) < states;

  // Of the window at hand, where what enters it is, and what its pieces have across them.
  const int64_t first = row * p.chunks + window_of<leg>(work, begin);
  float* edges = static_cast<float*>(leg == Leg::back ? p.other_edges : p.edges) + first * states;
  float* across_at = p.across + (first * states + lane.state(0)) * kPieces;
  using Piece = PreparedPiece<LaneRecurrence<Method, layout>, Shape, operand, leg>;
  // Of the pieces of a window in the order of this leg, the place in it of the i-th of so many.
  const auto place_of = [](int i, int pieces) { return leg == Leg::back ? pieces - 1 - i : i; };
  const auto load = [&](Piece& piece, int turn, int place) VIM_MM_INLINED {
    typename Piece::Inputs inputs;
#pragma unroll
    for (int j = 0; j < Piece::strides; ++j)
      inputs[j].template load<operand, leg == Leg::back>(
          shared.inputs[shared.pipeline.stage_of(turn)], lane, places.c,
          place * kPiece + j * kStride);
    piece.prepare(recurrence, of.a[0], inputs);
  };
  const auto y_of = [&](int turn) VIM_MM_INLINED {
    return shared.y[shared.pipeline.stage_of(turn)][0].values[0] + places.y;
  };
  const auto store = [&](float* y, const float2(&sums)[Piece::strides]) VIM_MM_INLINED {
#pragma unroll
    for (int j = 0; j < Piece::strides; ++j) *reinterpret_cast<float2*>(y + j * kStride) = sums[j];
  };
  const auto place_in_y = [](int place) { return place * kPiece; };
  // Of a window at once: the way back writes it, the way forth has it a window ahead.
  static_assert(kPieces == kQuad, "it is a quad");
  float across[kPieces] = {}, ahead[kPieces] = {};  // zeros where there is no such state
  const auto begin_window = [&](int turn) VIM_MM_INLINED {
    of.store(edges);
    edges += leg == Leg::back ? -states : states;
    if constexpr (leg == Leg::forth) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) across[i] = ahead[i];
      across_at += states * kPieces;
      if (inside && turn + 1 < end) load_quad(across_at, ahead);
    }
  };
  const auto end_window = [&] {
    if constexpr (leg == Leg::back) {
      if (inside) store_segment(across_at, across);
      across_at -= states * kPieces;
    }
  };
  // Past the last step there is nothing, which leaves states as they are.
  const auto scan_window = [&](int turn) VIM_MM_INLINED {
    begin_window(turn);
    shared.pipeline.consumer_wait(turn);
    const int steps = work.steps_from(window_of<leg>(work, turn), kChunk);
    const int pieces = (steps + kPiece - 1) / kPiece;
#pragma unroll 1
    for (int i = 0; i < pieces; ++i) {
      const int place = place_of(i, pieces);
      Piece piece;
      float2 sums[Piece::strides];
      load(piece, turn, place);
      // The next place comes first, on either way.
      if (leg == Leg::back) rotate(across, -1);
      piece.scan(state, across[0], sums);
      if (leg == Leg::forth) rotate(across, 1);
      store(y_of(turn) + place_in_y(place), sums);
    }
    end_window();
    shared.pipeline.consumer_release(turn);
  };

  int turn = begin;
  if (leg == Leg::forth && inside && turn < end) load_quad(across_at, ahead);
  if constexpr (Shape::straight) {
    // Of whole windows the next piece is prepared while one is scanned, and sums are stored when the next one
    // is: as scan_states does it with strides.
    const int whole = int(work.steps / kChunk);
    if (leg == Leg::back && turn < end && window_of<leg>(work, turn) >= whole) scan_window(turn++);
    const int whole_end = leg == Leg::back ? end : begin + whole;
    if (turn < whole_end) {
      const int first = turn;
      Piece piece[2];
      float2 sums[Piece::strides] = {};
      float* y = y_of(turn);  // zeros, which sums overwrite
      shared.pipeline.consumer_wait(turn);
      load(piece[0], turn, place_of(0, kPieces));
#pragma unroll 1
      for (; turn < whole_end; ++turn) {
        begin_window(turn);
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          store(y, sums);
          if (i == 0 && turn > first) shared.pipeline.consumer_release(turn - 1);
          // Behind the last one of a window the next window's, or where there is none this one's once more.
          const int from = i + 1 < kPieces || turn + 1 == whole_end ? turn : turn + 1;
          if (i + 1 == kPieces) shared.pipeline.consumer_wait(from);
          load(piece[(i + 1) % 2], from, place_of((i + 1) % kPieces, kPieces));
          const int place = place_of(i, kPieces);
          piece[i % 2].scan(state, across[place], sums);
          y = y_of(turn) + place_in_y(place);
        }
        end_window();
      }
      store(y, sums);
      shared.pipeline.consumer_release(turn - 1);
    }
  }
#pragma unroll 1
  for (; turn < end; ++turn) scan_window(turn);
  if (leg == Leg::forth) of.store(static_cast<float*>(p.last_state) + row * states);
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
