// What the operators on CUDA tensors ask torch for, and what they check.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <initializer_list>

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

template <class Sizes>
void expect_contiguous(const Tensor& t, const char* name, const Sizes& sizes) {
  const auto given = t.sizes();
  STD_TORCH_CHECK(
      given.size() == sizes.size() && std::equal(sizes.begin(), sizes.end(), given.begin()),
      "vim_mm: wrong shape of ", name);
  STD_TORCH_CHECK(t.is_cuda() && t.is_contiguous(), "vim_mm: expected ", name,
                  " contiguous on CUDA");
}
inline void expect_contiguous(const Tensor& t, const char* name,
                              std::initializer_list<int64_t> sizes) {
  expect_contiguous<std::initializer_list<int64_t>>(t, name, sizes);
}
inline void expect_type(const Tensor& t, const char* name,
                        std::initializer_list<ScalarType> types) {
  STD_TORCH_CHECK(std::find(types.begin(), types.end(), t.scalar_type()) != types.end(),
                  "vim_mm: wrong dtype of ", name);
}
// Of what kernels read and write as 16 or 32 bits.
inline void expect_narrow(const Tensor& t, const char* name) {
  expect_type(t, name, {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16});
}

}  // namespace vim_mm
