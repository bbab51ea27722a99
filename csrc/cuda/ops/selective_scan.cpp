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
#include <string>
#include <tuple>
#include <vector>

#include "../../arguments.h"
#include "../common/describe.h"
#include "../common/scan_arguments.h"
#include "tensors.h"
#include "workspace.h"

namespace vim_mm {
namespace {

using torch::stable::empty_like;
using torch::stable::accelerator::DeviceGuard;

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
bool are_aligned(const ScanArguments& scan, std::initializer_list<View> others) {
  const int64_t item = scan.u.storage == Storage::float32 ? 4 : 2;
  int64_t bits = scan.steps * item;
  const auto add = [&](const View& v) {
    bits |= reinterpret_cast<int64_t>(v.data) | v.batch | v.group | v.row;
  };
  for (const View& v : {scan.u, scan.delta, scan.z, scan.B, scan.C}) add(v);
  for (const View& v : others) add(v);
  return bits % (4 * item) == 0;
}

ScanArguments scan_arguments(const Inputs& in, const Sizes& sizes) {
  ScanArguments scan{};
  scan.is_complex = is_complex(in.A);
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
  set_directions(scan, in.reverse);
  return scan;
}

OwnBounds bounds_of(const Inputs& in, const Sizes& sizes, void* stream) {
  OwnBounds bounds(in.reset, sizes.batch, sizes.steps, in.u, stream);
  bounds.initial_state = view_of(in.initial_state, 0);
  return bounds;
}

// Floats of a state, which is complex with A.
int64_t width_of(const ScanArguments& scan) { return scan.is_complex ? 2 : 1; }
// Of the edges in one direction.
int64_t count_states(const ScanArguments& scan) {
  return rows_of(scan) * chunks_of(scan) * scan.states * width_of(scan);
}

}  // namespace

void set_directions(ScanArguments& scan, const std::vector<int64_t>& reverse) {
  const int64_t groups = int64_t(reverse.size());
  const auto flag = [&](int64_t g) { return reverse[g] != 0; };
  scan.same_direction = true;
  for (int64_t g = 1; g < groups; ++g) scan.same_direction &= flag(g) == flag(0);
  STD_TORCH_CHECK(scan.same_direction || groups <= kMaxGroups, "vim_mm: more than ", kMaxGroups,
                  " groups of different directions");
  for (int64_t g = 0; g < (scan.same_direction ? std::min<int64_t>(groups, 1) : groups); ++g)
    scan.directions.bits[g / 32] |= uint32_t(flag(g)) << (g % 32);
}

int64_t count_edges(const ScanArguments& scan) {
  return (is_causal(scan.method) ? 1 : 2) * count_states(scan);
}

OwnBounds::OwnBounds(const std::optional<Tensor>& reset, int64_t batch, int64_t steps,
                     const Tensor& like, void* stream) {
  if (!reset || batch == 0) return;
  const int64_t words = (steps + kChunk - 1) / kChunk + 1;
  memory = new_tensor(like, {batch, 2, words}, ScalarType::Long);
  View view;
  view.data = static_cast<char*>(reset->data_ptr());
  view.batch = reset->stride(0), view.last = reset->stride(1);
  auto* const filled = static_cast<uint64_t*>(memory->data_ptr());
  find_cuts(view, batch, steps, filled, stream);
  cuts = filled;
}

void scan_into(ScanArguments scan, const View& out, void* edges, void* last_state,
               const Tensor& like, void* stream, const Bounds& bounds) {
  ForwardArguments p{};
  scan.aligned = are_aligned(scan, {out});
  p.scan = scan;
  p.out = out;
  p.chunks = chunks_of(scan);
  p.last_state = last_state;
  p.bounds = bounds;
  p.edges = edges;
  p.other_edges = static_cast<float*>(edges) + count_states(scan);
  std::optional<Workspace> scratch;
  if (const ForwardScratch count = count_scratch(p); count.any()) {
    WorkspaceLayout layout;
    const Buffer first_sums = layout.add("first_sums", ScalarType::Float, {count.first_sums});
    const Buffer across = layout.add("across", ScalarType::Float, {count.across});
    const Buffer ends = layout.add("ends", ScalarType::Float, {count.ends});
    const Buffer step_sums = layout.add("step_sums", ScalarType::Float, {count.step_sums});
    scratch.emplace(layout, like);
    p.first_sums = scratch->floats(first_sums), p.across = scratch->floats(across);
    p.ends = scratch->floats(ends), p.step_sums = scratch->floats(step_sums);
  }
  scan_forward(p, stream);
}

namespace {

std::tuple<Tensor, Tensor, Tensor> selective_scan_fwd_cuda(
    const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B, const Tensor& C,
    const std::optional<Tensor>& D, const std::optional<Tensor>& z,
    const std::optional<Tensor>& delta_bias, const std::optional<Tensor>& initial_state,
    const std::optional<Tensor>& reset, bool delta_softplus, int64_t method,
    const std::vector<int64_t>& reverse) {
  const Inputs in{u,     delta,          A,      B,      C, D, z, delta_bias, initial_state,
                  reset, delta_softplus, method, reverse};
  const Sizes sizes(in);
  const DeviceGuard guard(u.get_device_index());
  const ScanArguments scan = scan_arguments(in, sizes);
  const ScalarType type = scan.is_complex ? ScalarType::ComplexFloat : ScalarType::Float;
  const Tensor out = empty_like(u);
  const Tensor last_state =
      new_tensor(u, {sizes.batch, sizes.groups, sizes.channels, sizes.states}, type);
  const Tensor edges = new_tensor(u,
                                  {is_causal(method) ? 1 : 2, sizes.batch, sizes.groups,
                                   sizes.channels, chunks_of(scan), sizes.states},
                                  type);
  void* const stream = current_stream(u);
  const OwnBounds bounds = bounds_of(in, sizes, stream);
  scan_into(scan, narrow_view(out, 0), edges.data_ptr(), last_state.data_ptr(), u, stream, bounds);
  return {out, last_state, edges};
}

}  // namespace

void scan_backward_into(ScanArguments scan, const ScanGradients& gradients, const void* edges,
                        const Tensor& like, void* stream, const Bounds& bounds) {
  const int64_t rows = rows_of(scan), chunks = chunks_of(scan), width = width_of(scan);
  BackwardArguments p{};
  p.grad_out = gradients.out, p.grad_last_state = gradients.last_state;
  p.grad_u = gradients.u, p.grad_delta = gradients.delta, p.grad_z = gradients.z;
  if (!scan.constant_B) p.grad_B = gradients.B;
  if (!scan.constant_C) p.grad_C = gradients.C;
  scan.aligned =
      are_aligned(scan, {p.grad_out, p.grad_u, p.grad_delta, p.grad_z, p.grad_B, p.grad_C});
  p.scan = scan;
  p.edges = edges;
  p.bounds = bounds, p.grad_initial_state = gradients.initial_state;
  plan_backward(p);

  const int64_t state = scan.states * width, all_chunks = scan.batch * scan.groups * chunks;
  const int64_t parts = all_chunks * p.parts * kChunk * state, constant = rows * chunks * state;
  const bool is_shared = std::max(p.body.slabs, p.tail.slabs) > 1;
  constexpr ScalarType real = ScalarType::Float;
  WorkspaceLayout layout;
  const Buffer grad_edges = layout.add("grad_edges", real, {count_edges(scan)});
  const Buffer B_parts = layout.add("B_parts", real, {scan.constant_B ? constant : parts});
  const Buffer C_parts = layout.add("C_parts", real, {scan.constant_C ? constant : parts});
  const Buffer D_parts = layout.add("D_parts", real, {rows * chunks});
  const Buffer bias_parts = layout.add("bias_parts", real, {rows * chunks});
  const Buffer counts = layout.add("counts", ScalarType::Int, {is_shared ? all_chunks : 0});
  const Buffer ends = layout.add("ends", real, {rows * p.splits.count * scan.states});
  const Workspace scratch(layout, like);
  p.ends = scratch.floats(ends);
  p.grad_edges = scratch.data(grad_edges);
  p.B_parts = scratch.data(B_parts), p.C_parts = scratch.data(C_parts);
  p.grad_D = scratch.floats(D_parts), p.grad_bias = scratch.floats(bias_parts);
  if (is_shared) p.counts = static_cast<uint32_t*>(scratch.data(counts));

  // No rows and no steps leave sums of nothing: zeros.
  const bool empty = rows == 0 || scan.steps == 0;
  if (!empty) scan_backward(p, stream);
  Sums sums;
  // Over batch and chunks of parts that are [B, G, rows, chunks, columns].
  const auto add = [&](const View& to, const Buffer& parts, int64_t rows, int64_t columns,
                       int64_t components) {
    Sum& sum = sums.each[sums.count++] = {};
    sum.parts = scratch.floats(parts);
    sum.components = int(components);
    sum.counts[0] = empty ? 0 : int(scan.batch), sum.counts[1] = int(std::max<int64_t>(chunks, 1));
    sum.sizes[0] = scan.groups, sum.sizes[1] = rows, sum.sizes[2] = columns;
    sum.to = to;
  };
  add(gradients.A, grad_edges, scan.channels, scan.states, width);
  if (scan.constant_B) add(gradients.B, B_parts, scan.channels, scan.states, width);
  if (scan.constant_C) add(gradients.C, C_parts, scan.channels, scan.states, width);
  // Of these channels are columns, for what they have no rows.
  const auto add_channels = [&](View to, const Buffer& parts) {
    to.last = to.row;
    add(to, parts, 1, scan.channels, 1);
  };
  if (scan.D.data) add_channels(gradients.D, D_parts);
  if (scan.delta_bias.data) add_channels(gradients.delta_bias, bias_parts);
  sum_in_order(sums, stream);
}

namespace {

Gradients selective_scan_bwd_cuda(const std::optional<Tensor>& grad_out,
                                  const std::optional<Tensor>& grad_last_state, const Tensor& edges,
                                  const Tensor& u, const Tensor& delta, const Tensor& A,
                                  const Tensor& B, const Tensor& C, const std::optional<Tensor>& D,
                                  const std::optional<Tensor>& z,
                                  const std::optional<Tensor>& delta_bias,
                                  const std::optional<Tensor>& initial_state,
                                  const std::optional<Tensor>& reset, bool delta_softplus,
                                  int64_t method, const std::vector<int64_t>& reverse) {
  const Inputs in{u,     delta,          A,      B,      C, D, z, delta_bias, initial_state,
                  reset, delta_softplus, method, reverse};
  const Sizes sizes(in);
  const DeviceGuard guard(u.get_device_index());
  const ScanArguments scan = scan_arguments(in, sizes);
  expect_gradients(in, sizes, grad_out, grad_last_state);
  expect_device(edges, "edges", u);
  STD_TORCH_CHECK(edges.is_contiguous() && storage_of(edges) == Storage::float32 &&
                      is_complex(edges) == scan.is_complex &&
                      edges.numel() * width_of(scan) == count_edges(scan),
                  "vim_mm: expected the edges that forward gave");
  const Tensor none = new_tensor(u, {0}, u.scalar_type());
  const auto like = [&](const std::optional<Tensor>& t) { return t ? empty_like(*t) : none; };
  const Gradients grads{
      empty_like(u), empty_like(delta), empty_like(A),
      empty_like(B), empty_like(C),     like(D),
      like(z),       like(delta_bias),  initial_state ? new_tensor(*initial_state) : none};
  const auto& [grad_u, grad_delta, grad_A, grad_B, grad_C, grad_D, grad_z, grad_bias,
               grad_initial] = grads;

  // The gradient comes in whatever layout the next layer left; where u is contiguous in time and it
  // is not, one copy is far cheaper than kernels for any stride.
  std::optional<Tensor> incoming = grad_out;
  if (grad_out && u.stride(3) == 1 && grad_out->stride(3) != 1) {
    incoming = empty_like(grad_u);
    torch::stable::copy_(*incoming, *grad_out);
  }
  ScanGradients views;
  if (incoming) views.out = narrow_view(*incoming, 0);
  views.last_state = view_of(grad_last_state, 0);
  views.u = view_of(grad_u, 0), views.delta = view_of(grad_delta, 0);
  if (z) views.z = view_of(grad_z, 0);
  views.A = view_of(grad_A, 1);
  views.B = view_of(grad_B, scan.constant_B), views.C = view_of(grad_C, scan.constant_C);
  if (D) views.D = view_of(grad_D, 1);
  if (delta_bias) views.delta_bias = view_of(grad_bias, 1);
  if (initial_state) views.initial_state = grad_initial.data_ptr();
  if (sizes.rows() == 0) {  // no block writes these
    for (Tensor t : {grad_B, grad_C}) torch::stable::zero_(t);
  }
  if (initial_state && sizes.steps == 0) {  // nothing is between it and the last state
    Tensor to = grad_initial;
    if (grad_last_state) torch::stable::copy_(to, *grad_last_state);
    else torch::stable::zero_(to);
  }
  void* const stream = current_stream(u);
  const OwnBounds bounds = bounds_of(in, sizes, stream);
  scan_backward_into(scan, views, edges.data_ptr(), u, stream, bounds);
  return grads;
}

std::string selective_scan_kernels_cuda(const Tensor& u, const Tensor& delta, const Tensor& A,
                                        const Tensor& B, const Tensor& C,
                                        const std::optional<Tensor>& D,
                                        const std::optional<Tensor>& z,
                                        const std::optional<Tensor>& delta_bias,
                                        const std::optional<Tensor>& initial_state,
                                        const std::optional<Tensor>& reset, bool delta_softplus,
                                        int64_t method, const std::vector<int64_t>& reverse) {
  const Inputs in{u,     delta,          A,      B,      C, D, z, delta_bias, initial_state,
                  reset, delta_softplus, method, reverse};
  const Sizes sizes(in);
  const DeviceGuard guard(u.get_device_index());
  ScanArguments scan = scan_arguments(in, sizes);
  scan.aligned = are_aligned(scan, {});
  return describe(scan, initial_state || reset);
}

Tensor discretize_cuda(const Tensor& delta, const Tensor& A, int64_t method) {
  expect_discretizable(delta, A, method);
  STD_TORCH_CHECK(delta.scalar_type() == ScalarType::Float, "vim_mm: CUDA has no float64 here");
  std::vector<int64_t> sizes{6};
  for (const int64_t size : A.sizes()) sizes.push_back(size);
  const Tensor result = new_tensor(A, sizes, A.scalar_type());
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
  m.impl("selective_scan_kernels", TORCH_BOX(&vim_mm::selective_scan_kernels_cuda));
  m.impl("discretize", TORCH_BOX(&vim_mm::discretize_cuda));
}
