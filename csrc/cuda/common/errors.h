// CUDA's error codes as exceptions that say what to do, and launches that throw them.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace vim_mm {

inline void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or the next call would report it again
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    int device = 0;
    cudaDeviceProp properties{};
    cudaGetDevice(&device);
    cudaGetDeviceProperties(&properties, device);
    const std::string capability =
        std::to_string(properties.major) + "." + std::to_string(properties.minor);
    throw std::runtime_error(std::string("vim_mm was built without code for ") + properties.name +
                             " (compute capability " + capability +
                             "): rebuild it with TORCH_CUDA_ARCH_LIST=" + capability);
  }
  throw std::runtime_error(std::string("vim_mm: CUDA error: ") + cudaGetErrorString(error));
}

// kernel<<<...>>>(arguments...), in words that every C++ compiler reads: see tests/emulation. `early`: it
// may begin before the last launch has ended, see common/dependent_launch.cuh.
struct LaunchSize {
  dim3 grid, threads;
  size_t shared_bytes = 0;
};
template <class... Arguments>
void enqueue(void (*kernel)(Arguments...), const LaunchSize& size, bool early, void* stream,
             const Arguments&... arguments) {
  cudaLaunchAttribute dependent{};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  const cudaLaunchConfig_t config{size.grid,         size.threads,
                                  size.shared_bytes, static_cast<cudaStream_t>(stream),
                                  &dependent,        early ? 1u : 0u};
  check(cudaLaunchKernelEx(&config, kernel, arguments...));
}
template <class... Arguments>
void enqueue(void (*kernel)(Arguments...), dim3 grid, dim3 threads, size_t shared_bytes,
             void* stream, const Arguments&... arguments) {
  enqueue(kernel, {grid, threads, shared_bytes}, false, stream, arguments...);
}

}  // namespace vim_mm
