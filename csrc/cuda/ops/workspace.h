// The memory of a workspace on the GPU.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <initializer_list>
#include <utility>
#include <vector>

#include "tensors.h"
#include "workspace_layout.h"

namespace vim_mm {

// One allocation for all buffers of a layout, because to allocate each takes as long as to launch its
// kernel; or one for each, see separate_buffers. Nobody has written it.
class Workspace {
 public:
  Workspace(const WorkspaceLayout& layout, const Tensor& like) {
    if (!separate_buffers()) {
      memory_.push_back(new_tensor(like, {layout.bytes()}, ScalarType::Byte));
    } else {
      for (const Buffer& b : layout.buffers())
        memory_.push_back(new_tensor(like, {b.bytes()}, ScalarType::Byte));
    }
    find_data();
  }
  // The memory of another workspace of that layout, which has come back; `what` is its name in errors.
  Workspace(const WorkspaceLayout& layout, std::vector<Tensor> memory, const char* what,
            const Tensor& like)
      : memory_(std::move(memory)) {
    const size_t count = separate_buffers() ? layout.buffers().size() : 1;
    STD_TORCH_CHECK(memory_.size() == count, "vim_mm: expected ", what);
    for (size_t i = 0; i < count; ++i) {
      const Tensor& t = memory_[i];
      const int64_t bytes = separate_buffers() ? layout.buffers()[i].bytes() : layout.bytes();
      int64_t offset = 0;
      TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(t.get(), &offset));
      STD_TORCH_CHECK(t.scalar_type() == ScalarType::Byte && t.is_contiguous() && offset == 0 &&
                          t.numel() == bytes,
                      "vim_mm: expected ", what);
      expect_device(t, what, like);
    }
    find_data();
  }

  const std::vector<Tensor>& memory() const { return memory_; }

  // The address of an entry.
  void* data(const Buffer& b, int64_t entry = 0) const {
    char* const first = separate_buffers() ? data_[b.index] : data_[0] + b.offset;
    return first + entry * bytes_of(b.type);
  }
  float* floats(const Buffer& b, int64_t entry = 0) const {
    return static_cast<float*>(data(b, entry));
  }

  // Entries of a buffer as a tensor, from `first` on.
  Tensor tensor(const Buffer& b, std::initializer_list<int64_t> sizes,
                std::initializer_list<int64_t> strides, int64_t first = 0) const {
    const bool separate = separate_buffers();
    const int64_t offset = (separate ? 0 : b.offset) + first * bytes_of(b.type);
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch__alloc_from_pool(
        memory_[separate ? b.index : 0].get(), offset, code_of(b.type), int64_t(sizes.size()),
        sizes.begin(), strides.begin(), &handle));
    return Tensor(handle);
  }
  // All leading dimensions as one: [rows, columns], or [columns, rows].
  Tensor matrix(const Buffer& b) const {
    return tensor(b, {b.rows(), b.size(-1)}, {b.size(-1), 1});
  }
  Tensor transposed(const Buffer& b) const {
    return tensor(b, {b.size(-1), b.rows()}, {1, b.size(-1)});
  }
  // The matrices of a buffer [n, rows, columns] as a batch; `count` rows of each, from `first` on.
  Tensor batch(const Buffer& b, int64_t first, int64_t count) const {
    return tensor(b, {b.size(0), count, b.size(2)}, {b.stride(0), b.stride(1), 1},
                  first * b.stride(1));
  }
  Tensor batch(const Buffer& b) const { return batch(b, 0, b.size(1)); }
  Tensor batch_transposed(const Buffer& b) const {
    return tensor(b, {b.size(0), b.size(2), b.size(1)}, {b.stride(0), 1, b.stride(1)});
  }

 private:
  void find_data() {
    for (const Tensor& t : memory_) data_.push_back(static_cast<char*>(t.data_ptr()));
  }

  std::vector<Tensor> memory_;
  std::vector<char*> data_;  // of each
};

}  // namespace vim_mm
