// The forward scan by marching. The sum over states is what a tensor core computes.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "march.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// d += a b: d is 16 x 8, a 16 x 8, b 8 x 8, in fragments as the instruction wants them. Of a and b
// only the upper 19 bits count.
__device__ __forceinline__ void multiply_add(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                             uint32_t a3, uint32_t b0, uint32_t b1) {
#if defined(__CUDA_ARCH__)
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else  // the same by shuffles, for tests/emulation
  const auto seen = [](uint32_t bits) { return __uint_as_float(bits & 0xffffe000u); };
  const int row = threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
  const auto add_half = [&](uint32_t upper_part, uint32_t lower_part, uint32_t right_part) {
    for (int k = 0; k < 4; ++k) {
      const float upper = shuffle(seen(upper_part), 4 * row + k);
      const float lower = shuffle(seen(lower_part), 4 * row + k);
      for (int j = 0; j < 2; ++j) {
        const float right = shuffle(seen(right_part), 4 * (column + j) + k);
        d[j] += upper * right;
        d[2 + j] += lower * right;
      }
    }
  };
  add_half(a0, a1, b0);
  add_half(a2, a3, b1);
#endif
}

// How states become operands of the tensor core, which sees 11 bits. `split`: in two parts, as C
// is, for float32; what is infinite gives NaN. `rounded`: to nearest, for float16, whose C has no
// more bits. `cut`, for bfloat16: cut off, with the mean of what is lost put back: 0.36 of the last
// bit, where mantissas are distributed as those of products are. That leaves 2e-4, a tenth of what
// rounding the output costs.
enum class Operand { split, rounded, cut };
constexpr float kCutBack = 1.0f + 0.3607f / 1024;

// What the tensor core does not see of v.
__device__ __forceinline__ float low_part(float v) {
  return v - __uint_as_float(__float_as_uint(v) & 0xffffe000u);
}
__device__ __forceinline__ float rounded(float v) {
  uint32_t bits;
#if !defined(__CUDA_ARCH__)
  bits = __float_as_uint(v);
  bits = (bits + 0xfff + (bits >> 13 & 1)) & 0xffffe000u;
#elif __CUDA_ARCH__ >= 900
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(bits) : "f"(v));
#else
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(v));
#endif
  return __uint_as_float(bits);
}
// d += a b where the left half of a is the first pair of states, the upper half of its rows the
// first of each pair, and c the two halves of b.
template <Operand operand>
__device__ __forceinline__ void multiply_add(float (&d)[4], float2 first, float2 last, float2 c) {
  const auto product = [&](auto&& left, auto&& right) {
    multiply_add(d, __float_as_uint(left(first.x)), __float_as_uint(left(first.y)),
                 __float_as_uint(left(last.x)), __float_as_uint(left(last.y)),
                 __float_as_uint(right(c.x)), __float_as_uint(right(c.y)));
  };
  const auto same = [](float v) { return v; };
  if constexpr (operand == Operand::split) {
    // The product of both low parts is less than a last bit.
    product([](float v) { return low_part(v); }, same);
    product(same, [](float v) { return low_part(v); });
    product(same, same);
  } else if constexpr (operand == Operand::rounded) {
    product([](float v) { return rounded(v); }, same);
  } else {
    product(same, same);
  }
}

// The sum over states of C x for eight steps in the channels of a warp: a lane has its states x of
// each step, C of its states in step lane / 4, and gets the sums of two steps, 2 (lane % 4) and the
// next.
template <Operand operand, int States>
struct OutputSums;

// One instruction takes the states of four steps. Columns are steps: the halves of C are 0 but in
// the two columns that belong to their steps, so that both instructions add to the same product, of
// which even steps have the upper rows and odd ones the lower. A state that is infinite makes outputs
// of steps just before it NaN.
template <Operand operand>
struct OutputSums<operand, 1> {
  static __device__ __forceinline__ float2 of(const float (&x)[1][kStride], const float (&c)[1]) {
    const int steps = threadIdx.x % 32 / 8;  // two of them
    float d[4] = {};
#pragma unroll
    for (int i = 0; i < kStride; i += 4)
      multiply_add<operand>(
          d, make_float2(x[0][i], x[0][i + 1]), make_float2(x[0][i + 2], x[0][i + 3]),
          make_float2(2 * steps == i ? c[0] : 0.0f, 2 * steps == i + 2 ? c[0] : 0.0f));
    return make_float2(d[0], d[3]);
  }
};

