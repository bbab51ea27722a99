// The operators of the fast block on CUDA tensors: takes tensors apart for the kernels. Shapes and
// letters as in ops.cpp.
//
// SPDX-License-Identifier: Apache-2.0
#include "block.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <tuple>
#include <vector>

#include "selective_scan.h"
#include "tensors.h"

namespace vim_mm {
namespace {

using torch::stable::empty_like;
using torch::stable::new_empty;
using torch::stable::accelerator::DeviceGuard;
using Tensors = std::vector<Tensor>;
using Flags = std::vector<int64_t>;

constexpr int kNormBlocks = 264;  // whatever the GPU, so that sums have one order

void expect(const Tensor& t, const char* name, std::initializer_list<int64_t> sizes,
            bool contiguous = true) {
  const auto given = t.sizes();
  STD_TORCH_CHECK(
      given.size() == sizes.size() && std::equal(sizes.begin(), sizes.end(), given.begin()),
      "vim_mm: wrong shape of ", name);
  STD_TORCH_CHECK(t.is_cuda() && (!contiguous || t.is_contiguous()), "vim_mm: expected ", name,
                  " contiguous on CUDA");
}

// Of what kernels read as 16 or 32 bits.
Storage narrow_storage(const Tensor& t, const char* name) {
  const ScalarType type = t.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Half ||
                      type == ScalarType::BFloat16,
                  "vim_mm: expected ", name, " float32, float16 or bfloat16");
  return storage_of(t);
}
void expect_type(const Tensor& t, const char* name, ScalarType type) {
  STD_TORCH_CHECK(t.scalar_type() == type, "vim_mm: wrong dtype of ", name);
}

Parameter parameter(const Tensor& t) {
  STD_TORCH_CHECK(t.is_cuda() && t.is_contiguous() && !is_complex(t),
                  "vim_mm: expected contiguous real parameters on CUDA");
  return {t.data_ptr(), storage_of(t)};
}
Parameter parameter(const std::optional<Tensor>& t) { return t ? parameter(*t) : Parameter(); }
Output output(const Tensor& t) { return {t.data_ptr(), storage_of(t)}; }

std::vector<int64_t> leading_sizes(const Tensor& t) {
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i + 1 < t.dim(); ++i) sizes.push_back(t.size(i));
  return sizes;
}
void expect_like(const Tensor& t, const char* name, const Tensor& other) {
  const auto a = t.sizes(), b = other.sizes();
  STD_TORCH_CHECK(a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin()),
                  "vim_mm: wrong shape of ", name);
  STD_TORCH_CHECK(t.is_cuda() && t.is_contiguous() && other.is_contiguous(), "vim_mm: expected ",
                  name, " contiguous on CUDA");
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_fwd(const Tensor& residual,
                                                    const std::optional<Tensor>& update,
                                                    const Tensor& weight, double eps,
                                                    ScalarType dtype) {
  const DeviceGuard guard(residual.get_device_index());
  expect_like(residual, "residual", residual);
  narrow_storage(residual, "residual");
  if (update) expect_like(*update, "update", residual), narrow_storage(*update, "update");
  const int64_t channels = residual.size(residual.dim() - 1);
  expect(weight, "weight", {channels});

  AddRmsNorm p{};
  p.channels = channels;
  p.rows = channels ? residual.numel() / channels : 0;
  p.eps = eps;
  const Tensor normed = new_empty(residual, residual.sizes(), dtype);
  narrow_storage(normed, "normed");
  const Tensor sum = update ? empty_like(residual) : new_empty(residual, {0});
  const auto rows = leading_sizes(residual);
  const Tensor rstd = new_empty(residual, {rows.data(), rows.size()}, ScalarType::Float);
  p.residual = parameter(residual), p.update = parameter(update), p.weight = parameter(weight);
  p.normed = output(normed);
  if (update) p.sum = output(sum);
  p.rstd = static_cast<float*>(rstd.data_ptr());
  add_rms_norm(p, current_stream(residual));
  return {normed, sum, rstd};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_bwd(const Tensor& grad_normed,
                                                    const std::optional<Tensor>& grad_sum,
                                                    const Tensor& sum, const Tensor& rstd,
                                                    const Tensor& weight,
                                                    const std::optional<ScalarType>& update_dtype) {
  const DeviceGuard guard(sum.get_device_index());
  expect_like(grad_normed, "grad_normed", sum);
  narrow_storage(grad_normed, "grad_normed"), narrow_storage(sum, "sum");
  if (grad_sum) expect_like(*grad_sum, "grad_sum", sum), narrow_storage(*grad_sum, "grad_sum");
  const int64_t channels = sum.size(sum.dim() - 1);
  expect(weight, "weight", {channels});

  AddRmsNormBackward p{};
  p.channels = channels;
  p.rows = channels ? sum.numel() / channels : 0;
  STD_TORCH_CHECK(rstd.numel() == p.rows && rstd.is_contiguous(), "vim_mm: wrong shape of rstd");
  expect_type(rstd, "rstd", ScalarType::Float);
  const Tensor grad_residual = empty_like(sum);
  const Tensor grad_update =
      update_dtype ? new_empty(sum, sum.sizes(), *update_dtype) : new_empty(sum, {0});
  const Tensor grad_weight = empty_like(weight);
  p.blocks = static_cast<int>(std::clamp<int64_t>((p.rows + 7) / 8, 1, kNormBlocks));
  const Tensor parts = new_empty(sum, {p.blocks, channels}, ScalarType::Float);
  p.grad_normed = parameter(grad_normed), p.grad_sum = parameter(grad_sum);
  p.sum = parameter(sum), p.weight = parameter(weight);
  p.rstd = static_cast<const float*>(rstd.data_ptr());
  p.grad_residual = output(grad_residual);
  if (update_dtype) p.grad_update = output(grad_update);
  p.grad_weight = static_cast<float*>(parts.data_ptr());
  void* const stream = current_stream(sum);
  add_rms_norm_backward(p, stream);

  Sums sums;
  sums.count = 1;
  Sum& total = sums.each[0];
  total = {};
  total.parts = p.grad_weight;
  total.components = 1;
  total.counts[0] = p.blocks, total.counts[1] = 1;
  total.part_strides[0] = channels;
  std::fill_n(total.sizes, 4, 1);
  total.sizes[3] = channels, total.strides[3] = 1;
  total.to.data = static_cast<char*>(grad_weight.data_ptr());
  total.to.storage = storage_of(grad_weight);
  total.to.last = int64_t(grad_weight.element_size());
  sum_in_order(sums, stream);
  return {grad_residual, grad_update, grad_weight};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> pack_parameters(
    const Tensor& in_proj, const Tensor& out_proj, const Tensors& x_proj, const Tensors& dt_proj,
    const Tensors& A_log, const Tensors& D, const Tensors& dt_bias, ScalarType dtype) {
  const DeviceGuard guard(in_proj.get_device_index());
  for (const Tensors* list : {&x_proj, &dt_proj, &A_log, &D, &dt_bias})
    STD_TORCH_CHECK(!list->empty() && list->size() <= kMaxDirections,
                    "vim_mm: expected parameters of 1 or 2 directions");
  Conversions conversions;
  const auto add = [&](const Tensor& from, const Tensor& to, int64_t part, bool negative_exp) {
    Output place = output(to);
    place.data = static_cast<char*>(place.data) +
                 part * from.numel() * static_cast<int64_t>(to.element_size());
    conversions.each[conversions.count++] = {parameter(from), place, from.numel(), negative_exp};
  };
  const auto copy = [&](const Tensor& from) {
    const Tensor to = new_empty(in_proj, from.sizes(), dtype);
    add(from, to, 0, false);
    return to;
  };
  const auto stack = [&](const Tensors& from, ScalarType type, bool negative_exp = false) {
    std::vector<int64_t> sizes{int64_t(from.size())};
    for (const int64_t size : from[0].sizes()) sizes.push_back(size);
    const Tensor to = new_empty(in_proj, {sizes.data(), sizes.size()}, type);
    for (size_t k = 0; k < from.size(); ++k) {
      expect_like(from[k], "stacked parameters", from[0]);
      add(from[k], to, int64_t(k), negative_exp);
    }
    return to;
  };
  const auto result = std::tuple(
      copy(in_proj), copy(out_proj), stack(x_proj, dtype), stack(dt_proj, dtype),
      stack(A_log, ScalarType::Float, true), stack(D, ScalarType::Float),
      stack(dt_bias, ScalarType::Float));
  convert(conversions, current_stream(in_proj));
  return result;
}

Convolution convolution(const Tensor& x, const Tensors& weight, const Tensors& bias,
                        const Flags& reverse) {
  STD_TORCH_CHECK(x.dim() == 3, "vim_mm: expected x [H, B, L]");
  Convolution p{};
  p.storage = narrow_storage(x, "x");
  p.channels = x.size(0), p.batch = x.size(1), p.steps = x.size(2);
  p.directions = static_cast<int>(weight.size());
  STD_TORCH_CHECK(x.is_cuda() && (p.steps <= 1 || x.stride(2) == 1) &&
                      (p.batch <= 1 || x.stride(1) == p.steps),
                  "vim_mm: expected x on CUDA with contiguous rows");
  STD_TORCH_CHECK(!weight.empty() && weight.size() <= kMaxDirections &&
                      reverse.size() == weight.size() &&
                      (bias.empty() || bias.size() == weight.size()),
                  "vim_mm: expected weights, biases and flags of 1 or 2 directions");
  p.taps = static_cast<int>(weight[0].dim() == 3 ? weight[0].size(2) : 0);
  STD_TORCH_CHECK(p.taps >= 1 && p.taps <= kMaxTaps, "vim_mm: expected weights [H, 1, W], W <= ",
                  kMaxTaps);
  for (size_t k = 0; k < weight.size(); ++k) {
    expect(weight[k], "weight", {p.channels, 1, p.taps});
    p.weight[k] = parameter(weight[k]);
    if (!bias.empty()) {
      expect(bias[k], "bias", {p.channels});
      p.bias[k] = parameter(bias[k]);
    }
    p.reverse[k] = reverse[k] != 0;
  }
  p.x = x.data_ptr();
  p.x_row = x.stride(0);
  return p;
}

Tensor conv1d_silu_fwd(const Tensor& x, const Tensors& weight, const Tensors& bias,
                       const Flags& reverse) {
  const DeviceGuard guard(x.get_device_index());
  Convolution p = convolution(x, weight, bias, reverse);
  const Tensor u = new_empty(x, {p.directions, p.channels, p.batch, p.steps});
  p.u = u.data_ptr();
  convolve(p, current_stream(x));
  return u;
}

std::tuple<Tensor, Tensor> conv1d_silu_bwd(const Tensor& grad_u, const Tensor& x,
                                           const Tensors& weight, const Tensors& bias,
                                           const Flags& reverse, const Tensor& grad_x) {
  const DeviceGuard guard(x.get_device_index());
  ConvolutionBackward p{};
  p.forward = convolution(x, weight, bias, reverse);
  const Convolution& f = p.forward;
  expect(grad_u, "grad_u", {f.directions, f.channels, f.batch, f.steps});
  expect_type(grad_u, "grad_u", x.scalar_type());
  expect(grad_x, "grad_x", {f.channels, f.batch, f.steps}, false);
  expect_type(grad_x, "grad_x", x.scalar_type());
  STD_TORCH_CHECK((f.steps <= 1 || grad_x.stride(2) == 1) &&
                      (f.batch <= 1 || grad_x.stride(1) == f.steps),
                  "vim_mm: expected grad_x with contiguous rows");
  const Tensor grad_weight =
      new_empty(x, {f.directions, f.channels, f.taps}, ScalarType::Float);
  const Tensor grad_bias = new_empty(x, {f.directions, f.channels}, ScalarType::Float);
  p.grad_u = grad_u.data_ptr();
  p.grad_x = grad_x.data_ptr();
  p.grad_x_row = grad_x.stride(0);
  p.grad_weight = static_cast<float*>(grad_weight.data_ptr());
  p.grad_bias = static_cast<float*>(grad_bias.data_ptr());
  convolve_backward(p, current_stream(x));
  return {grad_weight, grad_bias};
}

// A view of t's memory from an entry on.
Tensor view(const Tensor& t, std::initializer_list<int64_t> sizes,
            std::initializer_list<int64_t> strides, int64_t offset = 0) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
      t.get(), int64_t(sizes.size()), sizes.begin(), strides.begin(), offset, &handle));
  return Tensor(handle);
}

