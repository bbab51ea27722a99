// A block's parameters as its kernels take them, and their gradients as they are kept: many small
// matrices in one launch.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "block.h"
#include "errors.h"
#include "packs.cuh"

namespace vim_mm {
namespace {

constexpr int kThreads = 256, kPerThread = 4, kPerBlock = kThreads * kPerThread;

__host__ __device__ int64_t blocks_of(const Conversion& c) {
  return (int64_t(c.rows) * c.columns + kPerBlock - 1) / kPerBlock;
}

__global__ void __launch_bounds__(kThreads)
    convert_kernel(const __grid_constant__ Conversions conversions) {
  // Blocks are counted through the conversions, in their order.
  int64_t block = blockIdx.x;
  int which = 0;
  while (block >= blocks_of(conversions.each[which])) block -= blocks_of(conversions.each[which++]);
  const Conversion& c = conversions.each[which];
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const uint32_t i = block * kPerBlock + k * kThreads + threadIdx.x;
    if (i >= uint32_t(c.rows) * c.columns) return;
    const int row = int(i / c.columns) - c.zero_rows, column = int(i % c.columns) - c.zero_columns;
    float x = 0.0f;
    if (c.from && row >= 0 && column >= 0) {
      const int64_t index = int64_t(row) * c.from_row + column;
      x = load_real(static_cast<const char*>(c.from) + index * item_of(c.from_storage),
                    c.from_storage);
    }
    if (c.function == Conversion::negative_exp) x = -expf(x);
    if (c.function == Conversion::product) x *= c.factor[i];
    store_real(static_cast<char*>(c.to) + int64_t(i) * item_of(c.to_storage), c.to_storage, x);
  }
}

}  // namespace

void convert(const Conversions& conversions, void* stream) {
  int64_t blocks = 0;
  for (int i = 0; i < conversions.count; ++i) {
    const Conversion& c = conversions.each[i];
    if (int64_t(c.rows) * c.columns > INT32_MAX)
      throw std::runtime_error("vim_mm: too large a parameter");
    blocks += blocks_of(c);
  }
  if (blocks == 0) return;
  enqueue(convert_kernel, static_cast<unsigned>(blocks), kThreads, 0, stream, conversions);
}

}  // namespace vim_mm
