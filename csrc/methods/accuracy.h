// What every header of this folder needs first: the macros of functions that run on host and device, the namespace of
// an instruction set, and how exact a function is.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#if defined(__CUDACC__)
#define VIM_MM_INLINE __host__ __device__ __forceinline__
#define VIM_MM_UNROLL _Pragma("unroll")
#else
#define VIM_MM_INLINE inline __attribute__((always_inline))
#define VIM_MM_UNROLL _Pragma("GCC unroll 32")
#endif

// The CPU kernels compile these headers once per instruction set. Each copy lives in its own
// namespace, or the linker could hand an AVX-512 copy of a function to a machine without it.
#ifndef VIM_MM_ISA
#define VIM_MM_ISA portable
#endif

namespace vim_mm {
inline namespace VIM_MM_ISA {

// How exact a function is: to a few ulps, or to about 2^-16, in fewer instructions. `half` is for what
// meets tensors of 16 bits alone, whose own rounding is 30 times as large or more; only float has it.
enum class Accuracy { full, half };

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
