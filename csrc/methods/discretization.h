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
//   zoh_exact  e^z                    psi_1                          (the control, see the Python home)
//
// phi functions: Hochbruck & Ostermann, Exponential integrators, Acta Numerica (2010).
//
// What uses a method's struct (CONTRIBUTING.md says how to add one):
//
//   coefficients, derivatives        the CPU, and CUDA where nothing below takes their place
//   scale                            CUDA, of `scaled` methods
//   Short                            CUDA, real a: forward
//   order, beta and slopes           CUDA, real a: backward in float32, of psi methods (by FloatPsi)
//   Beta, HalfGradients, reused      CUDA, real a: forward, and backward in 16 bits, of psi methods
//
// So the CPU and its tests show nothing of the last four. nvcc does, and without a GPU tests/emulation.
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

// The same for a PsiMethod in float: Beta<accuracy>(a)(dt, bits, e) is beta, 2^bits = e = e^z.
template <class Method, Accuracy accuracy>
struct PsiRecurrence {
  float a_bits;
  typename Method::template Beta<accuracy> beta;

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

// What psi functions in float need near 0, in bits, z = bits ln(2): e^z comes from them, so they are there
// already. phi: the polynomial of (K-1)! phi_K, minimax where |bits| <= near; from there on psi_K comes from e^z.
// Where the two meet, both are as good as the rounding of e^z lets the latter be, with Accuracy::half 2^-16: few
// terms do.
template <int K, Accuracy accuracy>
struct NearZero;
// psi_2 as a square, because the root of phi_2 takes a term less than phi_2.
template <Accuracy accuracy>
struct NearZero<2, accuracy> {
  static constexpr bool half = accuracy == Accuracy::half;
  static constexpr float near = half ? 0.29f : 1.4f;
  static VIM_MM_INLINE float psi(float dt, float bits) {
    const float root = dt * root_of_phi(bits);
    return root * root;
  }
  static VIM_MM_INLINE float root_of_phi(float bits) {
    if constexpr (half) {
      constexpr float c[] = {0.707106848f, 0.0817431967f, 0.00943937094f};
      return polynomial(c, bits);
    } else {
      constexpr float c[] = {0.707106829f,    0.0816881657f,   0.00943664648f,
                             0.000872176664f, 6.34396783e-05f, 3.54165354e-06f};
      return polynomial(c, bits);
    }
  }
};
template <>
struct NearZero<3, Accuracy::half> {
  static constexpr float near = 0.7f;
  float phi[4] = {0.33333059f, 0.0577627436f, 0.0080525053f, 0.000927011348f};
};
template <>
struct NearZero<3, Accuracy::full> {
  static constexpr float near = 1.8f;
  float phi[7] = {0.333333343f,    0.0577624217f,   0.00800751522f, 0.000924677879f,
                  9.16139688e-05f, 8.17893215e-06f, 6.18787851e-07f};
};
template <>
struct NearZero<4, Accuracy::half> {
  static constexpr float near = 1.2f;
  float phi[5] = {0.249999963f, 0.0346556408f, 0.0040038476f, 0.000401240221f, 3.45484859e-05f};
};
template <>
struct NearZero<4, Accuracy::full> {
  static constexpr float near = 2.0f;
  float phi[7] = {0.25f,           0.0346574411f,   0.00400376273f, 0.00039629481f,
                  3.43524916e-05f, 2.72730358e-06f, 1.86177942e-07f};
};
// (K-1)! phi_K.
template <int K, Accuracy accuracy>
VIM_MM_INLINE float phi_near_zero(float bits) {
  if constexpr (K == 2) {
    const float root = NearZero<2, accuracy>::root_of_phi(bits);
    return root * root;
  } else {
    constexpr NearZero<K, accuracy> of;
    return polynomial(of.phi, bits);
  }
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
    far = magnitude(bits) > NearZero<K + 1, Accuracy::full>::near;
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

// What HalfPsiStep has of a step: beta and chi, each by a constant.
struct HalfParts {
  float beta, chi;
};
// The product of a step's input that one of its gradients wants again. To keep it takes a register, and which one
// spills least depends on what else a method has there.
enum class Reused { none, drive_b, drive_beta };

// `psi`: beta is made of psi functions. `causal`: scanned in one direction. `exponential`: a_bar =
// e^z, so that several steps together have that of the sum of their dt. `beta_is_step`: beta = dt,
// the same for all states. `scaled`: beta = dt times a function of z, which is in `scale`.
// `derivatives` takes what `coefficients` gave. `Short`: the recurrence in float in the fewest instructions.
// Without psi functions it may be FullRecurrence, and else is the same with either accuracy, as exact but for a last
// bit or two; a PsiMethod has one already, of its Beta.
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
  template <Accuracy>
  using Short = FullRecurrence<Zoh, float>;
};

// Methods whose beta is a sum of psi functions up to psi_K, sum of w_k psi_k. All of them have
//
//   beta, slopes     that sum, and all derivatives, of a Psi or a FloatPsi
//   Beta             beta in float by a polynomial near 0, else from e^z and i = 1/a, with all that follows from a
//                    alone, in the fewest instructions where nothing but beta is wanted. What is not used may be
//                    infinite, so it is assigned, not multiplied
//   HalfGradients    beta, chi = the sum of w_k k psi_(k+1), and by_dt, the product with P = the sum of
//                    w_k dt^(k-1)/(k-1)!. Each may leave a factor to of_u, of_chi and of_dt: HalfPsiStep in steps.h
//                    says what becomes of them
//
// and may have `reused`.
template <class Method, int K>
struct PsiMethod {
  static constexpr bool psi = true, causal = true, exponential = true, beta_is_step = false,
                        scaled = false;
  static constexpr int order = K;
  template <Accuracy>
  static constexpr Reused reused = Reused::none;
  template <Accuracy accuracy>
  using Short = PsiRecurrence<Method, accuracy>;

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
  template <Accuracy>
  static constexpr Reused reused = Reused::drive_b;

