// Elementary functions under the methods: host and device, for every number type of the scan.
//
// A number type V is float, double, Complex<float>, Complex<double>, or, on the CPU, a vector of
// lanes (cpu/lanes.h). The templates below use only operators and the overloads `fma`, `select`,
// `magnitude` and `scale_by_power_of_two`, which every real V brings along.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "fitted.h"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// What is known of a number type: its real scalar, its real counterpart (of the same lane count).
template <class V>
struct NumberTraits;
template <>
struct NumberTraits<float> {
  using Scalar = float;
  using Real = float;
};
template <>
struct NumberTraits<double> {
  using Scalar = double;
  using Real = double;
};

template <class V>
using ScalarOf = typename NumberTraits<V>::Scalar;
template <class V>
using RealOf = typename NumberTraits<V>::Real;

template <class S>
struct Precision;
template <>
struct Precision<float> {
  static constexpr int exp_degree = 7;   // Taylor, |r| <= ln(2)/2: 5e-9
  static constexpr int log1p_terms = 6;  // atanh series, s^2 <= 1/9: 1e-8
  static constexpr int phi_terms = 10;   // Taylor of phi_k, |z| <= phi_radius
  static constexpr float phi_radius = 1.5f;
  static constexpr float exp_underflow = -104.0f, exp_overflow = 89.0f;
  static constexpr float round_magic = 12582912.0f;  // 1.5 * 2^23
  static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
};
template <>
struct Precision<double> {
  static constexpr int exp_degree = 13;
  static constexpr int log1p_terms = 17;
  static constexpr int phi_terms = 22;
  static constexpr double phi_radius = 2.0;
  static constexpr double exp_underflow = -746.0, exp_overflow = 710.0;
  static constexpr double round_magic = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double ln2_high = 0x1.62e42feep-1, ln2_low = 0x1.a39ef35793c76p-33;
};

VIM_MM_INLINE float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
VIM_MM_INLINE double fma(double a, double b, double c) { return ::fma(a, b, c); }
VIM_MM_INLINE float select(bool mask, float a, float b) { return mask ? a : b; }
VIM_MM_INLINE double select(bool mask, double a, double b) { return mask ? a : b; }
VIM_MM_INLINE float magnitude(float x) { return ::fabsf(x); }
VIM_MM_INLINE double magnitude(double x) { return ::fabs(x); }
VIM_MM_INLINE float conj(float x) { return x; }
VIM_MM_INLINE double conj(double x) { return x; }
VIM_MM_INLINE float real(float x) { return x; }
VIM_MM_INLINE double real(double x) { return x; }

// The integer that `x + round_magic` holds in its low bits, as 2^n. Two factors, so that results
// below the normal range and overflow come out as in exact arithmetic.
VIM_MM_INLINE float scale_by_power_of_two(float value, float magic_sum) {
  int32_t bits, magic_bits;
  const float magic = Precision<float>::round_magic;
  memcpy(&bits, &magic_sum, sizeof bits);
  memcpy(&magic_bits, &magic, sizeof bits);
  const int32_t n = int32_t(uint32_t(bits) - uint32_t(magic_bits)), half = n >> 1;
  const uint32_t first = uint32_t(half + 127) << 23, second = uint32_t(n - half + 127) << 23;
  float a, b;
  memcpy(&a, &first, sizeof a);
  memcpy(&b, &second, sizeof b);
  return value * a * b;
}
VIM_MM_INLINE double scale_by_power_of_two(double value, double magic_sum) {
  int64_t bits, magic_bits;
  const double magic = Precision<double>::round_magic;
  memcpy(&bits, &magic_sum, sizeof bits);
  memcpy(&magic_bits, &magic, sizeof bits);
  const int64_t n = int64_t(uint64_t(bits) - uint64_t(magic_bits)), half = n >> 1;
  const uint64_t first = uint64_t(half + 1023) << 52, second = uint64_t(n - half + 1023) << 52;
  double a, b;
  memcpy(&a, &first, sizeof a);
  memcpy(&b, &second, sizeof b);
  return value * a * b;
}

// 1 / (j + offset)! for j < Terms.
template <class S, int Offset, int Terms>
struct InverseFactorials {
  S value[Terms] = {S(1)};
  VIM_MM_INLINE constexpr InverseFactorials() {
    for (int j = 1; j <= Offset; ++j) value[0] /= S(j);
    for (int j = 1; j < Terms; ++j) value[j] = value[j - 1] / S(j + Offset);
  }
};

