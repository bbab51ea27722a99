// The pipeline of a block: producer warps load and store windows of time, consumer warps scan them.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "dependent_launch.cuh"
#include "tile.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// Barriers in shared memory: one opens when so many have arrived, and closes again for its next turn.
// What a thread wrote before it arrived, others see when they have waited for that turn, of which
// they know whether it was an even or an odd one.
#if defined(__CUDACC__)
__device__ __forceinline__ void barrier_begin(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile(
      "{.reg .b64 token; mbarrier.arrive.shared.b64 token, [%0];}" ::"r"(shared_address(barrier))
      : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int odd) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define VIM_MM_WAIT "mbarrier.test_wait.parity.shared.b64"
#else  // sleeps a while
#define VIM_MM_WAIT "mbarrier.try_wait.parity.shared.b64"
#endif
  uint32_t open;
  do {
    asm volatile("{.reg .pred open; " VIM_MM_WAIT " open, [%1], %2; selp.u32 %0, 1, 0, open;}"
                 : "=r"(open)
                 : "r"(shared_address(barrier)), "r"(odd)
                 : "memory");
  } while (!open);
#undef VIM_MM_WAIT
}
#else  // tests/emulation
using emulation::barrier_arrive, emulation::barrier_begin, emulation::barrier_wait;
#endif

// The stages of shared memory between producer warps and those that scan, a window each turn; turns count from
// 0. Once it has begun, a block never meets: a warp waits for the window it needs, and may be windows ahead of
// another one that does the same.
template <class Shape>
class Pipeline {
 public:
  // Unsigned, or dividing would care for the sign.
  static __device__ __forceinline__ uint32_t stage_of(uint32_t turn) {
    return turn % Shape::stages;
  }
  // Makes the barriers, and waits till they are there. For all threads of the block before their ways part: CUDA
  // wants one __syncthreads for all of them, and not one in each role's code.
  __device__ __forceinline__ void begin() {
    if (threadIdx.x < Shape::stages) {
      barrier_begin(filled_ + threadIdx.x, Shape::threads);
      barrier_begin(scanned_ + threadIdx.x, Shape::scan_threads);
    }
    if (threadIdx.x == 0) barrier_begin(&met_, Shape::producer_threads);
    __syncthreads();
  }
  // All producers meet here once, between two turns, wherever in their code they are. Then all stages are empty,
  // and what any of them has written all of them see.
  __device__ __forceinline__ void producers_meet() {
    barrier_arrive(&met_);
    barrier_wait(&met_, 0);
  }
  __device__ __forceinline__ void producer_commit(int turn) { signal(filled_, turn); }
  __device__ __forceinline__ void consumer_wait(int turn) { wait(filled_, turn); }
  __device__ __forceinline__ void consumer_release(int turn) { signal(scanned_, turn); }
  __device__ __forceinline__ void producer_acquire(int turn) { wait(scanned_, turn); }

 private:
  // By all threads: one for its warp would do, but compute-sanitizer does not follow that.
  static __device__ __forceinline__ void signal(uint64_t* barriers, int turn) {
    barrier_arrive(barriers + stage_of(turn));
  }
  static __device__ __forceinline__ void wait(uint64_t* barriers, int turn) {
    barrier_wait(barriers + stage_of(turn), uint32_t(turn) / Shape::stages % 2);
  }
  uint64_t filled_[Shape::stages], scanned_[Shape::stages], met_;
};

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