// One instruction takes both states of two steps, with C of all eight; of what that gives only the
// two columns that belong to these steps are meant.
template <Operand operand>
struct OutputSums<operand, 2> {
  static __device__ __forceinline__ float2 of(const float (&x)[2][kStride], const float (&c)[2]) {
    float d[kStride / 2][4] = {};
#pragma unroll
    for (int j = 0; j < kStride / 2; ++j)
      multiply_add<operand>(d[j], make_float2(x[0][2 * j], x[0][2 * j + 1]),
                            make_float2(x[1][2 * j], x[1][2 * j + 1]), make_float2(c[0], c[1]));
    const int column = threadIdx.x % 4;
    const auto choose = [&](int k) {
      const float first = column & 1 ? d[1][k] : d[0][k], last = column & 1 ? d[3][k] : d[2][k];
      return column & 2 ? last : first;
    };
    return make_float2(choose(0), choose(3));
  }
};

template <class Shape, Layout layout>
struct ForwardMarchShared {
  Handover<Shape> handover;
  MarchInputs<Shape, 2, MatrixTile<Shape, layout>> inputs[Shape::stages];
  WindowTile<Shape::channels> y[Shape::stages][Shape::parts];
};

// A group of row warps: fills stages, and when one of its windows has been scanned, fills its stage
// with another one and finishes it.
template <class Method, class Shape, Layout layout, class Format, bool Aligned>
__device__ __forceinline__ void forward_rows(const ForwardArguments& p, const Work& work, Span span,
                                             ForwardMarchShared<Shape, layout>& shared) {
  constexpr float weight = layout == Layout::half && Format::bfloat ? kCutBack : 1.0f;
  const ScanArguments& scan = p.scan;
  using Rows = MarchRows<Shape, layout, Format, Aligned, 2>;
  constexpr int count = Rows::count, width = Rows::width, turn = Shape::groups;
  const int first = span.begin + int(threadIdx.x) / Shape::threads;
  if (first >= span.end) return shared.handover.meet();
  const View* const matrices[] = {&scan.B, &scan.C};
  Rows rows(scan, work, scan.u, matrices, false);
  typename Rows::Raw raw;
  rows.load(first, raw);
  shared.handover.meet();  // now that what it takes longest to get is on its way
  const auto fill = [&](int window, bool whole) {
    rows.fill(
        shared.inputs[shared.handover.stage_of(window)], window, raw,
        [](float dt, float u, float) {
          return Recurrence<Method, accuracy_of(layout), float>::drive(dt, u);
        },
        whole);
    shared.handover.signal_filled(window);
    rows.load(window + turn, raw, whole);
  };
  // What it takes to finish a window: u once more, which to keep would take registers.
  typename Rows::RowStream out;
  out.begin(p.out, work.at(p.out), rows.slots, work, rows.lowest);
  out.settle();
  typename Rows::Held u_raw, z_raw;
  float D[count];
#pragma unroll
  for (int k = 0; k < count; ++k)
    D[k] = channel_value(scan.D, scan, work.g, work.first_channel + rows.slots.row(k));
  const auto load = [&](int window, bool whole) {
    if (!whole && window >= span.end) return;
    const int steps = rows.steps_of(window);
    const int64_t offset = rows.offset_of(window);
    start_loads<Aligned>(whole || window < rows.whole, [&](auto how) {
      constexpr Loads loads = decltype(how)::value;
      rows.drive.template load<loads>(scan.u, rows.slots, work.channels, steps, offset, u_raw);
      if (scan.gated)
        rows.z.template load<loads>(scan.z, rows.slots, work.channels, steps, offset, z_raw);
    });
  };
  const auto finish = [&](int window, float (&y)[count][width], bool whole) {
#pragma unroll
    for (int k = 0; k < count; ++k) {
      float u_of[width], z_of[width];
      rows.drive.template values<Format>(scan.u, k, u_raw, u_of);
#pragma unroll
      for (int i = 0; i < width; ++i) y[k][i] = weight * y[k][i] + D[k] * u_of[i];
      if (scan.gated) {
        rows.z.template values<Format>(scan.z, k, z_raw, z_of);
#pragma unroll
        for (int i = 0; i < width; ++i) y[k][i] *= z_of[i] * sigmoid(z_of[i]);
      }
      const int steps = rows.steps_of(window);
      const int64_t offset = rows.offset_of(window);
      if constexpr (Aligned)
        out.template store_aligned<Format>(p.out, rows.slots, k, y[k], whole, work.channels, steps,
                                           offset);
      else
        out.template store<Format>(p.out, rows.slots, k, y[k], false, work.channels, steps, offset);
    }
  };
  const auto turn_over = [&](int window, bool whole) {
    const uint32_t stage = shared.handover.stage_of(window);
    shared.handover.wait_scanned(window);
    float y[count][width];
#pragma unroll
    for (int k = 0; k < count; ++k) get_sum(shared.y[stage], rows.slots, k, y[k]);
    if (whole || window + Shape::stages < span.end) fill(window + Shape::stages, whole);
    finish(window, y, whole);
    load(window + turn, whole);
  };

  load(first, false);
#pragma unroll 1
  for (int window = first; window < span.begin + Shape::stages && window < span.end; window += turn)
    fill(window, false);
  int window = first;
  // Most windows are whole, and so are those that are filled and loaded meanwhile: nobody asks. Not so
  // where lanes have two states: those that load wait little there, and code in one piece is faster.
  if constexpr (Aligned && Shape::states == 1) {
    const int ahead = rows.whole - turn, end = ahead < span.end ? ahead : span.end;
#pragma unroll 1
    for (; window < end - Shape::stages; window += turn) turn_over(window, true);
  }
#pragma unroll 1
  for (; window < span.end; window += turn) turn_over(window, false);
}

