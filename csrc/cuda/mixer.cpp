// The mixer of a block on CUDA tensors: a sequence of kernels and matrix products, forward and
// backward. Shapes and letters as in ops.cpp.
//
// Everything between in_proj and out_proj is rows of channels, time contiguous: nothing is
// transposed. A convolution, projections and scans of all directions are one launch each.
//
// SPDX-License-Identifier: Apache-2.0
// Products into given memory: torch's stable C interface, as AOTInductor's binaries call it.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <initializer_list>
#include <optional>
#include <tuple>
#include <vector>

#include "block.h"
#include "selective_scan.h"
#include "tensors.h"

namespace vim_mm {
namespace {

using torch::stable::empty_like;
using torch::stable::new_empty;
using torch::stable::accelerator::DeviceGuard;
using torch::stable::detail::from;
using torch::stable::detail::to;
using MaybeTensor = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;
using Flags = std::vector<int64_t>;
using Shape = std::vector<int64_t>;

// Of the pieces that share a buffer, in entries.
constexpr int64_t kPieceMultiple = 64;

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
int64_t numel_of(const Shape& shape) {
  int64_t numel = 1;
  for (const int64_t size : shape) numel *= size;
  return numel;
}
float* floats_of(const Tensor& t) { return static_cast<float*>(t.data_ptr()); }

// A view of t's memory.
Tensor view(const Tensor& t, const Shape& sizes, const Shape& strides, int64_t offset = 0) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
      t.get(), int64_t(sizes.size()), sizes.data(), strides.data(), offset, &handle));
  return Tensor(handle);
}
Tensor contiguous_view(const Tensor& t, const Shape& sizes, int64_t offset = 0) {
  Shape strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  return view(t, sizes, strides, offset);
}
// A matrix or a batch of them, transposed.
Tensor transposed(const Tensor& t) {
  Shape sizes, strides;
  for (int64_t i = 0; i < t.dim(); ++i) sizes.push_back(t.size(i)), strides.push_back(t.stride(i));
  std::swap(sizes.end()[-1], sizes.end()[-2]);
  std::swap(strides.end()[-1], strides.end()[-2]);
  return view(t, sizes, strides);
}

// Pieces of one allocation.
int64_t numel_of_pieces(const std::vector<Shape>& shapes) {
  int64_t numel = 0;
  for (const Shape& shape : shapes) numel += round_up(numel_of(shape), kPieceMultiple);
  return numel;
}
Tensors pieces_of(const Tensor& buffer, const std::vector<Shape>& shapes) {
  STD_TORCH_CHECK(buffer.dim() == 1 && buffer.numel() == numel_of_pieces(shapes),
                  "vim_mm: expected what the mixer's forward kept");
  Tensors pieces;
  int64_t offset = 0;
  for (const Shape& shape : shapes) {
    pieces.push_back(contiguous_view(buffer, shape, offset));
    offset += round_up(numel_of(shape), kPieceMultiple);
  }
  return pieces;
}

// out = a b, for matrices or batches of them, where out may be float32 whatever a and b are.
void multiply_into(const Tensor& out, const Tensor& a, const Tensor& b) {
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
    to<Tensor>(stack[0]);  // the reference to out that comes back
  }
}
// The sum over a dimension.
Tensor sum_over(const Tensor& t, int64_t dim, bool keep, ScalarType dtype) {
  std::array<StableIValue, 4> stack{from(t), from(std::optional(Shape{dim})), from(keep),
                                    from(std::optional(dtype))};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::sum", "dim_IntList", stack.data(), TORCH_ABI_VERSION));
  return to<Tensor>(stack[0]);
}

