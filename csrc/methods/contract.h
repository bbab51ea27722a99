// What a method is, in native code: a struct of static functions, of which two are required.
//
//   struct ImplicitEuler : MethodDefaults<ImplicitEuler> {
//     template <class V>
//     static VIM_MM_INLINE Coefficients<V> coefficients(RealOf<V> dt, V a);
//     template <class V>
//     static VIM_MM_INLINE Derivatives<V> derivatives(RealOf<V> dt, V a, const Coefficients<V>& k);
//   };
//
// With these alone it runs everywhere: on the CPU and on a GPU, forward and backward, for every dtype and
// layout. V is float, double, Complex of either, or on the CPU a vector of lanes.
//
//   coefficients   A_bar and beta at z = dt a, for every real dt and every a: nothing is clamped, and neither
//                  dt nor a is a divisor where it may be 0. At dt = 0 they are exactly 1 and 0: steps past the end
//                  of a sequence have that dt.
//   derivatives    Theirs, given k = coefficients(dt, a). The backward pass of a method is the derivative of its
//                  own forward pass.
//
// A method whose beta is a sum of psi functions has neither: it gives the weights, from which both follow (psi.h).
// The rest has defaults, which MethodDefaults holds:
//
//   causal = true         False: the output is the mean of the scans in both directions. Such a method is exponential.
//   exponential = false   Whether A_bar = e^z: then several steps together have that of the sum of their dt.
//   Forward<accuracy>     On a GPU, for real a: a step of one state of the sequential scan. Its default computes
//                         the coefficients anew in each step. Members, where `recurrence` is an object for one a:
//                           recurrence(), recurrence(a)       what follows from a alone
//                           recurrence.coefficients(dt)       A_bar and beta
//                           drive(dt, u)                      the part of the input that all states share, static
//                           recurrence.input(drive, k, b)     A step's input to the state, given its coefficients
//                           recurrence.move(dt, drive, b)     takes the state before the step to the one after it,
//                                                             from_zero() a state of 0; of a method that is not
//                                                             causal a Move<float>
//   Backward<accuracy, V> On a GPU: a step of one state of the backward scan, with what it adds to the gradients. V
//                         is float, or with Accuracy::full Complex<float>. The default is CoefficientStep in
//                         generic.h, which says what the members are.
//   Tuning                What kernels do for want of registers: see DefaultTuning. It changes no result by more than
//                         rounding.
//
// Each method has a file of its own, and its number in discretization.h; its CUDA kernels are compiled by a file of its name
// in cuda/methods. CONTRIBUTING.md has the other places that know what a method computes. No kernel and no table
// names a method.
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
// beta_dt and beta_a are the partial derivatives of beta, of type V, or constants.
template <class V, class ByDt = V, class ByA = V>
struct Derivatives {
  V a_bar_z;
  ByDt beta_dt;
  ByA beta_a;
};

// Exact constants: a product with one costs nothing, and 0 times what is infinite is 0.
struct One {};
struct Zero {};
VIM_MM_INLINE One conj(One x) { return x; }
VIM_MM_INLINE Zero conj(Zero x) { return x; }
template <class V>
VIM_MM_INLINE V operator*(V x, One) {
  return x;
}
template <class V>
VIM_MM_INLINE Zero operator*(V, Zero) {
  return {};
}
template <class V>
VIM_MM_INLINE V operator+(V x, Zero) {
  return x;
}
// As a number.
template <class V>
VIM_MM_INLINE V value_of(V x) {
  return x;
}
template <class V>
VIM_MM_INLINE V value_of(One) {
  return V(ScalarOf<V>(1));
}
template <class V>
VIM_MM_INLINE V value_of(Zero) {
  return V(ScalarOf<V>(0));
}

// The product of a step's input that one of its gradients wants again. To keep it takes a register, and which one
// spills least depends on what else a method has there.
enum class Kept { none, drive_b, drive_beta };

// Chosen by what ptxas makes of the kernels.
struct DefaultTuning {
  // Forward: lanes of one state have registers for parts of a window that overlap, or for two strides at work.
  static constexpr bool interleaves = true;
  // Forward, blocks of six channels: how many strides are loaded ahead, one or two.
  static constexpr int strides_of_six = 1;
  // Backward, in tensors of 16 bits: the addresses of gradients wait for their turn in shared memory, and aligned rows
  // of the next channels in registers, not there.
  static constexpr bool keeps_addresses = false, holds_rows = false;
  template <Accuracy>
  static constexpr Kept kept = Kept::none;
};

template <class Method, class V>
struct CoefficientRecurrence;
template <class Method, class V>
struct CoefficientStep;

// What Backward needs of a step whose a_bar is known.
template <class V, class D>
struct Linearized {
  V beta;
  D derivatives;
};

template <class Method>
struct MethodDefaults {
  static constexpr bool causal = true, exponential = false;
  template <Accuracy>
  using Forward = CoefficientRecurrence<Method, float>;
  template <Accuracy, class V>
  using Backward = CoefficientStep<Method, V>;
  using Tuning = DefaultTuning;

  // No promise: CoefficientStep asks for it, and a psi method in float has a shorter one.
  template <class V>
  static VIM_MM_INLINE auto linearize(RealOf<V> dt, V a, V a_bar) {
    const Coefficients<V> k{a_bar, Method::coefficients(dt, a).beta};
    auto derivatives = Method::derivatives(dt, a, k);
    return Linearized<V, decltype(derivatives)>{k.beta, derivatives};
  }
};

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
