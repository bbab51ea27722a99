// The selective scan on CUDA tensors: takes tensors apart for the kernels, gives them their scratch
// memory. Shapes and letters as in ops.cpp.
//
// SPDX-License-Identifier: Apache-2.0
#include "selective_scan.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <tuple>
#include <vector>

#include "../arguments.h"
#include "kernels.h"
#include "tensors.h"

namespace vim_mm {
namespace {

using torch::stable::empty_like;
using torch::stable::new_empty;
using torch::stable::accelerator::DeviceGuard;

constexpr int64_t kBlocksOfLargeGpu = 264, kMaxSlabs = 4, kLeastChannels = 64;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

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

// Whether four neighbours in time of u's dtype can be moved at once, at whichever end time begins.
bool is_aligned(const ScanArguments& scan, std::initializer_list<View> others) {
  const int64_t bytes = 4 * (scan.u.storage == Storage::float32 ? 4 : 2);
  const auto fits = [&](const View& v) {
    return (reinterpret_cast<int64_t>(v.data) | v.batch | v.group | v.row) % bytes == 0;
  };
  return scan.steps % 4 == 0 && fits(scan.u) && fits(scan.delta) && fits(scan.z) && fits(scan.B) &&
         fits(scan.C) && std::all_of(others.begin(), others.end(), fits);
}

ScanArguments scan_arguments(const Inputs& in, const Sizes& sizes) {
  ScanArguments scan{};
  scan.is_complex = is_complex(in.A);
  for (const Tensor* t : {&in.B, &in.C})
    STD_TORCH_CHECK(is_complex(*t) == scan.is_complex, "vim_mm: expected B and C complex with A");
  scan.u = narrow_view(in.u, 0);
  scan.delta = narrow_view(in.delta, 0);
  scan.z = in.z ? narrow_view(*in.z, 0) : scan.u;
  scan.gated = in.z.has_value();
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

int64_t count_chunks(const Sizes& sizes) { return ceil_div(sizes.steps, kChunk); }
int64_t count_directions(int64_t method) { return is_causal(method) ? 1 : 2; }

}  // namespace

std::tuple<Tensor, Tensor> scan_into(const Tensor& out, const Inputs& in, void* zeros) {
  const Tensor& u = in.u;
  const int64_t method = in.method;
  const Sizes sizes(in);
  const DeviceGuard guard(u.get_device_index());
  ForwardArguments p{};
  p.scan = scan_arguments(in, sizes);
  p.chunks = count_chunks(sizes);
  const ScalarType type = p.scan.is_complex ? ScalarType::ComplexFloat : ScalarType::Float;
  const Tensor last_state =
      new_empty(u, {sizes.batch, sizes.groups, sizes.channels, sizes.states}, type);
  const Tensor edges = new_empty(
      u,
      {count_directions(method), sizes.batch, sizes.groups, sizes.channels, p.chunks, sizes.states},
      type);
  p.out = view_of(out, 0);
  p.scan.aligned = is_aligned(p.scan, {p.out});
  p.last_state = last_state.data_ptr();
  p.edges = edges.data_ptr();
  p.other_edges = static_cast<char*>(edges.data_ptr()) +
                  sizes.rows() * p.chunks * sizes.states * edges.element_size();
  p.relief.counts = static_cast<uint32_t*>(zeros);
  scan_forward(p, current_stream(u));
  return {last_state, edges};
}

namespace {

std::tuple<Tensor, Tensor, Tensor> selective_scan_fwd_cuda(
    const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B, const Tensor& C,
    const std::optional<Tensor>& D, const std::optional<Tensor>& z,
    const std::optional<Tensor>& delta_bias, bool delta_softplus, int64_t method,
    const std::vector<int64_t>& reverse) {
  const Tensor out = empty_like(u);
  const auto [last_state, edges] =
      scan_into(out, {u, delta, A, B, C, D, z, delta_bias, delta_softplus, method, reverse});
  return {out, last_state, edges};
}

// How many slabs of partial gradients of B and C there are for each (b, g) and chunk: as many
// blocks share its channels. The number that leaves the fewest multiprocessors of a large GPU idle
// in the last round; only sizes count, so that every GPU adds up in the same order.
int64_t count_slabs(const ScanArguments& scan, int64_t chunks) {
  const int64_t blocks = std::max<int64_t>(1, scan.batch * scan.groups * chunks);
  int64_t best = 1;
  double least = 0.0;
  for (int64_t slabs = 1; slabs <= kMaxSlabs && (slabs - 1) * kLeastChannels < scan.channels;
       ++slabs) {
    const double rounds = double(ceil_div(slabs * blocks, kBlocksOfLargeGpu)) / double(slabs);
    if (slabs > 1 && rounds > 0.95 * least) continue;
    best = slabs, least = rounds;
  }
  return best;
}

// The sum over `counts` of parts that are contiguous [counts[0], sizes..., counts[1], last size]
// or, with counts[1] = 1, [counts[0], sizes...], into a gradient like an input, whose dimensions
// begin at `first`.
Sum sum_into(const Tensor& gradient, int first, const Tensor& parts, int64_t outer, int64_t inner,
             bool has_last) {
  Sum sum{};
  sum.parts = static_cast<const float*>(parts.data_ptr());
  sum.components = is_complex(gradient) ? 2 : 1;
  sum.counts[0] = int(outer), sum.counts[1] = int(std::max<int64_t>(inner, 1));
  sum.to = view_of(gradient, first);
  int64_t stride = 1;
  std::fill_n(sum.sizes, 4, 1);
  for (int64_t i = gradient.dim() - 1; i >= 0; --i) {
    if (i == gradient.dim() - (has_last ? 2 : 1)) {
      sum.part_strides[1] = stride;
      stride *= inner;
    }
    sum.sizes[first + i] = gradient.size(i);
    sum.strides[first + i] = stride;
    stride *= gradient.size(i);
  }
  sum.part_strides[0] = stride;
  return sum;
}

}  // namespace

void scan_backward_into(const Gradients& grads, const std::optional<Tensor>& grad_out,
                        const std::optional<Tensor>& grad_last_state, const Tensor& edges,
                        const Inputs& in) {
  const Tensor& u = in.u;
  const std::optional<Tensor>&z = in.z, &D = in.D, &delta_bias = in.delta_bias;
  const int64_t method = in.method;
  const Sizes sizes(in);
  const DeviceGuard guard(u.get_device_index());
  BackwardArguments p{};
  p.scan = scan_arguments(in, sizes);
  p.chunks = count_chunks(sizes);
  p.slabs = count_slabs(p.scan, p.chunks);
  const int64_t width = p.scan.is_complex ? 2 : 1, rows = sizes.rows();
  const int64_t per_chunks = rows * p.chunks * sizes.states;
  STD_TORCH_CHECK(edges.is_contiguous() && edges.numel() == count_directions(method) * per_chunks &&
                      storage_of(edges) == Storage::float32 &&
                      is_complex(edges) == p.scan.is_complex,
                  "vim_mm: expected the edges that forward gave");
  STD_TORCH_CHECK(!grad_out || (grad_out->numel() == u.numel() && grad_out->dim() == 4),
                  "vim_mm: expected grad_out shaped like u");
  STD_TORCH_CHECK(!grad_last_state || (grad_last_state->numel() == rows * sizes.states &&
                                       is_complex(*grad_last_state) == p.scan.is_complex),
                  "vim_mm: expected grad_last_state shaped like the last state, complex with A");

  const auto& [grad_u, grad_delta, grad_A, grad_B, grad_C, grad_D, grad_z, grad_bias] = grads;

  // Floats; states and what is summed into A, B and C are complex with A.
  const auto scratch = [&](int64_t floats) { return new_empty(u, {floats}, ScalarType::Float); };
  const int64_t per_slabs = p.slabs * sizes.batch * sizes.groups * sizes.states * sizes.steps;
  const Tensor grad_edges = scratch(edges.numel() * width);
  const Tensor D_parts = scratch(rows * p.chunks), bias_parts = scratch(rows * p.chunks);
  const Tensor B_parts = scratch((p.scan.constant_B ? per_chunks : per_slabs) * width);
  const Tensor C_parts = scratch((p.scan.constant_C ? per_chunks : per_slabs) * width);

  // The gradient comes in whatever layout the next layer left; where u is contiguous in time and it
  // is not, one copy is far cheaper than kernels for any stride.
  std::optional<Tensor> incoming = grad_out;
  if (grad_out && u.stride(3) == 1 && grad_out->stride(3) != 1) {
    incoming = empty_like(grad_u);
    torch::stable::copy_(*incoming, *grad_out);
  }
  if (incoming) p.grad_out = narrow_view(*incoming, 0);
  p.grad_last_state = view_of(grad_last_state, 0);
  p.grad_u = view_of(grad_u, 0);
  p.grad_delta = view_of(grad_delta, 0);
  if (z) p.grad_z = view_of(grad_z, 0);
  p.scan.aligned = is_aligned(p.scan, {p.grad_out, p.grad_u, p.grad_delta, p.grad_z});
  p.edges = edges.data_ptr();
  p.grad_edges = grad_edges.data_ptr();
  p.grad_B = B_parts.data_ptr();
  p.grad_C = C_parts.data_ptr();
  p.grad_D = static_cast<float*>(D_parts.data_ptr());
  p.grad_bias = static_cast<float*>(bias_parts.data_ptr());

  // No rows and no steps leave sums of nothing: zeros.
  const bool empty = rows == 0 || sizes.steps == 0;
  void* const stream = current_stream(u);
  if (!empty) scan_backward(p, stream);
  Sums sums;
  const auto add = [&](const Tensor& to, int first, const Tensor& parts, bool over_chunks) {
    const int64_t outer = empty ? 0 : over_chunks ? sizes.batch : p.slabs;
    sums.each[sums.count++] =
        sum_into(to, first, parts, outer, over_chunks ? p.chunks : 1, to.dim() > 2);
  };
  add(grad_A, 1, grad_edges, true);
  add(grad_B, p.scan.constant_B, B_parts, p.scan.constant_B);
  add(grad_C, p.scan.constant_C, C_parts, p.scan.constant_C);
  if (D) add(grad_D, 1, D_parts, true);
  if (delta_bias) add(grad_bias, 1, bias_parts, true);
  sum_in_order(sums, stream);
}

namespace {

Gradients selective_scan_bwd_cuda(const std::optional<Tensor>& grad_out,
                                  const std::optional<Tensor>& grad_last_state, const Tensor& edges,
                                  const Tensor& u, const Tensor& delta, const Tensor& A,
                                  const Tensor& B, const Tensor& C, const std::optional<Tensor>& D,
                                  const std::optional<Tensor>& z,
                                  const std::optional<Tensor>& delta_bias, bool delta_softplus,
                                  int64_t method, const std::vector<int64_t>& reverse) {
  const Inputs in{u, delta, A, B, C, D, z, delta_bias, delta_softplus, method, reverse};
  const Tensor none = new_empty(u, {0});
  const auto like = [&](const std::optional<Tensor>& t) { return t ? empty_like(*t) : none; };
  const Gradients grads{empty_like(u), empty_like(delta), empty_like(A), empty_like(B),
                        empty_like(C), like(D),           like(z),       like(delta_bias)};
  scan_backward_into(grads, grad_out, grad_last_state, edges, in);
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
