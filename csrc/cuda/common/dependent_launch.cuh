// How the blocks of a launch begin before those of the launch before it have ended: they come to
// multiprocessors that have room, find out what is theirs, and wait. That takes a launch and its
// kernel's first instructions, 1 to 2 us, off the time between two kernels.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace vim_mm {

// A launch begins early (`launch`, common/launch.cuh) behind a kernel that lets it, if all blocks of that one have
// begun. What its kernel must do: every thread waits before it reads or writes memory, and in every grid at least
// one thread does. As that holds of the kernel before too, by then all that was launched earlier is done, and
// seen. Before compute capability 9.0, and in launches that do not begin early, neither does anything.
__device__ __forceinline__ void let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#elif !defined(__CUDACC__)
  emulation::wait_for_previous();
#endif
}

}  // namespace vim_mm