// The same over the first dimension, which is kept, into a tensor that there is.
void sum_into(const Tensor& out, const Tensor& t) {
  std::array<StableIValue, 5> stack{from(t), from(std::optional(Shape{0})), from(true),
                                    from(std::optional(out.scalar_type())), from(out)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::sum", "IntList_out", stack.data(), TORCH_ABI_VERSION));
  to<Tensor>(stack[0]);  // the reference to out that comes back
}

struct Parameters {
  const Tensor& in_proj;
  const MaybeTensor& in_bias;
  const Tensor& out_proj;
  const MaybeTensor& out_bias;
  const Tensors &conv, &conv_bias, &x_proj, &dt_proj, &dt_bias, &D, &A_log;
};

// What kernels and products take instead of the parameters.
struct Packed {
  Tensor in_proj, out_proj, x_proj, dt_proj, in_bias, out_bias;  // in the dtype of x
  Tensor A, D, dt_bias, conv, conv_bias;                         // float32
};

// The mixer of one call: sizes, and how what it works on lies in memory.
struct Mixer {
  int64_t batch, steps, outer, channels, sets, directions, states, rank, taps;
  bool has_in_bias, has_out_bias, has_conv_bias;
  const Flags& reverse;

  Mixer(const Tensor& x, const Parameters& p, const Flags& reverse_) : reverse(reverse_) {
    STD_TORCH_CHECK(x.dim() == 3 && x.is_cuda() && x.is_contiguous(),
                    "vim_mm: expected x [B, L, C], contiguous on CUDA");
    expect_narrow(x, "x");
    batch = x.size(0), steps = x.size(1), outer = x.size(2);
    directions = int64_t(p.A_log.size()), sets = int64_t(p.conv.size());
    STD_TORCH_CHECK(
        directions >= 1 && directions <= kMaxDirections && int64_t(reverse.size()) == directions &&
            (sets == 1 || sets == directions),
        "vim_mm: expected 1 or 2 directions, and one set of parameters or one for each");
    STD_TORCH_CHECK(p.A_log[0].dim() == 2 && p.conv[0].dim() == 3,
                    "vim_mm: expected A_log [H, N] and convolutions [H, 1, W]");
    channels = p.A_log[0].size(0), states = p.A_log[0].size(1), taps = p.conv[0].size(2);
    STD_TORCH_CHECK(taps >= 1 && taps <= kMaxTaps,
                    "vim_mm: expected convolutions [H, 1, W], W <= ", kMaxTaps);
    has_in_bias = p.in_bias.has_value(), has_out_bias = p.out_bias.has_value();
    has_conv_bias = !p.conv_bias.empty();
    const auto expect = [&](const Tensor& t, const char* name,
                            std::initializer_list<int64_t> sizes) {
      expect_contiguous(t, name, sizes);
      STD_TORCH_CHECK(t.device() == x.device(), "vim_mm: expected ", name, " where x is");
      expect_type(t, name,
                  {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16, ScalarType::Double});
    };
    expect(p.in_proj, "in_proj", {2 * channels, outer});
    expect(p.out_proj, "out_proj", {outer, channels});
    if (has_in_bias) expect(*p.in_bias, "in_bias", {2 * channels});
    if (has_out_bias) expect(*p.out_bias, "out_bias", {outer});
    const auto expect_each = [&](const Tensors& list, const char* name, int64_t count,
                                 std::initializer_list<int64_t> sizes) {
      STD_TORCH_CHECK(int64_t(list.size()) == count, "vim_mm: wrong number of ", name);
      for (const Tensor& t : list) expect(t, name, sizes);
    };
    expect_each(p.dt_proj, "dt_proj", sets,
                {channels, p.dt_proj.empty() ? 0 : p.dt_proj[0].size(p.dt_proj[0].dim() - 1)});
    rank = p.dt_proj[0].size(1);
    expect_each(p.x_proj, "x_proj", sets, {rank + 2 * states, channels});
    expect_each(p.conv, "conv", sets, {channels, 1, taps});
    expect_each(p.conv_bias, "conv_bias", has_conv_bias ? sets : 0, {channels});
    expect_each(p.dt_bias, "dt_bias", sets, {channels});
    expect_each(p.D, "D", sets, {channels});
    expect_each(p.A_log, "A_log", directions, {channels, states});
  }

  int64_t tokens() const { return batch * steps; }
  int64_t rows() const { return rank + 2 * states; }  // of dt, B and C

  std::vector<Shape> narrow_shapes() const {
    return {{2 * channels, outer},
            {outer, channels},
            {sets, rows(), channels},
            {sets, rank, channels},
            {has_in_bias ? 2 * channels : 0},
            {has_out_bias ? outer : 0}};
  }
  std::vector<Shape> wide_shapes() const {
    return {{directions, channels, states},
            {sets, channels},
            {sets, channels},
            {sets, channels, taps},
            {sets, channels}};
  }
  Packed packed(const Tensor& narrow, const Tensor& wide) const {
    Tensors n = pieces_of(narrow, narrow_shapes()), w = pieces_of(wide, wide_shapes());
    return {n[0], n[1], n[2], n[3], n[4], n[5], w[0], w[1], w[2], w[3], w[4]};
  }

  // x or z, [H, B, L], of xz.
  Tensor half(const Tensor& xz, int64_t which) const {
    return contiguous_view(xz, {channels, batch, steps}, which * channels * tokens());
  }
  // The rows of the step sizes, [.., R, B L], of dt_B_C.
  Tensor steps_of(const Tensor& dt_B_C) const {
    return view(dt_B_C, {dt_B_C.size(0), rank, tokens()}, {rows() * tokens(), tokens(), 1});
  }
  // Those of B and C, [.., 2 N, B L].
  Tensor matrices_of(const Tensor& dt_B_C) const {
    return view(dt_B_C, {dt_B_C.size(0), 2 * states, tokens()}, {rows() * tokens(), tokens(), 1},
                rank * tokens());
  }

  // [B, K, H, L] of contiguous [count, H, B, L], which all directions share if it is one.
  Tensor per_direction(const Tensor& t, int64_t count) const {
    return view(t, {batch, directions, channels, steps},
                {steps, count == 1 ? 0 : channels * tokens(), tokens(), 1});
  }
  // B (which = 0) or C (1), [B, K, N, L], of dt_B_C.
  Tensor state_matrix(const Tensor& dt_B_C, int64_t which) const {
    return view(dt_B_C, {batch, directions, states, steps},
                {steps, dt_B_C.size(0) == 1 ? 0 : rows() * tokens(), tokens(), 1},
                (rank + which * states) * tokens());
  }
  Tensor per_channel(const Tensor& t) const {
    return view(t, {directions, channels}, {sets == 1 ? 0 : channels, 1});
  }

  Convolution convolution(const Tensor& x, const Packed& packed) const {
    Convolution p{};
    p.storage = storage_of(x);
    p.channels = channels, p.batch = batch, p.steps = steps;
    p.directions = int(sets), p.taps = int(taps);
    for (int64_t k = 0; k < sets; ++k) p.reverse[k] = reverse[k] != 0;
    p.weight = floats_of(packed.conv), p.bias = floats_of(packed.conv_bias);
    p.x = x.data_ptr(), p.x_row = tokens();
    return p;
  }
};

// The tensors of the scan operator.
struct Scan {
  Tensor u, delta, B, C;
  MaybeTensor D, dt_bias, no_gate;

  Scan(const Mixer& mixer, const Packed& packed, const Tensor& u_, const Tensor& delta_,
       const Tensor& dt_B_C)
      : u(mixer.per_direction(u_, mixer.sets)), delta(mixer.per_direction(delta_, mixer.sets)),
        B(mixer.state_matrix(dt_B_C, 0)), C(mixer.state_matrix(dt_B_C, 1)),
        D(mixer.per_channel(packed.D)), dt_bias(mixer.per_channel(packed.dt_bias)) {}

  Inputs inputs(const Packed& packed, int64_t method, const Flags& reverse) const {
    return {u, delta, packed.A, B, C, D, no_gate, dt_bias, true, method, reverse};
  }
};

Conversion conversion(const Tensor& from, const Tensor& to) {
  Conversion c;
  c.from = from.data_ptr(), c.from_storage = storage_of(from);
  c.to = to.data_ptr(), c.to_storage = storage_of(to);
  STD_TORCH_CHECK(to.numel() <= INT32_MAX, "vim_mm: too large a parameter");
  c.columns = int(to.numel());
  return c;
}
void add(Conversions& all, const Conversion& c) {
  STD_TORCH_CHECK(all.count < kMaxConversions, "vim_mm: too many parameters");
  all.each[all.count++] = c;
}
// The k-th of what is stacked in front.
Tensor select(const Tensor& stack, int64_t k) {
  Shape sizes;
  for (int64_t i = 1; i < stack.dim(); ++i) sizes.push_back(stack.size(i));
  return contiguous_view(stack, sizes, k * numel_of(sizes));
}

// Fills `packed` and, in the same launch, `zeros`.
void pack(const Mixer& mixer, const Parameters& p, const Packed& packed, const Tensor& zeros,
          void* stream) {
  Conversions all;
  add(all, conversion(p.in_proj, packed.in_proj));
  add(all, conversion(p.out_proj, packed.out_proj));
  if (p.in_bias) add(all, conversion(*p.in_bias, packed.in_bias));
  if (p.out_bias) add(all, conversion(*p.out_bias, packed.out_bias));
  for (int64_t k = 0; k < mixer.directions; ++k) {
    Conversion A = conversion(p.A_log[k], select(packed.A, k));
    A.function = Conversion::negative_exp;
    add(all, A);
  }
  for (int64_t k = 0; k < mixer.sets; ++k) {
    add(all, conversion(p.x_proj[k], select(packed.x_proj, k)));
    Conversion dt_proj = conversion(p.dt_proj[k], select(packed.dt_proj, k));
    dt_proj.rows = int(mixer.rank), dt_proj.columns = int(mixer.channels);
    dt_proj.from_row = 1, dt_proj.from_column = int(mixer.rank);
    add(all, dt_proj);
    add(all, conversion(p.D[k], select(packed.D, k)));
    add(all, conversion(p.dt_bias[k], select(packed.dt_bias, k)));
    add(all, conversion(p.conv[k], select(packed.conv, k)));
    const Tensor conv_bias = select(packed.conv_bias, k);
    Conversion bias = conversion(mixer.has_conv_bias ? p.conv_bias[k] : conv_bias, conv_bias);
    if (!mixer.has_conv_bias) bias.from = nullptr;
    add(all, bias);
  }
  Conversion clear = conversion(zeros, zeros);
  clear.from = nullptr;
  add(all, clear);
  convert(all, stream);
}

// u of the convolution, and delta of u and dt_B_C; forward fills dt_B_C in between.
Tensor convolve_rows(const Mixer& mixer, const Tensor& xz, const Packed& packed, void* stream) {
  Convolution p = mixer.convolution(mixer.half(xz, 0), packed);
  const Tensor u = new_empty(xz, {mixer.sets, mixer.channels, mixer.tokens()});
  p.u = u.data_ptr();
  convolve(p, stream);
  return u;
}
Tensor step_sizes(const Mixer& mixer, const Tensor& dt_B_C, const Packed& packed, void* stream) {
  const Tensor delta = new_empty(dt_B_C, {mixer.sets, mixer.channels, mixer.tokens()});
  StepProjection p{};
  p.storage = storage_of(delta);
  p.sets = int(mixer.sets), p.rank = int(mixer.rank);
  p.channels = mixer.channels, p.tokens = mixer.tokens();
  p.weight = packed.dt_proj.data_ptr(), p.delta = delta.data_ptr();
  p.dt = dt_B_C.data_ptr(), p.dt_set = mixer.rows() * mixer.tokens();
  project_steps(p, stream);
  return delta;
}

std::tuple<Tensor, Tensors> mixer_fwd(const Tensor& x, const Tensor& in_proj,
                                      const MaybeTensor& in_bias, const Tensor& out_proj,
                                      const MaybeTensor& out_bias, const Tensors& conv,
                                      const Tensors& conv_bias, const Tensors& x_proj,
                                      const Tensors& dt_proj, const Tensors& dt_bias,
                                      const Tensors& D, const Tensors& A_log, int64_t method,
                                      const Flags& reverse, double scale, bool keep) {
  const Parameters p{in_proj, in_bias, out_proj, out_bias, conv, conv_bias,
                     x_proj,  dt_proj, dt_bias,  D,        A_log};
  const Mixer mixer(x, p, reverse);
  const DeviceGuard guard(x.get_device_index());
  const int64_t tokens = mixer.tokens(), channels = mixer.channels;
  void* const stream = current_stream(x);
  const Tensor narrow = new_empty(x, {numel_of_pieces(mixer.narrow_shapes())});
  const Tensor wide = new_empty(x, {numel_of_pieces(mixer.wide_shapes())}, ScalarType::Float);
  const Packed packed = mixer.packed(narrow, wide);
  // The scan counts in these words, from 0, whose bits are those of 0.0f.
  const Tensor counts = new_empty(x, {kMaxRelieved}, ScalarType::Float);
  pack(mixer, p, packed, counts, stream);

  const Tensor xz = new_empty(x, {2 * channels, tokens});
  const Tensor x_rows = view(x, {mixer.outer, tokens}, {1, mixer.outer});
  if (in_bias) {
    const Tensor bias = view(packed.in_bias, {2 * channels, tokens}, {1, 0});
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_addmm_out(xz.get(), bias.get(), packed.in_proj.get(),
                                                     x_rows.get(), 1.0, 1.0));
  } else {
    multiply_into(xz, packed.in_proj, x_rows);
  }
  const Tensor u = convolve_rows(mixer, xz, packed, stream);
  const Tensor dt_B_C = new_empty(x, {mixer.sets, mixer.rows(), tokens});
  multiply_into(dt_B_C, packed.x_proj, u);
  const Tensor delta = step_sizes(mixer, dt_B_C, packed, stream);
  const Tensor y = new_empty(x, {mixer.directions, channels, mixer.batch, mixer.steps});
  const Scan scan(mixer, packed, u, delta, dt_B_C);
  const Tensor edges =
      std::get<1>(scan_into(mixer.per_direction(y, mixer.directions),
                            scan.inputs(packed, method, reverse), counts.data_ptr()));

  const Tensor z = mixer.half(xz, 1), gated = empty_like(z);
  const Tensor sum = keep ? empty_like(z) : new_empty(z, {0});
  Gate g{};
  g.storage = storage_of(z), g.count = z.numel(), g.scale = static_cast<float>(scale);
  g.directions = int(mixer.directions);
  g.y = y.data_ptr(), g.z = z.data_ptr(), g.out = gated.data_ptr();
  if (keep) g.sum = sum.data_ptr();
  gate(g, stream);

  const Tensor out = empty_like(x);
  const Tensor out_rows = contiguous_view(out, {tokens, mixer.outer});
  const Tensor gated_rows = view(gated, {tokens, channels}, {1, tokens});
  if (out_bias) {
    const Tensor bias = view(packed.out_bias, {tokens, mixer.outer}, {0, 1});
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_addmm_out(out_rows.get(), bias.get(), gated_rows.get(),
                                                     transposed(packed.out_proj).get(), 1.0, 1.0));
  } else {
    multiply_into(out_rows, gated_rows, transposed(packed.out_proj));
  }
  if (!keep) return {out, {}};
  return {out, {xz, dt_B_C, contiguous_view(edges, {edges.numel()}), sum, narrow, wide}};
}

