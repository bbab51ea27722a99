// One state over a lane's segment of time in backward: its states once more, the adjoint recurrence, gradients.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../common/state_matrix.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// What enters a chunk, for one state.
template <class E>
struct Edges {
  E x, grad_x;              // in scan order, and its adjoint against it
  E other_x, other_grad_x;  // of the other direction, where there is one
};

// What a lane has of its segment, and the sums over states that it collects.
template <class Shape>
struct Segment {
  static constexpr int steps = Shape::steps;
  // drive: as a Step takes it; grad_y: that of y + D u, before the gate, weighted.
  float dt[steps], drive[steps], grad_y[steps];
  float y[steps], grad_input[steps], grad_dt[steps];
};

constexpr __host__ __device__ int log2_of(int x) { return x > 1 ? 1 + log2_of(x / 2) : 0; }

// A sum or product over the 1, 2, 4, .. segments in front of a lane's, and over those behind it, of
// no use where there are not so many. No lane has half of all on both sides: the last ones share a
// place.
template <class V, class Shape>
struct Around {
  static constexpr int levels = log2_of(Shape::segments);
  V front[levels], behind[levels];

  // Calls f(to, own) for what is not shared.
  template <class Other, class F>
  __device__ __forceinline__ void each(Around<Other, Shape>& to, const F& f) const {
#pragma unroll
    for (int k = 0; k + 1 < levels; ++k) {
      to.front[k] = f(front[k]);
      to.behind[k] = f(behind[k]);
    }
    to.front[levels - 1] = to.behind[levels - 1] = f(front[levels - 1]);
  }
};
template <class Shape, class V, class Add>
__device__ __forceinline__ Around<V, Shape> around(V own, const Add& add) {
  Around<V, Shape> to;
  to.front[0] = shuffle_up(own, Shape::channels_of_set);
  to.behind[0] = shuffle_down(own, Shape::channels_of_set);
#pragma unroll
  for (int k = 1; k < to.levels; ++k) {
    const int by = Shape::channels_of_set << (k - 1);
    to.front[k] = add(to.front[k - 1], shuffle_up(to.front[k - 1], by));
    to.behind[k] = add(to.behind[k - 1], shuffle_down(to.behind[k - 1], by));
  }
  V& last = to.front[to.levels - 1];
  if (segment_of_lane<Shape>() < Shape::segments / 2) last = to.behind[to.levels - 1];
  to.behind[to.levels - 1] = last;
  return to;
}

// What enters a lane's segment, where `carry` enters the first one and each leaves `leaving` and
// its transition times what enters, or nothing of that where it has cuts. `transitions`: over the 1, 2, 4, .. segments
// in front.
template <bool Up, class Shape, class E, int Levels, class Cuts>
__device__ __forceinline__ E enter_segments(const E (&transitions)[Levels], E leaving, E carry,
                                            const Cuts& cuts) {
  const int segment = segment_of_lane<Shape>();
  const int position = Up ? segment : Shape::segments - 1 - segment;
  const auto before = [](E x, int by) {
    by *= Shape::channels_of_set;
    return Up ? shuffle_up(x, by) : shuffle_down(x, by);
  };
  E x = before(leaving, 1);
  if (position == 0) x = carry;
#pragma unroll
  for (int k = 0; k < Levels; ++k) {
    const int by = 1 << k;
    const E earlier = before(x, by);
    if (position >= by && !cuts.any_in(Up ? segment - by : segment + 1, by))
      x = transitions[k] * earlier + x;
  }
  return x;
}

// One state over a lane's segment: what the recurrences are made of, and what enters them.
template <class Method, Accuracy accuracy, class E, class Shape>
struct StateSegment {
  E a, b[Shape::steps], c[Shape::steps];
  typename Method::template Backward<accuracy, E> step[Shape::steps];
  E from_y[Shape::steps];   // the part of the state's gradient that does not come from later states
  E x, grad_x;              // enters in scan order, and against it
  E other_x, other_grad_x;  // of the other direction, where there is one
};