  template <class P>
  static VIM_MM_INLINE auto beta(const P& psi) {
    return psi.sum({0, 0, 1});
  }
  template <class P, class V>
  static VIM_MM_INLINE Derivatives<V> slopes(const P& psi, V e) {
    return {e, psi.sum({0, 1, 0}), psi.sum_by_a({0, 0, 1})};
  }
  // psi_2, or i^2 (e - 1) - i dt.
  template <Accuracy accuracy>
  struct Beta {
    using Near = NearZero<2, accuracy>;
    float i, i2;

    Beta() = default;
    explicit VIM_MM_INLINE Beta(float a) : i(reciprocal(a)), i2(i * i) {}
    VIM_MM_INLINE float operator()(float dt, float bits, float e) const {
      float beta = Near::psi(dt, bits);
      if (magnitude(bits) > Near::near) beta = fma(i2, e, -fma(i, dt, i2));
      return beta;
    }
  };
  // beta = psi_2, chi = 2 psi_3, P = dt. The derivative by a, dt psi_2 - 2 psi_3, is near 0 a third of the one and
  // half of the other: chi is the cube of a polynomial, which for one product more is five times as exact.
  struct HalfGradients {
    static constexpr float of_u = 0.5f, of_chi = 2.0f, of_dt = 2.0f;
    static constexpr float near = 0.9f;
    float a, i, two_i, two_i2;

    explicit VIM_MM_INLINE HalfGradients(float a_)
        : a(a_), i(reciprocal(a)), two_i(2.0f * i), two_i2(two_i * i) {}
    VIM_MM_INLINE HalfParts operator()(float dt, float bits, float e) const {
      constexpr float root_of_phi[] = {0.693360329f, 0.0400501415f, 0.00324833859f,
                                       0.000222963135f};
      const bool far = magnitude(bits) > near;
      const float square = dt * dt, root = dt * polynomial(root_of_phi, bits);
      HalfParts parts;
      parts.chi = root * root * root;
      parts.beta = fma(a, parts.chi, square);
      parts.beta = select(far, fma(two_i2, e, -fma(two_i, dt, two_i2)), parts.beta);
      parts.chi = select(far, i * (parts.beta - square), parts.chi);
      return parts;
    }
    static VIM_MM_INLINE float by_dt(float dt, float driven) { return dt * driven; }
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
    };
    VIM_MM_INLINE Move move(float dt, float drive, float b) const { return {s(dt), drive, b}; }
  };
  template <Accuracy>
  using Short = ByS;
};

struct Poly : PsiMethod<Poly, 2> {
  static constexpr bool causal = false;
  template <Accuracy accuracy>
  static constexpr Reused reused = accuracy == Accuracy::half ? Reused::drive_beta : Reused::none;

