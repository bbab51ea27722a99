// Every method, with its number: the native home of the mathematics, for host and device. The Python home is
// vim_mm/ops/discretization.py; tests hold both to the same 60-digit values.
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
// contract.h says what a method is.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bilinear.h"
#include "foh.h"
#include "highorder.h"
#include "poly.h"
#include "psi.h"
#include "rk4.h"
#include "zoh.h"
#include "zoh_exact.h"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// The recurrence of kernels that put steps together, and of those for complex a. In float32 they take Forward of psi
// methods, which is as exact as their coefficients and shorter; of others it moves from state to state alone, and
// where a state is infinite may give NaN.
template <class Method, Accuracy accuracy, class V>
using Recurrence = typename std::conditional<
    std::is_same<V, float>::value &&
        (is_psi_method(static_cast<const Method*>(nullptr)) || accuracy == Accuracy::half),
    typename Method::template Forward<accuracy>, CoefficientRecurrence<Method, V>>::type;

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
