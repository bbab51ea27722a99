// The row scan for x86-64 processors with AVX2 and FMA (32-byte vectors).
//
// SPDX-License-Identifier: Apache-2.0
#define VIM_MM_ISA avx2
#define VIM_MM_VECTOR_BYTES 32

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#include "kernels.h"
#include "scan_row.h"

namespace vim_mm {

RealKernels avx2_kernels() {
  return {scan_kernels<Lanes<float, 8>>(), scan_kernels<Lanes<double, 4>>(),
          elementwise_kernels<Lanes<float, 8>>(), elementwise_kernels<Lanes<double, 4>>()};
}

}  // namespace vim_mm

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // x86-64
