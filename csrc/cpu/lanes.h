// A vector of W real lanes as one number type for elementary.h and discretization.h. GCC's and
// Clang's vector extensions do the work; only the fused multiply-add needs an intrinsic.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../methods/elementary.h"

#if VIM_MM_VECTOR_BYTES >= 32
#include <immintrin.h>
#endif

namespace vim_mm {
inline namespace VIM_MM_ISA {

template <class S>
struct IntegerOf;
template <>
struct IntegerOf<float> {
  using type = int32_t;
};
template <>
struct IntegerOf<double> {
  using type = int64_t;
};

template <class S, int W>
struct NativeVector {
  typedef S type __attribute__((vector_size(W * sizeof(S))));
};

template <class S, int W>
struct Lanes {
  using Native = typename NativeVector<S, W>::type;
  using Integer = typename IntegerOf<S>::type;
  using Mask = typename NativeVector<Integer, W>::type;
  Native v;

  VIM_MM_INLINE Lanes() {}
  VIM_MM_INLINE Lanes(Native native) : v(native) {}
  VIM_MM_INLINE explicit Lanes(S s) : v(Native{} + s) {}
};
template <class S, int W>
struct NumberTraits<Lanes<S, W>> {
  using Scalar = S;
  using Real = Lanes<S, W>;
};

#define VIM_MM_LANES_OPERATOR(op)                                       \
  template <class S, int W>                                             \
  VIM_MM_INLINE Lanes<S, W> operator op(Lanes<S, W> a, Lanes<S, W> b) { \
    return Lanes<S, W>(a.v op b.v);                                     \
  }
VIM_MM_LANES_OPERATOR(+)
VIM_MM_LANES_OPERATOR(-)
VIM_MM_LANES_OPERATOR(*)
VIM_MM_LANES_OPERATOR(/)
#undef VIM_MM_LANES_OPERATOR

#define VIM_MM_LANES_COMPARISON(op)                                                    \
  template <class S, int W>                                                            \
  VIM_MM_INLINE typename Lanes<S, W>::Mask operator op(Lanes<S, W> a, Lanes<S, W> b) { \
    return a.v op b.v;                                                                 \
  }
VIM_MM_LANES_COMPARISON(<)
VIM_MM_LANES_COMPARISON(>)
VIM_MM_LANES_COMPARISON(<=)
#undef VIM_MM_LANES_COMPARISON

template <class S, int W>
VIM_MM_INLINE Lanes<S, W> select(typename Lanes<S, W>::Mask mask, Lanes<S, W> a, Lanes<S, W> b) {
  return Lanes<S, W>(mask ? a.v : b.v);
}
template <class S, int W>
VIM_MM_INLINE Lanes<S, W> magnitude(Lanes<S, W> x) {
  using Mask = typename Lanes<S, W>::Mask;
  using Integer = typename Lanes<S, W>::Integer;
  constexpr int sign_bit = 8 * sizeof(S) - 1;
  const Mask all_but_sign = Mask{} + Integer(~(Integer(1) << sign_bit));
  return Lanes<S, W>((typename Lanes<S, W>::Native)((Mask)x.v & all_but_sign));
}
template <class S, int W>
VIM_MM_INLINE Lanes<S, W> conj(Lanes<S, W> x) {
  return x;
}
template <class S, int W>
VIM_MM_INLINE Lanes<S, W> real(Lanes<S, W> x) {
  return x;
}

template <class S, int W>
VIM_MM_INLINE Lanes<S, W> fma(Lanes<S, W> a, Lanes<S, W> b, Lanes<S, W> c) {
#if VIM_MM_VECTOR_BYTES == 64
  if constexpr (sizeof(S) == 4) return Lanes<S, W>(_mm512_fmadd_ps(a.v, b.v, c.v));
  else return Lanes<S, W>(_mm512_fmadd_pd(a.v, b.v, c.v));
#elif VIM_MM_VECTOR_BYTES == 32
  if constexpr (sizeof(S) == 4) return Lanes<S, W>(_mm256_fmadd_ps(a.v, b.v, c.v));
  else return Lanes<S, W>(_mm256_fmadd_pd(a.v, b.v, c.v));
#else
  Lanes<S, W> out;
  for (int i = 0; i < W; ++i) out.v[i] = fma(S(a.v[i]), S(b.v[i]), S(c.v[i]));
  return out;
#endif
}

template <class S, int W>
VIM_MM_INLINE Lanes<S, W> scale_by_power_of_two(Lanes<S, W> value, Lanes<S, W> magic_sum) {
  using L = Lanes<S, W>;
  using Mask = typename L::Mask;
  using Integer = typename L::Integer;
  constexpr int mantissa = sizeof(S) == 4 ? 23 : 52;
  const Mask bias = Mask{} + Integer(sizeof(S) == 4 ? 127 : 1023);
  const Mask n = (Mask)magic_sum.v - (Mask)L(Precision<S>::round_magic).v;
  const Mask half = n >> 1;
  const L first((typename L::Native)((half + bias) << mantissa));
  const L second((typename L::Native)((n - half + bias) << mantissa));
  return value * first * second;
}

// The sum over the lanes, always in the same order.
template <class S, int W>
VIM_MM_INLINE S sum_lanes(Lanes<S, W> x) {
  if constexpr (W == 2) {
    return x.v[0] + x.v[1];
  } else {
    using Half = Lanes<S, W / 2>;
    // By memcpy, of which the compiler makes extracts: GCC 11 has no shuffle builtin.
    Half low, high;
    memcpy(static_cast<void*>(&low), &x, sizeof low);
    memcpy(static_cast<void*>(&high), reinterpret_cast<const char*>(&x) + sizeof low, sizeof high);
    return sum_lanes(low + high);
  }
}
VIM_MM_INLINE float sum_lanes(float x) { return x; }
VIM_MM_INLINE double sum_lanes(double x) { return x; }

// How a number type sits in arrays of its element.
template <class V>
struct Layout {  // a scalar is its own element
  using Element = V;
  static constexpr int lanes = 1;
  static VIM_MM_INLINE bool first(int64_t) { return true; }
};
template <class S, int W>
struct Layout<Lanes<S, W>> {
  using Element = S;
  using Mask = typename Lanes<S, W>::Mask;
  static constexpr int lanes = W;
  // So many lanes, if there are as many.
  static VIM_MM_INLINE Mask first(int64_t count) {
    Mask mask;
    for (int i = 0; i < W; ++i) mask[i] = i < count ? -1 : 0;
    return mask;
  }
};

template <class V>
VIM_MM_INLINE V load(const typename Layout<V>::Element* p) {
  V x;
  memcpy(static_cast<void*>(&x), p, sizeof x);
  return x;
}
template <class V>
VIM_MM_INLINE void store(typename Layout<V>::Element* p, V x) {
  memcpy(p, &x, sizeof x);
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
