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
// To add a method: its struct, and its number in VIM_MM_FOR_EACH_METHOD.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

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
    Sum low{V(S(0)), true}, high{V(S(0)), true};
    for (int k = K; k >= 1; --k) {
      low.add(weight[k], phi[k]);
      if (!low.empty) low.value = dt * low.value;
      high.add(weight[k], psi[k]);
    }
    return select(near, low.value, high.value);
  }
  // The sum of weight[k] d psi_k / da: dt^(k+1) phi_k' near 0, else (dt psi_(k-1) - k psi_k) / a.
  VIM_MM_INLINE V sum_by_a(const S (&weight)[K + 1]) const {
    Sum low{V(S(0)), true}, high{V(S(0)), true};
    for (int k = K; k >= 1; --k) {
      low.add(weight[k], phi[k] - V(S(k)) * phi[k + 1]);
      if (!low.empty) low.value = dt * low.value;
      high.add(weight[k], dt * psi[k - 1] - V(S(k)) * psi[k]);
    }
    return select(near, dt * low.value, high.value * inverse);
  }

 private:
  // Weights are constants: what they make 0 or 1 costs nothing.
  struct Sum {
    V value;
    bool empty;
    VIM_MM_INLINE void add(S weight, V x) {
      if (weight == S(0)) return;
      if (weight != S(1)) x = V(weight) * x;
      value = empty ? x : x + value;
      empty = false;
    }
  };
};

// `psi`: beta is made of psi functions. `causal`: scanned in one direction. `exponential`: a_bar =
// e^z, so that several steps together have that of the sum of their dt. `beta_is_step`: beta = dt,
// the same for all states. `scaled`: beta = dt times a function of z, which is in `scale`.
// `derivatives` takes what `coefficients` gave.
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
};

struct Foh {
  static constexpr bool psi = true, causal = true, exponential = true, beta_is_step = false,
                        scaled = false;
  template <class V>
  static VIM_MM_INLINE Coefficients<V> coefficients(RealOf<V> dt, V a) {
    const V e = exp_of_product(dt, a);
    return {e, Psi<2, V>(dt, a, e).sum({0, 0, 1})};
  }
  template <class V>
  static VIM_MM_INLINE Derivatives<V> derivatives(RealOf<V> dt, V a, const Coefficients<V>& k) {
    const Psi<2, V> psi(dt, a, k.a_bar);
    return {k.a_bar, psi.sum({0, 1, 0}), psi.sum_by_a({0, 0, 1})};
  }
};

struct Bilinear {
  static constexpr bool psi = false, causal = true, exponential = false, beta_is_step = false,
                        scaled = true;
  template <class V>
  static VIM_MM_INLINE Coefficients<V> coefficients(RealOf<V> dt, V a) {
    using S = ScalarOf<V>;
    const V half_z = V(S(0.5)) * (dt * a);
    const V q = reciprocal(V(S(1)) - half_z);
    return {(V(S(1)) + half_z) * q, dt * q};
  }
  template <class V>
  static VIM_MM_INLINE Scale<V> scale(RealOf<V> dt, V a) {
    using S = ScalarOf<V>;
    const V q = reciprocal(V(S(1)) - V(S(0.5)) * (dt * a));
    return {q, V(S(0.5)) * (q * q)};
  }
  template <class V>
  static VIM_MM_INLINE Derivatives<V> derivatives(RealOf<V> dt, V a, const Coefficients<V>& k) {
    using S = ScalarOf<V>;
    const V q = reciprocal(V(S(1)) - V(S(0.5)) * (dt * a));
    const V q2 = q * q;
    return {q2, q2, V(S(0.5)) * (dt * (dt * q2))};
  }
};

struct Poly {
  static constexpr bool psi = true, causal = false, exponential = true, beta_is_step = false,
                        scaled = false;
  template <class V>
  static VIM_MM_INLINE Coefficients<V> coefficients(RealOf<V> dt, V a) {
    const V e = exp_of_product(dt, a);
    return {e, Psi<2, V>(dt, a, e).sum({0, 1, 0.5})};
  }
  template <class V>
  static VIM_MM_INLINE Derivatives<V> derivatives(RealOf<V> dt, V a, const Coefficients<V>& k) {
    const Psi<2, V> psi(dt, a, k.a_bar);
    return {k.a_bar, k.a_bar + psi.sum({0, 0.5, 0}), psi.sum_by_a({0, 1, 0.5})};
  }
};

struct HighOrder {
  static constexpr bool psi = true, causal = true, exponential = true, beta_is_step = false,
                        scaled = false;
  template <class V>
  static VIM_MM_INLINE Coefficients<V> coefficients(RealOf<V> dt, V a) {
    const V e = exp_of_product(dt, a);
    return {e, Psi<3, V>(dt, a, e).sum({0, 1, 1, 0.5})};
  }
  template <class V>
  static VIM_MM_INLINE Derivatives<V> derivatives(RealOf<V> dt, V a, const Coefficients<V>& k) {
    const Psi<3, V> psi(dt, a, k.a_bar);
    return {k.a_bar, k.a_bar + psi.sum({0, 1, 0.5, 0}), psi.sum_by_a({0, 1, 1, 0.5})};
  }
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
