// The choice of the shape of the blocks.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include "tile.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// Calls f(shape, tiled): B and C of the usual real scan come in tiles, which is known when compiled.
// Few rows want many lanes for each, so that all multiprocessors have work; many rows want many
// states in each thread, which share what belongs to a channel. The thresholds were measured
// (docs/kernels.md).
template <class E, class F>
auto choose_forward(const ScanArguments& scan, const F& f) {
  const bool tiled = !scan.constant_B && !scan.constant_C;
  const int64_t rows = scan.batch * scan.groups * scan.channels;
  if constexpr (sizeof(E) == sizeof(float)) {
    if (tiled && scan.states <= 16) {
      if (rows < 4096) return f(Shape<16, 1, 128>(), std::true_type());
      if (rows < 8192) return f(Shape<8, 2, 128>(), std::true_type());
      return f(Shape<4, 4, 128, 4>(), std::true_type());
    }
  }
  if (scan.states <= 16) return f(Shape<16, 1, 128>(), std::false_type());
  if (scan.states <= 64) return f(Shape<32, 2, 128>(), std::false_type());
  return f(Shape<32, 8, 128>(), std::false_type());
}

template <class E, class F>
auto choose_backward(const ScanArguments& scan, const F& f) {
  const bool tiled = !scan.constant_B && !scan.constant_C;
  const int64_t rows = scan.batch * scan.groups * scan.channels;
  if constexpr (sizeof(E) == sizeof(float)) {
    if (tiled && scan.states <= 16) {
      if (rows < 2048) return f(Shape<16, 1, 128>(), std::true_type());
      if (rows < 4096) return f(Shape<16, 1, 128, 4>(), std::true_type());
      return f(Shape<8, 2, 128, 3>(), std::true_type());
    }
  }
  if (scan.states <= 16) return f(Shape<16, 1, 128>(), std::false_type());
  if (scan.states <= 64) return f(Shape<32, 2, 128>(), std::false_type());
  return f(Shape<32, 8, 128>(), std::false_type());
}

template <class F>
auto dispatch_element(const ScanArguments& scan, const F& f) {
  return scan.is_complex ? f(Complex<float>()) : f(float());
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
