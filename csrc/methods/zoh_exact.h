// The exact zero-order hold, the control of comparisons: A_bar = e^z, beta = psi_1 = (e^z - 1) / a. Of a method with psi
// functions the smallest, and so the one to read first.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "psi.h"

namespace vim_mm {
inline namespace VIM_MM_ISA {

struct ZohExact : PsiMethod<ZohExact> {
  static VIM_MM_INLINE constexpr Weights<1> weights() { return {1}; }

  // dt + a psi_2, or i (e - 1).
  template <Accuracy accuracy>
  struct Beta {
    using Near = NearZero<2, accuracy>;
    float a, i;

    Beta() = default;
    explicit VIM_MM_INLINE Beta(float a_) : a(a_), i(reciprocal(a)) {}
    VIM_MM_INLINE float operator()(float dt, float bits, float e) const {
      float beta = fma(a, Near::psi(dt, bits), dt);
      if (magnitude(bits) > Near::end) beta = fma(i, e, -i);
      return beta;
    }
  };
  // beta = psi_1, chi = psi_2, P = 1.
  struct HalfGradients {
    using Near = NearZero<2, Accuracy::half>;
    static constexpr float of_u = 1.0f, of_chi = 1.0f, of_dt = 1.0f;
    float a, i;

    explicit VIM_MM_INLINE HalfGradients(float a_) : a(a_), i(reciprocal(a)) {}
    VIM_MM_INLINE HalfParts operator()(float dt, float bits, float e) const {
      const bool far = magnitude(bits) > Near::end;
      HalfParts parts;
      parts.chi = Near::psi(dt, bits);
      parts.beta = select(far, fma(i, e, -i), fma(a, parts.chi, dt));
      parts.chi = select(far, i * (parts.beta - dt), parts.chi);
      return parts;
    }
    static VIM_MM_INLINE float by_dt(float, float driven) { return driven; }
  };

  template <Accuracy accuracy>
  using Forward = PsiRecurrence<Beta<accuracy>>;
  template <Accuracy accuracy, class V>
  using Backward = HalfPsiBackward<accuracy, V>;
};

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