// `cuts`: those before steps; `other_cuts`: those behind them, for methods that are not causal.
template <class Method, class E, class Shape, Layout layout, class Cuts>
__device__ __forceinline__ StateSegment<Method, accuracy_of(layout), E, Shape> enter_state(
    const Segment<Shape>& lane, const Around<float, Shape>& dt_around, E a,
    const SegmentOf<E, layout>& b_of, const SegmentOf<E, layout>& c_of, const Edges<E>& edges,
    const Cuts& cuts, const Cuts& other_cuts) {
  constexpr int steps = Shape::steps;
  using Steps = typename Method::template Backward<accuracy_of(layout), E>;
  StateSegment<Method, accuracy_of(layout), E, Shape> s;
  s.a = a;
  E x, product;
  b_of.load(s.b);
  c_of.load(s.c);
#pragma unroll
  for (int i = 0; i < steps; ++i) {
    s.step[i] = {lane.dt[i], a, lane.drive[i], s.b[i]};
    s.from_y[i] = lane.grad_y[i] * conj(s.c[i]);
    const bool cut = cuts.at(i);
    // Its product with a state of 0 may be NaN.
    if (Method::causal && !Steps::needs_a_bar && cut) s.step[i].a_bar = E(0.0f);
    x = i == 0 || cut ? s.step[i].input : s.step[i].a_bar * x + s.step[i].input;
    product = i == 0 ? s.step[0].a_bar : product * s.step[i].a_bar;
  }
  E grad_x = s.from_y[steps - 1];
#pragma unroll
  for (int i = steps - 1; i > 0; --i)
    grad_x = cuts.at(i) ? s.from_y[i - 1] : conj(s.step[i].a_bar) * grad_x + s.from_y[i - 1];
  grad_x = cuts.at(0) ? E(0.0f) : conj(s.step[0].a_bar) * grad_x;

  Around<E, Shape> transitions, adjoint;
  if constexpr (Method::exponential)
    dt_around.each(transitions, [&](float dt) { return exp_of_product(dt, a); });
  else transitions = around<Shape>(product, [](E one, E other) { return one * other; });
  transitions.each(adjoint, [](E x) { return conj(x); });
  s.x = enter_segments<true, Shape>(transitions.front, x, edges.x, cuts);
  s.grad_x = enter_segments<false, Shape>(adjoint.behind, grad_x, edges.grad_x, cuts);

  // The other direction: its states descend, their adjoint ascends.
  if constexpr (!Method::causal) {
    x = s.step[steps - 1].input;
#pragma unroll
    for (int i = steps - 2; i >= 0; --i)
      x = other_cuts.at(i) ? s.step[i].input : s.step[i].a_bar * x + s.step[i].input;
    grad_x = s.from_y[0];
#pragma unroll
    for (int i = 0; i < steps - 1; ++i)
      grad_x =
          other_cuts.at(i) ? s.from_y[i + 1] : conj(s.step[i].a_bar) * grad_x + s.from_y[i + 1];
    grad_x = other_cuts.at(steps - 1) ? E(0.0f) : conj(s.step[steps - 1].a_bar) * grad_x;
    s.other_x = enter_segments<false, Shape>(transitions.behind, x, edges.other_x, other_cuts);
    s.other_grad_x =
        enter_segments<true, Shape>(adjoint.front, grad_x, edges.other_grad_x, other_cuts);
  }
  return s;
}

// What comes to step i from a state on the other side of a cut, or of none.
template <class E, class Cuts>
__device__ __forceinline__ E unless_cut(const Cuts& cuts, int i, E x) {
  return cuts.at(i) ? E(0.0f) : x;
}

// Adds one state's part to the segment's sums and to the gradients of B and C, returns that of A
// over the segment. grad_input is the gradient of `drive`; where dt is in that, its part of grad_dt
// is missing.
template <class Method, Accuracy accuracy, class E, class Shape, class Cuts>
__device__ __forceinline__ E segment_vjp(Segment<Shape>& lane,
                                         const StateSegment<Method, accuracy, E, Shape>& s,
                                         const Cuts& cuts, const Cuts& other_cuts,
                                         E (&grad_b)[Shape::steps], E (&grad_c)[Shape::steps]) {
  using Steps = typename Method::template Backward<accuracy, E>;
  constexpr int steps = Shape::steps;
  E other_x[steps + 1], other_gradient[steps];
  if constexpr (!Method::causal) {
    other_x[steps] = s.other_x;
#pragma unroll
    for (int i = steps - 1; i >= 0; --i)
      other_x[i] = s.step[i].a_bar * unless_cut(other_cuts, i, other_x[i + 1]) + s.step[i].input;
    other_gradient[0] = s.other_grad_x + s.from_y[0];
#pragma unroll
    for (int i = 1; i < steps; ++i)
      other_gradient[i] = other_cuts.at(i - 1)
                              ? s.from_y[i]
                              : conj(s.step[i - 1].a_bar) * other_gradient[i - 1] + s.from_y[i];
  }

  E x = s.x, before[steps];  // whether there is a cut or not
#pragma unroll
  for (int i = 0; i < steps; ++i) {
    before[i] = x;
    x = s.step[i].a_bar * unless_cut(cuts, i, before[i]) + s.step[i].input;
    const E both = Method::causal ? x : x + other_x[i];
    lane.y[i] += real(s.c[i] * both);
    grad_c[i] = grad_c[i] + lane.grad_y[i] * conj(both);
  }

  typename Steps::OfA grad_a;
  E own_gradient;
#pragma unroll
  for (int i = steps - 1; i >= 0; --i) {
    const float dt = lane.dt[i], drive = lane.drive[i];
    // Of the state after step i.
    if (i == steps - 1) own_gradient = s.grad_x + s.from_y[i];
    else if (cuts.at(i + 1)) own_gradient = s.from_y[i];
    else own_gradient = conj(s.step[i + 1].a_bar) * own_gradient + s.from_y[i];
    const E after = i + 1 < steps ? before[(i + 1) % steps] : x;
    const Passage<E> own{own_gradient, unless_cut(cuts, i, before[i]), after};
    const StepGradients<E, typename Steps::OfA> to{lane.grad_input[i], lane.grad_dt[i], grad_b[i],
                                                   grad_a};
    if constexpr (Method::causal) {
      s.step[i].vjp(dt, s.a, drive, s.b[i], to, own);
    } else {
      const Passage<E> other{other_gradient[i], unless_cut(other_cuts, i, other_x[i + 1]),
                             other_x[i]};
      s.step[i].vjp(dt, s.a, drive, s.b[i], to, own, other);
    }
  }
  return grad_a.total();
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
