// What the gate makes of entries in registers.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "vectors.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// out = silu(z) * sum, of which `sum` comes as the sum of y over directions.
template <class T, int Width>
__device__ __forceinline__ void gate_pack(float (&sum)[Width], const float (&z)[Width], float scale,
                                          float (&out)[Width]) {
#pragma unroll
  for (int j = 0; j < Width; ++j) sum[j] *= scale;
  unpack(pack_of<T>(sum), sum);  // as backward will find it
#pragma unroll
  for (int j = 0; j < Width; ++j) out[j] = z[j] * sigmoid(z[j]) * sum[j];
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