  template <class P>
  static VIM_MM_INLINE auto beta(const P& psi) {
    return psi.sum({0, 1, 0.5});
  }
  template <class P, class V>
  static VIM_MM_INLINE Derivatives<V> slopes(const P& psi, V e) {
    return {e, e + psi.sum({0, 0.5, 0}), psi.sum_by_a({0, 1, 0.5})};
  }
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
      if (magnitude(bits) > Near::near) beta = far(dt, e);
      return beta;
    }
  };
  // Near 0 in powers of dt, phi_2 being minimax in z where |bits| <= kNear.
  struct HalfBeta : FarBeta {
    static constexpr float kNear = 0.255f;
    float near[3];

    HalfBeta() = default;
    explicit VIM_MM_INLINE HalfBeta(float a) : FarBeta(a) {
      constexpr float phi[] = {0.500000339f, 0.16686196f, 0.04167751f};
      const float weight = a + 0.5f;
      near[0] = weight * phi[0], near[1] = weight * phi[1] * a, near[2] = weight * phi[2] * a * a;
    }
    VIM_MM_INLINE float operator()(float dt, float bits, float e) const {
      float beta = dt * fma(dt, polynomial(near, dt), 1.0f);
      if (magnitude(bits) > kNear) beta = far(dt, e);
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
      const bool far = magnitude(bits) > NearZero<3, Accuracy::half>::near;
      const float square = dt * dt,
                  twice_psi_3 = dt * square * phi_near_zero<3, Accuracy::half>(bits);
      const float twice_psi_2 = fma(a, twice_psi_3, square);
      return {select(far, of.far(dt, e), fma(weight, twice_psi_2, dt)),
              select(far, fma(c, e, -fma(dt, fma(dt, i, linear), c)), twice_psi_2 + twice_psi_3)};
    }
    static VIM_MM_INLINE float by_dt(float dt, float driven) { return (dt + 2.0f) * driven; }
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
      if (magnitude(bits) > Near::near) beta = fma(k, e, -fma(dt, fma(dt, quarter_i, linear), k));
      return beta;
    }

   private:
    // With the weight in the coefficients where they are few.
    VIM_MM_INLINE float weighted_phi(float bits) const {
      Near of;
      if constexpr (accuracy == Accuracy::full) {
        return weight * polynomial(of.phi, bits);
      } else {
        for (float& c : of.phi) c *= weight;
        return polynomial(of.phi, bits);
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
      const bool far = magnitude(bits) > NearZero<4, Accuracy::half>::near;
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
  using Short = InBits;
};

// The control: of a psi method the smallest, and so the one to read first.
struct ZohExact : PsiMethod<ZohExact, 1> {
  template <class P>
  static VIM_MM_INLINE auto beta(const P& psi) {
    return psi.sum({0, 1});
  }
  template <class P, class V>
  static VIM_MM_INLINE Derivatives<V> slopes(const P& psi, V e) {
    return {e, e, psi.sum_by_a({0, 1})};
  }
  // dt + a psi_2, or i (e - 1).
  template <Accuracy accuracy>
  struct Beta {
    using Near = NearZero<2, accuracy>;
    float a, i;

    Beta() = default;
    explicit VIM_MM_INLINE Beta(float a_) : a(a_), i(reciprocal(a)) {}
    VIM_MM_INLINE float operator()(float dt, float bits, float e) const {
      float beta = fma(a, Near::psi(dt, bits), dt);
      if (magnitude(bits) > Near::near) beta = fma(i, e, -i);
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
      const bool far = magnitude(bits) > Near::near;
      HalfParts parts;
      parts.chi = Near::psi(dt, bits);
      parts.beta = select(far, fma(i, e, -i), fma(a, parts.chi, dt));
      parts.chi = select(far, i * (parts.beta - dt), parts.chi);
      return parts;
    }
    static VIM_MM_INLINE float by_dt(float, float driven) { return driven; }
  };
};

template <class Method, Accuracy accuracy, class V>
using Recurrence = typename std::conditional<
    std::is_same<V, float>::value && (Method::psi || accuracy == Accuracy::half),
    typename Method::template Short<accuracy>, FullRecurrence<Method, V>>::type;

// Every method with its number, which is that of the Python table.
#define VIM_MM_FOR_EACH_METHOD(call)                                                        \
  call(0, Zoh) call(1, Foh) call(2, Bilinear) call(3, Poly) call(4, HighOrder) call(5, Rk4) \
      call(6, ZohExact)

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