// What forward kept.
struct Kept {
  Tensor xz, dt_B_C, edges, sum;
  Packed packed;
};
Kept unpack(const Mixer& mixer, const Tensors& kept) {
  STD_TORCH_CHECK(kept.size() == 6, "vim_mm: expected what the mixer's forward kept");
  expect_contiguous(kept[0], "xz", {2 * mixer.channels, mixer.tokens()});
  expect_contiguous(kept[1], "dt_B_C", {mixer.sets, mixer.rows(), mixer.tokens()});
  expect_contiguous(kept[3], "the sum of directions", {mixer.channels, mixer.batch, mixer.steps});
  return {kept[0], kept[1], kept[2], kept[3], mixer.packed(kept[4], kept[5])};
}

Tensor new_floats(const Tensor& like, const Shape& shape) {
  return new_empty(like, {shape.data(), shape.size()}, ScalarType::Float);
}

// Backward, part by part from the last: each takes the gradient of what forward's part makes. The
// gradients of parameters are float32 sums over tokens.
struct OutputGradients {
  Tensor y, out_proj;
};
// Of the gate and out_proj; fills grad_z.
OutputGradients output_gradients(const Mixer& mixer, const Kept& kept, const Tensor& grad_rows,
                                 const Tensor& grad_z, double scale, void* stream) {
  const Tensor grad_gated = new_empty(grad_rows, {mixer.channels, mixer.tokens()});
  const Tensor grad_y = empty_like(grad_gated), gated = empty_like(grad_gated);
  multiply_into(grad_gated, transposed(kept.packed.out_proj), transposed(grad_rows));
  const Tensor z = mixer.half(kept.xz, 1);
  GateBackward g{};
  g.storage = storage_of(z), g.count = z.numel(), g.scale = static_cast<float>(scale);
  g.grad_out = grad_gated.data_ptr(), g.sum = kept.sum.data_ptr(), g.z = z.data_ptr();
  g.grad_y = grad_y.data_ptr(), g.grad_z = grad_z.data_ptr(), g.out = gated.data_ptr();
  gate_backward(g, stream);
  const Tensor grad_out_proj = new_floats(grad_rows, {mixer.outer, mixer.channels});
  multiply_into(grad_out_proj, transposed(grad_rows), transposed(gated));
  return {grad_y, grad_out_proj};
}