// A stride or one entry of a state matrix, from that entry of its tile on.
template <Operand operand>
__device__ __forceinline__ void read_stride(const WindowTile<kStateTile>& tile, int at,
                                            float (&out)[kStride]) {
  load_by_two(tile.values[0] + at, out);
}
template <Operand operand>
__device__ __forceinline__ float read_entry(const WindowTile<kStateTile>& tile, int at) {
  return tile.values[0][at];
}
template <Operand operand>
__device__ __forceinline__ float unpack(uint32_t bits) {
  if constexpr (operand == Operand::cut) return __uint_as_float(bits << 16);
  else return __half2float(__ushort_as_half(uint16_t(bits)));
}
template <Operand operand>
__device__ __forceinline__ void read_stride(const PackedTile& tile, int at, float (&out)[kStride]) {
  const uint4 packed = *reinterpret_cast<const uint4*>(tile.entries() + at);
  const uint32_t words[] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < kStride / 2; ++i) {
    out[2 * i] = unpack<operand>(words[i]);
    if constexpr (operand == Operand::cut) out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    else out[2 * i + 1] = unpack<operand>(words[i] >> 16);
  }
}
template <Operand operand>
__device__ __forceinline__ float read_entry(const PackedTile& tile, int at) {
  return unpack<operand>(tile.entries()[at]);
}

// What a lane needs for a stride of steps.
template <class Shape>
struct MarchStride {
  static constexpr int states = Shape::states;
  float dt[kStride], drive[kStride], b[states][kStride], c[states];

  // `entry`: where C of its first state and of its step begins in a tile.
  template <Operand operand, class Inputs>
  __device__ __forceinline__ void load(const Inputs& in, const MarchLane<Shape>& lane, int entry,
                                       int step) {
    const float* const dt_row = in.dt.values[0] + lane.row + step;
    const float* const drive_row = in.drive.values[0] + lane.row + step;
    if constexpr (Shape::straight) load_by_two(dt_row, dt), load_by_two(drive_row, drive);
    else load_segment(dt_row, dt), load_segment(drive_row, drive);
#pragma unroll
    for (int m = 0; m < states; ++m) {
      const int of_state = 4 * m * kPitch + step;
      read_stride<operand>(in.matrix[0], lane.state_row + of_state, b[m]);
      c[m] = read_entry<operand>(in.matrix[1], entry + of_state);
    }
  }
};

