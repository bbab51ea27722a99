// Methods whose beta is a sum of psi functions, psi_k = dt^k phi_k(z), phi_k(z) = the sum over j of z^j / (j + k)!, and
// whose A_bar is e^z. Such a method gives its weights, and what else it has makes it faster on a GPU:
//
//   struct ZohExact : PsiMethod<ZohExact> {
//     static VIM_MM_INLINE constexpr Weights<1> weights() { return {1}; }
//   };
//
// phi functions: Hochbruck & Ostermann, Exponential integrators, Acta Numerica (2010).
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "generic.h"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// Those of psi_1 to psi_K. K is at most 3: near 0 psi_K comes from phi_(K+1), and fitted.h ends with phi_4.
template <int K>
struct Weights {
  static_assert(1 <= K && K <= 3, "a method has weights of psi_1 to psi_3");
  double of[K];
};
template <class Method>
constexpr int order_of = sizeof(Method::weights()) / sizeof(double);
// Them as numbers S, that of psi_k at k. `Earlier`: those of the derivative by dt, which makes psi_k psi_(k-1), without
// that of psi_0. `any`: whether one is not 0.
template <class S, int K>
struct Terms {
  S weight[K + 1];
  bool any;
};
template <class S, class Method, bool Earlier = false>
VIM_MM_INLINE constexpr Terms<S, order_of<Method>> terms_of() {
  constexpr int K = order_of<Method>;
  constexpr Weights<K> weights = Method::weights();
  Terms<S, K> terms{};
  for (int k = 1; k + Earlier <= K; ++k) {
    terms.weight[k] = S(weights.of[k - 1 + Earlier]);
    terms.any = terms.any || terms.weight[k] != S(0);
  }
  return terms;
}

// A sum with weights. They are constants: what they make 0 or 1 costs nothing.
template <class V>
struct WeightedSum {
  using S = ScalarOf<V>;
  V value;
  bool empty;

  VIM_MM_INLINE WeightedSum() : value(S(0)), empty(true) {}
  VIM_MM_INLINE void add(S weight, V x) {
    if (weight == S(0)) return;
    if (weight != S(1)) x = V(weight) * x;
    value = empty ? x : x + value;
    empty = false;
  }
};

// Sums of psi_k = dt^k phi_k(dt a), 1 <= k <= K, and of their derivatives by a; that by dt is
// psi_(k-1), with psi_0 = e^z. For small |z| from the Taylor series of phi_(K+1) and
// phi_k = z phi_(k+1) + 1/k! downwards; elsewhere from e^z and psi_k = (psi_(k-1) - dt^(k-1)/(k-1)!) / a
// upwards, which the compiler turns into products with one 1/a for all steps. Where the two meet each
// costs a few ulps; what is not used of either may be infinite.
template <int K, class V>
struct Psi {
  using S = ScalarOf<V>;
  using R = RealOf<V>;
  decltype(within(V(), S())) near;
  R dt;
  V inverse;     // 1 / a
  V phi[K + 2];  // near
  V psi[K + 1];  // elsewhere

  VIM_MM_INLINE Psi(R dt_, V a, V e) : dt(dt_), inverse(reciprocal(a)) {
    constexpr S factorial[] = {S(1), S(1), S(2), S(6), S(24)};
    const V z = dt * a;
    near = within(z, S(Precision<S>::phi_radius));
    phi[K + 1] = exponential_series<K + 1, Precision<S>::phi_terms>(z);
    for (int k = K; k >= 1; --k) phi[k] = z * phi[k + 1] + V(S(1) / factorial[k]);
    psi[0] = e;
    psi[1] = expm1_far(dt, a, e) * inverse;
    R power = dt;
    for (int k = 2; k <= K; ++k) {
      psi[k] = (psi[k - 1] - V(R(S(1) / factorial[k - 1]) * power)) * inverse;
      power = power * dt;
    }
  }

  // The sum of weight[k] psi_k.
  VIM_MM_INLINE V sum(const S (&weight)[K + 1]) const {
    WeightedSum<V> low, high;
    for (int k = K; k >= 1; --k) {
      low.add(weight[k], phi[k]);
      if (!low.empty) low.value = dt * low.value;
      high.add(weight[k], psi[k]);
    }
    return select(near, low.value, high.value);
  }
  // The sum of weight[k] d psi_k / da: dt^(k+1) phi_k' near 0, else (dt psi_(k-1) - k psi_k) / a.
  VIM_MM_INLINE V sum_by_a(const S (&weight)[K + 1]) const {
    WeightedSum<V> low, high;
    for (int k = K; k >= 1; --k) {
      low.add(weight[k], phi[k] - V(S(k)) * phi[k + 1]);
      if (!low.empty) low.value = dt * low.value;
      high.add(weight[k], dt * psi[k - 1] - V(S(k)) * psi[k]);
    }
    return select(near, dt * low.value, high.value * inverse);
  }
};

