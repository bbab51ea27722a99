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
// each step, entries of C, and gets the sums of two steps that follow each other.
template <Operand operand, class Shape, int States = Shape::states>
struct OutputSums;

// One instruction takes the states of four steps. Columns are steps: of every four the halves of C are 0
// but in the two that belong to their steps, of which the even one has the upper rows and the odd one
// the lower. Each instruction gives four columns that are meant: those of its steps. Where parts are mixed the
// other four columns have the same steps, too, but C of the last part, for the rows that are in that: so
// these get the sums of the other half of a stride. A state that is infinite makes outputs of its neighbours
// among the four NaN.
template <Operand operand, class Shape>
struct OutputSums<operand, Shape, 1> {
  static constexpr int entries = Shape::entries_of_C;

  // Where a lane's entry of C for the i-th instruction is in a tile. It has that of its row_of_warp, which
  // is a column there.
  template <class Matrix>
  static __device__ __forceinline__ int place_of_C(const MarchLane<Shape>& lane, int i) {
    const int column = lane.row_of_warp;
    if constexpr (!Shape::mixed) return lane.state_row + Matrix::place(column);
    const int part = column / 4 == i ? Shape::scan_thread() / 32 : lane.last_part;
    return (4 * part + lane.column) * kPitch + Matrix::place(4 * i + column % 4);
  }
  // The first step of a lane's sums.
  static __device__ __forceinline__ int step(const MarchLane<Shape>& lane) {
    return 4 * is_in_last_four() + 2 * (lane.column % 2);
  }
  static __device__ __forceinline__ float2 of(const float (&x)[1][kStride],
                                              const float (&c)[entries]) {
    const bool last_two = threadIdx.x / 8 % 2;
    float d[2][4] = {};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float entry = c[j % entries];
      multiply_add<operand>(d[j], make_float2(x[0][4 * j], x[0][4 * j + 1]),
                            make_float2(x[0][4 * j + 2], x[0][4 * j + 3]),
                            make_float2(last_two ? 0.0f : entry, last_two ? entry : 0.0f));
    }
    const bool last_four = is_in_last_four();
    return make_float2(last_four ? d[1][0] : d[0][0], last_four ? d[1][3] : d[0][3]);
  }

 private:
  static __device__ __forceinline__ bool is_in_last_four() {
    const bool last_columns = threadIdx.x / 2 % 2;
    if (Shape::mixed && threadIdx.x % 32 / 4 >= Shape::channels) return !last_columns;
    return last_columns;
  }
};

// One instruction takes both states of two steps, with C of all eight; of what that gives only the
// two columns that belong to these steps are meant.
template <Operand operand, class Shape>
struct OutputSums<operand, Shape, 2> {
  template <class Matrix>
  static __device__ __forceinline__ int place_of_C(const MarchLane<Shape>& lane, int m) {
    return lane.state_row + 4 * m * kPitch + Matrix::place(lane.row_of_warp);
  }
  static __device__ __forceinline__ int step(const MarchLane<Shape>& lane) {
    return 2 * lane.column;
  }
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

// How a block goes over windows, turn by turn: turn and window have one number, or of a method that is not
// causal all windows come from the last one back, in the turns from 0 on, and then forth.
enum class Leg { only, back, forth };

template <Leg leg>
__device__ __forceinline__ int window_of(const Span& span, int turn) {
  if constexpr (leg == Leg::back) return span.end - 1 - turn;
  else return leg == Leg::only ? turn : turn - span.begin;
}
// The i-th of so many in the order of a leg.
template <Leg leg>
__device__ constexpr int in_order(int i, int of) {
  return leg == Leg::back ? of - 1 - i : i;
}

// What the way back leaves for the way forth, in memory: a thread's quads of window after window.
template <class Shape, class Places>
class FirstSums {
 public:
  static constexpr int count = Places::entries / kQuad;

  __device__ __forceinline__ FirstSums(float* sums, const Work& work, uint32_t block,
                                       const Places& slots)
      : sums_(sums), first_(block * work.windows * of_window + slots.thread) {}
  // The k-th quad of a window.
  __device__ __forceinline__ float* at(int window, int k) const {
    return sums_ + (first_ + int64_t(window) * of_window + k * Shape::threads) * kQuad;
  }

