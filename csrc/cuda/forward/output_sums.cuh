// What a lane of the forward scan loads of a stride, and the sum over states, which a tensor core computes.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../sequential/lane.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// d += a b: d is 16 x 8, a 16 x 8, b 8 x 8, in fragments as the instruction wants them. Of a and b
// only the upper 19 bits count.
__device__ __forceinline__ void multiply_add(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                             uint32_t a3, uint32_t b0, uint32_t b1) {
#if defined(__CUDACC__)
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else  // tests/emulation
  const int row = threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
  const auto lanes = emulation::exchange({a0, a1, a2, a3, b0, b1});
  const auto seen = [&](int lane, int word) {
    return __uint_as_float(lanes[lane][word] & 0xffffe000u);
  };
  for (int half = 0; half < 2; ++half) {
    for (int k = 0; k < 4; ++k) {
      const float upper = seen(4 * row + k, 2 * half), lower = seen(4 * row + k, 2 * half + 1);
      for (int j = 0; j < 2; ++j) {
        const float right = seen(4 * (column + j) + k, 4 + half);
        d[j] += upper * right;
        d[2 + j] += lower * right;
      }
    }
  }
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
  static __device__ __forceinline__ int place_of_C(const LaneMap<Shape>& lane, int i) {
    const int column = lane.row_of_warp;
    if constexpr (!Shape::mixed) return lane.state_row + column;
    const int part = column / 4 == i ? Shape::scan_thread() / 32 : lane.last_part;
    return (4 * part + lane.column) * kPitch + 4 * i + column % 4;
  }
  // The first step of a lane's sums.
  static __device__ __forceinline__ int step(const LaneMap<Shape>& lane) {
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
  static __device__ __forceinline__ int place_of_C(const LaneMap<Shape>& lane, int m) {
    return lane.state_row + 4 * m * kPitch + lane.row_of_warp;
  }
  static __device__ __forceinline__ int step(const LaneMap<Shape>& lane) { return 2 * lane.column; }
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

// A stride or one entry of a state matrix, at that place of its tile.
template <Operand operand>
__device__ __forceinline__ void read_stride(const WindowTile<kStateTile>& tile, int at,
                                            float (&out)[kStride]) {
  load_stride<true>(tile.values[0] + at, out);
}
template <Operand operand>
__device__ __forceinline__ float read_entry(const WindowTile<kStateTile>& tile, int at) {
  return tile.values[0][at];
}
template <Operand operand>
__device__ __forceinline__ float widen(uint32_t bits) {
  if constexpr (operand == Operand::cut) return __uint_as_float(bits << 16);
  else return __half2float(__ushort_as_half(uint16_t(bits)));
}
template <Operand operand>
__device__ __forceinline__ void read_stride(const HalfTile& tile, int at, float (&out)[kStride]) {
  const uint4 vector = *reinterpret_cast<const uint4*>(tile.entries() + at);
  const uint32_t words[] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < kStride / 2; ++i) {
    out[2 * i] = widen<operand>(words[i]);
    if constexpr (operand == Operand::cut) out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    else out[2 * i + 1] = widen<operand>(words[i] >> 16);
  }
}
template <Operand operand>
__device__ __forceinline__ float read_entry(const HalfTile& tile, int at) {
  return widen<operand>(tile.entries()[at]);
}

// What a lane needs for a stride of steps.
template <class Shape>
struct StrideInputs {
  static constexpr int states = Shape::states;
  static constexpr int entries = Shape::entries_of_C;
  float dt[kStride], drive[kStride], b[states][kStride], c[entries];

  // `entry`: the places of its C in a tile. `Driven`: with what drives it, and B.
  template <Operand operand, bool Driven = true, class Inputs>
  __device__ __forceinline__ void load(const Inputs& in, const LaneMap<Shape>& lane,
                                       const int (&entry)[entries], int step) {
    const int of_row = lane.row + step;
    load_stride<Shape::straight>(in.dt.values[0] + of_row, dt);
    if constexpr (Driven) {
      load_stride<Shape::straight>(in.drive.values[0] + of_row, drive);
#pragma unroll
      for (int m = 0; m < states; ++m)
        read_stride<operand>(in.matrix[0], lane.state_row + 4 * m * kPitch + step, b[m]);
    }
#pragma unroll
    for (int i = 0; i < entries; ++i) c[i] = read_entry<operand>(in.matrix[1], entry[i] + step);
  }
};

// Where a lane's entries of C are in their tile, and the sums that it gets in theirs.
template <class Shape, Operand operand>
struct LanePlaces {
  int c[Shape::entries_of_C], y;

  explicit __device__ __forceinline__ LanePlaces(const LaneMap<Shape>& lane) {
    using Sums = OutputSums<operand, Shape>;
#pragma unroll
    for (int i = 0; i < Shape::entries_of_C; ++i) {
      c[i] = Sums::place_of_C(lane, i);
      if constexpr (Shape::straight) settle(c[i]);
    }
    y = lane.part * Shape::channels * kPitch + lane.row + Sums::step(lane);
    if constexpr (Shape::straight) settle(y);
  }
};

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