// What psi functions in float need near 0, in bits, z = bits ln(2): e^z comes from them, so they are there
// already. Up to |bits| = end (K-1)! phi_K comes from a polynomial of fitted.h, from there on psi_K from e^z.
// Where the two meet, both are as good as the rounding of e^z lets the latter be, with Accuracy::half 2^-16: few
// terms do.
template <int K, Accuracy accuracy>
struct NearZero;
template <Accuracy accuracy>
struct NearZero<3, accuracy> : TwicePhi3<accuracy> {};
template <Accuracy accuracy>
struct NearZero<4, accuracy> : SixPhi4<accuracy> {};
// As a square, because the root of phi_2 takes a term less than phi_2.
template <Accuracy accuracy>
struct NearZero<2, accuracy> : RootOfPhi2<accuracy> {
  static VIM_MM_INLINE float psi(float dt, float bits) {
    const float root = dt * polynomial<RootOfPhi2<accuracy>>(bits);
    return root * root;
  }
};
// (K-1)! phi_K.
template <int K, Accuracy accuracy>
VIM_MM_INLINE float phi_near_zero(float bits) {
  const float value = polynomial<NearZero<K, accuracy>>(bits);
  return K == 2 ? value * value : value;
}

// Psi in float, in fewer instructions: each psi_k is chosen before sums are made of it. Near 0 from psi_(K+1)
// and psi_k = a psi_(k+1) + dt^k / k! downwards. So dt^(K+1) has to be in float's range, as for HalfGradients: with
// |a| above 1e9 steps of |z| about 1 are too short.
template <int K>
struct FloatPsi {
  bool far;
  float dt, inverse;
  float psi[K + 2];  // times (k-1)!; psi_(K+1) is there near 0 alone

  VIM_MM_INLINE FloatPsi(float dt_, float a, float e) : dt(dt_), inverse(reciprocal(a)) {
    const float bits = dt * (a * kLog2E);
    far = magnitude(bits) > NearZero<K + 1, Accuracy::full>::end;
    float power[K + 1];
    power[1] = dt;
    for (int k = 2; k <= K; ++k) power[k] = power[k - 1] * dt;
    psi[K + 1] = power[K] * dt * phi_near_zero<K + 1, Accuracy::full>(bits);
    for (int k = K; k >= 1; --k) psi[k] = fma(a * (1.0f / k), psi[k + 1], power[k] * (1.0f / k));
    psi[0] = e;
    psi[1] = select(far, fma(e, inverse, -inverse), psi[1]);
    for (int k = 2; k <= K; ++k) {
      const float step = (k - 1) * inverse;
      psi[k] = select(far, fma(psi[k - 1], step, -(inverse * power[k - 1])), psi[k]);
    }
  }

  VIM_MM_INLINE float sum(const float (&weight)[K + 1]) const {
    WeightedSum<float> sum;
    for (int k = K; k >= 1; --k) sum.add(weight[k] * of(k), psi[k]);
    return sum.value;
  }
  // The sum of weight[k] d psi_k / da, which is dt psi_k - k psi_(k+1), away from 0 as Psi has it.
  VIM_MM_INLINE float sum_by_a(const float (&weight)[K + 1]) const {
    WeightedSum<float> earlier, same, later;
    for (int k = K; k >= 1; --k) {
      earlier.add(weight[k] * of(k - 1), psi[k - 1]);
      same.add(weight[k] * k * of(k), psi[k]);
      later.add(weight[k] * k * of(k + 1), psi[k + 1]);
    }
    return select(far, inverse * fma(dt, earlier.value, -same.value),
                  fma(dt, sum(weight), -later.value));
  }

 private:
  // psi_k is that times psi[k].
  static VIM_MM_INLINE float of(int k) {
    constexpr float inverse_factorial[] = {1.0f, 1.0f, 1.0f, 0.5f, 1.0f / 6};
    return inverse_factorial[k];
  }
};

// beta and the derivatives of a method, of its Psi or FloatPsi.
template <class S, class Method, class P>
VIM_MM_INLINE auto beta_of(const P& psi) {
  constexpr auto terms = terms_of<S, Method>();
  return psi.sum(terms.weight);
}
template <class S, class Method, class V, class P>
VIM_MM_INLINE Derivatives<V> derivatives_of(const P& psi, V e) {
  constexpr auto terms = terms_of<S, Method>(), earlier = terms_of<S, Method, true>();
  WeightedSum<V> by_dt;
  if constexpr (earlier.any) by_dt.add(S(1), psi.sum(earlier.weight));
  by_dt.add(S(Method::weights().of[0]), e);
  return {e, by_dt.value, psi.sum_by_a(terms.weight)};
}