 private:
  static constexpr int of_window = count * Shape::threads;
  float* const sums_;
  const int64_t first_;
};

template <class Shape, Layout layout>
struct ForwardMarchShared {
  Handover<Shape> handover;
  MarchInputs<Shape, layout, 2, MatrixTile<Shape, layout>> inputs[Shape::stages];
  SlotTile<Shape::channels, Shape, layout> y[Shape::stages][Shape::parts];
};

// A group of row warps: fills stages, and when one of its windows has been scanned, fills its stage
// with another one and finishes it: on the way back as far as u goes, on the way forth from there.
template <class Method, class Shape, Layout layout, class Format, bool Aligned, Leg leg>
__device__ __forceinline__ void forward_rows(const ForwardArguments& p, const Work& work, Span span,
                                             uint32_t block,
                                             ForwardMarchShared<Shape, layout>& shared) {
  constexpr float weight =
      output_weight<Method, float>() * (layout == Layout::half && Format::bfloat ? kCutBack : 1.0f);
  const ScanArguments& scan = p.scan;
  using Rows = MarchRows<Shape, layout, Format, Aligned, 2>;
  constexpr int count = Rows::count, width = Rows::width, groups = Shape::groups;
  const int first = span.begin + Shape::group();
  if (first >= span.end) return shared.handover.meet();
  const View* const matrices[] = {&scan.B, &scan.C};
  Rows rows(scan, work, scan.u, matrices, false);
  typename Rows::Raw raw;
  wait_for_previous();
  rows.load(window_of<leg>(span, first), raw);
  rows.load_bias();
  // Now that what it takes longest to get is on its way. On the way forth all first sums are there.
  shared.handover.meet();
  const auto fill = [&](int turn, bool whole) VIM_MM_INLINED {
    rows.fill(
        shared.inputs[shared.handover.stage_of(turn)], window_of<leg>(span, turn), raw,
        [](float dt, float u, float) { return MarchRecurrence<Method, layout>::drive(dt, u); },
        whole);
    shared.handover.signal_filled(turn);
    rows.load(window_of<leg>(span, turn + groups), raw, whole);
  };
  // What it takes to finish a window: u once more, which to keep would take registers.
  typename Rows::RowStream out;
  out.begin(p.out, work.at(p.out), rows.slots, work, rows.lowest);
  out.settle();
  using Sums = FirstSums<Shape, typename Rows::Places>;
  const Sums first_sums(p.first_sums, work, block, rows.slots);
  typename Rows::Held u_raw, z_raw;
  float sums[Sums::count][kQuad];
  float D[count];
#pragma unroll
  for (int k = 0; k < count; ++k)
    D[k] = channel_value(scan.D, scan, work.g, work.first_channel + rows.slots.row(k));
  const auto load = [&](int turn, bool whole) VIM_MM_INLINED {
    if (!whole && turn >= span.end) return;
    const int window = window_of<leg>(span, turn);
    if constexpr (leg == Leg::forth) {
#pragma unroll
      for (int k = 0; k < Sums::count; ++k) load_quad(first_sums.at(window, k), sums[k]);
    }
    const int steps = rows.steps_of(window);
    const int64_t offset = rows.offset_of(window);
    start_loads<Aligned>(whole || window < rows.whole, [&](auto how) {
      constexpr Loads loads = decltype(how)::value;
      if constexpr (leg != Leg::forth)
        rows.drive.template load<loads>(scan.u, rows.slots, work.channels, steps, offset, u_raw);
      if (leg != Leg::back && scan.gated)
        rows.z.template load<loads>(scan.z, rows.slots, work.channels, steps, offset, z_raw);
    });
  };
  const auto finish = [&](int turn, float (&y)[count][width], bool whole) VIM_MM_INLINED {
    const int window = window_of<leg>(span, turn);
#pragma unroll
    for (int k = 0; k < count; ++k) {
      if constexpr (leg == Leg::forth) {
#pragma unroll
        for (int i = 0; i < width; ++i) {
          const int entry = k * width + i;
          y[k][i] = weight * y[k][i] + sums[entry / kQuad][entry % kQuad];
        }
      } else {
        float u_of[width];
        rows.drive.template values<Format>(scan.u, k, u_raw, u_of);
#pragma unroll
        for (int i = 0; i < width; ++i) y[k][i] = weight * y[k][i] + D[k] * u_of[i];
      }
      if constexpr (leg == Leg::back) {
#pragma unroll
        for (int i = 0; i < width; i += kQuad)
          store_segment(first_sums.at(window, (k * width + i) / kQuad),
                        reinterpret_cast<const float (&)[kQuad]>(y[k][i]));
        continue;
      }
      float z_of[width];
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
  const auto turn_over = [&](int turn, bool whole) VIM_MM_INLINED {
    const uint32_t stage = shared.handover.stage_of(turn);
    shared.handover.wait_scanned(turn);
    float y[count][width];
#pragma unroll
    for (int k = 0; k < count; ++k) get_sum(shared.y[stage], rows.slots, k, y[k]);
    if (whole || turn + Shape::stages < span.end) fill(turn + Shape::stages, whole);
    finish(turn, y, whole);
    load(turn + groups, whole);
  };

  if (leg != Leg::forth) load(first, false);
#pragma unroll 1
  for (int turn = first; turn < span.begin + Shape::stages && turn < span.end; turn += groups)
    fill(turn, false);
  if (leg == Leg::forth) {
    if (span.stopped) wait_for_warps(span.stopped, Shape::row_threads / 32);
    load(first, false);
  }
  int turn = first;
  // Most windows are whole, and so are those that are filled and loaded meanwhile: nobody asks. Not so
  // where lanes have two states: those that load wait little there, and code in one piece is faster.
  if constexpr (Aligned && Shape::states == 1) {
    int ahead = rows.whole - groups;
    if (leg == Leg::forth) ahead += span.begin;
    if (leg == Leg::back && rows.whole > 0) {
      if (window_of<leg>(span, turn) >= rows.whole) turn_over(turn, false), turn += groups;
      ahead = span.end - groups;
    }
    const int end = ahead < span.end ? ahead : span.end;
#pragma unroll 1
    for (; turn < end - Shape::stages; turn += groups) turn_over(turn, true);
  }
#pragma unroll 1
  for (; turn < span.end; turn += groups) turn_over(turn, false);
  if (leg == Leg::back && span.stopped) signal_by_warp(span.stopped);
}

// A stride or one entry of a state matrix, at that place of its tile.
template <Operand operand, bool Split>
__device__ __forceinline__ void read_stride(const WindowTile<kStateTile, Split>& tile, int at,
                                            float (&out)[kStride]) {
  load_stride<true>(tile, tile.values[0] + at, out);
}
template <Operand operand, bool Split>
__device__ __forceinline__ float read_entry(const WindowTile<kStateTile, Split>& tile, int at) {
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
  static constexpr int entries = Shape::entries_of_C;
  float dt[kStride], drive[kStride], b[states][kStride], c[entries];

  // `entry`: the places of its C in a tile.
  template <Operand operand, class Inputs>
  __device__ __forceinline__ void load(const Inputs& in, const MarchLane<Shape>& lane,
                                       const int (&entry)[entries], int step) {
    const int of_row = lane.row + in.dt.place(step);
    load_stride<Shape::straight>(in.dt, in.dt.values[0] + of_row, dt);
    load_stride<Shape::straight>(in.drive, in.drive.values[0] + of_row, drive);
#pragma unroll
    for (int m = 0; m < states; ++m)
      read_stride<operand>(in.matrix[0], lane.state_row + 4 * m * kPitch + in.matrix[0].place(step),
                           b[m]);
#pragma unroll
    for (int i = 0; i < entries; ++i)
      c[i] = read_entry<operand>(in.matrix[1], entry[i] + in.matrix[1].place(step));
  }
};

// A stride of one state, of which nothing but the state before is missing.
template <class Steps, class Shape>
struct PreparedStride {
  static constexpr int entries = Shape::entries_of_C;
  decltype(Steps().move(0.0f, 0.0f, 0.0f)) moves[kStride];
  float c[entries];

  __device__ __forceinline__ void prepare(const Steps& steps, const MarchStride<Shape>& from) {
#pragma unroll
    for (int i = 0; i < kStride; ++i)
      moves[i] = steps.move(from.dt[i], from.drive[i], from.b[0][i]);
#pragma unroll
    for (int i = 0; i < entries; ++i) c[i] = from.c[i];
  }
  // Moves the state on, and gives the sums of the stride.
  template <Operand operand, Leg leg>
  __device__ __forceinline__ float2 scan(float& state) const {
    float x[1][kStride];
#pragma unroll
    for (int j = 0; j < kStride; ++j) {
      const int i = in_order<leg>(j, kStride);
      x[0][i] = state = moves[i](state);
    }
    return OutputSums<operand, Shape>::of(x, c);
  }
};

// The half that scans.
template <class Method, class Shape, Layout layout, Operand operand, Leg leg>
__device__ __forceinline__ void forward_states(const ForwardArguments& p, const Work& work,
                                               Span span,
                                               ForwardMarchShared<Shape, layout>& shared) {
  constexpr int ahead = Shape::strides, piece = ahead * kStride;
  const MarchLane<Shape> lane;
  wait_for_previous();
  MarchStates<Shape> of(p.scan, work, lane, View());
  using Steps = MarchRecurrence<Method, layout>;
  Steps recurrence[Shape::states];
#pragma unroll
  for (int m = 0; m < Shape::states; ++m) recurrence[m] = Steps(of.a[m]);
  using Y = SlotTile<Shape::channels, Shape, layout>;
  using Sums = OutputSums<operand, Shape>;
  int entry[Shape::entries_of_C];
#pragma unroll
  for (int i = 0; i < Shape::entries_of_C; ++i) {
    entry[i] = Sums::template place_of_C<MatrixTile<Shape, layout>>(lane, i);
    if constexpr (Shape::straight) settle(entry[i]);
  }
  int y_place = lane.part * Shape::channels * kPitch + lane.row + Y::place(Sums::step(lane));
  if constexpr (Shape::straight) settle(y_place);
  const int64_t row = work.row(p.scan, lane.channel), states = p.scan.states;
  shared.handover.meet();
  float* edges = static_cast<float*>(leg == Leg::back ? p.other_edges : p.edges) +
                 (row * p.chunks + window_of<leg>(span, span.begin)) * states;
  if (leg == Leg::only && Shape::straight && span.begin > 0) {
    wait_for_warps(span.stopped, Shape::scan_threads / 32);
    of.load(edges);
  }

  // Several strides at once, or the lane would wait for its own results; where whole windows are one
  // piece of code, this is for what is left after them.
  const auto scan_piece = [&](const auto& in, float* y, int step) VIM_MM_INLINED {
    MarchStride<Shape> inputs[ahead];
    float2 sum[ahead];
#pragma unroll
    for (int j = 0; j < ahead; ++j)
      inputs[j].template load<operand>(in, lane, entry, step + j * kStride);
#pragma unroll
    for (int jj = 0; jj < ahead; ++jj) {
      const int j = in_order<leg>(jj, ahead);
      const MarchStride<Shape>& at = inputs[j];
      float x[Shape::states][kStride];
#pragma unroll
      for (int m = 0; m < Shape::states; ++m) {
#pragma unroll
        for (int ii = 0; ii < kStride; ++ii) {
          const int i = in_order<leg>(ii, kStride);
          of.x[m] = recurrence[m].move(at.dt[i], at.drive[i], at.b[m][i])(of.x[m]);
          x[m][i] = of.x[m];
        }
      }
      sum[j] = Sums::of(x, at.c);
    }
#pragma unroll
    for (int j = 0; j < ahead; ++j)
      *reinterpret_cast<float2*>(y + Y::place(step + j * kStride)) = sum[j];
  };
  const auto y_of = [&](int turn) VIM_MM_INLINED {
    return shared.y[shared.handover.stage_of(turn)][0].values[0] + y_place;
  };
  const auto begin_window = [&] {
    of.store(edges);
    edges += leg == Leg::back ? -states : states;
  };
  const auto scan_in_pieces = [&](int turn) VIM_MM_INLINED {
    const auto& in = shared.inputs[shared.handover.stage_of(turn)];
    float* const y = y_of(turn);
    begin_window();
    shared.handover.wait_filled(turn);
    const int steps = work.steps_from(window_of<leg>(span, turn), kChunk);
    const int last = (steps - 1) / piece * piece;
#pragma unroll 1
    for (int step = 0; step < steps; step += piece)
      scan_piece(in, y, leg == Leg::back ? last - step : step);
    shared.handover.signal_scanned(turn);
  };

  int turn = span.begin;
  if constexpr (Shape::straight) {
    const int whole = int(work.steps / kChunk);
    int end = span.end;
    if (leg == Leg::back) {
      if (turn < end && window_of<leg>(span, turn) >= whole) scan_in_pieces(turn++);
    } else {
      const int end_whole = leg == Leg::only ? whole : span.begin + whole;
      if (end > end_whole) end = end_whole;
    }
    if (turn < end) {
      const int first = turn;
      // While a stride is scanned the next one is prepared, and the one or two (`ahead`) after that are
      // loaded; what a stride gives is stored when the next one is scanned. So nothing waits for what has
      // just been asked for.
      constexpr int strides = kChunk / kStride;
      // Strides from `strides` on are the next window's; where there is none, once more the last one's.
      const auto load = [&](MarchStride<Shape>& to, int stride) VIM_MM_INLINED {
        const int from = stride < strides || turn + 1 == end ? turn : turn + 1;
        if (stride % strides == 0) shared.handover.wait_filled(from);
        to.template load<operand>(shared.inputs[shared.handover.stage_of(from)], lane, entry,
                                  in_order<leg>(stride % strides, strides) * kStride);
      };
      MarchStride<Shape> loaded[ahead];
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
          if (stride == 0 && turn > first) shared.handover.signal_scanned(turn - 1);
          prepared[(stride + 1) % 2].prepare(recurrence[0], loaded[(stride + 1) % ahead]);
          // Before the scan or behind it, whichever ptxas makes the better code of.
          if (ahead == 1) load_next(stride);
          sum = prepared[stride % 2].template scan<operand, leg>(of.x[0]);
          y = y_of(turn) + Y::place(in_order<leg>(stride, strides) * kStride);
          if (ahead > 1) load_next(stride);
        }
      }
      *reinterpret_cast<float2*>(y) = sum;
      shared.handover.signal_scanned(turn - 1);
    }
  }
#pragma unroll 1
  for (; turn < span.end; ++turn) scan_in_pieces(turn);

  if (leg == Leg::back) return;
  if (leg == Leg::only && Shape::straight && span.end < work.windows) {
    of.store(edges);
    signal_by_warp(span.stopped);
  } else {
    of.store(static_cast<float*>(p.last_state) + row * states);
  }
}

// What a block does of both legs; where one block relieves another, each has one of them. Of a causal method
// `forth` is all there is.
struct Legs {
  Span back, forth;
  bool goes_back, goes_forth;
};

// Calls f with each leg of a block, as a constant, and its span.
template <class Method, class F>
__device__ __forceinline__ void each_leg(const Legs& legs, const F& f) {
  using std::integral_constant;
  if constexpr (Method::causal) {
    f(integral_constant<Leg, Leg::only>(), legs.forth);
  } else {
    if (legs.goes_back) f(integral_constant<Leg, Leg::back>(), legs.back);
    if (legs.goes_forth) f(integral_constant<Leg, Leg::forth>(), legs.forth);
  }
}

template <class Method, class Shape, Layout layout>
__global__ void __launch_bounds__(Shape::all_threads, Shape::min_blocks)
    forward_march_kernel(const __grid_constant__ ForwardArguments p) {
  let_next_begin();
  extern __shared__ float4 memory[];
  auto& shared = *reinterpret_cast<ForwardMarchShared<Shape, layout>*>(memory);
  const bool relieves = Shape::straight && int(blockIdx.x) >= int(gridDim.x) - p.relief.blocks;
  const uint32_t block = blockIdx.x - (relieves ? p.relief.blocks : 0);
  const Work work = work_of_block<Shape>(p.scan, block);
  const int windows = int(work.windows);
  Span span{0, windows, nullptr};
  if constexpr (Shape::straight) {
    const int pair = int(block) - (int(gridDim.x) - 2 * p.relief.blocks);
    if (p.relief.blocks > 0 && pair >= 0) {
      if (Method::causal) (relieves ? span.begin : span.end) = p.relief.chunk;
      span.stopped = p.relief.counts ? p.relief.counts + pair
                                     : static_cast<uint32_t*>(p.last_state) +
                                           work.row(p.scan, 0) * p.scan.states;
    }
  }
  Legs legs{span, span, !relieves, relieves || !span.stopped};
  if (!Method::causal && !relieves) legs.forth = {windows, 2 * windows, nullptr};
  shared.handover.begin();
  if (Shape::has_rows()) {
    specialize<layout>(p.scan.u.storage, work.reverse, [&](auto format) VIM_MM_INLINED {
      using Format = decltype(format);
      specialize_alignment<Shape>(p.scan, [&](auto aligned) VIM_MM_INLINED {
        constexpr bool Aligned = decltype(aligned)::value;
        each_leg<Method>(legs, [&](auto leg, const Span& of_leg) VIM_MM_INLINED {
          forward_rows<Method, Shape, layout, Format, Aligned, decltype(leg)::value>(
              p, work, of_leg, block, shared);
        });
      });
    });
  } else if (Shape::is_idle()) {
    each_leg<Method>(legs, [&](auto, const Span&) { shared.handover.meet(); });
  } else {
    using std::integral_constant;
    const auto scan = [&](auto operand) VIM_MM_INLINED {
      each_leg<Method>(legs, [&](auto leg, const Span& of_leg) VIM_MM_INLINED {
        forward_states<Method, Shape, layout, decltype(operand)::value, decltype(leg)::value>(
            p, work, of_leg, shared);
      });
    };
    if constexpr (layout == Layout::single) scan(integral_constant<Operand, Operand::split>());
    else if (p.scan.u.storage == Storage::bfloat16)
      scan(integral_constant<Operand, Operand::cut>());
    else scan(integral_constant<Operand, Operand::rounded>());
  }
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