// Of u and dt_B_C what comes through the scan alone, of dt_B_C therefore its B and C.
struct ScanGradients {
  Tensor u, delta, dt_B_C, A, D, dt_bias;
};
ScanGradients scan_gradients(const Mixer& mixer, const Kept& kept, const Tensor& u,
                             const Tensor& grad_y, int64_t method, void* stream) {
  const int64_t directions = mixer.directions, channels = mixer.channels, tokens = mixer.tokens();
  const Tensor delta = step_sizes(mixer, kept.dt_B_C, kept.packed, stream);
  const Scan scan(mixer, kept.packed, u, delta, kept.dt_B_C);
  ScanGradients grads{new_empty(u, {directions, channels, tokens}),
                      new_empty(u, {directions, channels, tokens}),
                      new_empty(u, {directions, mixer.rows(), tokens}),
                      empty_like(kept.packed.A),
                      new_floats(u, {directions, channels}),
                      new_floats(u, {directions, channels})};
  const Gradients per_direction{mixer.per_direction(grads.u, directions),
                                mixer.per_direction(grads.delta, directions),
                                grads.A,
                                mixer.state_matrix(grads.dt_B_C, 0),
                                mixer.state_matrix(grads.dt_B_C, 1),
                                grads.D,
                                grads.D,  // in the place of the gate's, which there is none of
                                grads.dt_bias};
  scan_backward_into(per_direction, mixer.per_direction(grad_y, 1), std::nullopt, kept.edges,
                     scan.inputs(kept.packed, method, mixer.reverse));
  if (mixer.sets < directions) {
    for (Tensor* t : {&grads.u, &grads.delta, &grads.D, &grads.dt_bias})
      *t = sum_over(*t, 0, true, t->scalar_type());
    const Tensor sum = new_empty(u, {1, mixer.rows(), tokens});
    sum_into(mixer.matrices_of(sum), mixer.matrices_of(grads.dt_B_C));
    grads.dt_B_C = sum;
  }
  return grads;
}