// A stride of one state, of which nothing but the state before is missing.
template <class Steps>
struct PreparedStride {
  decltype(Steps().move(0.0f, 0.0f, 0.0f)) moves[kStride];
  float c[1];

  template <class Shape>
  __device__ __forceinline__ void prepare(const Steps& steps, const MarchStride<Shape>& from) {
#pragma unroll
    for (int i = 0; i < kStride; ++i)
      moves[i] = steps.move(from.dt[i], from.drive[i], from.b[0][i]);
    c[0] = from.c[0];
  }
  // Moves the state on, and gives the sums of the stride.
  template <Operand operand>
  __device__ __forceinline__ float2 scan(float& state) const {
    float x[1][kStride];
#pragma unroll
    for (int i = 0; i < kStride; ++i) x[0][i] = state = moves[i](state);
    return OutputSums<operand, 1>::of(x, c);
  }
};

// The half that scans.
template <class Method, class Shape, Layout layout, Operand operand>
__device__ __forceinline__ void forward_states(const ForwardArguments& p, const Work& work,
                                               Span span,
                                               ForwardMarchShared<Shape, layout>& shared) {
  constexpr int together = Shape::strides, piece = together * kStride;
  const MarchLane<Shape> lane;
  MarchStates<Shape> of(p.scan, work, lane, View());
  using Steps = Recurrence<Method, accuracy_of(layout), float>;
  Steps recurrence[Shape::states];
#pragma unroll
  for (int m = 0; m < Shape::states; ++m) recurrence[m] = Steps(of.a[m]);
  int entry = lane.state_row + lane.row_in_octet;
  int y_place = lane.part * Shape::channels * kPitch + lane.row + 2 * lane.column;
  if constexpr (Shape::straight) settle(entry), settle(y_place);
  const int64_t row = work.row(p.scan, lane.channel), states = p.scan.states;
  shared.handover.meet();
  float* edges = static_cast<float*>(p.edges) + (row * p.chunks + span.begin) * states;
  if (Shape::straight && span.begin > 0) {
    wait_for_warps(span.stopped, Shape::scan_threads / 32);
    of.load(edges);
  }

  // Several strides at once, or the lane would wait for its own results; where whole windows are one
  // piece of code, this is for what is left after them.
  const auto scan_piece = [&](const auto& in, float* y, int step) {
    MarchStride<Shape> inputs[together];
    float2 sum[together];
#pragma unroll
    for (int j = 0; j < together; ++j)
      inputs[j].template load<operand>(in, lane, entry, step + j * kStride);
#pragma unroll
    for (int j = 0; j < together; ++j) {
      const MarchStride<Shape>& at = inputs[j];
      float x[Shape::states][kStride];
#pragma unroll
      for (int m = 0; m < Shape::states; ++m) {
#pragma unroll
        for (int i = 0; i < kStride; ++i) {
          of.x[m] = recurrence[m].move(at.dt[i], at.drive[i], at.b[m][i])(of.x[m]);
          x[m][i] = of.x[m];
        }
      }
      sum[j] = OutputSums<operand, Shape::states>::of(x, at.c);
    }
#pragma unroll
    for (int j = 0; j < together; ++j) *reinterpret_cast<float2*>(y + step + j * kStride) = sum[j];
  };
  const auto y_of = [&](int window) {
    return shared.y[shared.handover.stage_of(window)][0].values[0] + y_place;
  };
  const auto begin_window = [&] {
    of.store(edges);
    edges += states;
  };

  int window = span.begin;
  if constexpr (Shape::straight) {
    const int whole = int(work.steps / kChunk), end = span.end < whole ? span.end : whole;
    if (window < end) {
      // While a stride is scanned the next one is prepared, and the one or two (`together`) after that are
      // loaded; what a stride gives is stored when the next one is scanned. So nothing waits for what has
      // just been asked for.
      constexpr int strides = kChunk / kStride;
      // Strides from `strides` on are the next window's; where there is none, once more the last one's.
      const auto load = [&](MarchStride<Shape>& to, int stride) {
        const int from = stride < strides || window + 1 == end ? window : window + 1;
        if (stride % strides == 0) shared.handover.wait_filled(from);
        to.template load<operand>(shared.inputs[shared.handover.stage_of(from)], lane, entry,
                                  stride % strides * kStride);
      };
      MarchStride<Shape> loaded[together];
      PreparedStride<Steps> prepared[2];
      float2 sum = {};
      float* y = y_of(window);  // zeros, which the first sums overwrite
#pragma unroll
      for (int j = 0; j < together; ++j) load(loaded[j], j);
      prepared[0].prepare(recurrence[0], loaded[0]);
      load(loaded[0], together);
#pragma unroll 1
      for (; window < end; ++window) {
        begin_window();
#pragma unroll
        for (int stride = 0; stride < strides; ++stride) {
          *reinterpret_cast<float2*>(y) = sum;
          if (stride == 0 && window > span.begin) shared.handover.signal_scanned(window - 1);
          prepared[(stride + 1) % 2].prepare(recurrence[0], loaded[(stride + 1) % together]);
          sum = prepared[stride % 2].template scan<operand>(of.x[0]);
          y = y_of(window) + stride * kStride;
          load(loaded[(stride + 1) % together], stride + 1 + together);
        }
      }
      *reinterpret_cast<float2*>(y) = sum;
      shared.handover.signal_scanned(window - 1);
    }
  }
#pragma unroll 1
  for (; window < span.end; ++window) {
    const auto& in = shared.inputs[shared.handover.stage_of(window)];
    float* const y = y_of(window);
    begin_window();
    shared.handover.wait_filled(window);
    const int steps = work.steps_from(window, kChunk);
#pragma unroll 1
    for (int step = 0; step < steps; step += piece) scan_piece(in, y, step);
    shared.handover.signal_scanned(window);
  }

  if (Shape::straight && span.end < work.windows) {
    of.store(edges);
    signal_by_warp(span.stopped);
  } else {
    of.store(static_cast<float*>(p.last_state) + row * states);
  }
}