// The tensors of a block's scan as those of the scan operator.
struct DirectionalScan {
  int64_t directions, sets, channels, batch, steps, states, rank;
  Tensor u, delta, B, C, D, dt_bias;

  DirectionalScan(const Tensor& u_, const Tensor& delta_, const Tensor& dt_B_C, const Tensor& A,
                  const Tensor& D_, const Tensor& dt_bias_)
      : directions(A.size(0)), sets(u_.size(0)), channels(u_.size(1)), batch(u_.size(2)),
        steps(u_.size(3)), states(A.size(2)), rank(dt_B_C.size(1) - 2 * states),
        u(rows(checked(u_, "u", {sets, channels, batch, steps}), channels, sets)),
        delta(rows(checked(delta_, "delta", {sets, channels, batch * steps}), channels, sets)),
        B(state_matrix(checked(dt_B_C, "dt_B_C", {sets, rank + 2 * states, batch * steps}), 0,
                       sets)),
        C(state_matrix(dt_B_C, 1, sets)),
        D(per_channel(checked(D_, "D", {sets, channels}))),
        dt_bias(per_channel(checked(dt_bias_, "dt_bias", {sets, channels}))) {
    STD_TORCH_CHECK(rank >= 0 && (sets == directions || sets == 1),
                    "vim_mm: expected one set of parameters or one per direction");
  }

