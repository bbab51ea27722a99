// The steps of a scan that follow from a method's coefficients and derivatives: the defaults of Forward and Backward
// (contract.h).
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

#include "contract.h"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// Of a method, what its derivatives are at numbers V.
template <class Method, class V>
using DerivativesOf = decltype(Method::derivatives(std::declval<RealOf<V>>(), std::declval<V>(),
                                                   std::declval<const Coefficients<V>&>()));
// Whether beta = dt, the same for all states.
template <class Method, class V>
constexpr bool beta_is_step =
    std::is_same<DerivativesOf<Method, V>, Derivatives<V, One, Zero>>::value;

// A step of one state, of which only the state before is missing.
template <class V>
struct Move {
  V a_bar, input;

  // By name, or the compiler may fuse another product, which makes the chain of steps twice as long.
  VIM_MM_INLINE V operator()(V x) const { return fma(a_bar, x, input); }
  // From a state of 0, where a_bar may be infinite.
  VIM_MM_INLINE V from_zero() const { return input; }
};

// x <- A_bar x + beta b u of one state, a step at a time: what follows from a alone is there once.
template <class Method, class V>
struct CoefficientRecurrence {
  using R = RealOf<V>;
  V a;

  CoefficientRecurrence() = default;
  explicit VIM_MM_INLINE CoefficientRecurrence(V a_) : a(a_) {}

  VIM_MM_INLINE Coefficients<V> coefficients(R dt) const { return Method::coefficients(dt, a); }
  static VIM_MM_INLINE R drive(R dt, R u) { return beta_is_step<Method, V> ? dt * u : u; }
  // The part of the input that is this state's.
  static VIM_MM_INLINE V input(R drive, const Coefficients<V>& k, V b) {
    if constexpr (beta_is_step<Method, V>) return drive * b;
    else return (drive * b) * k.beta;
  }
  VIM_MM_INLINE Move<V> move(R dt, R drive, V b) const {
    const Coefficients<V> k = coefficients(dt);
    return {k.a_bar, input(drive, k, b)};
  }
};

// The states of one direction around a step, in the order of that direction, and the gradient of the one after it.
template <class V>
struct Passage {
  V gradient, before, after;
};

// Where a step adds what it has of the gradients: of `drive`, of dt but for what drive has of it, of b and of a.
template <class V, class OfA>
struct StepGradients {
  float &drive, &dt;
  V& b;
  OfA& a;
};

// What backward keeps of a step of one state, which takes x to a_bar x + input, and the gradients it has of it. Its
// members are those of every Backward:
//
//   driven_by_dt     whether `drive`, which all states share, is of_u dt u, or of_u u
//   of_u, of_dt      the gradient of dt is of_dt times what states add, but for what drive has of it
//   OfA              sums of the gradient of a, which total() gives
//   needs_a_bar      whether a_bar is in more than its product with the state before: in beta's derivatives, say
//   step(dt, a, drive, b)
//   vjp              adds the gradients, given the passage of the scan and, of a method that is not causal, that of the
//                    other direction
template <class Method, class V>
struct CoefficientStep {
  static constexpr bool driven_by_dt = false, needs_a_bar = true;
  static constexpr float of_u = 1.0f, of_dt = 1.0f;
  V a_bar, input;
  struct OfA {
    V sum = V(0.0f);
    VIM_MM_INLINE V total() const { return sum; }
  };

  CoefficientStep() = default;
  VIM_MM_INLINE CoefficientStep(float dt, V a, float drive, V b)
      : a_bar(Method::coefficients(dt, a).a_bar), input(drive * b) {
    input = input * Method::linearize(dt, a, a_bar).beta;
  }

  // Numbers by reference and `gradient` behind grad_z: in another order the compiler spills more.
  template <class... Others>
  VIM_MM_INLINE void vjp(const float& dt, const V& a, const float& drive, const V& b,
                         StepGradients<V, OfA> to, const Passage<V>& own,
                         const Others&... other) const {
    const auto at = Method::linearize(dt, a, a_bar);
    const auto& d = at.derivatives;
    V grad_z;
    if constexpr (sizeof...(other) == 0) grad_z = own.gradient * conj(d.a_bar_z * own.before);
    else
      grad_z = conj(d.a_bar_z) *
               ((own.gradient * conj(own.before)) + ... + (other.gradient * conj(other.before)));
    const V gradient = (own.gradient + ... + other.gradient);
    const V scaled = gradient * conj(at.beta);
    // The same but for rounding; of the products that might be kept, drive b alone is.
    V grad_beta;
    if constexpr (Method::Tuning::template kept<Accuracy::full> == Kept::drive_b)
      grad_beta = gradient * conj(drive * b);
    else grad_beta = drive * (gradient * conj(b));
    to.drive += real(scaled * conj(b));
    to.dt += real(grad_z * conj(a) + grad_beta * conj(d.beta_dt));
    to.b = to.b + drive * scaled;
    // Two FMAs, and in this order: in the other one the compiler spills more.
    to.a.sum = to.a.sum + grad_beta * conj(d.beta_a);
    to.a.sum = to.a.sum + dt * grad_z;
  }
};

// A function of z and its derivative, of type V, or constants.
template <class Value, class Slope = Value>
struct Scale {
  Value value;
  Slope slope;
};

// Of a causal method whose beta is dt times a function of z, which it has in `scale`: dt u is the same for all states,
// a product less than CoefficientStep.
template <class Method, class V>
struct ScaledStep {
  static constexpr bool driven_by_dt = true, needs_a_bar = false;
  static constexpr float of_u = 1.0f, of_dt = 1.0f;
  V a_bar, input;
  struct OfA {
    V sum = V(0.0f);
    VIM_MM_INLINE V total() const { return sum; }
  };

  ScaledStep() = default;
  VIM_MM_INLINE ScaledStep(float dt, V a, float drive, V b)
      : a_bar(Method::coefficients(dt, a).a_bar), input(drive * b) {
    input = input * Method::scale(dt, a).value;
  }

  VIM_MM_INLINE void vjp(float dt, V a, float drive, V b, StepGradients<V, OfA> to,
                         const Passage<V>& own) const {
    const auto d = Method::linearize(dt, a, a_bar).derivatives;
    const auto scale = Method::scale(dt, a);
    // The gradient times the derivative of the state by z, which has two parts where `scale` is no constant: to
    // add them up first is an instruction less, but makes the compiler spill.
    V grad_z;
    if constexpr (std::is_same<decltype(scale.slope), Zero>::value)
      grad_z = own.gradient * conj(d.a_bar_z * own.before);
    else
      grad_z = own.gradient * conj(d.a_bar_z) * conj(own.before) +
               own.gradient * conj(drive * b * scale.slope);
    const V scaled = own.gradient * conj(scale.value);
    to.drive += real(scaled * conj(b));
    to.dt += real(grad_z * conj(a));
    to.b = to.b + drive * scaled;
    to.a.sum = to.a.sum + dt * grad_z;
  }
};

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