template <class Method, class Shape, Layout layout>
__global__ void __launch_bounds__(Shape::all_threads, Shape::min_blocks)
    forward_march_kernel(const __grid_constant__ ForwardArguments p) {
  extern __shared__ float4 memory[];
  auto& shared = *reinterpret_cast<ForwardMarchShared<Shape, layout>*>(memory);
  const bool relieves = Shape::straight && int(blockIdx.x) >= int(gridDim.x) - p.relief.blocks;
  const uint32_t block = blockIdx.x - (relieves ? p.relief.blocks : 0);
  const Work work = work_of_block<Shape>(p.scan, block);
  Span span{0, int(work.windows), nullptr};
  if constexpr (Shape::straight) {
    const int relieved = int(block) - (int(gridDim.x) - 2 * p.relief.blocks);
    if (p.relief.blocks > 0 && relieved >= 0) {
      (relieves ? span.begin : span.end) = p.relief.chunk;
      span.stopped = p.relief.counts ? p.relief.counts + relieved
                                     : static_cast<uint32_t*>(p.last_state) +
                                           work.row(p.scan, 0) * p.scan.states;
    }
  }
  shared.handover.begin();
  if (threadIdx.x < Shape::row_threads) {
    specialize<layout>(p.scan.u.storage, work.reverse, [&](auto format) {
      using Format = decltype(format);
      if (p.scan.aligned) forward_rows<Method, Shape, layout, Format, true>(p, work, span, shared);
      else forward_rows<Method, Shape, layout, Format, false>(p, work, span, shared);
    });
  } else {
    if constexpr (layout == Layout::single)
      forward_states<Method, Shape, layout, Operand::split>(p, work, span, shared);
    else if (p.scan.u.storage == Storage::bfloat16)
      forward_states<Method, Shape, layout, Operand::cut>(p, work, span, shared);
    else forward_states<Method, Shape, layout, Operand::rounded>(p, work, span, shared);
  }
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
