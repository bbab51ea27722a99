// Products of 16 bits by tensor cores, and how their operands come into registers.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "vectors.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// d += a b: d is 16 x 8, a 16 x 16, b 16 x 8, in fragments as the instruction wants them. Volatile, so
// that it stays where the whole warp comes by.
template <class T>
__device__ __forceinline__ void multiply_add(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                             uint32_t a3, uint32_t b0, uint32_t b1) {
#if defined(__CUDACC__)
#define VIM_MM_MULTIPLY_ADD(type)                                           \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type       \
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])             \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
  if constexpr (std::is_same_v<T, __half>) VIM_MM_MULTIPLY_ADD("f16");
  else VIM_MM_MULTIPLY_ADD("bf16");
#undef VIM_MM_MULTIPLY_ADD
#else  // tests/emulation
  constexpr Storage storage = std::is_same_v<T, __half> ? Storage::float16 : Storage::bfloat16;
  const int row = threadIdx.x % kWarp / 4, column = 2 * (threadIdx.x % 4);
  const auto lanes = emulation::exchange({a0, a1, a2, a3, b0, b1});
  const auto entry = [&](int lane, int word, int which) {
    return decode(lanes[lane][word] >> 16 * which & 0xffff, storage);
  };
  for (int half = 0; half < 2; ++half) {
    for (int k = 0; k < 8; ++k) {
      const float above = entry(4 * row + k / 2, 2 * half, k % 2);
      const float below = entry(4 * row + k / 2, 2 * half + 1, k % 2);
      for (int j = 0; j < 2; ++j) {
        const float factor = entry(4 * (column + j) + k / 2, 4 + half, k % 2);
        d[j] += above * factor;
        d[2 + j] += below * factor;
      }
    }
  }
#endif
}

// Two entries as they are in memory.
template <class T>
__device__ __forceinline__ uint32_t word_of(float x, float y) {
  const auto pair = pair_from_floats<T>(x, y);
  uint32_t word;
  memcpy(&word, &pair, sizeof word);
  return word;
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
