// Mamba's zero-order hold, simplified: A_bar = e^z, beta = dt.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "generic.h"

namespace vim_mm {
inline namespace VIM_MM_ISA {

struct Zoh : MethodDefaults<Zoh> {
  static constexpr bool exponential = true;
  struct Tuning : DefaultTuning {
    static constexpr bool keeps_addresses = true, holds_rows = true;
  };
  template <class V>
  static VIM_MM_INLINE Coefficients<V> coefficients(RealOf<V> dt, V a) {
    return {exp_of_product(dt, a), V(dt)};
  }
  template <class V>
  static VIM_MM_INLINE Derivatives<V, One, Zero> derivatives(RealOf<V> dt, V a,
                                                             const Coefficients<V>& k) {
    return {k.a_bar, {}, {}};
  }
  template <class V>
  static VIM_MM_INLINE Scale<One, Zero> scale(RealOf<V>, V) {
    return {};
  }
  template <Accuracy, class V>
  using Backward = ScaledStep<Zoh, V>;
};

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