// One product for all sets of parameters, of which only the blocks where a set meets itself count:
// sums over so many tokens are faster split, as products are and batches of them are not.
struct ProjectionGradients {
  Tensor x_proj, dt_proj;
};
// Completes those of dt_B_C and u in `grads`.
ProjectionGradients projection_gradients(const Mixer& mixer, const Kept& kept, const Tensor& u,
                                         const ScanGradients& grads) {
  const int64_t rows = mixer.sets * mixer.rows(), channels = mixer.sets * mixer.channels;
  const auto flat = [&](const Tensor& t, int64_t count) {
    return contiguous_view(t, {count, mixer.tokens()});
  };
  multiply_into(mixer.steps_of(grads.dt_B_C), kept.packed.dt_proj, grads.delta);
  const Tensor grad_dt_proj = new_floats(u, {channels, rows});
  multiply_into(grad_dt_proj, flat(grads.delta, channels), transposed(flat(kept.dt_B_C, rows)));
  const Tensor grad_x_proj = new_floats(u, {rows, channels});
  multiply_into(grad_x_proj, flat(grads.dt_B_C, rows), transposed(flat(u, channels)));
  TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_baddbmm_out(grads.u.get(), grads.u.get(),
                                                     transposed(kept.packed.x_proj).get(),
                                                     grads.dt_B_C.get(), 1.0, 1.0));
  return {grad_x_proj, grad_dt_proj};
}

