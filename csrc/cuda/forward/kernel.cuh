// The sequential forward scan: the warps that scan, and the kernel.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "averaged.cuh"
#include "splits.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// A stride of one state, of which nothing but the state before is missing.
template <class Steps, class Shape>
struct PreparedStride {
  static constexpr int entries = Shape::entries_of_C;
  decltype(Steps().move(0.0f, 0.0f, 0.0f)) moves[kStride];
  float c[entries];

  __device__ __forceinline__ void prepare(const Steps& steps, const StrideInputs<Shape>& from) {
#pragma unroll
    for (int i = 0; i < kStride; ++i)
      moves[i] = steps.move(from.dt[i], from.drive[i], from.b[0][i]);
#pragma unroll
    for (int i = 0; i < entries; ++i) c[i] = from.c[i];
  }
  // Moves the state on, and gives the sums of the stride.
  template <Operand operand>
  __device__ __forceinline__ float2 scan(float& state) const {
    float x[1][kStride];
#pragma unroll
    for (int i = 0; i < kStride; ++i) x[0][i] = state = moves[i](state);
    return OutputSums<operand, Shape>::of(x, c);
  }
};

// The half that scans.
template <class Method, class Shape, Layout layout, Operand operand, bool Bounded>
__device__ __forceinline__ void scan_states(const ForwardArguments& p, const Work& work,
                                            ForwardShared<Shape, layout>& shared) {
  constexpr int ahead = Shape::strides, piece = ahead * kStride;
  const LaneMap<Shape> lane;
  wait_for_previous();
  LaneStates<Shape> of(p.scan, work, lane, Bounded ? p.bounds.initial_state : View());
  using Steps = LaneRecurrence<Method, layout>;
  Steps recurrence[Shape::states];
#pragma unroll
  for (int m = 0; m < Shape::states; ++m) recurrence[m] = Steps(of.a[m]);
  const LanePlaces<Shape, operand> places(lane);
  const int64_t row = work.row(p.scan, lane.channel), states = p.scan.states;
  float* edges = static_cast<float*>(p.edges) + row * p.chunks * states;
  if constexpr (is_split<Shape>) {
    enter_split(p, work, row, of);
    edges += work.split * p.splits.chunks * states;
  }
  const Cuts<Bounded> all_cuts(p.bounds, work, p.chunks);

  // Several strides at once, or the lane would wait for its own results; where whole windows are one
  // piece of code, this is for what is left after them. `cuts`: where no state passes to a step; or a constant, null.
  const auto scan_piece = [&](const auto& in, float* y, int step, auto cuts) VIM_MM_INLINED {
    constexpr bool cut = !std::is_same<decltype(cuts), decltype(nullptr)>::value;
    StrideInputs<Shape> inputs[ahead];
    float2 sum[ahead];
#pragma unroll
    for (int j = 0; j < ahead; ++j)
      inputs[j].template load<operand>(in, lane, places.c, step + j * kStride);
#pragma unroll
    for (int j = 0; j < ahead; ++j) {
      const StrideInputs<Shape>& at = inputs[j];
      float x[Shape::states][kStride];
#pragma unroll
      for (int m = 0; m < Shape::states; ++m) {
#pragma unroll
        for (int i = 0; i < kStride; ++i) {
          const auto move = recurrence[m].move(at.dt[i], at.drive[i], at.b[m][i]);
          of.x[m] = move(of.x[m]);
          if constexpr (cut)
            if (cuts >> (j * kStride + i) & 1) of.x[m] = move.from_zero();
          x[m][i] = of.x[m];
        }
      }
      sum[j] = OutputSums<operand, Shape>::of(x, at.c);
    }
#pragma unroll
    for (int j = 0; j < ahead; ++j) *reinterpret_cast<float2*>(y + step + j * kStride) = sum[j];
  };
  const auto y_of = [&](int turn) VIM_MM_INLINED {
    return shared.y[shared.pipeline.stage_of(turn)][0].values[0] + places.y;
  };
  const auto begin_window = [&] {
    of.store(edges);
    edges += states;
  };
  const auto scan_in_pieces = [&](int turn) VIM_MM_INLINED {
    const auto& in = shared.inputs[shared.pipeline.stage_of(turn)];
    float* const y = y_of(turn);
    begin_window();
    const uint64_t cuts = all_cuts.before(turn);
    shared.pipeline.consumer_wait(turn);
    const int steps = work.steps_from(turn, kChunk);
#pragma unroll 1
    for (int step = 0; step < steps; step += piece) {
      if constexpr (Bounded) {
        const uint32_t cuts_of_piece = uint32_t(cuts >> step) & ((1u << piece) - 1);
        if (cuts_of_piece) {
          scan_piece(in, y, step, cuts_of_piece);
          continue;
        }
      }
      scan_piece(in, y, step, nullptr);
    }
    shared.pipeline.consumer_release(turn);
  };

  int turn = 0;
  static_assert(!Bounded || (!Shape::straight && piece < 32), "cuts are of pieces");
  if constexpr (Shape::straight) {
    const int end = int(work.steps / kChunk);
    if (turn < end) {
      // While a stride is scanned the next one is prepared, and the one or two (`ahead`) after that are
      // loaded; what a stride gives is stored when the next one is scanned. So nothing waits for what has
      // just been asked for.
      constexpr int strides = kChunk / kStride;
      // Strides from `strides` on are the next window's; where there is none, once more the last one's.
      const auto load = [&](StrideInputs<Shape>& to, int stride) VIM_MM_INLINED {
        const int from = stride < strides || turn + 1 == end ? turn : turn + 1;
        if (stride % strides == 0) shared.pipeline.consumer_wait(from);
        to.template load<operand>(shared.inputs[shared.pipeline.stage_of(from)], lane, places.c,
                                  stride % strides * kStride);
      };
      StrideInputs<Shape> loaded[ahead];
      // Into the registers of the stride that is prepared while this one is scanned.
      const auto load_next = [&](int stride) VIM_MM_INLINED {
        load(loaded[(stride + 1) % ahead], stride + 1 + ahead);
      };
      PreparedStride<Steps, Shape> prepared[2];
      float2 sum = {};
      float* y = y_of(turn);  // zeros, which the first sums overwrite
#pragma unroll
      for (int j = 0; j < ahead; ++j) load(loaded[j], j);
      prepared[0].prepare(recurrence[0], loaded[0]);
      load_next(-1);
#pragma unroll 1
      for (; turn < end; ++turn) {
        begin_window();
#pragma unroll
        for (int stride = 0; stride < strides; ++stride) {
          *reinterpret_cast<float2*>(y) = sum;
          if (stride == 0 && turn > 0) shared.pipeline.consumer_release(turn - 1);
          prepared[(stride + 1) % 2].prepare(recurrence[0], loaded[(stride + 1) % ahead]);
          // Before the scan or behind it, whichever ptxas makes the better code of.
          if (ahead == 1) load_next(stride);
          sum = prepared[stride % 2].template scan<operand>(of.x[0]);
          y = y_of(turn) + stride * kStride;
          if (ahead > 1) load_next(stride);
        }
      }
      *reinterpret_cast<float2*>(y) = sum;
      shared.pipeline.consumer_release(turn - 1);
    }
  }
#pragma unroll 1
  for (; turn < int(work.windows); ++turn) scan_in_pieces(turn);

  if constexpr (is_split<Shape>)
    if (work.split + 1 < p.splits.count) return;
  of.store(static_cast<float*>(p.last_state) + row * states);
}

