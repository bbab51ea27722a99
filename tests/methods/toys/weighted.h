// A mean of both directions with beta = psi_1 / 4 + psi_2 + 3/2 psi_3: a method by its weights alone.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "psi.h"

namespace vim_mm {
inline namespace VIM_MM_ISA {

struct Weighted : PsiMethod<Weighted> {
  static constexpr bool causal = false;
  static VIM_MM_INLINE constexpr Weights<3> weights() { return {0.25, 1, 1.5}; }
};

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
