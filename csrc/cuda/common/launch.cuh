// What launches share.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "dependent_launch.cuh"
#include "errors.h"

namespace vim_mm {

// Of the current device.
inline int64_t device_attribute(cudaDeviceAttr of) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&value, of, device));
  return value;
}

// Whether what the current device runs of a kernel was compiled for 9.0 or later, and so waits for the launch
// before: it may come from PTX of lower architectures. Kernels of one list of arguments share the answer, as all
// files are compiled for the same architectures.
template <class... Arguments>
bool is_for_90(void (*kernel)(Arguments...)) {
  constexpr int devices = 64;
  static std::atomic<int8_t> answers[devices];  // 0: not asked yet
  int device = 0;
  check(cudaGetDevice(&device));
  int8_t answer = device < devices ? answers[device].load(std::memory_order_relaxed) : 0;
  if (answer == 0) {
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, kernel));
    answer = attributes.ptxVersion >= 90 ? 1 : -1;
    if (device < devices) answers[device].store(answer, std::memory_order_relaxed);
  }
  return answer > 0;
}

// The least shared memory with which no multiprocessor takes more than its share of the blocks; none where
// their threads see to that.
inline size_t bytes_for_even_shares(const LaunchSize& size) {
  const int64_t blocks = int64_t(size.grid.x) * size.grid.y * size.grid.z;
  const int64_t processors = device_attribute(cudaDevAttrMultiProcessorCount);
  const int64_t too_many = (blocks + processors - 1) / processors + 1;
  if (too_many * size.threads.x > device_attribute(cudaDevAttrMaxThreadsPerMultiProcessor))
    return 0;
  const int64_t all = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  const int64_t reserved = device_attribute(cudaDevAttrReservedSharedMemoryPerBlock);
  const int64_t unit = 128;  // in which it is given out
  return std::max<int64_t>(0, all / too_many - reserved + unit) / unit * unit;
}

// Of kernels whose shared memory is all dynamic. From 9.0 on it begins before the launch before has ended, which
// common/dependent_launch.cuh asks something of the kernel for. Blocks go where there is room first, and if few of a
// launch before still run that is not where fewest of this one are: so each asks for shared memory as if it needed
// all of its share.
template <class... Arguments>
void launch(void (*kernel)(Arguments...), LaunchSize size, void* stream,
            const Arguments&... arguments) {
  if (size.grid.x == 0) return;
  const bool early = is_for_90(kernel);
  if (early) size.shared_bytes = std::max(size.shared_bytes, bytes_for_even_shares(size));
  // Always the same, because the kernel has it in common with the launches of other threads.
  check(cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
      static_cast<int>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin))));
  enqueue(kernel, size, early, stream, arguments...);
}

inline unsigned grid_of(int64_t blocks) {
  if (blocks > INT32_MAX) throw std::runtime_error("vim_mm: too many rows for one launch");
  return static_cast<unsigned>(blocks);
}

}  // namespace vim_mm
