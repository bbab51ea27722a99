// Which tensors an operator needs memory for, and where each lies. Nothing here needs a GPU.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <vector>

namespace vim_mm {

using torch::headeronly::ScalarType;

inline int64_t bytes_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
    case ScalarType::Int: return 4;
    case ScalarType::Half:
    case ScalarType::BFloat16: return 2;
    default: STD_TORCH_CHECK(false, "vim_mm: no buffer has this dtype");
  }
  return 0;
}

// A contiguous tensor in a workspace.
struct Buffer {
  static constexpr int kMaxDims = 4;

  const char* name = "";
  ScalarType type = ScalarType::Float;
  int dims = 0;
  std::array<int64_t, kMaxDims> sizes{};
  int64_t offset = 0;  // bytes from the beginning of the workspace
  int index = 0;       // in the order of the layout
  int replaced = -1;  // index of the buffer in whose memory this one lies; -1 for memory of its own

  int64_t size(int dim) const { return sizes[dim < 0 ? dim + dims : dim]; }
  // Entries from one index of the dimension to the next.
  int64_t stride(int dim) const {
    int64_t stride = 1;
    for (int i = dims - 1; i > (dim < 0 ? dim + dims : dim); --i) stride *= sizes[i];
    return stride;
  }
  int64_t numel() const { return rows() * size(-1); }
  // All leading dimensions as one.
  int64_t rows() const {
    int64_t rows = 1;
    for (int i = 0; i + 1 < dims; ++i) rows *= sizes[i];
    return rows;
  }
  int64_t bytes() const { return numel() * bytes_of(type); }
};

// Buffers one behind the other, each aligned.
class WorkspaceLayout {
 public:
  static constexpr int64_t kAlignment = 256;

  Buffer add(const char* name, ScalarType type, std::initializer_list<int64_t> sizes) {
    Buffer& b = append(name, type, sizes);
    b.offset = bytes_;
    bytes_ += (b.bytes() + kAlignment - 1) / kAlignment * kAlignment;
    return b;
  }
  // A buffer in the memory of another one, whose values nobody needs any more when this one is
  // written. It must be no larger.
  Buffer replace(const Buffer& other, const char* name, std::initializer_list<int64_t> sizes) {
    Buffer& b = append(name, other.type, sizes);
    STD_TORCH_CHECK(b.bytes() <= other.bytes(), "vim_mm: ", name, " does not fit in ", other.name);
    b.offset = other.offset, b.replaced = other.index;
    return b;
  }

  int64_t bytes() const { return bytes_; }
  const std::vector<Buffer>& buffers() const { return buffers_; }

 private:
  Buffer& append(const char* name, ScalarType type, std::initializer_list<int64_t> sizes) {
    STD_TORCH_CHECK(sizes.size() >= 1 && sizes.size() <= Buffer::kMaxDims,
                    "vim_mm: wrong number of dimensions of ", name);
    if (buffers_.empty()) buffers_.reserve(32);  // one allocation for all
    Buffer b;
    b.name = name, b.type = type, b.dims = int(sizes.size()), b.index = int(buffers_.size());
    std::copy(sizes.begin(), sizes.end(), b.sizes.begin());
    buffers_.push_back(b);
    return buffers_.back();
  }

  int64_t bytes_ = 0;
  std::vector<Buffer> buffers_;
};

// Whether every buffer gets an allocation of its own, those that replace another one too, so that
// memcheck sees what a kernel reads or writes beyond it. VIM_MM_SEPARATE_BUFFERS=1 says so; it is
// read once.
inline bool separate_buffers() {
  static const bool separate = [] {
    const char* const value = std::getenv("VIM_MM_SEPARATE_BUFFERS");
    if (value == nullptr || *value == 0 || std::strcmp(value, "0") == 0) return false;
    STD_TORCH_CHECK(std::strcmp(value, "1") == 0, "VIM_MM_SEPARATE_BUFFERS=", value,
                    ": expected 0 or 1");
    return true;
  }();
  return separate;
}

}  // namespace vim_mm