struct ConvolutionGradients {
  Tensor weight, bias;
};
// Fills grad_x, of the half of xz.
ConvolutionGradients convolution_gradients(const Mixer& mixer, const Kept& kept,
                                           const Tensor& grad_u, const Tensor& grad_x,
                                           void* stream) {
  const Tensor weight = new_floats(grad_u, {mixer.sets, mixer.channels, mixer.taps});
  const Tensor bias = new_floats(grad_u, {mixer.sets, mixer.channels});
  ConvolutionBackward c{};
  c.forward = mixer.convolution(mixer.half(kept.xz, 0), kept.packed);
  c.grad_u = grad_u.data_ptr();
  c.grad_x = grad_x.data_ptr(), c.grad_x_row = mixer.tokens();
  c.grad_weight = floats_of(weight), c.grad_bias = floats_of(bias);
  convolve_backward(c, stream);
  return {weight, bias};
}

struct InputGradients {
  Tensor x, in_proj;
};
InputGradients input_gradients(const Mixer& mixer, const Kept& kept, const Tensor& x,
                               const Tensor& grad_xz) {
  const Shape rows{mixer.tokens(), mixer.outer};
  const Tensor grad_in_proj = new_floats(x, {2 * mixer.channels, mixer.outer});
  const Tensor grad_x = empty_like(x);
  multiply_into(grad_in_proj, grad_xz, contiguous_view(x, rows));
  multiply_into(contiguous_view(grad_x, rows), transposed(grad_xz), kept.packed.in_proj);
  return {grad_x, grad_in_proj};
}

