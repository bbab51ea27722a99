// Strided tensors of any dtype <-> contiguous rows of the compute type, for the CPU operators.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <memory>
#include <new>

#include "../methods/elementary.h"

namespace vim_mm {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Aligned scratch memory.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t size) : size_(size), data_(allocate(size)) {}
  T* data() const { return data_.get(); }
  void zero() { std::memset(static_cast<void*>(data()), 0, size_ * sizeof(T)); }

 private:
  static constexpr std::align_val_t alignment{64};
  struct Free {
    void operator()(T* p) const { ::operator delete(static_cast<void*>(p), alignment); }
  };
  static T* allocate(int64_t size) try {
    return static_cast<T*>(::operator new(size * sizeof(T), alignment));
  } catch (const std::bad_alloc&) {
    STD_TORCH_CHECK(false, "vim_mm: out of memory: ", size * sizeof(T), " bytes");
    return nullptr;
  }
  int64_t size_;
  std::unique_ptr<T, Free> data_;
};

template <class From, class S>
void read_as(const void* from, int64_t stride, int64_t n, S* to) {
  const From* p = static_cast<const From*>(from);
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<S>(p[i * stride]);
}
template <class To, class S>
void write_as(const S* from, int64_t n, void* to, int64_t stride) {
  To* p = static_cast<To*>(to);
  for (int64_t i = 0; i < n; ++i) p[i * stride] = static_cast<To>(from[i]);
}

// Calls f with a value of the C++ type of a real floating dtype.
template <class F>
void dispatch_real(ScalarType type, const F& f) {
  switch (type) {
    case ScalarType::Float: f(float()); return;
    case ScalarType::Double: f(double()); return;
    case ScalarType::Half: f(torch::headeronly::Half()); return;
    case ScalarType::BFloat16: f(torch::headeronly::BFloat16()); return;
    default: STD_TORCH_CHECK(false, "vim_mm: expected a floating point tensor");
  }
}

inline void read_row(const void* from, ScalarType type, int64_t stride, int64_t n, float* to) {
  dispatch_real(type, [&](auto x) { read_as<decltype(x)>(from, stride, n, to); });
}
inline void read_row(const void* from, ScalarType type, int64_t stride, int64_t n, double* to) {
  dispatch_real(type, [&](auto x) { read_as<decltype(x)>(from, stride, n, to); });
}
inline void write_row(const float* from, int64_t n, void* to, ScalarType type, int64_t stride) {
  dispatch_real(type, [&](auto x) { write_as<decltype(x)>(from, n, to, stride); });
}
inline void write_row(const double* from, int64_t n, void* to, ScalarType type, int64_t stride) {
  dispatch_real(type, [&](auto x) { write_as<decltype(x)>(from, n, to, stride); });
}

// Complex elements are two real rows, interleaved on both sides.
template <class S>
void read_row(const void* from, ScalarType type, int64_t stride, int64_t n, Complex<S>* to) {
  const auto copy = [&](auto x) {
    using T = decltype(x);
    const T* p = static_cast<const T*>(from);
    for (int64_t i = 0; i < n; ++i) to[i] = {S(p[2 * i * stride]), S(p[2 * i * stride + 1])};
  };
  if (type == ScalarType::ComplexFloat) return copy(float());
  STD_TORCH_CHECK(type == ScalarType::ComplexDouble, "vim_mm: expected a complex tensor");
  copy(double());
}
template <class S>
void write_row(const Complex<S>* from, int64_t n, void* to, ScalarType type, int64_t stride) {
  const auto copy = [&](auto x) {
    using T = decltype(x);
    T* p = static_cast<T*>(to);
    for (int64_t i = 0; i < n; ++i) {
      p[2 * i * stride] = T(from[i].re);
      p[2 * i * stride + 1] = T(from[i].im);
    }
  };
  if (type == ScalarType::ComplexFloat) return copy(float());
  STD_TORCH_CHECK(type == ScalarType::ComplexDouble, "vim_mm: expected a complex tensor");
  copy(double());
}

// The rows of a tensor along its last dimension, numbered as if the others were one.
class RowView {
 public:
  explicit RowView(const Tensor& t)
      : data_(static_cast<char*>(t.data_ptr())), type_(t.scalar_type()),
        dims_(static_cast<int>(t.dim())), item_(static_cast<int64_t>(t.element_size())) {
    STD_TORCH_CHECK(dims_ >= 1 && dims_ <= 4, "vim_mm: expected 1 to 4 dimensions");
    for (int i = 0; i < dims_; ++i) {
      sizes_[i] = t.size(i);
      strides_[i] = t.stride(i);
    }
  }

  int64_t rows() const {
    int64_t n = 1;
    for (int i = 0; i + 1 < dims_; ++i) n *= sizes_[i];
    return n;
  }
  int64_t length() const { return sizes_[dims_ - 1]; }

  template <class E>
  void read(int64_t row, E* to) const {
    read_row(at(row), type_, strides_[dims_ - 1], length(), to);
  }
  template <class E>
  void write(int64_t row, const E* from) const {
    write_row(from, length(), at(row), type_, strides_[dims_ - 1]);
  }

 private:
  char* at(int64_t row) const {
    int64_t offset = 0;
    for (int i = dims_ - 2; i >= 0; --i) {
      offset += (row % sizes_[i]) * strides_[i];
      row /= sizes_[i];
    }
    return data_ + offset * item_;
  }

  char* data_;
  ScalarType type_;
  int dims_;
  int64_t item_;
  int64_t sizes_[4], strides_[4];
};

}  // namespace vim_mm