// Forward of such a method: Beta(a)(dt, bits, e) is beta, 2^bits = e = e^z.
template <class Beta>
struct PsiRecurrence {
  float a_bits;
  Beta beta;

  PsiRecurrence() = default;
  explicit VIM_MM_INLINE PsiRecurrence(float a) : a_bits(a * kLog2E), beta(a) {}

  VIM_MM_INLINE Coefficients<float> coefficients(float dt) const {
    const float bits = dt * a_bits, e = power_of_two(bits);
    return {e, beta(dt, bits, e)};
  }
  static VIM_MM_INLINE float drive(float, float u) { return u; }
  static VIM_MM_INLINE float input(float drive, const Coefficients<float>& k, float b) {
    return drive * b * k.beta;
  }
  VIM_MM_INLINE Move<float> move(float dt, float drive, float b) const {
    const Coefficients<float> k = coefficients(dt);
    return {k.a_bar, input(drive, k, b)};
  }
};

// beta by all psi functions: the default, which knows no shorter sum.
template <class Method>
struct BetaOfWeights {
  float a;

  BetaOfWeights() = default;
  explicit VIM_MM_INLINE BetaOfWeights(float a_) : a(a_) {}
  VIM_MM_INLINE float operator()(float dt, float, float e) const {
    return beta_of<float, Method>(FloatPsi<order_of<Method>>(dt, a, e));
  }
};

// What HalfPsiStep has of a step: beta and chi, each by a constant.
struct HalfParts {
  float beta, chi;
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
  static constexpr bool driven_by_dt = false, needs_a_bar = false;
  static constexpr float of_u = Gradients::of_u, of_dt = Gradients::of_dt;
  static constexpr Kept kept = Method::Tuning::template kept<Accuracy::half>;
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
    input = kept == Kept::drive_beta ? drive * beta * b : drive * b * beta;
  }

  template <class... Others>
  VIM_MM_INLINE void vjp(float dt, float a, float drive, float b, StepGradients<float, OfA> to,
                         const Passage<float>& own, const Others&... other) const {
    // `gradient` behind `states`: in the other order the compiler spills more.
    const float states = ((own.gradient * own.after) + ... + (other.gradient * other.after));
    const float gradient = (own.gradient + ... + other.gradient);
    float driven;
    if constexpr (kept == Kept::drive_b) {
      const float scaled = gradient * beta;
      driven = gradient * (drive * b);
      to.drive += scaled * b;
      to.b += drive * scaled;
    } else {
      const float to_input = gradient * b;
      driven = drive * to_input;
      to.drive += beta * to_input;
      to.b += gradient * (drive * beta);
    }
    to.dt += (a / of_dt) * states;
    to.dt += Gradients::by_dt(dt, driven);
    to.a.by_input += chi * driven;
    to.a.by_state += dt * states;
  }
};

// Psi functions leave few registers.
struct PsiTuning : DefaultTuning {
  static constexpr bool interleaves = false, keeps_addresses = true;
};

template <class Method>
struct PsiMethod : MethodDefaults<Method> {
  static constexpr bool exponential = true;
  template <Accuracy>
  using Forward = PsiRecurrence<BetaOfWeights<Method>>;
  using Tuning = PsiTuning;
  // For methods that have HalfGradients.
  template <Accuracy accuracy, class V>
  using HalfPsiBackward = typename std::conditional<accuracy == Accuracy::half, HalfPsiStep<Method>,
                                                    CoefficientStep<Method, V>>::type;

  template <class V>
  static VIM_MM_INLINE Coefficients<V> coefficients(RealOf<V> dt, V a) {
    const V e = exp_of_product(dt, a);
    return {e, beta_of<ScalarOf<V>, Method>(Psi<order_of<Method>, V>(dt, a, e))};
  }
  template <class V>
  static VIM_MM_INLINE Derivatives<V> derivatives(RealOf<V> dt, V a, const Coefficients<V>& k) {
    return derivatives_of<ScalarOf<V>, Method>(Psi<order_of<Method>, V>(dt, a, k.a_bar), k.a_bar);
  }
  template <class V>
  static VIM_MM_INLINE auto linearize(RealOf<V> dt, V a, V a_bar) {
    if constexpr (std::is_same<V, float>::value) {
      const FloatPsi<order_of<Method>> psi(dt, a, a_bar);
      return Linearized<V, Derivatives<V>>{beta_of<float, Method>(psi),
                                           derivatives_of<float, Method>(psi, a_bar)};
    } else {
      return MethodDefaults<Method>::linearize(dt, a, a_bar);
    }
  }
};
template <class Method>
VIM_MM_INLINE constexpr bool is_psi_method(const PsiMethod<Method>*) {
  return true;
}
VIM_MM_INLINE constexpr bool is_psi_method(const void*) { return false; }

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
