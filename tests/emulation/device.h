// The device side of CUDA for a C++ compiler, as far as the emulated kernels use it. Each thread of a block
// is a fiber; they take turns where they wait for each other.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <string.h>

#include <array>
#include <cmath>
#include <functional>
#include <set>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __shared__  // and `extern` or `static`: one object for all threads
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

namespace emulation {

// Of the thread that runs.
extern uint3 thread, block;
extern dim3 grid, block_size;

// All threads of the block call it at one place of the kernel, as CUDA wants it of __syncthreads.
void wait_for_block();
void wait_for_warp();
// Waits for the block: whether any of its threads says so.
bool any_of_block(bool says);
// The thread waits for the launch before its own.
void wait_for_previous();
// A barrier in shared memory that opens, turn by turn, when so many have arrived.
void barrier_begin(uint64_t* barrier, int arrivals);
void barrier_arrive(uint64_t* barrier);
void barrier_wait(uint64_t* barrier, int odd);
// Copies of so many bytes, and zeros behind those that are `inside`, that come when the thread waits for all.
void start_copy(void* to, const void* from, int bytes, int inside);
template <int bytes>
void start_copy(void* to, const void* from, int inside) {
  start_copy(to, from, bytes, inside);
}
void wait_for_all_copies();
// What all lanes of the warp pass, by lane, until the next exchange.
using Words = std::array<uint32_t, 6>;
const Words* exchange(const Words& words);
// Runs the blocks one after the other, in any order: kernels must not depend on one. Of a launch that may begin
// before the last one has ended (`early`) some thread has to wait for that.
cudaError_t run(dim3 blocks, int threads, size_t shared_bytes, bool early,
                const std::function<void()>& kernel);
extern std::set<const void*> launched;  // kernels, so far

inline int lane() { return thread.x % 32; }

}  // namespace emulation

#define threadIdx emulation::thread
#define blockIdx emulation::block
#define gridDim emulation::grid
#define blockDim emulation::block_size

inline void __syncthreads() { emulation::wait_for_block(); }
inline int __syncthreads_or(int says) { return emulation::any_of_block(says != 0); }
inline void __syncwarp() { emulation::wait_for_warp(); }
inline void __threadfence() {}
inline uint32_t atomicAdd(uint32_t* to, uint32_t value) {
  *to += value;
  return *to - value;
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float __shfl_sync(unsigned, float value, int lane) {
  return __uint_as_float(emulation::exchange({__float_as_uint(value)})[lane % 32][0]);
}
inline float __shfl_xor_sync(unsigned all, float value, int bits) {
  return __shfl_sync(all, value, emulation::lane() ^ bits);
}
// At either end of a warp lanes keep what they have.
inline float __shfl_up_sync(unsigned all, float value, int by) {
  const int from = emulation::lane() - by;
  return __shfl_sync(all, value, from < 0 ? emulation::lane() : from);
}
inline float __shfl_down_sync(unsigned all, float value, int by) {
  const int from = emulation::lane() + by;
  return __shfl_sync(all, value, from > 31 ? emulation::lane() : from);
}
// Four of the eight bytes of low and high; each digit of the selector is the number of one.
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t bytes = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t number = selector >> 4 * i & 7;
    bytes |= ((number < 4 ? low : high) >> 8 * (number % 4) & 0xff) << 8 * i;
  }
  return bytes;
}

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

// A GPU's is good to 2^-22, up or down, but exact at 0.
namespace emulation {
inline float exp2f(float x) {
  if (x == 0.0f) return 1.0f;
  return std::exp2(x) * (1.0f + (__float_as_uint(x) & 1 ? 1.0f : -1.0f) / (1 << 22));
}
}  // namespace emulation
#define exp2f emulation::exp2f

// The runtime's own take a void*; nothing links it. Launches come one after the other, also those that on a GPU
// may begin early.
namespace emulation {
template <class... Arguments>
cudaError_t launch(const cudaLaunchConfig_t* config, void (*kernel)(Arguments...),
                   const Arguments&... arguments) {
  const auto [blocks, threads, bytes, stream, attributes, count] = *config;
  if (count > 1) return cudaErrorNotSupported;
  if (count == 1 && attributes->id != cudaLaunchAttributeProgrammaticStreamSerialization)
    return cudaErrorNotSupported;
  launched.insert(reinterpret_cast<const void*>(kernel));
  return run(blocks, threads.x, bytes, count == 1, [&] { kernel(arguments...); });
}
}  // namespace emulation
#define cudaLaunchKernelEx emulation::launch
template <class... Arguments>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*)(Arguments...)) {
  attributes->ptxVersion = 90;
  return cudaSuccess;
}
template <class... Arguments>
cudaError_t cudaFuncSetAttribute(void (*)(Arguments...), cudaFuncAttribute, int) {
  return cudaSuccess;
}
