// The native home of the mathematics: A_bar and beta of every discretization, and their
// derivatives, for host and device, float and double, real and complex. Included by the CPU
// and the CUDA kernels alike. The Python home is vim_mm/ops/discretization.py;
// tests hold both to the same 60-digit values.
//
// With z = dt a, phi_k(z) = sum over j of z^j / (j + k)! and psi_k = dt^k phi_k(z):
//
//   zoh        e^z                    dt
//   foh        e^z                    psi_2
//   bilinear   (1 + z/2)/(1 - z/2)    dt / (1 - z/2)
//   poly       e^z                    psi_1 + psi_2 / 2              (averaged over both directions)
//   highorder  e^z                    psi_1 + psi_2 + psi_3 / 2
//   rk4        e^z                    dt (1 + z/2 + z^2/6 + z^3/24)
//
// phi functions: Hochbruck & Ostermann, Exponential integrators, Acta Numerica (2010).
//
// To add a method: its struct, and its number in VIM_MM_FOR_EACH_METHOD. Its `Half` may be its
// FullRecurrence; without psi functions it has to be as exact, but for a last bit or two.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include "elementary.h"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// dt is real: for complex a it is the real scalar, else of a's own type.
template <class V>
struct Coefficients {
  V a_bar, beta;
};

// a_bar depends on z alone: a_bar_z is its derivative, a a_bar_z that by dt, dt a_bar_z that by a.
// beta_dt and beta_a are the partial derivatives of beta.
template <class V>
struct Derivatives {
  V a_bar_z, beta_dt, beta_a;
};

// Of methods whose beta is dt times a function of z: that function and its derivative.
template <class V>
struct Scale {
  V value, slope;
};

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

// A step of one state, of which only the state before is missing.
template <class V>
struct Move {
  V a_bar, input;

  // By name, or the compiler may fuse another product, which makes the chain of steps twice as long.
  VIM_MM_INLINE V operator()(V x) const { return fma(a_bar, x, input); }
};

// x <- A_bar x + beta b u of one state, a step at a time: what follows from a alone is there once.
template <class Method, class V>
struct FullRecurrence {
  using R = RealOf<V>;
  V a;

  FullRecurrence() = default;
  explicit VIM_MM_INLINE FullRecurrence(V a_) : a(a_) {}

  VIM_MM_INLINE Coefficients<V> coefficients(R dt) const { return Method::coefficients(dt, a); }
  // The part of the input that all states share, and that of this state.
  static VIM_MM_INLINE R drive(R dt, R u) { return Method::beta_is_step ? dt * u : u; }
  static VIM_MM_INLINE V input(R drive, const Coefficients<V>& k, V b) {
    if constexpr (Method::beta_is_step) return drive * b;
    else return (drive * b) * k.beta;
  }
  VIM_MM_INLINE Move<V> move(R dt, R drive, V b) const {
    const Coefficients<V> k = coefficients(dt);
    return {k.a_bar, input(drive, k, b)};
  }
};

// The same with Accuracy::half, for a PsiMethod: HalfBeta(a)(dt, bits, e) is beta, 2^bits = e = e^z.
template <class Method>
struct HalfRecurrence {
  float a_bits;
  typename Method::HalfBeta beta;

  HalfRecurrence() = default;
  explicit VIM_MM_INLINE HalfRecurrence(float a) : a_bits(a * kLog2E), beta(a) {}

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

// What Psi needs near 0, with Accuracy::half, in bits, z = bits ln(2): e^z comes from them, so they are
// there already. The polynomials are minimax where |bits| <= near; from there on psi_k comes from e^z,
// upwards. Where the two meet, both are as good as the rounding of e^z lets the latter be: few terms do.
template <int K>
struct HalfPsiNear;
// psi_2 as a square, because the root of phi_2 takes a term less than phi_2.
template <>
struct HalfPsiNear<2> {
  static constexpr float near = 0.29f, near_by_a = 0.85f;
  static VIM_MM_INLINE float psi(float dt, float bits) {
    constexpr float root_of_phi[] = {0.707106848f, 0.0817431967f, 0.00943937094f};
    const float root = dt * polynomial(root_of_phi, bits);
    return root * root;
  }
  // phi_2' / phi_2, to near_by_a.
  static VIM_MM_INLINE float slope(float bits) {
    constexpr float c[] = {0.333334427f, 0.0385078162f, 0.00176727815f, -0.000102164294f};
    return polynomial(c, bits);
  }
};
template <>
struct HalfPsiNear<3> {
  static constexpr float near = 0.7f, near_by_a = 1.3f;
  float phi[4] = {0.166665295f, 0.0288813718f, 0.00402625265f, 0.000463505674f};

