// The choice of the shape of the blocks.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include "tile.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

inline bool is_tiled(const ScanArguments& scan) { return !scan.constant_B && !scan.constant_C; }
inline int64_t rows_of(const ScanArguments& scan) {
  return scan.batch * scan.groups * scan.channels;
}

// Calls f(shape, tiled): B and C of the usual real scan come in tiles, which is known when compiled.
// Few rows want many segments side by side, so that all multiprocessors have work; many rows want
// none, which spares the combination of segments. The thresholds were measured (docs/kernels.md).
template <class Method, class E, class F>
void choose_forward(const ScanArguments& scan, const F& f) {
  if constexpr (sizeof(E) == sizeof(float)) {
    if (is_tiled(scan)) {
      if (rows_of(scan) < 2048) return f(Shape<8, 16, 4, 3>(), std::true_type());
      if constexpr (Method::causal) {
        if (rows_of(scan) >= 8192 && scan.states <= kStateTile)
          return f(Shape<1, 16, 4, 4>(), std::true_type());
      }
      return f(Shape<4, 16, 4, 3>(), std::true_type());
    }
  }
  return f(Shape<8, 8, 4>(), std::false_type());
}

template <class E, class F>
void choose_edges(const ScanArguments& scan, const F& f) {
  if constexpr (sizeof(E) == sizeof(float)) {
    if (is_tiled(scan)) {
      if (rows_of(scan) < 2048) return f(Shape<8, 16, 4, 3>(), std::true_type());
      return f(Shape<4, 16, 4, 3>(), std::true_type());
    }
  }
  return f(Shape<8, 8, 4>(), std::false_type());
}

// Calls f(shape, few): see BackwardBlock.
template <class E, class F>
void choose_backward(const ScanArguments& scan, const F& f) {
  if constexpr (sizeof(E) == sizeof(float)) {
    if (is_tiled(scan) && scan.states <= kStateTile)
      return f(Shape<8, 8, 4, 3>(), std::true_type());
  }
  return f(Shape<8, 8, 4>(), std::false_type());
}

template <class F>
void dispatch_element(const ScanArguments& scan, const F& f) {
  if (scan.is_complex) f(Complex<float>());
  else f(float());
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
