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

// Step sizes have as many rows, zeros in front, that every matrix is aligned as tensor cores like it.
constexpr int64_t kRankMultiple = 8;
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

  Mixer(const Tensor& x, const Parameters& p, const Flags& reverse) {
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
  int64_t padded_rank() const { return round_up(rank, kRankMultiple); }
  int64_t padding() const { return padded_rank() - rank; }
  int64_t rows() const { return padded_rank() + 2 * states; }  // of dt, B and C

  std::vector<Shape> narrow_shapes() const {
    return {{2 * channels, outer},
            {outer, channels},
            {sets, rows(), channels},
            {sets, channels, padded_rank()},
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
    return view(dt_B_C, {dt_B_C.size(0), padded_rank(), tokens()},
                {rows() * tokens(), tokens(), 1});
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
                (padded_rank() + which * states) * tokens());
  }
  Tensor per_channel(const Tensor& t) const {
    return view(t, {directions, channels}, {sets == 1 ? 0 : channels, 1});
  }

  Convolution convolution(const Tensor& x, const Packed& packed, const Flags& reverse) const {
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

void pack(const Mixer& mixer, const Parameters& p, const Packed& packed, void* stream) {
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
    Conversion x_proj = conversion(p.x_proj[k], select(packed.x_proj, k));
    x_proj.rows = int(mixer.rows()), x_proj.zero_rows = int(mixer.padding());
    x_proj.columns = x_proj.from_row = int(mixer.channels);
    add(all, x_proj);
    Conversion dt_proj = conversion(p.dt_proj[k], select(packed.dt_proj, k));
    dt_proj.rows = int(mixer.channels), dt_proj.columns = int(mixer.padded_rank());
    dt_proj.zero_columns = int(mixer.padding()), dt_proj.from_row = int(mixer.rank);
    add(all, dt_proj);
    add(all, conversion(p.D[k], select(packed.D, k)));
    add(all, conversion(p.dt_bias[k], select(packed.dt_bias, k)));
    add(all, conversion(p.conv[k], select(packed.conv, k)));
    const Tensor conv_bias = select(packed.conv_bias, k);
    Conversion bias = conversion(mixer.has_conv_bias ? p.conv_bias[k] : conv_bias, conv_bias);
    if (!mixer.has_conv_bias) bias.from = nullptr;
    add(all, bias);
  }
  convert(all, stream);
}

// u of the convolution, and delta of u and dt_B_C; forward fills dt_B_C in between.
Tensor convolve_rows(const Mixer& mixer, const Tensor& xz, const Packed& packed,
                     const Flags& reverse, void* stream) {
  Convolution p = mixer.convolution(mixer.half(xz, 0), packed, reverse);
  const Tensor u = new_empty(xz, {mixer.sets, mixer.channels, mixer.tokens()});
  p.u = u.data_ptr();
  convolve(p, stream);
  return u;
}
Tensor step_sizes(const Mixer& mixer, const Tensor& dt_B_C, const Packed& packed) {
  const Tensor delta = new_empty(dt_B_C, {mixer.sets, mixer.channels, mixer.tokens()});
  multiply_into(delta, packed.dt_proj, mixer.steps_of(dt_B_C));
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
  pack(mixer, p, packed, stream);

  const Tensor xz = new_empty(x, {2 * channels, tokens});
  const Tensor x_rows = view(x, {mixer.outer, tokens}, {1, mixer.outer});
  if (in_bias) {
    const Tensor bias = view(packed.in_bias, {2 * channels, tokens}, {1, 0});
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_addmm_out(xz.get(), bias.get(), packed.in_proj.get(),
                                                     x_rows.get(), 1.0, 1.0));
  } else {
    multiply_into(xz, packed.in_proj, x_rows);
  }
  const Tensor u = convolve_rows(mixer, xz, packed, reverse, stream);
  const Tensor dt_B_C = new_empty(x, {mixer.sets, mixer.rows(), tokens});
  multiply_into(dt_B_C, packed.x_proj, u);
  const Tensor delta = step_sizes(mixer, dt_B_C, packed);
  const Tensor y = new_empty(x, {mixer.directions, channels, mixer.batch, mixer.steps});
  const Scan scan(mixer, packed, u, delta, dt_B_C);
  const Tensor edges = std::get<1>(
      scan_into(mixer.per_direction(y, mixer.directions), scan.inputs(packed, method, reverse)));

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

// The gradients of parameters, in their own dtypes, from float32 sums: all in one launch.
class ParameterGradients {
 public:
  // Of a parameter whose gradient is in `source` from an entry on, in rows that are so far apart.
  void add(const Tensor& parameter, const Tensor& source, int64_t offset = 0,
           int64_t source_row = 0) {
    Conversion c = place(parameter);
    c.from = floats_of(source) + offset;
    if (source_row) {
      c.rows = int(parameter.size(0)), c.columns = int(parameter.size(1));
      c.from_row = int(source_row);
    }
    vim_mm::add(all_, c);
  }
  // Of A_log: A is its own derivative by it.
  void add_logarithm(const Tensor& parameter, const Tensor& source, const Tensor& A) {
    Conversion c = place(parameter);
    c.from = floats_of(source), c.factor = floats_of(A), c.function = Conversion::product;
    vim_mm::add(all_, c);
  }
  // Of a parameter that has one already, or an empty tensor of its own where there is none.
  void add_done(const Tensor& gradient) { gradients_.push_back(gradient); }
  Tensors finish(void* stream) {
    convert(all_, stream);
    return std::move(gradients_);
  }

 private:
  Conversion place(const Tensor& parameter) {
    gradients_.push_back(empty_like(parameter));
    Conversion c = conversion(parameter, gradients_.back());
    c.from_storage = Storage::float32;  // that of the sums, whatever the parameter's
    return c;
  }

  Conversions all_;
  Tensors gradients_;
};

Tensors mixer_bwd(const Tensor& grad_out, const Tensor& x, const Tensors& kept,
                  const Tensor& in_proj, const MaybeTensor& in_bias, const Tensor& out_proj,
                  const MaybeTensor& out_bias, const Tensors& conv, const Tensors& conv_bias,
                  const Tensors& x_proj, const Tensors& dt_proj, const Tensors& dt_bias,
                  const Tensors& D, const Tensors& A_log, int64_t method, const Flags& reverse,
                  double scale) {
  const Parameters p{in_proj, in_bias, out_proj, out_bias, conv, conv_bias,
                     x_proj,  dt_proj, dt_bias,  D,        A_log};
  const Mixer mixer(x, p, reverse);
  const DeviceGuard guard(x.get_device_index());
  const int64_t tokens = mixer.tokens(), channels = mixer.channels, sets = mixer.sets;
  const int64_t directions = mixer.directions, outer = mixer.outer, batch = mixer.batch;
  const int64_t steps = mixer.steps;
  void* const stream = current_stream(x);
  expect_contiguous(grad_out, "grad_out", x.sizes());
  expect_type(grad_out, "grad_out", {x.scalar_type()});
  STD_TORCH_CHECK(kept.size() == 6, "vim_mm: expected what the mixer's forward kept");
  const Tensor &xz = kept[0], &dt_B_C = kept[1], &edges = kept[2], &sum = kept[3];
  expect_contiguous(xz, "xz", {2 * channels, tokens});
  expect_contiguous(dt_B_C, "dt_B_C", {sets, mixer.rows(), tokens});
  expect_contiguous(sum, "the sum of directions", {channels, batch, steps});
  const Packed packed = mixer.packed(kept[4], kept[5]);
  const auto floats = [&](const Shape& shape) {
    return new_empty(x, {shape.data(), shape.size()}, ScalarType::Float);
  };

  // out_proj and the gate.
  const Tensor grad_rows = contiguous_view(grad_out, {tokens, outer});
  const Tensor grad_gated = new_empty(x, {channels, tokens}), grad_y = empty_like(grad_gated);
  const Tensor grad_xz = empty_like(xz), gated = empty_like(grad_gated);
  multiply_into(grad_gated, transposed(packed.out_proj), transposed(grad_rows));
  const Tensor z = mixer.half(xz, 1), grad_z = mixer.half(grad_xz, 1);
  GateBackward g{};
  g.storage = storage_of(z), g.count = z.numel(), g.scale = static_cast<float>(scale);
  g.grad_out = grad_gated.data_ptr(), g.sum = sum.data_ptr(), g.z = z.data_ptr();
  g.grad_y = grad_y.data_ptr(), g.grad_z = grad_z.data_ptr(), g.out = gated.data_ptr();
  gate_backward(g, stream);
  const Tensor grad_out_proj = floats({outer, channels});
  multiply_into(grad_out_proj, transposed(grad_rows), transposed(gated));

  // The scan, all of whose gradients are per direction.
  const Tensor u = convolve_rows(mixer, xz, packed, reverse, stream);
  const Tensor delta = step_sizes(mixer, dt_B_C, packed);
  Tensor grad_u = new_empty(x, {directions, channels, tokens}), grad_delta = empty_like(grad_u);
  Tensor grad_dt_B_C = new_empty(x, {directions, mixer.rows(), tokens});
  const Tensor grad_A = empty_like(packed.A);
  Tensor grad_D = floats({directions, channels}), grad_dt_bias = floats({directions, channels});
  const Scan scan(mixer, packed, u, delta, dt_B_C);
  const Gradients grads{mixer.per_direction(grad_u, directions),
                        mixer.per_direction(grad_delta, directions),
                        grad_A,
                        mixer.state_matrix(grad_dt_B_C, 0),
                        mixer.state_matrix(grad_dt_B_C, 1),
                        grad_D,
                        grad_D,  // in the place of the gate's, which there is none of
                        grad_dt_bias};
  scan_backward_into(grads, mixer.per_direction(grad_y, 1), std::nullopt, edges,
                     scan.inputs(packed, method, reverse));
  if (sets < directions) {
    for (Tensor* t : {&grad_u, &grad_delta, &grad_dt_B_C, &grad_D, &grad_dt_bias})
      *t = sum_over(*t, 0, true, t->scalar_type());
  }

  // dt_proj, x_proj and the convolution.
  multiply_into(mixer.steps_of(grad_dt_B_C), transposed(packed.dt_proj), grad_delta);
  // One product for all sets of parameters, of which only the blocks where a set meets itself count:
  // sums over so many tokens are faster split, as products are and batches of them are not.
  const int64_t all_rows = sets * mixer.rows(), all_channels = sets * channels;
  const auto flat = [&](const Tensor& t, int64_t count) {
    return contiguous_view(t, {count, tokens});
  };
  const Tensor grad_dt_proj = floats({all_channels, all_rows});
  multiply_into(grad_dt_proj, flat(grad_delta, all_channels), transposed(flat(dt_B_C, all_rows)));
  const Tensor grad_x_proj = floats({all_rows, all_channels});
  multiply_into(grad_x_proj, flat(grad_dt_B_C, all_rows), transposed(flat(u, all_channels)));
  TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_baddbmm_out(
      grad_u.get(), grad_u.get(), transposed(packed.x_proj).get(), grad_dt_B_C.get(), 1.0, 1.0));
  const Tensor grad_conv = floats({sets, channels, mixer.taps});
  const Tensor grad_conv_bias = floats({sets, channels});
  ConvolutionBackward c{};
  c.forward = mixer.convolution(mixer.half(xz, 0), packed, reverse);
  c.grad_u = grad_u.data_ptr();
  c.grad_x = mixer.half(grad_xz, 0).data_ptr(), c.grad_x_row = tokens;
  c.grad_weight = floats_of(grad_conv), c.grad_bias = floats_of(grad_conv_bias);
  convolve_backward(c, stream);

  // in_proj.
  const Tensor grad_in_proj = floats({2 * channels, outer}), grad_x = empty_like(x);
  multiply_into(grad_in_proj, grad_xz, contiguous_view(x, {tokens, outer}));
  multiply_into(contiguous_view(grad_x, {tokens, outer}), transposed(grad_xz), packed.in_proj);

  ParameterGradients result;
  // A bias' gradient lives here until it is converted.
  MaybeTensor in_sum, out_sum;
  if (in_bias) in_sum = sum_over(grad_xz, 1, false, ScalarType::Float);
  if (out_bias) out_sum = sum_over(grad_rows, 0, false, ScalarType::Float);
  const auto add_matrix = [&](const Tensor& parameter, const Tensor& gradient) {
    if (parameter.scalar_type() == ScalarType::Float) result.add_done(gradient);
    else result.add(parameter, gradient);
  };
  result.add_done(grad_x);
  add_matrix(in_proj, grad_in_proj);
  if (in_bias) result.add(*in_bias, *in_sum);
  else result.add_done(new_empty(x, {0}));
  add_matrix(out_proj, grad_out_proj);
  if (out_bias) result.add(*out_bias, *out_sum);
  else result.add_done(new_empty(x, {0}));
  const auto add_each = [&](const Tensors& parameters, const Tensor& stack) {
    for (size_t k = 0; k < parameters.size(); ++k)
      result.add(parameters[k], select(stack, int64_t(k)));
  };
  add_each(conv, grad_conv);
  add_each(conv_bias, grad_conv_bias);
  for (int64_t k = 0; k < sets; ++k) {
    const int64_t row = k * mixer.rows() + mixer.padding();
    result.add(x_proj[k], grad_x_proj, row * all_channels + k * channels, all_channels);
  }
  for (int64_t k = 0; k < sets; ++k) {
    const int64_t column = k * mixer.rows() + mixer.padding();
    result.add(dt_proj[k], grad_dt_proj, k * channels * all_rows + column, all_rows);
  }
  add_each(dt_bias, grad_dt_bias);
  add_each(D, grad_D);
  for (int64_t k = 0; k < directions; ++k)
    result.add_logarithm(A_log[k], select(grad_A, k), select(packed.A, k));
  return result.finish(stream);
}

}  // namespace
}  // namespace vim_mm

STABLE_TORCH_LIBRARY_IMPL(vim_mm, CUDA, m) {
  m.impl("mixer_fwd", TORCH_BOX(&vim_mm::mixer_fwd));
  m.impl("mixer_bwd", TORCH_BOX(&vim_mm::mixer_bwd));
}