  static VIM_MM_INLINE float psi(float dt, float bits) {
    constexpr HalfPsiNear of;
    return dt * dt * (dt * polynomial(of.phi, bits));
  }
  static VIM_MM_INLINE float slope(float bits) {
    constexpr float c[] = {0.250004059f, 0.0260005215f, 0.00148775745f};
    return polynomial(c, bits);
  }
};

// The same as Psi, with Accuracy::half.
template <int K>
struct HalfPsi {
  using Near = HalfPsiNear<K>;
  float dt, a, inverse, bits;
  float psi[K + 1];

  VIM_MM_INLINE HalfPsi(float dt_, float a_, float e)
      : dt(dt_), a(a_), inverse(reciprocal(a)), bits(dt * (a * kLog2E)) {
    const float power[] = {1.0f, dt, 0.5f * (dt * dt)};
    const bool far = magnitude(bits) > Near::near;
    psi[0] = e;
    psi[K] = Near::psi(dt, bits);
    for (int k = K - 1; k >= 1; --k) psi[k] = fma(a, psi[k + 1], power[k]);
    float high = fma(inverse, e, -inverse);
    for (int k = 1; k <= K; ++k) {
      if (k > 1) high = inverse * (high - power[k - 1]);
      psi[k] = select(far, high, psi[k]);
    }
  }
  VIM_MM_INLINE float sum(const float (&weight)[K + 1]) const {
    WeightedSum<float> sum;
    VIM_MM_UNROLL
    for (int k = K; k >= 1; --k) sum.add(weight[k], psi[k]);
    return sum.value;
  }
  // Near 0 the derivatives of psi_k = a psi_(k+1) + dt^k / k!, else of a^k psi_k, a function of z.
  VIM_MM_INLINE float sum_by_a(const float (&weight)[K + 1]) const {
    WeightedSum<float> low, by_dt, own;
    float by_a = dt * psi[K] * Near::slope(bits);
    low.add(weight[K], by_a);
    VIM_MM_UNROLL
    for (int k = K - 1; k >= 1; --k) {
      by_a = fma(a, by_a, psi[k + 1]);
      low.add(weight[k], by_a);
    }
    VIM_MM_UNROLL
    for (int k = K; k >= 1; --k) {
      by_dt.add(weight[k], psi[k - 1]);
      own.add(k * weight[k], psi[k]);
    }
    const float high = fma(dt, by_dt.value, -own.value);
    return select(magnitude(bits) > Near::near_by_a, inverse * high, low.value);
  }
};

// `psi`: beta is made of psi functions. `causal`: scanned in one direction. `exponential`: a_bar =
// e^z, so that several steps together have that of the sum of their dt. `beta_is_step`: beta = dt,
// the same for all states. `scaled`: beta = dt times a function of z, which is in `scale`.
// `derivatives` takes what `coefficients` gave. `Half`: the recurrence with Accuracy::half; without psi
// functions nothing is less exact, only shorter, and scans that march take it in float32, too.
struct Zoh {
  static constexpr bool psi = false, causal = true, exponential = true, beta_is_step = true,
                        scaled = true;
  template <class V>
  static VIM_MM_INLINE Coefficients<V> coefficients(RealOf<V> dt, V a) {
    return {exp_of_product(dt, a), V(dt)};
  }
  template <class V>
  static VIM_MM_INLINE Derivatives<V> derivatives(RealOf<V> dt, V a, const Coefficients<V>& k) {
    return {k.a_bar, V(ScalarOf<V>(1)), V(ScalarOf<V>(0))};
  }
  using Half = FullRecurrence<Zoh, float>;
};

// Methods whose beta is a sum of psi functions up to psi_K. They have that sum, `beta`, and `slopes`,
// its derivatives, both of a Psi or a HalfPsi, and HalfBeta: by a polynomial near 0, else from e^z and
// i = 1/a. It has all that follows from a alone and takes the fewest instructions where nothing but
// beta is wanted; what is not used of it may be infinite, so that it is assigned, not multiplied.
template <class Method, int K>
struct PsiMethod {
  static constexpr bool psi = true, causal = true, exponential = true, beta_is_step = false,
                        scaled = false;
  static constexpr int order = K;
  using Half = HalfRecurrence<Method>;

  template <class V>
  static VIM_MM_INLINE Coefficients<V> coefficients(RealOf<V> dt, V a) {
    const V e = exp_of_product(dt, a);
    return {e, Method::beta(Psi<K, V>(dt, a, e))};
  }
  template <class V>
  static VIM_MM_INLINE Derivatives<V> derivatives(RealOf<V> dt, V a, const Coefficients<V>& k) {
    return Method::slopes(Psi<K, V>(dt, a, k.a_bar), k.a_bar);
  }
};

struct Foh : PsiMethod<Foh, 2> {
  template <class P>
  static VIM_MM_INLINE auto beta(const P& psi) {
    return psi.sum({0, 0, 1});
  }
  template <class P, class V>
  static VIM_MM_INLINE Derivatives<V> slopes(const P& psi, V e) {
    return {e, psi.sum({0, 1, 0}), psi.sum_by_a({0, 0, 1})};
  }
  // psi_2, or i^2 (e - 1) - i dt.
  struct HalfBeta {
    float i, i2;

