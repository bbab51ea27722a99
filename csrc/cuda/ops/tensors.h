// What the operators on CUDA tensors ask torch for, and what they check.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <initializer_list>
#include <vector>

#include "../../arguments.h"
#include "../common/scan_arguments.h"

namespace vim_mm {

constexpr int64_t kFloat = sizeof(float);

// The number by which torch's C interface knows a type.
inline int32_t code_of(ScalarType type) {
  return torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
}

// Contiguous memory that nobody has written, where `like` is. torch::stable::new_empty finds its operator
// by name, at every call.
template <class Sizes>
Tensor new_tensor(const Tensor& like, const Sizes& sizes, ScalarType type) {
  const std::vector<int64_t> all(sizes.begin(), sizes.end());
  std::vector<int64_t> strides(all.size(), 1);
  for (size_t i = all.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(all[i], 1);
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(int64_t(all.size()), all.data(), strides.data(),
                                                  code_of(type), aoti_torch_device_type_cuda(),
                                                  like.get_device_index(), &handle));
  return Tensor(handle);
}
inline Tensor new_tensor(const Tensor& like, std::initializer_list<int64_t> sizes,
                         ScalarType type) {
  return new_tensor<std::initializer_list<int64_t>>(like, sizes, type);
}
// As a contiguous tensor.
inline Tensor new_tensor(const Tensor& like) {
  return new_tensor(like, like.sizes(), like.scalar_type());
}

inline void* current_stream(const Tensor& t) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
  return stream;
}

inline Storage storage_of(ScalarType type) {
  switch (type) {
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
inline Storage storage_of(const Tensor& t) { return storage_of(t.scalar_type()); }

template <class Sizes>
void expect_contiguous(const Tensor& t, const char* name, const Sizes& sizes) {
  expect_shape(t, name, sizes);
  STD_TORCH_CHECK(t.is_cuda() && t.is_contiguous(), "vim_mm: expected ", name,
                  " contiguous on CUDA");
}
inline void expect_contiguous(const Tensor& t, const char* name,
                              std::initializer_list<int64_t> sizes) {
  expect_contiguous<std::initializer_list<int64_t>>(t, name, sizes);
}
// Of what kernels read and write as 16 or 32 bits.
inline void expect_narrow(const Tensor& t, const char* name) {
  expect_type(t, name, {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16});
}

}  // namespace vim_mm
