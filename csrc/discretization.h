// The native home of the mathematics: A_bar and beta of every discretization, and their
// derivatives, for host and device, float and double, real and complex. Included by the CPU
// and the CUDA kernels alike. The Python home is vim_mm/ops/discretization.py;
// tests hold both to the same 60-digit values.
//
// With z = dt a and phi_k(z) = sum over j of z^j / (j + k)!:
//
//   zoh        e^z                    dt
//   foh        e^z                    dt^2 phi_2
//   bilinear   (1 + z/2)/(1 - z/2)    dt / (1 - z/2)
//   poly       e^z                    dt phi_1 + dt^2 phi_2 / 2      (averaged over both directions)
//   highorder  e^z                    dt phi_1 + dt^2 phi_2 + dt^3 phi_3 / 2
//   rk4        e^z                    dt (1 + z/2 + z^2/6 + z^3/24)
//
// phi functions: Hochbruck & Ostermann, Exponential integrators, Acta Numerica (2010).
//
// To add a method: its number below, its struct, and its line in `dispatch_method`.
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

// phi_0 .. phi_K at z = dt a, and phi_1' .. phi_K'. For |z| <= 2 the Taylor series of the highest
// and phi_k = z phi_(k+1) + 1/k! downwards; elsewhere e^z and the same relation upwards. At the
// switch each costs a few ulps, which is why it sits at 2 and not nearer 0.
template <int K, class V>
struct Phi {
  V value[K + 1];
  V derivative[K + 1];

  VIM_MM_INLINE Phi(RealOf<V> dt, V a) {
    using S = ScalarOf<V>;
    constexpr S factorial[] = {S(1), S(1), S(2), S(6), S(24)};
    const V z = dt * a;
    const auto near = within(z, S(2));
    const V z_near = select(near, z, V(S(0))), z_far = select(near, V(S(4)), z);
    const V inverse = reciprocal(z_far);

    V series[K + 2];
    series[K + 1] = V(S(1) / factorial[K + 1]) *
                    scaled_exponential_series<K + 1, Precision<S>::phi_terms>(z_near);
    for (int k = K; k >= 1; --k) series[k] = z_near * series[k + 1] + V(S(1) / factorial[k]);

    value[0] = exp_of_product(dt, a);
    V closed = expm1_far(dt, a, value[0]) * inverse;
    V closed_below = value[0];
    for (int k = 1; k <= K; ++k) {
      if (k > 1) {
        closed_below = closed;
        closed = (closed - V(S(1) / factorial[k - 1])) * inverse;
      }
      value[k] = select(near, series[k], closed);
      derivative[k] = select(near, series[k] - V(S(k)) * series[k + 1],
                             (closed_below - V(S(k)) * closed) * inverse);
    }
  }
};

// `causal`: scanned in one direction. `exponential`: a_bar = e^z, so that several steps together
// have that of the sum of their dt. `beta_is_step`: beta = dt, the same for all states.
// `derivatives` takes what `coefficients` gave.
struct Zoh {
  static constexpr bool causal = true, exponential = true, beta_is_step = true;
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
  static constexpr bool causal = true, exponential = true, beta_is_step = false;
  template <class V>
  static VIM_MM_INLINE Coefficients<V> coefficients(RealOf<V> dt, V a) {
    const Phi<2, V> phi(dt, a);
    return {phi.value[0], dt * (dt * phi.value[2])};
  }
  template <class V>
  static VIM_MM_INLINE Derivatives<V> derivatives(RealOf<V> dt, V a, const Coefficients<V>& k) {
    const Phi<2, V> phi(dt, a);
    return {k.a_bar, dt * phi.value[1], dt * (dt * (dt * phi.derivative[2]))};
  }
};

struct Bilinear {
  static constexpr bool causal = true, exponential = false, beta_is_step = false;
  template <class V>
  static VIM_MM_INLINE Coefficients<V> coefficients(RealOf<V> dt, V a) {
    using S = ScalarOf<V>;
    const V half_z = V(S(0.5)) * (dt * a);
    const V q = reciprocal(V(S(1)) - half_z);
    return {(V(S(1)) + half_z) * q, dt * q};
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
  static constexpr bool causal = false, exponential = true, beta_is_step = false;
  template <class V>
  static VIM_MM_INLINE Coefficients<V> coefficients(RealOf<V> dt, V a) {
    using S = ScalarOf<V>;
    const Phi<2, V> phi(dt, a);
    return {phi.value[0], dt * (phi.value[1] + V(S(0.5)) * (dt * phi.value[2]))};
  }
  template <class V>
  static VIM_MM_INLINE Derivatives<V> derivatives(RealOf<V> dt, V a, const Coefficients<V>& k) {
    using S = ScalarOf<V>;
    const Phi<2, V> phi(dt, a);
    return {k.a_bar, k.a_bar + V(S(0.5)) * (dt * phi.value[1]),
            dt * (dt * (phi.derivative[1] + V(S(0.5)) * (dt * phi.derivative[2])))};
  }
};

struct HighOrder {
  static constexpr bool causal = true, exponential = true, beta_is_step = false;
  template <class V>
  static VIM_MM_INLINE Coefficients<V> coefficients(RealOf<V> dt, V a) {
    using S = ScalarOf<V>;
    const Phi<3, V> phi(dt, a);
    const V inner = phi.value[2] + V(S(0.5)) * (dt * phi.value[3]);
    return {phi.value[0], dt * (phi.value[1] + dt * inner)};
  }
  template <class V>
  static VIM_MM_INLINE Derivatives<V> derivatives(RealOf<V> dt, V a, const Coefficients<V>& k) {
    using S = ScalarOf<V>;
    const Phi<3, V> phi(dt, a);
    const V beta_dt = k.a_bar + dt * (phi.value[1] + V(S(0.5)) * (dt * phi.value[2]));
    const V inner = phi.derivative[2] + V(S(0.5)) * (dt * phi.derivative[3]);
    return {k.a_bar, beta_dt, dt * (dt * (phi.derivative[1] + dt * inner))};
  }
};

struct Rk4 {
  static constexpr bool causal = true, exponential = true, beta_is_step = false;
  template <class V>
  static VIM_MM_INLINE Coefficients<V> coefficients(RealOf<V> dt, V a) {
    using S = ScalarOf<V>;
    const V z = dt * a;
    const V inner = V(S(1) / S(6)) + z * V(S(1) / S(24));
    return {exp_of_product(dt, a), dt * (V(S(1)) + z * (V(S(0.5)) + z * inner))};
  }
  template <class V>
  static VIM_MM_INLINE Derivatives<V> derivatives(RealOf<V> dt, V a, const Coefficients<V>& k) {
    using S = ScalarOf<V>;
    const V z = dt * a;
    const V beta_dt = V(S(1)) + z * (V(S(1)) + z * (V(S(0.5)) + z * V(S(1) / S(6))));
    const V beta_a = dt * (dt * (V(S(0.5)) + z * (V(S(1) / S(3)) + z * V(S(0.125)))));
    return {k.a_bar, beta_dt, beta_a};
  }
};

constexpr int kMethods = 6;

// Calls f(Method()) for the method of that number; the numbers are those of the Python table.
// Returns false for a number that is none's.
template <class F>
inline bool dispatch_method(int64_t method, const F& f) {
  switch (method) {
    case 0: f(Zoh()); return true;
    case 1: f(Foh()); return true;
    case 2: f(Bilinear()); return true;
    case 3: f(Poly()); return true;
    case 4: f(HighOrder()); return true;
    case 5: f(Rk4()); return true;
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
