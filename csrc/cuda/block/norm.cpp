// Residual add and RMSNorm on CUDA tensors. Shapes and letters as in ops.cpp.
//
// SPDX-License-Identifier: Apache-2.0
#include "norm.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>
#include <vector>

namespace vim_mm {
namespace {

using torch::stable::accelerator::DeviceGuard;

void* data_of(const std::optional<Tensor>& t) { return t ? t->data_ptr() : nullptr; }

// What forward and backward have in common.
template <class P>
P arguments_of(const Tensor& residual, const Tensor& weight, ScalarType dtype) {
  STD_TORCH_CHECK(residual.dim() >= 1, "vim_mm: expected residual [.., C]");
  expect_contiguous(residual, "residual", residual.sizes());
  expect_contiguous(weight, "weight", {residual.size(residual.dim() - 1)});
  expect_device(weight, "weight", residual);
  STD_TORCH_CHECK(
      dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16,
      "vim_mm: expected a normalized sum of float32, float16 or bfloat16");
  expect_type(residual, "residual", {ScalarType::Float, dtype});
  expect_type(weight, "weight", {ScalarType::Float, dtype});
  P p{};
  p.channels = weight.numel();
  p.rows = p.channels ? residual.numel() / p.channels : 0;
  p.residual_storage = storage_of(residual), p.weight_storage = storage_of(weight);
  p.storage = storage_of(dtype);
  p.weight = weight.data_ptr();
  return p;
}

}  // namespace

AddRmsNorm norm_arguments(const Tensor& residual, const std::optional<Tensor>& update,
                          const Tensor& weight, double eps, ScalarType dtype) {
  AddRmsNorm p = arguments_of<AddRmsNorm>(residual, weight, dtype);
  if (update) {
    expect_contiguous(*update, "update", residual.sizes());
    expect_type(*update, "update", {dtype});
    expect_device(*update, "update", residual);
  }
  p.eps = static_cast<float>(eps);
  p.residual = residual.data_ptr(), p.update = data_of(update);
  return p;
}

AddRmsNormBackward norm_backward_arguments(const Tensor& sum, const Tensor& weight,
                                           ScalarType dtype) {
  AddRmsNormBackward p = arguments_of<AddRmsNormBackward>(sum, weight, dtype);
  p.sum = sum.data_ptr();
  p.blocks = static_cast<int>(rms_norm_backward_blocks(p.rows));
  return p;
}

int64_t count_parts(const AddRmsNormBackward& p) { return p.blocks * p.channels; }

void norm_backward_into(const AddRmsNormBackward& p, const Tensor& grad_weight, void* stream) {
  add_rms_norm_backward(p, stream);
  Sums sums;
  sums.count = 1;
  Sum& total = sums.each[0] = {};
  total.parts = p.grad_weight;
  total.components = 1;
  total.counts[0] = p.blocks, total.counts[1] = 1;
  total.sizes[0] = total.sizes[1] = 1, total.sizes[2] = p.channels;
  total.to.data = static_cast<char*>(grad_weight.data_ptr());
  total.to.storage = p.weight_storage;
  total.to.last = int64_t(grad_weight.element_size());
  sum_in_order(sums, stream);
}

namespace {

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_fwd(const Tensor& residual,
                                                    const std::optional<Tensor>& update,
                                                    const Tensor& weight, double eps,
                                                    ScalarType dtype) {
  AddRmsNorm p = norm_arguments(residual, update, weight, eps, dtype);
  const DeviceGuard guard(residual.get_device_index());
  const auto shape = residual.sizes();
  const Tensor normed = new_tensor(residual, shape, dtype);
  const Tensor sum =
      update ? new_tensor(residual) : new_tensor(residual, {0}, residual.scalar_type());
  const std::vector<int64_t> rows(shape.begin(), shape.end() - 1);
  const Tensor rstd = new_tensor(residual, rows, ScalarType::Float);
  p.normed = normed.data_ptr();
  if (update) p.sum = sum.data_ptr();
  p.rstd = static_cast<float*>(rstd.data_ptr());
  add_rms_norm(p, {}, current_stream(residual));
  return {normed, sum, rstd};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_bwd(const Tensor& grad_normed,
                                                    const std::optional<Tensor>& grad_sum,
                                                    const Tensor& sum, const Tensor& rstd,
                                                    const Tensor& weight, bool with_update) {
  const ScalarType dtype = grad_normed.scalar_type();
  AddRmsNormBackward p = norm_backward_arguments(sum, weight, dtype);
  expect_contiguous(grad_normed, "grad_normed", sum.sizes());
  if (grad_sum) {
    expect_contiguous(*grad_sum, "grad_sum", sum.sizes());
    expect_type(*grad_sum, "grad_sum", {sum.scalar_type()});
  }
  STD_TORCH_CHECK(rstd.numel() == p.rows && rstd.is_contiguous(), "vim_mm: wrong shape of rstd");
  expect_type(rstd, "rstd", {ScalarType::Float});
  const DeviceGuard guard(sum.get_device_index());
  const Tensor grad_residual = new_tensor(sum);
  const Tensor grad_update =
      with_update ? new_tensor(grad_normed) : new_tensor(grad_normed, {0}, dtype);
  const Tensor grad_weight = new_tensor(weight);
  const Tensor parts = new_tensor(sum, {count_parts(p)}, ScalarType::Float);
  p.grad_normed = grad_normed.data_ptr(), p.grad_sum = data_of(grad_sum);
  p.rstd = static_cast<const float*>(rstd.data_ptr());
  p.grad_residual = grad_residual.data_ptr();
  if (with_update) p.grad_update = grad_update.data_ptr();
  p.grad_weight = static_cast<float*>(parts.data_ptr());
  norm_backward_into(p, grad_weight, current_stream(sum));
  return {grad_residual, grad_update, grad_weight};
}

}  // namespace
}  // namespace vim_mm

STABLE_TORCH_LIBRARY_IMPL(vim_mm, CUDA, m) {
  m.impl("add_rms_norm_fwd", TORCH_BOX(&vim_mm::add_rms_norm_fwd));
  m.impl("add_rms_norm_bwd", TORCH_BOX(&vim_mm::add_rms_norm_bwd));
}
