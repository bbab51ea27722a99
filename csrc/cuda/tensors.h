// What the operators on CUDA tensors ask torch for.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include "../arguments.h"
#include "kernels.h"

namespace vim_mm {

inline void* current_stream(const Tensor& t) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
  return stream;
}

inline Storage storage_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
    case ScalarType::ComplexFloat: return Storage::float32;
    case ScalarType::Half: return Storage::float16;
    case ScalarType::BFloat16: return Storage::bfloat16;
    case ScalarType::Double:
    case ScalarType::ComplexDouble: return Storage::float64;
    default: STD_TORCH_CHECK(false, "vim_mm: expected a floating point or complex tensor");
  }
  return {};
}

}  // namespace vim_mm
