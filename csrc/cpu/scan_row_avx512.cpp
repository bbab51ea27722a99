// The row scan for x86-64 processors with AVX512 (64-byte vectors).
//
// SPDX-License-Identifier: Apache-2.0
#define VIM_MM_ISA avx512
#define VIM_MM_VECTOR_BYTES 64

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")
#endif

#include "kernels.h"
#include "scan_row.h"

namespace vim_mm {

RealKernels avx512_kernels() {
  return {scan_kernels<Lanes<float, 16>>(), scan_kernels<Lanes<double, 8>>(),
          elementwise_kernels<Lanes<float, 16>>(), elementwise_kernels<Lanes<double, 8>>()};
}

}  // namespace vim_mm

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // x86-64
