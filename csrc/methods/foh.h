// First-order hold: A_bar = e^z, beta = psi_2 = (e^z - 1 - z) / a^2.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "psi.h"

namespace vim_mm {
inline namespace VIM_MM_ISA {

struct Foh : PsiMethod<Foh> {
  static VIM_MM_INLINE constexpr Weights<2> weights() { return {0, 1}; }
  struct Tuning : PsiTuning {
    static constexpr bool keeps_addresses = false;  // it has a few registers more than the others
    template <Accuracy>
    static constexpr Kept kept = Kept::drive_b;
  };

  // psi_2, or i^2 (e - 1) - i dt.
  template <Accuracy accuracy>
  struct Beta {
    using Near = NearZero<2, accuracy>;
    float i, i2;

    Beta() = default;
    explicit VIM_MM_INLINE Beta(float a) : i(reciprocal(a)), i2(i * i) {}
    VIM_MM_INLINE float operator()(float dt, float bits, float e) const {
      float beta = Near::psi(dt, bits);
      if (magnitude(bits) > Near::end) beta = fma(i2, e, -fma(i, dt, i2));
      return beta;
    }
  };
  // beta = psi_2, chi = 2 psi_3, P = dt. The derivative by a, dt psi_2 - 2 psi_3, is near 0 a third of the one and
  // half of the other: chi is the cube of a polynomial, which for one product more is five times as exact.
  struct HalfGradients {
    static constexpr float of_u = 0.5f, of_chi = 2.0f, of_dt = 2.0f;
    using Root = RootOfTwicePhi3<Accuracy::half>;
    float a, i, two_i, two_i2;

    explicit VIM_MM_INLINE HalfGradients(float a_)
        : a(a_), i(reciprocal(a)), two_i(2.0f * i), two_i2(two_i * i) {}
    VIM_MM_INLINE HalfParts operator()(float dt, float bits, float e) const {
      const bool far = magnitude(bits) > Root::end;
      const float square = dt * dt, root = dt * polynomial<Root>(bits);
      HalfParts parts;
      parts.chi = root * root * root;
      parts.beta = fma(a, parts.chi, square);
      parts.beta = select(far, fma(two_i2, e, -fma(two_i, dt, two_i2)), parts.beta);
      parts.chi = select(far, i * (parts.beta - square), parts.chi);
      return parts;
    }
    static VIM_MM_INLINE float by_dt(float dt, float driven) { return dt * driven; }
  };

  template <Accuracy accuracy>
  using Forward = PsiRecurrence<Beta<accuracy>>;
  template <Accuracy accuracy, class V>
  using Backward = HalfPsiBackward<accuracy, V>;
};

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
