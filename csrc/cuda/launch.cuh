// What the launches of the scan kernels share.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "errors.h"
#include "shapes.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

template <class Arguments>
void launch(void (*kernel)(Arguments), int64_t blocks, int threads, size_t shared_bytes,
            const Arguments& arguments, void* stream) {
  if (blocks == 0) return;
  if (blocks > INT32_MAX) throw std::runtime_error("vim_mm: too many rows for one launch");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared_bytes)));
  enqueue(kernel, static_cast<unsigned>(blocks), threads, shared_bytes, stream, arguments);
}

// Of the current device.
inline int64_t device_attribute(cudaDeviceAttr of) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&value, of, device));
  return value;
}

template <class Shape>
int64_t blocks_of(const ScanArguments& scan) {
  return scan.batch * scan.groups * ((scan.channels + Shape::channels - 1) / Shape::channels);
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
