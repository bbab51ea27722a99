// The choice of the kernel: what its tensors have in common, and the shape of its blocks.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <initializer_list>
#include <type_traits>

#include "../common/launch.cuh"
#include "../sequential/shape.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// What all these tensors and the scan's have in common.
inline Layout layout_of(const ScanArguments& scan, std::initializer_list<View> others) {
  if (scan.is_complex || scan.constant_B || scan.constant_C || scan.states > kStateTile)
    return Layout::any;
  const int item = scan.u.storage == Storage::float32 ? 4 : 2;
  const auto fits = [&](const View& v) { return v.storage == scan.u.storage && v.last == item; };
  for (const View& v : {scan.u, scan.delta, scan.z, scan.B, scan.C})
    if (!fits(v)) return Layout::any;
  for (const View& v : others)
    if (!fits(v)) return Layout::any;
  return item == 2 ? Layout::half : Layout::single;
}

// Calls f(element, layout) with an object of the type and a constant.
template <class F>
void dispatch_layout(const ScanArguments& scan, Layout layout, const F& f) {
  using std::integral_constant;
  switch (layout) {
    case Layout::any:
      if (scan.is_complex) return f(Complex<float>(), integral_constant<Layout, Layout::any>());
      return f(float(), integral_constant<Layout, Layout::any>());
    case Layout::half: return f(float(), integral_constant<Layout, Layout::half>());
    case Layout::single: return f(float(), integral_constant<Layout, Layout::single>());
  }
}

// The thresholds below were measured on the shapes of docs/benchmarks.md. A block has channels of one
// group only.

#ifdef VIM_MM_FEW_ROWS  // tests/emulation, where 2048 take too long
constexpr int64_t kFewRows = VIM_MM_FEW_ROWS;
#else
constexpr int64_t kFewRows = 2048;
#endif

template <class Shape>
int64_t blocks_of(const ScanArguments& scan) {
  return scan.batch * scan.groups * ((scan.channels + Shape::channels - 1) / Shape::channels);
}

// Calls f with a shape of six channels where each block has a multiprocessor, and returns whether it did. It
// gives the bits that eight channels give, so that none depends on the GPU.
template <class Shape, Layout layout, class F>
bool choose_six(const ScanArguments& scan, const F& f) {
  if constexpr (layout == Layout::half) {
    if (scan.aligned && scan.channels % Shape::channels == 0 &&
        blocks_of<Shape>(scan) <= device_attribute(cudaDevAttrMultiProcessorCount))
      return f(Shape()), true;
  }
  return false;
}

// Whether there are so many rows that lanes of two states and 16 channels in a block pay, which take fewer
// instructions.
inline bool has_most_rows(const ScanArguments& scan) {
  return rows_of(scan) >= 2 * kFewRows && scan.channels > 8;
}

// Few rows want lanes that do not wait for themselves, nor for those that load. Both halves of
// float32 need registers; psi functions need so many that little is left for strides to interleave, and
// nothing where rows are not the fewest. With six channels, one or two strides by what ptxas makes of them. A
// method that is not causal takes pieces of one state, which leave no registers for a second.
template <class Method, Layout layout, class F>
void choose_forward(const ScanArguments& scan, const F& f) {
  constexpr bool straight = !Method::psi, roomy = layout == Layout::single;
  if constexpr (layout == Layout::any) {
    f(Shape<8, 8, 4>());
  } else if (Method::causal && has_most_rows(scan)) {
    if constexpr (Method::causal) f(SequentialShape<2, 2, 2, 1, 4, roomy ? 2 : 3, 2>());
  } else if (rows_of(scan) >= kFewRows) {
    f(SequentialShape<1, 1, 2, 1, 4, 3, straight ? 1 : 2, straight>());
  } else if (!choose_six<SixChannelShape<std::is_same<Method, Rk4>::value ? 2 : 1>, layout>(scan,
                                                                                            f)) {
    f(SequentialShape<1, 1, 4, 2, 2, 2, straight ? 2 : 1, true>());
  }
}

// A sweep for edges alone is short enough for segments to win where rows are few: many side by side, so
// that all multiprocessors have work. Of 16 bits a sequential scan wins again where each of its blocks has a
// multiprocessor and few are left. A method that is not causal has both directions of one sequential scan.
template <class Method, Layout layout, class F>
void choose_edges(const ScanArguments& scan, const F& f) {
  if constexpr (layout == Layout::any) {
    f(Shape<8, 8, 4>());
  } else {
    const int64_t rows = rows_of(scan);
    if (has_most_rows(scan)) return f(SequentialShape<2, 2, 2, 1, 4, 3, 2>());
    if constexpr (Method::causal) {
      if (rows < kFewRows && rows >= kFewRows / 2) return f(Shape<8, 16, 4, 3>());
      if (rows < kFewRows / 4 || (rows < kFewRows && layout == Layout::single))
        return f(Shape<16, 16, 4, 3>());
    }
    if (rows >= kFewRows || !choose_six<SixChannelShape<1>, layout>(scan, f))
      f(SequentialShape<1, 1, 4, 2, 2, 3, 1>());
  }
}

// Registers count for more than warps here: two blocks per multiprocessor spill little. In a chunk of few
// steps a warp has four times as many channels, but two segments.
using BackwardShape = Shape<8, 8, 4, 2, 2>;
using BackwardTail = Shape<2, 8, 4, 2, 2>;
using BackwardAny = Shape<8, 8, 4>;

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