// The Taylor series of phi_offset(z), sum over j < Terms of z^j / (j + offset)!, by Horner.
template <int Offset, int Terms, class V>
VIM_MM_INLINE V exponential_series(V z) {
  using S = ScalarOf<V>;
  constexpr InverseFactorials<S, Offset, Terms> coefficients;
  V sum = V(coefficients.value[Terms - 1]);
  VIM_MM_UNROLL
  for (int j = Terms - 2; j >= 0; --j) sum = sum * z + V(coefficients.value[j]);
  return sum;
}

// The sum over j of c[j] x^j.
template <int Terms>
VIM_MM_INLINE float polynomial(const float (&c)[Terms], float x) {
  float sum = c[Terms - 1];
  VIM_MM_UNROLL
  for (int j = Terms - 2; j >= 0; --j) sum = fma(sum, x, c[j]);
  return sum;
}

// The same with coefficients of fitted.h.
template <class Fitted>
VIM_MM_INLINE float polynomial(float x) {
  float sum = Fitted::at(Fitted::terms - 1);
  VIM_MM_UNROLL
  for (int j = Fitted::terms - 2; j >= 0; --j) sum = fma(sum, x, Fitted::at(j));
  return sum;
}

// e^(dt a). The product is never rounded: at a = -16, dt = 5 a rounded product alone costs 40 ulps.
template <class V>
VIM_MM_INLINE V exp_of_product(V dt, V a) {
  using S = ScalarOf<V>;
  using P = Precision<S>;
  const V z = dt * a;
  const V magic_sum = z * V(S(1.4426950408889634074)) + V(P::round_magic);
  const V n = magic_sum - V(P::round_magic);
  const V r = fma(dt, a, n * V(-P::ln2_high)) - n * V(P::ln2_low);
  V q = V(S(1));  // ((e^r - 1 - r) / r^2) * 2
  VIM_MM_UNROLL
  for (int j = P::exp_degree; j >= 3; --j) q = q * (r * V(S(1) / S(j))) + V(S(1));
  const V e = (r * r * V(S(0.5)) * q + r) + V(S(1));
  const V scaled = scale_by_power_of_two(e, magic_sum);
  return select(z < V(P::exp_underflow), V(S(0)),
                select(z > V(P::exp_overflow), V(S(INFINITY)), scaled));
}

// 2^x; on the GPU in one instruction, to 2^-22.
VIM_MM_INLINE float power_of_two(float x) {
#if defined(__CUDA_ARCH__)
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x));
  return e;
#else
  return ::exp2f(x);
#endif
}

constexpr float kLog2E = 1.4426950408889634074f;  // log2(e)

#if defined(__CUDACC__)
// Both roundings, of a log2(e) and of its product with dt, act like a relative change of a by
// 2^-24: small wherever e^(dt a) is not itself negligible, and out of reach of an unrounded product,
// which costs five more instructions.
VIM_MM_INLINE float exp_of_product(float dt, float a) {
#if defined(__CUDA_ARCH__)
  return power_of_two(dt * (a * kLog2E));
#else
  return exp_of_product<float>(dt, a);
#endif
}
#endif

// 1 / x; on the GPU to one ulp, in one instruction.
template <class V>
VIM_MM_INLINE V reciprocal(V x) {
  return V(ScalarOf<V>(1)) / x;
}
#if defined(__CUDACC__)
VIM_MM_INLINE float reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}
#endif

// log(1 + e^x), with no threshold: log1p through atanh, whose series converges for every x, or a
// minimax polynomial.
template <Accuracy accuracy = Accuracy::full, class V>
VIM_MM_INLINE V softplus(V x) {
  using S = ScalarOf<V>;
  const V w = exp_of_product(V(S(-1)), magnitude(x));
  if constexpr (accuracy == Accuracy::half) {
    // Not per element but per step and channel, where a term costs little.
    return fma(w, polynomial<Log1p<accuracy>>(w), select(x > 0.0f, x, 0.0f));
  }
  const V s = w * reciprocal(w + V(S(2)));
  const V s2 = s * s;
  V series = V(S(0));
  VIM_MM_UNROLL
  for (int j = Precision<S>::log1p_terms; j >= 0; --j)
    series = series * s2 + V(S(2) / S(2 * j + 1));
  return select(x > V(S(0)), x, V(S(0))) + s * series;
}

