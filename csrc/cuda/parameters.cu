// A block's parameters as its kernels take them, all in one launch.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "block.h"
#include "errors.h"
#include "packs.cuh"

namespace vim_mm {
namespace {

constexpr int kThreads = 256, kPerThread = 4;

__global__ void __launch_bounds__(kThreads)
    convert_kernel(const __grid_constant__ Conversions conversions) {
  // Blocks are counted through the conversions, in their order.
  int64_t block = blockIdx.x;
  int which = 0;
  for (;; ++which) {
    constexpr int per_block = kThreads * kPerThread;
    const int64_t blocks = (conversions.each[which].count + per_block - 1) / per_block;
    if (block < blocks) break;
    block -= blocks;
  }
  const Conversion& c = conversions.each[which];
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int64_t i = (block * kPerThread + k) * kThreads + threadIdx.x;
    if (i >= c.count) return;
    const float x = load_entry(c.from, i);
    store_real(static_cast<char*>(c.to.data) + i * item_of(c.to.storage), c.to.storage,
               c.negative_exp ? -expf(x) : x);
  }
}

}  // namespace

void convert(const Conversions& conversions, void* stream) {
  int64_t blocks = 0;
  for (int i = 0; i < conversions.count; ++i)
    blocks += (conversions.each[i].count + kThreads * kPerThread - 1) / (kThreads * kPerThread);
  if (blocks == 0) return;
  if (blocks > INT32_MAX) throw std::runtime_error("vim_mm: too many parameters for one launch");
  convert_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      conversions);
  check(cudaGetLastError());
}

}  // namespace vim_mm
