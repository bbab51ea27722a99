// What the backward scan keeps of a step of one state, and the gradients it has of it: with all of float32's
// accuracy as they are in discretization.h, and for tensors of 16 bits in fewer instructions.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "discretization.h"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// beta and derivatives of a step, given its A_bar.
template <class V>
struct Linearized {
  V beta;
  Derivatives<V> derivatives;
};
template <class Method, class V>
VIM_MM_INLINE Linearized<V> linearize(RealOf<V> dt, V a, V a_bar) {
  if constexpr (Method::psi && std::is_same<V, float>::value) {
    const FloatPsi<Method::order> psi(dt, a, a_bar);
    return {Method::beta(psi), Method::slopes(psi, a_bar)};
  } else {
    const Coefficients<V> k{a_bar, Method::coefficients(dt, a).beta};
    return {k.beta, Method::derivatives(dt, a, k)};
  }
}

// What backward keeps of a step of one state, which takes x to a_bar x + input. `drive`, which all states share,
// is u, but with Method::scaled dt u, times of_u; the gradient of dt is of_dt times the sum of what states add.
// `pulls_back`: it has gradients of its own.
template <class Method, class E>
struct FullStep {
  static constexpr bool pulls_back = false;
  static constexpr float of_u = 1.0f, of_dt = 1.0f;
  E a_bar, input;
  struct OfA {  // the sum that is the gradient of a
    E sum = E(0.0f);
    VIM_MM_INLINE E total() const { return sum; }
  };

  FullStep() = default;
  VIM_MM_INLINE FullStep(float dt, E a, float drive, E b)
      : a_bar(Method::coefficients(dt, a).a_bar), input(drive * b) {
    if constexpr (!Method::scaled) input = input * linearize<Method>(dt, a, a_bar).beta;
    else if constexpr (!Method::beta_is_step) input = input * Method::scale(dt, a).value;
  }
};

// As Bilinear::ByS does it, s (x + b drive) - x with the derivative s^2 / 4 of s by z: fewer
// instructions than by A_bar and beta, each with its own derivative.
struct HalfBilinearStep {
  static constexpr bool pulls_back = true;
  static constexpr float of_u = 0.5f, of_dt = 1.0f;
  float s, a_bar, input;
  struct OfA {  // sums of the gradient of a
    float by_s = 0.0f;
    VIM_MM_INLINE float total() const { return 0.25f * by_s; }
  };

  HalfBilinearStep() = default;
  VIM_MM_INLINE HalfBilinearStep(float dt, float a, float drive, float b)
      : s(Bilinear::ByS(a).s(dt)), a_bar(s - 1.0f), input(s * drive * b) {}

  // What the gradients need of the states before and after the step, whose sum is s (x + b drive).
  static VIM_MM_INLINE float of_states(float, float before, float after) { return before + after; }
  // From the gradient of the state after the step and that sum; where |z| is large its parts cancel, and
  // 1.5e-8 |z| of it is lost. Adds to the gradients of drive, of dt (but for what drive has of it), of b and of a.
  VIM_MM_INLINE void pull_back(float gradient, float states, float dt, float a, float drive,
                               float b, float& to_drive, float& to_dt, float& to_b,
                               OfA& to_a) const {
    const float driven = s * gradient, grad_z = driven * states;
    to_drive += driven * b;
    to_dt += grad_z * (0.25f * a);
    to_b += drive * driven;
    to_a.by_s += dt * grad_z;
  }
};

// Of psi functions in 16 bits. psi_k has the derivatives a psi_k + dt^(k-1)/(k-1)! by dt and
// dt psi_k - k psi_(k+1) by a. So with beta the sum of w_k psi_k, what is driven d = b u, and x' = A_bar x + beta d
// the state after the step, that has the derivatives
//
//   by dt   a x' + P d    P = the sum of w_k dt^(k-1)/(k-1)!
//   by a    dt x' - chi d    chi = the sum of w_k k psi_(k+1)
//
// and no other is needed. Where |z| is large, of `poly` and `highorder` |a|, the parts cancel, and up to 3e-7 of
// either is lost. As drive is of_u u, Method::HalfGradients has beta / of_u, chi / (of_u of_chi) and, times what
// is driven, P / (of_u of_dt).
template <class Method>
struct HalfPsiStep {
  using Gradients = typename Method::HalfGradients;
  static constexpr bool pulls_back = true;
  static constexpr float of_u = Gradients::of_u, of_dt = Gradients::of_dt;
  static constexpr Reused reused = Method::template reused<Accuracy::half>;
  float a_bar, input, beta, chi;
  struct OfA {
    float by_state = 0.0f, by_input = 0.0f;
    VIM_MM_INLINE float total() const { return by_state - Gradients::of_chi * by_input; }
  };

  HalfPsiStep() = default;
  VIM_MM_INLINE HalfPsiStep(float dt, float a, float drive, float b)
      : a_bar(exp_of_product(dt, a)) {
    const HalfParts parts = Gradients(a)(dt, dt * (a * kLog2E), a_bar);
    beta = parts.beta, chi = parts.chi;
    input = reused == Reused::drive_beta ? drive * beta * b : drive * b * beta;
  }

  // Of each direction.
  static VIM_MM_INLINE float of_states(float gradient, float, float after) {
    return gradient * after;
  }
  // From the gradient of the states after the step, of all directions, and the sum of of_states.
  VIM_MM_INLINE void pull_back(float gradient, float states, float dt, float a, float drive,
                               float b, float& to_drive, float& to_dt, float& to_b,
                               OfA& to_a) const {
    float driven;
    if constexpr (reused == Reused::drive_b) {
      const float scaled = gradient * beta;
      driven = gradient * (drive * b);
      to_drive += scaled * b;
      to_b += drive * scaled;
    } else {
      const float to_input = gradient * b;
      driven = drive * to_input;
      to_drive += beta * to_input;
      to_b += gradient * (drive * beta);
    }
    to_dt += (a / of_dt) * states;
    to_dt += Gradients::by_dt(dt, driven);
    to_a.by_input += chi * driven;
    to_a.by_state += dt * states;
  }
};

template <class Method, Accuracy accuracy, class E>
struct StepOf {
  using Type = FullStep<Method, E>;
};
template <class Method>
struct StepOf<Method, Accuracy::half, float> {
  using Type =
      typename std::conditional<Method::psi, HalfPsiStep<Method>, FullStep<Method, float>>::type;
};
template <>
struct StepOf<Bilinear, Accuracy::half, float> {
  using Type = HalfBilinearStep;
};
template <class Method, Accuracy accuracy, class E>
using Step = typename StepOf<Method, accuracy, E>::Type;

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