// The results of backward: gradients of parameters in their own dtypes, from float32 sums that the
// caller keeps, all in one launch.
class Results {
 public:
  // What is in its dtype already.
  void add_done(const Tensor& gradient) { gradients_.push_back(gradient); }
  void add_matrix(const Tensor& parameter, const Tensor& sum) {
    if (parameter.scalar_type() == ScalarType::Float) add_done(sum);
    else add(parameter, sum);
  }
  // Of a bias, or an empty tensor where there is none: the sum of `gradient` over a dimension.
  void add_bias(const MaybeTensor& bias, const Tensor& gradient, int64_t dim) {
    if (!bias) return add_done(new_empty(gradient, {0}));
    bias_sums_.push_back(sum_over(gradient, dim, false, ScalarType::Float));
    add(*bias, bias_sums_.back());
  }
  void add_each(const Tensors& parameters, const Tensor& sums) {
    for (size_t k = 0; k < parameters.size(); ++k) add(parameters[k], select(sums, int64_t(k)));
  }
  // Of matrices that begin the blocks on the diagonal of `sums`.
  void add_blocks(const Tensors& parameters, const Tensor& sums) {
    const int64_t count = int64_t(parameters.size());
    const int64_t rows = sums.size(0) / count, columns = sums.size(1) / count;
    for (int64_t k = 0; k < count; ++k) {
      Conversion c = place(parameters[k], sums);
      c.from = floats_of(sums) + k * rows * sums.size(1) + k * columns;
      c.from_row = int(sums.size(1));
      c.rows = int(parameters[k].size(0)), c.columns = int(parameters[k].size(1));
      vim_mm::add(all_, c);
    }
  }
  // Of A_log: A is its own derivative by it.
  void add_logarithms(const Tensors& parameters, const Tensor& sums, const Tensor& A) {
    for (size_t k = 0; k < parameters.size(); ++k) {
      Conversion c = place(parameters[k], select(sums, int64_t(k)));
      c.factor = floats_of(select(A, int64_t(k))), c.function = Conversion::product;
      vim_mm::add(all_, c);
    }
  }
  Tensors finish(void* stream) {
    convert(all_, stream);
    return std::move(gradients_);
  }

