// The selective scan on CUDA tensors: takes tensors apart for the kernels, gives them their scratch
// memory. Shapes and letters as in ops.cpp.
//
// SPDX-License-Identifier: Apache-2.0
#ifndef USE_CUDA
#define USE_CUDA  // torch's stable C interface to streams is hidden without it
#endif
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "../arguments.h"
#include "kernels.h"

namespace vim_mm {
namespace {

using torch::stable::empty_like;
using torch::stable::new_empty;
using torch::stable::accelerator::DeviceGuard;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void* current_stream(const Tensor& t) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
  return stream;
}

Storage storage_of(const Tensor& t) {
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

// Lines the dimensions up with [batch, group, row, last], beginning where a tensor does.
View view_of(const Tensor& t, int first) {
  View view;
  int64_t* const strides[] = {&view.batch, &view.group, &view.row, &view.last};
  for (int64_t i = 0; i < t.dim(); ++i)
    *strides[first + i] = t.stride(i) * int64_t(t.element_size());
  view.data = static_cast<char*>(t.data_ptr());
  view.storage = storage_of(t);
  return view;
}
View view_of(const std::optional<Tensor>& t, int first) { return t ? view_of(*t, first) : View(); }

// What varies over batch and time is read in 16 or 32 bits.
View narrow_view(const Tensor& t, int first) {
  const View view = view_of(t, first);
  STD_TORCH_CHECK(view.storage != Storage::float64, "vim_mm: the CUDA scan has no float64");
  return view;
}

ScanArguments scan_arguments(const Inputs& in, const Sizes& sizes) {
  ScanArguments scan{};
  scan.is_complex = is_complex(in.A);
  for (const Tensor* t : {&in.B, &in.C})
    STD_TORCH_CHECK(is_complex(*t) == scan.is_complex, "vim_mm: expected B and C complex with A");
  scan.u = narrow_view(in.u, 0);
  scan.delta = narrow_view(in.delta, 0);
  if (in.z) scan.z = narrow_view(*in.z, 0);
  scan.A = view_of(in.A, 1);
  scan.constant_B = in.B.dim() == 3;
  scan.constant_C = in.C.dim() == 3;
  scan.B = narrow_view(in.B, scan.constant_B);
  scan.C = narrow_view(in.C, scan.constant_C);
  scan.D = view_of(in.D, 1);
  scan.delta_bias = view_of(in.delta_bias, 1);
  scan.delta_softplus = in.delta_softplus;
  scan.batch = sizes.batch, scan.groups = sizes.groups, scan.channels = sizes.channels;
  scan.steps = sizes.steps, scan.states = sizes.states;
  scan.method = static_cast<int>(in.method);
  const auto flag = [&](int64_t g) { return in.reverse[g] != 0; };
  scan.same_direction = true;
  for (int64_t g = 1; g < sizes.groups; ++g) scan.same_direction &= flag(g) == flag(0);
  STD_TORCH_CHECK(scan.same_direction || sizes.groups <= kMaxGroups, "vim_mm: more than ",
                  kMaxGroups, " groups of different directions");
  for (int64_t g = 0; g < (scan.same_direction ? std::min<int64_t>(sizes.groups, 1) : sizes.groups);
       ++g)
    scan.directions.bits[g / 32] |= uint32_t(flag(g)) << (g % 32);
  return scan;
}

std::tuple<Tensor, Tensor> selective_scan_fwd_cuda(const Tensor& u, const Tensor& delta,
                                                   const Tensor& A, const Tensor& B,
                                                   const Tensor& C, const std::optional<Tensor>& D,
                                                   const std::optional<Tensor>& z,
                                                   const std::optional<Tensor>& delta_bias,
                                                   bool delta_softplus, int64_t method,
                                                   const std::vector<int64_t>& reverse) {
  const Inputs in{u, delta, A, B, C, D, z, delta_bias, delta_softplus, method, reverse};
  const Sizes sizes(in);
  const DeviceGuard guard(u.get_device_index());
  ForwardArguments p{scan_arguments(in, sizes), {}, nullptr, nullptr};
  const Tensor out = empty_like(u);
  const Tensor last_state =
      new_empty(u, {sizes.batch, sizes.groups, sizes.channels, sizes.states},
                p.scan.is_complex ? ScalarType::ComplexFloat : ScalarType::Float);
  // Allocated for causal methods too, but of no size.
  const Tensor one_way =
      new_empty(u, {is_causal(method) ? 0 : sizes.rows() * sizes.steps}, ScalarType::Float);
  p.out = view_of(out, 0);
  p.last_state = last_state.data_ptr();
  p.one_way = static_cast<float*>(one_way.data_ptr());
  scan_forward(p, current_stream(u));
  return {out, last_state};
}

// How many slabs of partial gradients of B and C there are for each (b, g): one per block. Enough
// blocks for a large GPU, or else as many as keep a slab set about as large as u in float32. Only
// sizes count, so that every GPU adds up in the same order.
int64_t count_slabs(const ScanArguments& scan, const BlockShape& shape) {
  const int64_t sets = ceil_div(scan.channels, shape.channels);
  const int64_t busy = ceil_div(512, std::max<int64_t>(1, scan.batch * scan.groups));
  const int64_t small = ceil_div(scan.channels, 2 * shape.padded_states);
  const int64_t rounds = ceil_div(sets, std::max(busy, small));
  return rounds == 0 ? 1 : ceil_div(sets, rounds);
}

// Sums `count` parts, each [sizes], into a gradient like an input; its dimensions begin at `first`.
Sum sum_into(const Tensor& gradient, int first, const Tensor& parts, int64_t count) {
  Sum sum{static_cast<const float*>(parts.data_ptr()),
          count,
          is_complex(gradient) ? 2 : 1,
          {1, 1, 1, 1},
          view_of(gradient, first)};
  for (int64_t i = 0; i < gradient.dim(); ++i) sum.sizes[first + i] = gradient.size(i);
  return sum;
}

Gradients selective_scan_bwd_cuda(const std::optional<Tensor>& grad_out,
                                  const std::optional<Tensor>& grad_last_state, const Tensor& u,
                                  const Tensor& delta, const Tensor& A, const Tensor& B,
                                  const Tensor& C, const std::optional<Tensor>& D,
                                  const std::optional<Tensor>& z,
                                  const std::optional<Tensor>& delta_bias, bool delta_softplus,
                                  int64_t method, const std::vector<int64_t>& reverse) {
  const Inputs in{u, delta, A, B, C, D, z, delta_bias, delta_softplus, method, reverse};
  const Sizes sizes(in);
  const DeviceGuard guard(u.get_device_index());
  BackwardArguments p{};
  p.scan = scan_arguments(in, sizes);
  const BlockShape shape = backward_shape(p.scan);
  p.slabs = count_slabs(p.scan, shape);

  const Tensor none = new_empty(u, {0});
  const auto like = [&](const std::optional<Tensor>& t) { return t ? empty_like(*t) : none; };
  const Gradients grads{empty_like(u), empty_like(delta), empty_like(A), empty_like(B),
                        empty_like(C), like(D),           like(z),       like(delta_bias)};
  const auto& [grad_u, grad_delta, grad_A, grad_B, grad_C, grad_D, grad_z, grad_bias] = grads;

  // Floats; states and what is summed into A, B and C are complex with A.
  const auto scratch = [&](int64_t floats) { return new_empty(u, {floats}, ScalarType::Float); };
  const int64_t width = p.scan.is_complex ? 2 : 1, rows = sizes.rows();
  const int64_t per_row = rows * sizes.states * width;
  const int64_t per_slabs =
      p.slabs * sizes.batch * sizes.groups * sizes.states * sizes.steps * width;
  const int64_t blocks = sizes.batch * sizes.groups * p.slabs;
  const int64_t per_tile = shape.channels * shape.padded_states * width;
  const Tensor A_parts = scratch(per_row), D_parts = scratch(rows), bias_parts = scratch(rows);
  const Tensor B_parts = scratch(p.scan.constant_B ? per_row : per_slabs);
  const Tensor C_parts = scratch(p.scan.constant_C ? per_row : per_slabs);
  const Tensor starts = scratch(blocks * ceil_div(sizes.steps, kSteps) * per_tile);
  const Tensor one_way = scratch(is_causal(method) ? 0 : 3 * rows * sizes.steps);

  if (grad_out) p.grad_out = narrow_view(*grad_out, 0);
  p.grad_last_state = view_of(grad_last_state, 0);
  p.grad_u = view_of(grad_u, 0);
  p.grad_delta = view_of(grad_delta, 0);
  if (z) p.grad_z = view_of(grad_z, 0);
  p.grad_A = A_parts.data_ptr();
  p.grad_B = B_parts.data_ptr();
  p.grad_C = C_parts.data_ptr();
  p.grad_D = static_cast<float*>(D_parts.data_ptr());
  p.grad_bias = static_cast<float*>(bias_parts.data_ptr());
  p.starts = starts.data_ptr();
  p.one_way = static_cast<float*>(one_way.data_ptr());

  // No rows and no steps leave sums of nothing: zeros.
  const bool empty = rows == 0 || sizes.steps == 0;
  void* const stream = current_stream(u);
  if (!empty) scan_backward(p, stream);
  const auto parts = [&](int64_t count) { return empty ? 0 : count; };
  Sums sums;
  const auto add = [&](const Sum& sum) { sums.each[sums.count++] = sum; };
  add(sum_into(grad_A, 1, A_parts, parts(sizes.batch)));
  add(sum_into(grad_B, p.scan.constant_B, B_parts,
               parts(p.scan.constant_B ? sizes.batch : p.slabs)));
  add(sum_into(grad_C, p.scan.constant_C, C_parts,
               parts(p.scan.constant_C ? sizes.batch : p.slabs)));
  if (D) add(sum_into(grad_D, 1, D_parts, parts(sizes.batch)));
  if (delta_bias) add(sum_into(grad_bias, 1, bias_parts, parts(sizes.batch)));
  sum_in_order(sums, stream);
  return grads;
}

Tensor discretize_cuda(const Tensor& delta, const Tensor& A, int64_t method) {
  STD_TORCH_CHECK(delta.is_contiguous() && A.is_contiguous() && delta.numel() == A.numel() &&
                      delta.device() == A.device(),
                  "vim_mm: expected contiguous delta and A of one shape and device");
  STD_TORCH_CHECK(method >= 0 && method < kMethods, "vim_mm: unknown discretization number ",
                  method);
  STD_TORCH_CHECK(delta.scalar_type() == ScalarType::Float && storage_of(A) == Storage::float32,
                  "vim_mm: expected delta and A of one precision, float32 on CUDA");
  std::vector<int64_t> sizes{6};
  for (const int64_t size : A.sizes()) sizes.push_back(size);
  const Tensor result = new_empty(A, {sizes.data(), sizes.size()});
  const DeviceGuard guard(A.get_device_index());
  discretize(A.numel(), static_cast<int>(method), is_complex(A),
             static_cast<const float*>(delta.data_ptr()), A.data_ptr(), result.data_ptr(),
             current_stream(A));
  return result;
}

}  // namespace
}  // namespace vim_mm

STABLE_TORCH_LIBRARY_IMPL(vim_mm, CUDA, m) {
  m.impl("selective_scan_fwd", TORCH_BOX(&vim_mm::selective_scan_fwd_cuda));
  m.impl("selective_scan_bwd", TORCH_BOX(&vim_mm::selective_scan_bwd_cuda));
  m.impl("discretize", TORCH_BOX(&vim_mm::discretize_cuda));
}