    HalfBeta() = default;
    explicit VIM_MM_INLINE HalfBeta(float a) : i(reciprocal(a)), i2(i * i) {}
    VIM_MM_INLINE float operator()(float dt, float bits, float e) const {
      float beta = HalfPsiNear<2>::psi(dt, bits);
      if (magnitude(bits) > HalfPsiNear<2>::near) beta = fma(i2, e, -fma(i, dt, i2));
      return beta;
    }
  };
};

struct Bilinear {
  static constexpr bool psi = false, causal = true, exponential = false, beta_is_step = false,
                        scaled = true;
  template <class V>
  static VIM_MM_INLINE Coefficients<V> coefficients(RealOf<V> dt, V a) {
    using S = ScalarOf<V>;
    const V half_z = dt * (V(S(0.5)) * a);
    const V q = reciprocal(V(S(1)) - half_z);
    return {(V(S(1)) + half_z) * q, dt * q};
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
  struct Half {
    float quarter;  // -a/4

    Half() = default;
    explicit VIM_MM_INLINE Half(float a) : quarter(-0.25f * a) {}
    VIM_MM_INLINE float s(float dt) const { return reciprocal(fma(dt, quarter, 0.5f)); }
    VIM_MM_INLINE Coefficients<float> coefficients(float dt) const {
      return {s(dt) - 1.0f, 0.5f * dt * s(dt)};
    }
    static VIM_MM_INLINE float drive(float dt, float u) { return 0.5f * dt * u; }
    struct Move {
      float s, drive, b;
      VIM_MM_INLINE float operator()(float x) const { return fma(s, fma(drive, b, x), -x); }
    };
    VIM_MM_INLINE Move move(float dt, float drive, float b) const { return {s(dt), drive, b}; }
  };
};

struct Poly : PsiMethod<Poly, 2> {
  static constexpr bool causal = false;

  template <class P>
  static VIM_MM_INLINE auto beta(const P& psi) {
    return psi.sum({0, 1, 0.5});
  }
  template <class P, class V>
  static VIM_MM_INLINE Derivatives<V> slopes(const P& psi, V e) {
    return {e, e + psi.sum({0, 0.5, 0}), psi.sum_by_a({0, 1, 0.5})};
  }
  // dt + (a + 1/2) psi_2 in powers of dt, phi_2 being minimax in z where |bits| <= kNear, or with
  // k = i + i^2/2: k (e - 1) - i/2 dt.
  struct HalfBeta {
    static constexpr float kNear = 0.255f;
    float near[3], half_i, k;

    HalfBeta() = default;
    explicit VIM_MM_INLINE HalfBeta(float a) : half_i(0.5f * reciprocal(a)) {
      constexpr float phi[] = {0.500000339f, 0.16686196f, 0.04167751f};
      const float weight = a + 0.5f;
      near[0] = weight * phi[0], near[1] = weight * phi[1] * a, near[2] = weight * phi[2] * a * a;
      k = fma(2.0f * half_i, half_i, 2.0f * half_i);
    }
    VIM_MM_INLINE float operator()(float dt, float bits, float e) const {
      float beta = dt * fma(dt, polynomial(near, dt), 1.0f);
      if (magnitude(bits) > kNear) beta = fma(k, e, -fma(half_i, dt, k));
      return beta;
    }
  };
};

struct HighOrder : PsiMethod<HighOrder, 3> {
  template <class P>
  static VIM_MM_INLINE auto beta(const P& psi) {
    return psi.sum({0, 1, 1, 0.5});
  }
  template <class P, class V>
  static VIM_MM_INLINE Derivatives<V> slopes(const P& psi, V e) {
    return {e, e + psi.sum({0, 1, 0.5, 0}), psi.sum_by_a({0, 1, 1, 0.5})};
  }
  // dt + (1 + a)/2 dt^2 + (a^2 + a + 1/2) psi_3, or with k = i + i^2 + i^3/2:
  // k (e - 1) - dt (i + i^2/2 + i/4 dt).
  struct HalfBeta {
    float near[4], half_sum, k, linear, quarter_i;