  static const Tensor& checked(const Tensor& t, const char* name,
                               std::initializer_list<int64_t> sizes) {
    expect(t, name, sizes);
    return t;
  }
  // [B, K, H, L] of contiguous [count, H, B, L], the only one for all directions if it is one.
  Tensor rows(const Tensor& t, int64_t channels_, int64_t count) const {
    const int64_t row = batch * steps;
    return view(t, {batch, directions, channels_, steps},
                {steps, count == 1 ? 0 : channels_ * row, row, 1});
  }
  // B (which 0) or C (1), [B, K, N, L], of dt_B_C [count, R + 2N, B, L].
  Tensor state_matrix(const Tensor& dt_B_C, int64_t which, int64_t count) const {
    const int64_t row = batch * steps;
    return view(dt_B_C, {batch, directions, states, steps},
                {steps, count == 1 ? 0 : (rank + 2 * states) * row, row, 1},
                (rank + which * states) * row);
  }
  Tensor per_channel(const Tensor& t) const {
    return view(t, {directions, channels}, {sets == 1 ? 0 : channels, 1});
  }
  Inputs inputs(const Tensor& A, int64_t method, const Flags& reverse) const {
    return {u, delta, A, B, C, optional_D, no_gate, optional_bias, true, method, reverse};
  }