// Calls f with each leg of a block, as a constant.
template <class Method, class F>
__device__ __forceinline__ void each_leg(const F& f) {
  using std::integral_constant;
  if constexpr (Method::causal) {
    f(integral_constant<Leg, Leg::only>());
  } else {
    f(integral_constant<Leg, Leg::back>());
    f(integral_constant<Leg, Leg::forth>());
  }
}

template <class Method, class Shape, Layout layout, bool Bounded>
__global__ void __launch_bounds__(Shape::all_threads, Shape::min_blocks)
    forward_kernel(const __grid_constant__ ForwardArguments p) {
  static_assert(Method::causal || !Bounded, "the way forth knows of no cuts");
  let_next_begin();
  extern __shared__ float4 memory[];
  auto& shared = *reinterpret_cast<ForwardShared<Shape, layout>*>(memory);
  const Work work = [&] {
    if constexpr (is_split<Shape>) return work_of_split<Shape>(p.scan, p.splits);
    else return work_of_block<Shape>(p.scan);
  }();
  shared.pipeline.begin();
  if (Shape::is_producer()) {
    specialize<layout>(p.scan.u.storage, work.reverse, [&](auto format) VIM_MM_INLINED {
      using Format = decltype(format);
      specialize_alignment<Shape, Bounded>(p.scan, [&](auto aligned) VIM_MM_INLINED {
        constexpr bool Aligned = decltype(aligned)::value;
        each_leg<Method>([&](auto leg) VIM_MM_INLINED {
          load_and_store<Method, Shape, layout, Format, Aligned, decltype(leg)::value, Bounded>(
              p, work, shared);
        });
      });
    });
  } else if (!Shape::is_idle()) {
    __syncwarp();  // says that warps are whole, or ptxas asks for that in the loops, ahead of tensor cores
    using std::integral_constant;
    const auto scan = [&](auto operand) VIM_MM_INLINED {
      constexpr Operand how = decltype(operand)::value;
      if constexpr (Method::causal) {
        scan_states<Method, Shape, layout, how, Bounded>(p, work, shared);
      } else {
        each_leg<Method>([&](auto leg) VIM_MM_INLINED {
          scan_states_both_ways<Method, Shape, layout, how, decltype(leg)::value>(p, work, shared);
        });
      }
    };
    if constexpr (layout == Layout::single) scan(integral_constant<Operand, Operand::split>());
    else if (p.scan.u.storage == Storage::bfloat16)
      scan(integral_constant<Operand, Operand::cut>());
    else scan(integral_constant<Operand, Operand::rounded>());
  }
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
