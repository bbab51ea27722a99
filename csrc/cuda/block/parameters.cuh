// Converts many small matrices in one launch, which may do other work in other blocks.
//
// Latency decides, because a thread moves only a few bytes. A thread therefore loads kQuad entries at
// once, and finds its matrix without a chain of dependent reads.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <iterator>
#include <stdexcept>

#include "block.h"
#include "vectors.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

constexpr int kConversionThreads = 256, kPerBlock = kConversionThreads * kQuad;

// Conversion k has the blocks [ends[k - 1], ends[k]).
struct ConversionBlocks {
  Conversions conversions;
  bool wide[kMaxConversions];  // whether quads of `to` are moved at once
  uint32_t ends[kMaxConversions];
  uint32_t count;
};

// From one entry to the next there may be a stride.
template <int Width>
__device__ __forceinline__ void load_entries(const void* p, Storage storage, int64_t index,
                                             int stride, float (&x)[Width]) {
  if constexpr (Width == 1) {
    x[0] = load_real(static_cast<const char*>(p) + index * item_of(storage), storage);
  } else {
    dispatch_storage(storage, [&](auto t) {
      const auto* const first = static_cast<const decltype(t)*>(p) + index;
      if (stride == 1) return load_vector(first, x);
#pragma unroll
      for (int j = 0; j < Width; ++j) x[j] = to_float(first[j * stride]);
    });
  }
}
template <int Width>
__device__ __forceinline__ void store_entries(void* p, Storage storage, int64_t index,
                                              const float (&x)[Width]) {
  if constexpr (Width == 1) {
    store_real(static_cast<char*>(p) + index * item_of(storage), storage, x[0]);
  } else {
    dispatch_storage(storage,
                     [&](auto t) { store_vector(static_cast<decltype(t)*>(p) + index, x); });
  }
}

// Entries [i, i + Width) of `to`, which are in one row.
template <int Width>
__device__ __forceinline__ void convert_entries(const Conversion& c, uint32_t i) {
  const int64_t from = int64_t(i / c.columns) * c.from_row + int64_t(i % c.columns) * c.from_column;
  float x[Width] = {};
  if (c.from) load_entries(c.from, c.from_storage, from, c.from_column, x);
  if (c.function == Conversion::negative_exp) {
#pragma unroll
    for (float& value : x) value = -expf(value);
  } else if (c.function == Conversion::product) {
    float factor[Width];
    load_vector(c.factor + i, factor);
#pragma unroll
    for (int j = 0; j < Width; ++j) x[j] *= factor[j];
  }
  store_entries(c.to, c.to_storage, i, x);
}

// By one of `count` blocks of kConversionThreads.
__device__ __forceinline__ void convert_block(const ConversionBlocks& blocks, uint32_t index) {
  int which = 0;
#pragma unroll
  for (const uint32_t end : blocks.ends) which += index >= end;
  const Conversion& c = blocks.conversions.each[which];
  const uint32_t block = index - (which == 0 ? 0 : blocks.ends[which - 1]);
  const uint32_t first = (block * kConversionThreads + threadIdx.x) * kQuad;
  const uint32_t count = c.rows * c.columns;
  if (blocks.wide[which]) {
    if (first < count) convert_entries<kQuad>(c, first);
  } else {
    for (uint32_t i = first; i < first + kQuad && i < count; ++i) convert_entries<1>(c, i);
  }
}

inline bool is_wide(const Conversion& c) {
  return c.from_storage != Storage::float64 && c.to_storage != Storage::float64 &&
         (c.from_column != 1 || fits(c.from, c.from_storage, kQuad, c.from_row)) &&
         fits(c.to, c.to_storage, kQuad, c.columns) &&
         fits(c.factor, Storage::float32, kQuad, c.columns);
}

inline ConversionBlocks conversion_blocks(const Conversions& conversions) {
  ConversionBlocks blocks{conversions, {}, {}, 0};
  int64_t end = 0;
  for (int k = 0; k < conversions.count; ++k) {
    const Conversion& c = conversions.each[k];
    const int64_t count = int64_t(c.rows) * c.columns;
    if (count > INT32_MAX) throw std::runtime_error("vim_mm: too large a parameter");
    end += (count + kPerBlock - 1) / kPerBlock;
    blocks.wide[k] = is_wide(c), blocks.ends[k] = uint32_t(end);
  }
  std::fill(blocks.ends + conversions.count, std::end(blocks.ends), UINT32_MAX);
  blocks.count = uint32_t(end);
  return blocks;
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
