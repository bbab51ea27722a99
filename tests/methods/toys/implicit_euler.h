// Implicit Euler, A_bar = 1 / (1 - z), beta = dt / (1 - z): a method by its two formulas alone.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "generic.h"

namespace vim_mm {
inline namespace VIM_MM_ISA {

struct ImplicitEuler : MethodDefaults<ImplicitEuler> {
  template <class V>
  static VIM_MM_INLINE Coefficients<V> coefficients(RealOf<V> dt, V a) {
    const V q = reciprocal(V(ScalarOf<V>(1)) - dt * a);
    return {q, dt * q};
  }
  template <class V>
  static VIM_MM_INLINE Derivatives<V> derivatives(RealOf<V> dt, V, const Coefficients<V>& k) {
    const V q2 = k.a_bar * k.a_bar;
    return {q2, q2, dt * (dt * q2)};
  }
};

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