    HalfBeta() = default;
    explicit VIM_MM_INLINE HalfBeta(float a) : half_sum(fma(0.5f, a, 0.5f)) {
      constexpr HalfPsiNear<3> of;
      for (int j = 0; j < 4; ++j) near[j] = fma(a, a + 1.0f, 0.5f) * of.phi[j];
      const float i = reciprocal(a);
      quarter_i = 0.25f * i;
      linear = fma(0.5f * i, i, i);
      k = fma(i, linear, i);
    }
    VIM_MM_INLINE float operator()(float dt, float bits, float e) const {
      float beta = dt * fma(dt, fma(dt, polynomial(near, bits), half_sum), 1.0f);
      if (magnitude(bits) > HalfPsiNear<3>::near)
        beta = fma(k, e, -fma(dt, fma(dt, quarter_i, linear), k));
      return beta;
    }
  };
};

struct Rk4 {
  static constexpr bool psi = false, causal = true, exponential = true, beta_is_step = false,
                        scaled = true;
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
  struct Half {
    float a_bits;

    Half() = default;
    explicit VIM_MM_INLINE Half(float a) : a_bits(a * kLog2E) {}
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
};

template <class Method, Accuracy accuracy, class V>
using Recurrence = typename std::conditional<accuracy == Accuracy::half, typename Method::Half,
                                             FullRecurrence<Method, V>>::type;

// beta and derivatives of a step, given its A_bar. Methods that are not made of psi functions have
// nothing to gain from less accuracy here.
template <class V>
struct Linearized {
  V beta;
  Derivatives<V> derivatives;
};
template <class Method, Accuracy accuracy, class V>
VIM_MM_INLINE Linearized<V> linearize(RealOf<V> dt, V a, V a_bar) {
  if constexpr (Method::psi && accuracy == Accuracy::half) {
    const HalfPsi<Method::order> psi(dt, a, a_bar);
    return {Method::beta(psi), Method::slopes(psi, a_bar)};
  } else {
    const Coefficients<V> k{a_bar, Method::coefficients(dt, a).beta};
    return {k.beta, Method::derivatives(dt, a, k)};
  }
}

// What backward keeps of a step of one state, which takes x to a_bar x + input. `drive`, which all states share, is u, but with Method::scaled dt u
// times drive_weight. `pulls_back`: it has gradients of its own.
template <class Method, Accuracy accuracy, class E>
struct Step {
  static constexpr bool pulls_back = false;
  static constexpr float drive_weight = 1.0f, a_weight = 1.0f;
  E a_bar, input;

  Step() = default;
  VIM_MM_INLINE Step(float dt, E a, float drive, E b)
      : a_bar(Method::coefficients(dt, a).a_bar), input(drive * b) {
    if constexpr (!Method::scaled) input = input * linearize<Method, accuracy>(dt, a, a_bar).beta;
    else if constexpr (!Method::beta_is_step) input = input * Method::scale(dt, a).value;
  }
};

// As Bilinear::Half does it, s (x + b drive) - x with the derivative s^2 / 4 of s by z: fewer
// instructions than by A_bar and beta, each with its own derivative.
template <>
struct Step<Bilinear, Accuracy::half, float> {
  static constexpr bool pulls_back = true;
  static constexpr float drive_weight = 0.5f, a_weight = 0.25f;
  float s, a_bar, input;

  Step() = default;
  VIM_MM_INLINE Step(float dt, float a, float drive, float b)
      : s(Bilinear::Half(a).s(dt)), a_bar(s - 1.0f), input(s * drive * b) {}

  // From the gradient of the state after the step and the sum of the states before and after, which is
  // s (x + b drive); where |z| is large they cancel, and 1.5e-8 |z| of it is lost. Adds to the gradients
  // of drive, of dt (but for what drive has of it) and of b, returns what times a_weight is that of a.
  VIM_MM_INLINE float pull_back(float gradient, float states, float dt, float a, float drive,
                                float b, float& to_drive, float& to_dt, float& to_b) const {
    const float driven = s * gradient, grad_z = driven * states;
    to_drive += driven * b;
    to_dt += grad_z * (a_weight * a);
    to_b += drive * driven;
    return dt * grad_z;
  }
};

// Every method with its number, which is that of the Python table.
#define VIM_MM_FOR_EACH_METHOD(call) \
  call(0, Zoh) call(1, Foh) call(2, Bilinear) call(3, Poly) call(4, HighOrder) call(5, Rk4)

#define VIM_MM_COUNT(number, Method) +1
constexpr int kMethods = 0 VIM_MM_FOR_EACH_METHOD(VIM_MM_COUNT);
#undef VIM_MM_COUNT

// Calls f(Method()) for the method of that number. Returns false for a number that is none's.
template <class F>
inline bool dispatch_method(int64_t method, const F& f) {
  switch (method) {
#define VIM_MM_CASE(number, Method) \
  case number: f(Method()); return true;
    VIM_MM_FOR_EACH_METHOD(VIM_MM_CASE)
#undef VIM_MM_CASE
    default: return false;
  }
}

inline bool is_causal(int64_t method) {
  bool causal = true;
  dispatch_method(method, [&](auto m) { causal = decltype(m)::causal; });
  return causal;
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
