// The bilinear transform: A_bar = (1 + z/2) / (1 - z/2), beta = dt / (1 - z/2).
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "generic.h"

namespace vim_mm {
inline namespace VIM_MM_ISA {

struct Bilinear : MethodDefaults<Bilinear> {
  template <class V>
  static VIM_MM_INLINE Coefficients<V> coefficients(RealOf<V> dt, V a) {
    using S = ScalarOf<V>;
    const V half_z = dt * (V(S(0.5)) * a);
    const V q = reciprocal(V(S(1)) - half_z);
    return {V(S(2)) * q - V(S(1)), dt * q};  // (1 + z/2) q, also where z is infinite
  }
  template <class V>
  static VIM_MM_INLINE Scale<V> scale(RealOf<V> dt, V a) {
    using S = ScalarOf<V>;
    const V q = reciprocal(V(S(1)) - dt * (V(S(0.5)) * a));
    return {q, V(S(0.5)) * (q * q)};
  }
  template <class V>
  static VIM_MM_INLINE Derivatives<V> derivatives(RealOf<V> dt, V a, const Coefficients<V>& k) {
    using S = ScalarOf<V>;
    const V q = reciprocal(V(S(1)) - dt * (V(S(0.5)) * a));
    const V q2 = q * q;
    return {q2, q2, V(S(0.5)) * (dt * (dt * q2))};
  }
  // With s = 2 / (1 - z/2): A_bar = s - 1, beta = s dt/2, and the step s (x + b u dt/2) - x.
  struct ByS {
    float quarter;  // -a/4

    ByS() = default;
    explicit VIM_MM_INLINE ByS(float a) : quarter(-0.25f * a) {}
    VIM_MM_INLINE float s(float dt) const { return reciprocal(fma(dt, quarter, 0.5f)); }
    VIM_MM_INLINE Coefficients<float> coefficients(float dt) const {
      return {s(dt) - 1.0f, 0.5f * dt * s(dt)};
    }
    static VIM_MM_INLINE float drive(float dt, float u) { return 0.5f * dt * u; }
    struct Move {
      float s, drive, b;
      VIM_MM_INLINE float operator()(float x) const { return fma(s, fma(drive, b, x), -x); }
      VIM_MM_INLINE float from_zero() const { return s * (drive * b); }
    };
    VIM_MM_INLINE Move move(float dt, float drive, float b) const { return {s(dt), drive, b}; }
  };
  // As ByS does it, s (x + b drive) - x with the derivative s^2 / 4 of s by z: fewer
  // instructions than by A_bar and beta, each with its own derivative.
  struct HalfStep {
    static constexpr bool driven_by_dt = true, needs_a_bar = false;
    static constexpr float of_u = 0.5f, of_dt = 1.0f;
    float s, a_bar, input;
    struct OfA {  // sums of the gradient of a
      float by_s = 0.0f;
      VIM_MM_INLINE float total() const { return 0.25f * by_s; }
    };

    HalfStep() = default;
    VIM_MM_INLINE HalfStep(float dt, float a, float drive, float b)
        : s(ByS(a).s(dt)), a_bar(s - 1.0f), input(s * drive * b) {}

    // The states before and after the step add up to s (x + b drive). Where |z| is large the parts of the gradient by
    // that and by the state cancel, and 1.5e-8 |z| of it is lost.
    VIM_MM_INLINE void vjp(float dt, float a, float drive, float b, StepGradients<float, OfA> to,
                           const Passage<float>& own) const {
      const float driven = s * own.gradient, grad_z = driven * (own.before + own.after);
      to.drive += driven * b;
      to.dt += grad_z * (0.25f * a);
      to.b += drive * driven;
      to.a.by_s += dt * grad_z;
    }
  };

  template <Accuracy>
  using Forward = ByS;
  template <Accuracy accuracy, class V>
  using Backward = typename std::conditional<accuracy == Accuracy::half, HalfStep,
                                             ScaledStep<Bilinear, V>>::type;
};

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