 private:
  const std::optional<Tensor> optional_D = D, no_gate, optional_bias = dt_bias;
};

std::tuple<Tensor, Tensor> directional_scan_fwd(const Tensor& u, const Tensor& delta,
                                                const Tensor& dt_B_C, const Tensor& A,
                                                const Tensor& D, const Tensor& dt_bias,
                                                int64_t method, const Flags& reverse) {
  STD_TORCH_CHECK(u.dim() == 4 && dt_B_C.dim() == 3 && A.dim() == 3,
                  "vim_mm: expected u [P, H, B, L], dt_B_C [P, R + 2N, B L] and A [K, H, N]");
  const DeviceGuard guard(u.get_device_index());
  const DirectionalScan scan(u, delta, dt_B_C, A, D, dt_bias);
  const Tensor y = new_empty(u, {scan.directions, scan.channels, scan.batch, scan.steps});
  const Tensor edges = std::get<1>(scan_into(scan.rows(y, scan.channels, scan.directions),
                                             scan.inputs(A, method, reverse)));
  return {y, view(edges, {edges.numel()}, {1})};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> directional_scan_bwd(
    const Tensor& grad_y, const Tensor& edges, const Tensor& u, const Tensor& delta,
    const Tensor& dt_B_C, const Tensor& A, const Tensor& D, const Tensor& dt_bias, int64_t method,
    const Flags& reverse, const Tensor& grad_dt_B_C) {
  STD_TORCH_CHECK(u.dim() == 4 && dt_B_C.dim() == 3 && A.dim() == 3,
                  "vim_mm: expected u [P, H, B, L], dt_B_C [P, R + 2N, B L] and A [K, H, N]");
  const DeviceGuard guard(u.get_device_index());
  const DirectionalScan scan(u, delta, dt_B_C, A, D, dt_bias);
  const int64_t directions = scan.directions, channels = scan.channels;
  expect(grad_y, "grad_y", {channels, scan.batch, scan.steps});
  expect(grad_dt_B_C, "grad_dt_B_C",
         {directions, scan.rank + 2 * scan.states, scan.batch * scan.steps});
  expect_type(grad_dt_B_C, "grad_dt_B_C", dt_B_C.scalar_type());

  const Tensor grad_u = new_empty(u, {directions, channels, scan.batch, scan.steps});
  const Tensor grad_delta = new_empty(delta, {directions, channels, scan.batch * scan.steps});
  const Tensor grad_A = empty_like(A);
  const Tensor grad_D = new_empty(D, {directions, channels});
  const Tensor grad_dt_bias = new_empty(dt_bias, {directions, channels});
  const Gradients grads{scan.rows(grad_u, channels, directions),
                        scan.rows(grad_delta, channels, directions),
                        grad_A,
                        scan.state_matrix(grad_dt_B_C, 0, directions),
                        scan.state_matrix(grad_dt_B_C, 1, directions),
                        grad_D,
                        grad_D,  // no gate: not looked at
                        grad_dt_bias};
  scan_backward_into(grads, scan.rows(grad_y, channels, 1), std::nullopt, edges,
                     scan.inputs(A, method, reverse));
  return {grad_u, grad_delta, grad_A, grad_D, grad_dt_bias};
}

std::tuple<Tensor, Tensor> gate_fwd(const Tensor& y, const Tensor& z, double scale, bool keep_sum) {
  STD_TORCH_CHECK(y.dim() == 4 && y.size(0) >= 1 && y.size(0) <= kMaxDirections,
                  "vim_mm: expected y [K, H, B, L] of 1 or 2 directions");
  const DeviceGuard guard(z.get_device_index());
  expect(z, "z", {y.size(1), y.size(2), y.size(3)});
  expect(y, "y", {y.size(0), y.size(1), y.size(2), y.size(3)});
  expect_type(y, "y", z.scalar_type());
  Gate p{};
  p.storage = narrow_storage(z, "z");
  p.count = z.numel();
  p.directions = static_cast<int>(y.size(0));
  p.scale = static_cast<float>(scale);
  const Tensor out = empty_like(z), sum = keep_sum ? empty_like(z) : new_empty(z, {0});
  p.y = y.data_ptr(), p.z = z.data_ptr(), p.out = out.data_ptr();
  if (keep_sum) p.sum = sum.data_ptr();
  gate(p, current_stream(z));
  return {out, sum};
}

std::tuple<Tensor, Tensor> gate_bwd(const Tensor& grad_out, const Tensor& sum, const Tensor& z,
                                    double scale, const Tensor& grad_z) {
  const DeviceGuard guard(z.get_device_index());
  GateBackward p{};
  p.storage = narrow_storage(z, "z");
  for (const Tensor* t : {&grad_out, &sum, &grad_z}) {
    STD_TORCH_CHECK(t->numel() == z.numel(), "vim_mm: expected gradients and sum shaped like z");
    STD_TORCH_CHECK(t->is_cuda() && t->is_contiguous() && z.is_contiguous(),
                    "vim_mm: expected the gate's tensors contiguous on CUDA");
    expect_type(*t, "gradients and sum", z.scalar_type());
  }
  p.count = z.numel();
  p.scale = static_cast<float>(scale);
  const Tensor grad_y = empty_like(z), out = empty_like(z);
  p.grad_out = grad_out.data_ptr(), p.sum = sum.data_ptr(), p.z = z.data_ptr();
  p.grad_y = grad_y.data_ptr(), p.grad_z = grad_z.data_ptr(), p.out = out.data_ptr();
  gate_backward(p, current_stream(z));
  return {grad_y, out};
}

}  // namespace
}  // namespace vim_mm

STABLE_TORCH_LIBRARY_IMPL(vim_mm, CUDA, m) {
  m.impl("add_rms_norm_fwd", TORCH_BOX(&vim_mm::add_rms_norm_fwd));
  m.impl("add_rms_norm_bwd", TORCH_BOX(&vim_mm::add_rms_norm_bwd));
  m.impl("pack_parameters", TORCH_BOX(&vim_mm::pack_parameters));
  m.impl("conv1d_silu_fwd", TORCH_BOX(&vim_mm::conv1d_silu_fwd));
  m.impl("conv1d_silu_bwd", TORCH_BOX(&vim_mm::conv1d_silu_bwd));
  m.impl("directional_scan_fwd", TORCH_BOX(&vim_mm::directional_scan_fwd));
  m.impl("directional_scan_bwd", TORCH_BOX(&vim_mm::directional_scan_bwd));
  m.impl("gate_fwd", TORCH_BOX(&vim_mm::gate_fwd));
  m.impl("gate_bwd", TORCH_BOX(&vim_mm::gate_bwd));
}
