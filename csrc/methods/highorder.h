// Higher order: A_bar = e^z, beta = psi_1 + psi_2 + psi_3 / 2.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "psi.h"

namespace vim_mm {
inline namespace VIM_MM_ISA {

struct HighOrder : PsiMethod<HighOrder> {
  static VIM_MM_INLINE constexpr Weights<3> weights() { return {1, 1, 0.5}; }

  // dt + (1 + a)/2 dt^2 + (a^2 + a + 1/2) psi_3, or with k = i + i^2 + i^3/2:
  // k (e - 1) - dt (i + i^2/2 + i/4 dt).
  template <Accuracy accuracy>
  struct Beta {
    using Near = NearZero<3, accuracy>;
    float weight, half_sum, k, linear, quarter_i;

    Beta() = default;
    explicit VIM_MM_INLINE Beta(float a)
        : weight(0.5f * fma(a, a + 1.0f, 0.5f)), half_sum(fma(0.5f, a, 0.5f)) {
      const float i = reciprocal(a);
      quarter_i = 0.25f * i;
      linear = fma(0.5f * i, i, i);
      k = fma(i, linear, i);
    }
    VIM_MM_INLINE float operator()(float dt, float bits, float e) const {
      float beta = dt * fma(dt, fma(dt, weighted_phi(bits), half_sum), 1.0f);
      if (magnitude(bits) > Near::end) beta = fma(k, e, -fma(dt, fma(dt, quarter_i, linear), k));
      return beta;
    }

   private:
    // With the weight in the coefficients where they are few.
    VIM_MM_INLINE float weighted_phi(float bits) const {
      if constexpr (accuracy == Accuracy::full) {
        return weight * polynomial<Near>(bits);
      } else {
        float c[Near::terms];
        for (int j = 0; j < Near::terms; ++j) c[j] = weight * Near::at(j);
        return polynomial(c, bits);
      }
    }
  };
  // beta = psi_1 + psi_2 + psi_3 / 2, chi = psi_2 + 2 psi_3 + 3/2 psi_4, P = (1 + dt/2)^2.
  struct HalfGradients {
    static constexpr float of_u = 1.0f, of_chi = 0.25f, of_dt = 0.25f;
    float a, third, half, i, two_i, two_i2, three_i;

    explicit VIM_MM_INLINE HalfGradients(float a_)
        : a(a_), third(a * (1.0f / 3)), half(0.5f * a), i(reciprocal(a)), two_i(2.0f * i),
          two_i2(two_i * i), three_i(3.0f * i) {}
    VIM_MM_INLINE HalfParts operator()(float dt, float bits, float e) const {
      const bool far = magnitude(bits) > NearZero<4, Accuracy::half>::end;
      const float square = dt * dt, cube = dt * square;
      float six_psi_4 = dt * cube * phi_near_zero<4, Accuracy::half>(bits);
      float six_psi_3 = fma(a, six_psi_4, cube);
      float twice_psi_2 = fma(third, six_psi_3, square);
      float psi_1 = fma(half, twice_psi_2, dt);
      // From 0 the later ones first, elsewhere the earlier ones.
      psi_1 = select(far, fma(i, e, -i), psi_1);
      twice_psi_2 = select(far, fma(two_i2, e, -fma(two_i, dt, two_i2)), twice_psi_2);
      six_psi_3 = select(far, three_i * (twice_psi_2 - square), six_psi_3);
      six_psi_4 = select(far, i * (six_psi_3 - cube), six_psi_4);
      return {fma(six_psi_3, 1.0f / 12, fma(0.5f, twice_psi_2, psi_1)),
              fma(2.0f, twice_psi_2, fma(six_psi_3, 4.0f / 3, six_psi_4))};
    }
    static VIM_MM_INLINE float by_dt(float dt, float driven) {
      const float twice_root = dt + 2.0f;
      return twice_root * (twice_root * driven);
    }
  };

  template <Accuracy accuracy>
  using Forward = PsiRecurrence<Beta<accuracy>>;
  template <Accuracy accuracy, class V>
  using Backward = HalfPsiBackward<accuracy, V>;
};

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
