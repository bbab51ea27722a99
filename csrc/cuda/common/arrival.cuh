// How blocks that share a sum find out which of them comes last, and has to add up what all have left. No block
// waits for another one: CUDA promises neither that blocks start in the order of their index nor that they ever
// are at work at the same time.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdint.h>

namespace vim_mm {

// Whether this block is the last one of so many that come here with the same count, which was zero. All its
// threads call it; what any thread of any of these blocks has written before it did, the last block sees.
__device__ __forceinline__ bool is_last_to_arrive(uint32_t* count, uint32_t blocks) {
  __threadfence();
  __syncthreads();
  const bool last = threadIdx.x == 0 && atomicAdd(count, 1u) + 1 == blocks;
  if (!__syncthreads_or(last)) return false;
  __threadfence();
  return true;
}

// An earlier launch sets such counts to zero, so many threads of each of its blocks together.
__device__ __forceinline__ void clear_counts(uint32_t* counts, int64_t size, int thread,
                                             int threads) {
  if (!counts) return;
  const int64_t all = int64_t(gridDim.x) * threads;
  for (int64_t i = int64_t(blockIdx.x) * threads + thread; i < size; i += all) counts[i] = 0;
}

}  // namespace vim_mm
