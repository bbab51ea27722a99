// Runge-Kutta of order four: A_bar = e^z, beta = dt (1 + z/2 + z^2/6 + z^3/24).
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "generic.h"

namespace vim_mm {
inline namespace VIM_MM_ISA {

struct Rk4 : MethodDefaults<Rk4> {
  static constexpr bool exponential = true;
  struct Tuning : DefaultTuning {
    static constexpr int strides_of_six = 2;
  };

  template <class V>
  static VIM_MM_INLINE Coefficients<V> coefficients(RealOf<V> dt, V a) {
    return {exp_of_product(dt, a), dt * scale(dt, a).value};
  }
  template <class V>
  static VIM_MM_INLINE Scale<V> scale(RealOf<V> dt, V a) {
    using S = ScalarOf<V>;
    const V z = dt * a;
    const V inner = V(S(1) / S(6)) + z * V(S(1) / S(24));
    return {V(S(1)) + z * (V(S(0.5)) + z * inner),
            V(S(0.5)) + z * (V(S(1) / S(3)) + z * V(S(0.125)))};
  }
  template <class V>
  static VIM_MM_INLINE Derivatives<V> derivatives(RealOf<V> dt, V a, const Coefficients<V>& k) {
    using S = ScalarOf<V>;
    const V z = dt * a;
    const V beta_dt = V(S(1)) + z * (V(S(1)) + z * (V(S(0.5)) + z * V(S(1) / S(6))));
    return {k.a_bar, beta_dt, dt * (dt * scale(dt, a).slope)};
  }
  // The same polynomial, in bits = z log2(e). What all states share is dt u.
  struct InBits {
    float a_bits;

    InBits() = default;
    explicit VIM_MM_INLINE InBits(float a) : a_bits(a * kLog2E) {}
    VIM_MM_INLINE Coefficients<float> coefficients(float dt) const {
      const float bits = dt * a_bits;
      return {power_of_two(bits), dt * scale_of(bits)};
    }
    static VIM_MM_INLINE float drive(float dt, float u) { return dt * u; }
    VIM_MM_INLINE Move<float> move(float dt, float drive, float b) const {
      const float bits = dt * a_bits;
      return {power_of_two(bits), drive * b * scale_of(bits)};
    }

   private:
    static VIM_MM_INLINE float scale_of(float bits) {
      constexpr float ln2 = 1.0f / kLog2E;
      constexpr float p[] = {1.0f, ln2 / 2, ln2 * ln2 / 6, ln2 * ln2 * ln2 / 24};
      return polynomial(p, bits);
    }
  };
  template <Accuracy>
  using Forward = InBits;
  template <Accuracy, class V>
  using Backward = ScaledStep<Rk4, V>;
};

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
