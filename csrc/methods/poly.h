// The mean of both directions, A_bar = e^z, beta = psi_1 + psi_2 / 2.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "psi.h"

namespace vim_mm {
inline namespace VIM_MM_ISA {

struct Poly : PsiMethod<Poly> {
  static constexpr bool causal = false;
  static VIM_MM_INLINE constexpr Weights<2> weights() { return {1, 0.5}; }
  struct Tuning : PsiTuning {
    template <Accuracy accuracy>
    static constexpr Kept kept = accuracy == Accuracy::half ? Kept::drive_beta : Kept::none;
  };

  // dt + (a + 1/2) psi_2, or with k = i + i^2/2: k (e - 1) - i/2 dt.
  struct FarBeta {
    float half_i, k;

    FarBeta() = default;
    explicit VIM_MM_INLINE FarBeta(float a) : half_i(0.5f * reciprocal(a)) {
      k = fma(2.0f * half_i, half_i, 2.0f * half_i);
    }
    VIM_MM_INLINE float far(float dt, float e) const { return fma(k, e, -fma(half_i, dt, k)); }
  };
  struct FullBeta : FarBeta {
    using Near = NearZero<2, Accuracy::full>;
    float weight;

    FullBeta() = default;
    explicit VIM_MM_INLINE FullBeta(float a) : FarBeta(a), weight(a + 0.5f) {}
    VIM_MM_INLINE float operator()(float dt, float bits, float e) const {
      float beta = fma(weight, Near::psi(dt, bits), dt);
      if (magnitude(bits) > Near::end) beta = far(dt, e);
      return beta;
    }
  };
  // Near 0 in powers of dt, phi_2 being minimax in z where |bits| <= end.
  struct HalfBeta : FarBeta {
    using Near = Phi2<Accuracy::half>;
    float near[3];

    HalfBeta() = default;
    explicit VIM_MM_INLINE HalfBeta(float a) : FarBeta(a) {
      const float weight = a + 0.5f;
      near[0] = weight * Near::at(0), near[1] = weight * Near::at(1) * a,
      near[2] = weight * Near::at(2) * a * a;
    }
    VIM_MM_INLINE float operator()(float dt, float bits, float e) const {
      float beta = dt * fma(dt, polynomial(near, dt), 1.0f);
      if (magnitude(bits) > Near::end) beta = far(dt, e);
      return beta;
    }
  };
  template <Accuracy accuracy>
  using Beta = typename std::conditional<accuracy == Accuracy::half, HalfBeta, FullBeta>::type;
  // beta = dt + (a + 1/2) psi_2, chi = psi_2 + psi_3, P = 1 + dt/2.
  struct HalfGradients {
    static constexpr float of_u = 1.0f, of_chi = 0.5f, of_dt = 0.5f;
    FarBeta of;
    float a, weight, i, linear, c;

    explicit VIM_MM_INLINE HalfGradients(float a_)
        : of(a_), a(a_), weight(fma(0.5f, a, 0.25f)), i(reciprocal(a)), linear(2.0f * fma(i, i, i)),
          c(i * linear) {}
    VIM_MM_INLINE HalfParts operator()(float dt, float bits, float e) const {
      const bool far = magnitude(bits) > NearZero<3, Accuracy::half>::end;
      const float square = dt * dt,
                  twice_psi_3 = dt * square * phi_near_zero<3, Accuracy::half>(bits);
      const float twice_psi_2 = fma(a, twice_psi_3, square);
      return {select(far, of.far(dt, e), fma(weight, twice_psi_2, dt)),
              select(far, fma(c, e, -fma(dt, fma(dt, i, linear), c)), twice_psi_2 + twice_psi_3)};
    }
    static VIM_MM_INLINE float by_dt(float dt, float driven) { return (dt + 2.0f) * driven; }
  };

  template <Accuracy accuracy>
  using Forward = PsiRecurrence<Beta<accuracy>>;
  template <Accuracy accuracy, class V>
  using Backward = HalfPsiBackward<accuracy, V>;
};

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