template <class V>
VIM_MM_INLINE V sigmoid(V x) {
  using S = ScalarOf<V>;
  return reciprocal(V(S(1)) + exp_of_product(V(S(-1)), x));
}

// sigmoid(x), the slope of softplus, from y = softplus(x): its logarithm is x - y.
template <class V>
VIM_MM_INLINE V softplus_slope(V x, V y) {
  return exp_of_product(V(ScalarOf<V>(1)), x - y);
}

// Complex numbers without the library's: its operators branch on NaN, and nvcc and the host
// would not share them.
template <class S>
struct Complex {
  S re, im;
  VIM_MM_INLINE Complex() {}
  VIM_MM_INLINE Complex(S re_) : re(re_), im(0) {}
  VIM_MM_INLINE Complex(S re_, S im_) : re(re_), im(im_) {}
};
template <class S>
struct NumberTraits<Complex<S>> {
  using Scalar = S;
  using Real = S;
};

template <class S>
VIM_MM_INLINE Complex<S> operator+(Complex<S> a, Complex<S> b) {
  return {a.re + b.re, a.im + b.im};
}
template <class S>
VIM_MM_INLINE Complex<S> operator-(Complex<S> a, Complex<S> b) {
  return {a.re - b.re, a.im - b.im};
}
template <class S>
VIM_MM_INLINE Complex<S> operator*(Complex<S> a, Complex<S> b) {
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}
template <class S>
VIM_MM_INLINE Complex<S> operator*(S a, Complex<S> b) {
  return {a * b.re, a * b.im};
}
template <class S>
VIM_MM_INLINE Complex<S> operator/(Complex<S> a, Complex<S> b) {
  const S scale = S(1) / (b.re * b.re + b.im * b.im);
  return scale * Complex<S>(a.re * b.re + a.im * b.im, a.im * b.re - a.re * b.im);
}
template <class S>
VIM_MM_INLINE Complex<S> fma(Complex<S> a, Complex<S> b, Complex<S> c) {
  return a * b + c;
}
template <class S>
VIM_MM_INLINE Complex<S> conj(Complex<S> a) {
  return {a.re, -a.im};
}
template <class S>
VIM_MM_INLINE S real(Complex<S> a) {
  return a.re;
}
template <class S>
VIM_MM_INLINE Complex<S> select(bool mask, Complex<S> a, Complex<S> b) {
  return mask ? a : b;
}

// Whether |z| <= radius, lane by lane.
template <class V>
VIM_MM_INLINE auto within(V z, ScalarOf<V> radius) {
  return magnitude(z) <= V(radius);
}
template <class S>
VIM_MM_INLINE bool within(Complex<S> z, S radius) {
  return z.re * z.re + z.im * z.im <= radius * radius;
}

VIM_MM_INLINE float sine(float x) { return ::sinf(x); }
VIM_MM_INLINE double sine(double x) { return ::sin(x); }
VIM_MM_INLINE float cosine(float x) { return ::cosf(x); }
VIM_MM_INLINE double cosine(double x) { return ::cos(x); }
VIM_MM_INLINE float exp_minus_one(float x) { return ::expm1f(x); }
VIM_MM_INLINE double exp_minus_one(double x) { return ::expm1(x); }

// e^(i dt b): the rounding error of the phase, up to |phase| ulps, is added back to first order.
template <class S>
VIM_MM_INLINE Complex<S> unit_phase(S dt, S b, S half) {
  const S phase = half * dt * b, residual = fma(half * dt, b, -phase);
  const S s = sine(phase), c = cosine(phase);
  return {c - residual * s, s + residual * c};
}

template <class S>
VIM_MM_INLINE Complex<S> exp_of_product(S dt, Complex<S> a) {
  return exp_of_product(dt, a.re) * unit_phase(dt, a.im, S(1));
}

// e^z - 1 for |z| > phi_radius, given e = e^z.
template <class V>
VIM_MM_INLINE V expm1_far(V, V, V e) {
  return e - V(ScalarOf<V>(1));
}
template <class S>
VIM_MM_INLINE Complex<S> expm1_far(S dt, Complex<S> a, Complex<S> e) {
  // Such z may still mean e^z close to 1, at z close to 2 pi i.
  const Complex<S> full = unit_phase(dt, a.im, S(1)), half = unit_phase(dt, a.im, S(0.5));
  return {exp_minus_one(dt * a.re) * full.re - S(2) * half.im * half.im, e.im};
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
