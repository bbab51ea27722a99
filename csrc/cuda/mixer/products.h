// Matrix products and sums by torch, into given memory: its stable C interface, as AOTInductor's binaries
// call it.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <initializer_list>
#include <optional>
#include <vector>

#include "../ops/tensors.h"

namespace vim_mm {

// A view of t's memory.
inline Tensor view(const Tensor& t, std::initializer_list<int64_t> sizes,
                   std::initializer_list<int64_t> strides) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
      t.get(), int64_t(sizes.size()), sizes.begin(), strides.begin(), 0, &handle));
  return Tensor(handle);
}

// out = a b, for matrices or batches of them, where out may be float32 whatever a and b are.
inline void multiply_into(const Tensor& out, const Tensor& a, const Tensor& b) {
  using torch::stable::detail::from;
  const bool batched = a.dim() == 3;
  if (a.size(a.dim() - 1) == 0) {  // not every matrix product knows empty sums
    Tensor zeros = out;
    torch::stable::zero_(zeros);
  } else if (out.scalar_type() == a.scalar_type()) {
    const auto product = batched ? aoti_torch_cuda_bmm_out : aoti_torch_cuda_mm_out;
    TORCH_ERROR_CODE_CHECK(product(out.get(), a.get(), b.get()));
  } else {
    std::array<StableIValue, 4> stack{from(a), from(b), from(out.scalar_type()), from(out)};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(batched ? "aten::bmm" : "aten::mm", "dtype_out",
                                                 stack.data(), TORCH_ABI_VERSION));
    torch::stable::detail::to<Tensor>(stack[0]);  // the reference to out that comes back
  }
}

// out = a b + bias, where there may be no bias.
inline void multiply_add_into(const Tensor& out, const std::optional<Tensor>& bias, const Tensor& a,
                              const Tensor& b) {
  if (!bias) return multiply_into(out, a, b);
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_cuda_addmm_out(out.get(), bias->get(), a.get(), b.get(), 1.0, 1.0));
}

// out += a b, for batches of matrices.
inline void accumulate_product(const Tensor& out, const Tensor& a, const Tensor& b) {
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_cuda_baddbmm_out(out.get(), out.get(), a.get(), b.get(), 1.0, 1.0));
}

// out = the sum of t over a dimension, in the type of out.
inline void sum_into(const Tensor& out, const Tensor& t, int64_t dim, bool keep) {
  using torch::stable::detail::from;
  std::array<StableIValue, 5> stack{from(t), from(std::optional(std::vector<int64_t>{dim})),
                                    from(keep), from(std::optional(out.scalar_type())), from(out)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::sum", "IntList_out", stack.data(), TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);
}

}  // namespace vim_mm
