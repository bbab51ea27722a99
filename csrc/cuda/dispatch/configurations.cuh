// The table of kernels: from what tensors have in common and their sizes to the shape of blocks.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "../common/launch.cuh"
#include "../sequential/splits.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// Why a scan takes the general path, or null if these tensors and the scan's have enough in common.
template <class Method>
const char* reason_for_general_path(const ScanArguments& scan, bool bounded,
                                    std::initializer_list<View> others) {
  if (scan.is_complex) return "A is complex";
  if (scan.constant_B || scan.constant_C) return "B or C is constant in time";
  if (scan.states > kStateTile) return "there are more than 16 states";
  const int item = scan.u.storage == Storage::float32 ? 4 : 2;
  const char* reason = nullptr;
  const auto look_at = [&](const View& v) {
    if (v.storage != scan.u.storage) reason = "dtypes differ";
    else if (v.last != item) reason = "a tensor is missing or not contiguous in time";
  };
  for (const View& v : {scan.u, scan.delta, scan.z, scan.B, scan.C}) look_at(v);
  for (const View& v : others) look_at(v);
  // Few kernels are compiled for these.
  if (bounded && reason == nullptr) {
    if (!Method::causal) reason = "a scan in both directions has resets";
    else if (item != 2 || !scan.aligned)
      reason = "a scan with an initial state or resets is not of 16 bits and aligned";
  }
  return reason;
}
template <class Method>
Layout layout_of(const ScanArguments& scan, bool bounded, std::initializer_list<View> others) {
  if (reason_for_general_path<Method>(scan, bounded, others)) return Layout::any;
  return scan.u.storage == Storage::float32 ? Layout::single : Layout::half;
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

// The table: which kernel a scan gets, from its sizes and from what its tensors have in common. Each function calls
// f(shape, bounded, row) with the shape of the first row that fits. `bounded`: the scan has Bounds, for which one kernel
// each is compiled that serves any number of rows; f gets it as a constant. A row says when it is taken and what put it
// there: us in a graph, `zoh`, bfloat16, one H200, shapes of docs/scan_benchmarks.md. It was tuned on 132 multiprocessors
// with 227 KB of shared memory a block; where less fits, kernels run, untuned. A block has channels of one group only.
struct Row {
  const char *when, *measured;
};
constexpr Row kBoundedRow{
    "an initial state or resets",
    "H100, 3868bb4, 2026-11-27: t512 40 with a state and 50 with resets, 27 with neither; "
    "backward 134 and 148, 110"};
constexpr Row kSplitRow{
    "at most 66 times eight channels, 8192 steps or more, 16 bits, aligned, causal, A_bar = e^z: "
    "time is split",
    "H100, 3868bb4, 2026-11-27: (1, 384, 16384) 93, not split 136; backward 222, not split 259"};

// The general path. Twice as many warps, each with half of the loads of B and C, are a third less code.
template <class F>
void choose_general(bool bounded, const F& f) {
  const Row row{"the general path", "not tuned"};
  if (bounded) f(Shape<8, 8, 8>(), std::true_type(), row);
  else f(Shape<8, 8, 4>(), std::false_type(), row);
}

#ifdef VIM_MM_FEW_ROWS  // tests/emulation, where 2048 take too long
constexpr int64_t kFewRows = VIM_MM_FEW_ROWS;
#else
constexpr int64_t kFewRows = 2048;
#endif

template <class Shape>
int64_t sets_of(const ScanArguments& scan) {
  return scan.batch * scan.groups * ((scan.channels + Shape::channels - 1) / Shape::channels);
}
// Time is cut so that the blocks of all splits fill 132 multiprocessors once. What enters a split is found from the
// others one by one, so there are not many.
template <class Shape>
Splits splits_of(const ScanArguments& scan) {
  constexpr int64_t max_splits = kFewRows / 64;
  const int64_t units = (scan.steps + kSplitUnit - 1) / kSplitUnit;
  const int64_t sets = std::max<int64_t>(1, sets_of<Shape>(scan));
  const int64_t most = std::min(max_splits, Shape::min_blocks * kMultiprocessors / sets);
  const int64_t each = (units + most - 1) / most;
  return {(units + each - 1) / each, each * (kSplitUnit / kChunk)};
}
template <class Shape>
int64_t blocks_of(const ScanArguments& scan) {
  if constexpr (is_split<Shape>) return sets_of<Shape>(scan) * splits_of<Shape>(scan).count;
  else return sets_of<Shape>(scan);
}
// Whether there are so many rows that lanes of two states and 16 channels in a block pay, which take fewer
// instructions.
inline bool has_most_rows(const ScanArguments& scan) {
  return rows_of(scan) >= 2 * kFewRows && scan.channels > 8;
}
// Calls f with a shape of six channels where each block has a multiprocessor, and returns whether it did. It
// gives the bits that eight channels give, so that none depends on the GPU.
template <class Shape, Layout layout, class F>
bool choose_six(const ScanArguments& scan, const char* measured, const F& f) {
  if constexpr (layout == Layout::half) {
    if (scan.aligned && scan.channels % Shape::channels == 0 &&
        blocks_of<Shape>(scan) <= device_attribute(cudaDevAttrMultiProcessorCount)) {
      f(Shape(), std::false_type(),
        Row{"16 bits, aligned, channels in sixes, a multiprocessor for each block", measured});
      return true;
    }
  }
  return false;
}

// Calls f with a shape of splits where the blocks of all rows leave half of the multiprocessors idle and steps are so
// many that two launches pay (docs/kernels.md counts), and returns whether it did.
template <class Method, class Shape, Layout layout, class F>
bool choose_split(const ScanArguments& scan, const F& f) {
  if constexpr (Method::causal && Method::exponential && layout == Layout::half) {
    if (scan.aligned && sets_of<Shape>(scan) <= kMultiprocessors / 2 &&
        scan.steps >= 4 * kFewRows) {
      f(SplitShape<Shape>(), std::false_type(), kSplitRow);
      return true;
    }
  }
  return false;
}

// Few rows want lanes that do not wait for themselves, nor for those that load. Both halves of
// float32 need registers; psi functions need so many that little is left for strides to interleave, and
// nothing where rows are not the fewest. With six channels, one or two strides by what ptxas makes of them. A
// method that is not causal takes pieces of one state, which leave no registers for a second.
template <class Method, Layout layout, class F>
void choose_forward(const ScanArguments& scan, bool bounded, const F& f) {
  constexpr bool straight = Method::Tuning::interleaves, roomy = layout == Layout::single;
  constexpr std::false_type unbounded;
  using Rows = SequentialShape<1, 1, 2, 1, 4, 3, straight ? 1 : 2, straight>;
  if constexpr (layout == Layout::any) {
    choose_general(bounded, f);
  } else if (bounded) {
    if constexpr (Method::causal && layout == Layout::half)
      f(SequentialShape<1, 1, 4, 2, 2, 2, 2>(), std::true_type(), kBoundedRow);
  } else if (Method::causal && has_most_rows(scan)) {
    if constexpr (Method::causal)
      f(SequentialShape<2, 2, 2, 1, 4, roomy ? 2 : 3, 2>(), unbounded,
        Row{"4096 rows or more, of more than 8 channels, causal",
            "two states a lane: the fewest instructions; with fewer rows (2, 768, 6084) took 124, "
            "not 109"});
  } else if (rows_of(scan) >= kFewRows) {
    f(Rows(), unbounded,
      Row{"2048 rows or more",
          "t512: 28.7; with four stages 29.0, with two groups of producers 30.3"});
  } else if (!choose_split<Method, Rows, layout>(scan, f) &&
             !choose_six<SixChannelShape<Method::Tuning::strides_of_six>, layout>(
                 scan,
                 "t1024: 35.1, with eight channels 38.4; rk4 by two strides 43.8, by one 47.7",
                 f)) {
    f(SequentialShape<1, 1, 4, 2, 2, 2, straight ? 2 : 1, true>(), unbounded,
      Row{"fewer rows",
          "t1024: 40.1; with four groups of one warp 41.9, with eight producer warps 51"});
  }
}

// A sweep for edges alone is short enough for segments to win where rows are few: many side by side, so
// that all multiprocessors have work. Of 16 bits a sequential scan wins again where each of its blocks has a
// multiprocessor and few are left. A method that is not causal has both directions of one sequential scan.
template <class Method, Layout layout, class F>
void choose_edges(const ScanArguments& scan, bool bounded, const F& f) {
  using OtherRows = SequentialShape<1, 1, 4, 2, 2, 3, 1>;
  constexpr std::false_type unbounded;
  if constexpr (layout == Layout::any) {
    choose_general(bounded, f);
  } else if (bounded) {
    if constexpr (Method::causal && layout == Layout::half)
      f(OtherRows(), std::true_type(), kBoundedRow);
  } else {
    const int64_t rows = rows_of(scan);
    if (has_most_rows(scan))
      return f(SequentialShape<2, 2, 2, 1, 4, 3, 2>(), unbounded,
               Row{"4096 rows or more, of more than 8 channels", "t512b32: 71.3, by segments 98"});
    if constexpr (Method::causal) {
      if (choose_split<Method, OtherRows, layout>(scan, f)) return;
      if (rows < kFewRows && rows >= kFewRows / 2)
        return f(Shape<8, 16, 4, 3>(), unbounded,
                 Row{"1024 to 2047 rows, causal: by segments",
                     "backward of t1248: 349, with a sequential sweep 353"});
      if (rows < kFewRows / 4 || (rows < kFewRows && layout == Layout::single))
        return f(Shape<16, 16, 4, 3>(), unbounded,
                 Row{"fewer than 512 rows, or of float32 1024, causal: by segments",
                     "float32 of 768 rows: backward 125, with a sequential sweep 129"});
    }
    if (rows < kFewRows &&
        choose_six<SixChannelShape<1>, layout>(scan, "t1024: 29.0, by segments 34.0", f))
      return;
    f(OtherRows(), unbounded, Row{"other numbers of rows", "t512: 20.7, by segments 28"});
  }
}

// Registers count for more than warps here: two blocks per multiprocessor spill little. In a chunk of few
// steps a warp has four times as many channels, but two segments.
using BackwardShape = Shape<8, 8, 4, 2, 2>;
using BackwardTail = Shape<2, 8, 4, 2, 2>;

// Calls f(shape, aligned, bounded, row) for the chunks of a layout, or with `is_tail` for a last chunk of few steps.
template <class Method, Layout layout, class F>
void choose_backward(const ScanArguments& scan, bool bounded, bool is_tail, const F& f) {
  constexpr std::false_type unaligned, unbounded;
  if constexpr (layout == Layout::any) {
    choose_general(bounded, [&](auto shape, auto bounded, const Row& row) {
      f(shape, unaligned, bounded, row);
    });
  } else if (bounded) {
    if constexpr (Method::causal && layout == Layout::half)
      f(BackwardShape(), std::true_type(), std::true_type(), kBoundedRow);
  } else if (is_tail) {
    f(BackwardTail(), unaligned, unbounded,
      Row{"a last chunk of at most 16 steps, where a launch of its own pays",
          "t224: 411, without 462"});
  } else if (!scan.aligned) {
    f(BackwardShape(), unaligned, unbounded,
      Row{"rows that are not aligned", "t224: 473; loaded entry by entry 507"});
  } else {
    f(BackwardShape(), std::true_type(), unbounded,
      Row{"aligned rows",
          "t512: 165; with 12 warps of 168 registers, which spilled, and other code 282"});
  }
}

// How many blocks share the channels of a chunk, where a multiprocessor holds two at once.
constexpr int64_t kBlocksAtOnce = 2 * kMultiprocessors;
constexpr int64_t kMaxSlabs = 4, kLeastChannels = 64;
static_assert(kLeastChannels >= BackwardTail::channels, "each slab has channels");
constexpr double kTailTime = 0.55;  // of a whole chunk's: 0.54 measured at t224

// How often that GPU is full of these chunks, where a block has all channels of one: the time they take.
inline double rounds(int64_t chunks, int64_t slabs) {
  const int64_t blocks = slabs * chunks;
  return double((blocks + kBlocksAtOnce - 1) / kBlocksAtOnce) / double(slabs);
}
// The number of slabs that leaves the fewest of its multiprocessors idle in the last round.
inline int64_t count_slabs(int64_t chunks, int64_t channels) {
  chunks = std::max<int64_t>(1, chunks);
  int64_t best = 1;
  for (int64_t slabs = 2; slabs <= kMaxSlabs && (slabs - 1) * kLeastChannels < channels; ++slabs) {
    if (rounds(chunks, slabs) <= 0.95 * rounds(chunks, best)) best = slabs;
  }
  return best;
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