 private:
  Conversion place(const Tensor& parameter, const Tensor& sum) {
    gradients_.push_back(empty_like(parameter));
    Conversion c = conversion(parameter, gradients_.back());
    c.from = sum.data_ptr(), c.from_storage = Storage::float32;
    return c;
  }
  void add(const Tensor& parameter, const Tensor& sum) { vim_mm::add(all_, place(parameter, sum)); }

  Conversions all_;
  Tensors gradients_, bias_sums_;
};

Tensors mixer_bwd(const Tensor& grad_out, const Tensor& x, const Tensors& kept_tensors,
                  const Tensor& in_proj, const MaybeTensor& in_bias, const Tensor& out_proj,
                  const MaybeTensor& out_bias, const Tensors& conv, const Tensors& conv_bias,
                  const Tensors& x_proj, const Tensors& dt_proj, const Tensors& dt_bias,
                  const Tensors& D, const Tensors& A_log, int64_t method, const Flags& reverse,
                  double scale) {
  const Parameters p{in_proj, in_bias, out_proj, out_bias, conv, conv_bias,
                     x_proj,  dt_proj, dt_bias,  D,        A_log};
  const Mixer mixer(x, p, reverse);
  const DeviceGuard guard(x.get_device_index());
  void* const stream = current_stream(x);
  expect_contiguous(grad_out, "grad_out", x.sizes());
  expect_type(grad_out, "grad_out", {x.scalar_type()});
  const Kept kept = unpack(mixer, kept_tensors);

  const Tensor grad_rows = contiguous_view(grad_out, {mixer.tokens(), mixer.outer});
  const Tensor grad_xz = empty_like(kept.xz);
  const OutputGradients output =
      output_gradients(mixer, kept, grad_rows, mixer.half(grad_xz, 1), scale, stream);
  const Tensor u = convolve_rows(mixer, kept.xz, kept.packed, stream);
  const ScanGradients scan = scan_gradients(mixer, kept, u, output.y, method, stream);
  const ProjectionGradients projections = projection_gradients(mixer, kept, u, scan);
  const ConvolutionGradients convolution =
      convolution_gradients(mixer, kept, scan.u, mixer.half(grad_xz, 0), stream);
  const InputGradients input = input_gradients(mixer, kept, x, grad_xz);

  Results results;
  results.add_done(input.x);
  results.add_matrix(in_proj, input.in_proj);
  results.add_bias(in_bias, grad_xz, 1);
  results.add_matrix(out_proj, output.out_proj);
  results.add_bias(out_bias, grad_rows, 0);
  results.add_each(conv, convolution.weight);
  results.add_each(conv_bias, convolution.bias);
  results.add_blocks(x_proj, projections.x_proj);
  results.add_blocks(dt_proj, projections.dt_proj);
  results.add_each(dt_bias, scan.dt_bias);
  results.add_each(D, scan.D);
  results.add_logarithms(A_log, scan.A, kept.packed.A);
  return results.finish(stream);
}

}  // namespace
}  // namespace vim_mm

STABLE_TORCH_LIBRARY_IMPL(vim_mm, CUDA, m) {
  m.impl("mixer_fwd", TORCH_BOX(&vim_mm::mixer_fwd));
  m.impl("mixer_bwd", TORCH_BOX(&vim_mm::mixer_bwd));
}
