// Copies from global to shared memory that nobody waits for until it is said so. The thread that asked sees what
// has come.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tile.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

#if defined(__CUDACC__)
// So many of the bytes, 4, 8 or 16, and zeros in the place of the others. Either address is a multiple of that.
template <int bytes>
__device__ __forceinline__ void start_copy(void* to, const void* from, int inside) {
  if constexpr (bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(inside)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)),
                 "l"(from), "n"(bytes), "r"(inside)
                 : "memory");
}
__device__ __forceinline__ void wait_for_all_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
#else  // tests/emulation
using emulation::start_copy, emulation::wait_for_all_copies;
#endif

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
