// The mixer of a block on CUDA tensors, and the norm before it: backward. Shapes and letters as in
// ops.cpp, buffers in mixer_layout.h.
//
// Part by part from the last: each takes the gradient of what forward's part makes. The convolution and
// the step sizes are computed once more. The gradients of parameters are sums over tokens in float32.
//
// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <array>
#include <iterator>
#include <optional>
#include <vector>

#include "../block/norm.h"
#include "mixer_arguments.h"
#include "products.h"

namespace vim_mm {
namespace {

using torch::stable::accelerator::DeviceGuard;

struct BackwardInputs {
  const Tensor &grad_out, &x;  // x is the sum where there is a norm
  const std::optional<Tensor>&grad_sum, &norm;
  const Tensors& saved;
  const Integers &types, &reverse;  // types of parameters
  bool with_update;
  float scale;
  const std::optional<Tensor>& reset;
};

class Backward {
 public:
  Backward(const Mixer& mixer, const BackwardInputs& inputs)
      : m_(mixer), in_(inputs), s_(mixer, true), b_(mixer, inputs.types),
        saved_(s_.layout, inputs.saved, "what the mixer's forward saved", inputs.x),
        scratch_(b_.layout, inputs.x), arguments_(mixer, s_, saved_, inputs.reverse, inputs.reset),
        stream_(current_stream(inputs.x)) {}

  Tensors run() {
    output_projection_gradients();
    scan_gradients();
    if (m_.shares()) sum_over_directions();
    projection_gradients();
    convolution_gradients();
    input_projection_gradients();
    if (m_.normed) norm_gradients();
    convert_parameter_gradients();
    return results();
  }

 private:
  // Of out_proj, its bias and the gate.
  void output_projection_gradients() {
    const int64_t channels = m_.channels, tokens = m_.tokens();
    const int64_t gated = b_.grad_and_gated.stride(0), z = s_.xz.stride(0);
    const Tensor grad_rows = view(in_.grad_out, {tokens, m_.outer}, {m_.outer, 1});
    const Tensor grad_columns = view(in_.grad_out, {m_.outer, tokens}, {1, m_.outer});
    multiply_into(scratch_.tensor(b_.grad_and_gated, {channels, tokens}, {tokens, 1}),
                  saved_.transposed(s_.parameters[kOutProj]), grad_columns);
    GateBackward g{};
    g.storage = arguments_.storage(), g.count = channels * tokens, g.scale = in_.scale;
    g.grad_out = scratch_.data(b_.grad_and_gated);
    g.sum = saved_.data(s_.sum), g.z = saved_.data(s_.xz, z);
    g.grad_y = scratch_.data(b_.grad_y), g.grad_z = scratch_.data(b_.grad_xz, z);
    g.out = scratch_.data(b_.grad_and_gated, gated);
    gate_backward(g, stream_);
    multiply_into(float_gradient(kOutProj), grad_columns,
                  scratch_.tensor(b_.grad_and_gated, {tokens, channels}, {1, tokens}, gated));
    if (in_.types[kOutBias] >= 0) sum_into(float_gradient(kOutBias), grad_rows, 0, false);
  }

  // Of u and dt_B_C what comes through the scan alone, of dt_B_C therefore its B and C.
  void scan_gradients() {
    void *const u = scratch_.data(b_.u), *const delta = scratch_.data(b_.delta);
    const int64_t channels = m_.channels, rows = m_.rows(), tokens = m_.tokens();
    convolve(arguments_.convolution(u), stream_);
    project_steps(arguments_.step_projection(delta), stream_);
    ScanGradients g;
    g.out = arguments_.activations(scratch_.data(b_.grad_y), 0);
    g.u = arguments_.activations(scratch_.data(b_.grad_u), channels);
    g.delta = arguments_.activations(scratch_.data(b_.grad_delta), channels);
    g.B = arguments_.activations(scratch_.data(b_.grad_dt_B_C, m_.rank * tokens), rows);
    g.C =
        arguments_.activations(scratch_.data(b_.grad_dt_B_C, (m_.rank + m_.states) * tokens), rows);
    g.A = arguments_.floats(scratch_.floats(b_.A), false, m_.states);
    g.D = arguments_.floats(scratch_.floats(b_.D), false);
    g.delta_bias = arguments_.floats(scratch_.floats(b_.dt_bias), false);
    const OwnBounds bounds(in_.reset, m_.batch, m_.steps, in_.x, stream_);
    scan_backward_into(arguments_.scan(u, delta), g, saved_.data(s_.edges), in_.x, stream_, bounds);
  }

  // Where they share parameters and activations. Of dt_B_C, dt comes with the projections.
  void sum_over_directions() {
    const auto add = [&](const Buffer& sum, const Buffer& directions, int64_t first) {
      const int64_t count = sum.size(1) - first;
      sum_into(scratch_.batch(sum, first, count), scratch_.batch(directions, first, count), 0,
               true);
    };
    add(b_.set.grad_u, b_.grad_u, 0), add(b_.set.grad_delta, b_.grad_delta, 0);
    add(b_.set.grad_dt_B_C, b_.grad_dt_B_C, m_.rank);
    sum_into(scratch_.matrix(b_.set.D), scratch_.matrix(b_.D), 0, true);
    sum_into(scratch_.matrix(b_.set.dt_bias), scratch_.matrix(b_.dt_bias), 0, true);
  }

  // One product for all sets of parameters, of which only the blocks where a set meets itself count:
  // sums over so many tokens are faster split, as products are and batches of them are not.
  void projection_gradients() {
    const Buffer &grad_u = b_.set.grad_u, &grad_delta = b_.set.grad_delta;
    const Buffer& grad_dt_B_C = b_.set.grad_dt_B_C;
    multiply_into(scratch_.batch(grad_dt_B_C, 0, m_.rank), saved_.batch(s_.parameters[kDtProj]),
                  scratch_.batch(grad_delta));
    multiply_into(scratch_.matrix(b_.dt_proj), scratch_.matrix(grad_delta),
                  saved_.transposed(s_.dt_B_C));
    multiply_into(scratch_.matrix(b_.x_proj), scratch_.matrix(grad_dt_B_C),
                  scratch_.transposed(b_.u));
    accumulate_product(scratch_.batch(grad_u), saved_.batch_transposed(s_.parameters[kXProj]),
                       scratch_.batch(grad_dt_B_C));
  }

  void convolution_gradients() {
    ConvolutionBackward c{};
    c.forward = arguments_.convolution(nullptr);
    c.grad_u = scratch_.data(b_.set.grad_u);
    c.grad_x = scratch_.data(b_.grad_xz), c.grad_x_row = m_.tokens();
    c.grad_weight = scratch_.floats(b_.conv), c.grad_bias = scratch_.floats(b_.conv_bias);
    convolve_backward(c, stream_);
  }

  // Of in_proj, its bias, and x or what the norm made of it.
  void input_projection_gradients() {
    const int64_t tokens = m_.tokens(), outer = m_.outer;
    const auto matrix_of = [&](const Tensor& t) { return view(t, {tokens, outer}, {outer, 1}); };
    grad_x_ = new_tensor(in_.x);
    multiply_into(float_gradient(kInProj), scratch_.matrix(b_.grad_xz),
                  m_.normed ? saved_.matrix(s_.normed) : matrix_of(in_.x));
    if (in_.types[kInBias] >= 0)
      sum_into(float_gradient(kInBias), scratch_.matrix(b_.grad_xz), 1, false);
    multiply_into(m_.normed ? scratch_.matrix(b_.grad_normed) : matrix_of(grad_x_),
                  scratch_.transposed(b_.grad_xz), saved_.matrix(s_.parameters[kInProj]));
  }

  void norm_gradients() {
    AddRmsNormBackward p = norm_backward_arguments(in_.x, *in_.norm, m_.type);
    p.grad_normed = scratch_.data(b_.grad_normed);
    if (in_.grad_sum) p.grad_sum = in_.grad_sum->data_ptr();
    p.rstd = saved_.floats(s_.rstd);
    p.grad_residual = grad_x_.data_ptr();
    if (in_.with_update) {
      grad_update_ = new_tensor(in_.grad_out);
      p.grad_update = grad_update_.data_ptr();
    }
    p.grad_weight = scratch_.floats(b_.norm_parts);
    grad_norm_ = new_tensor(*in_.norm);
    norm_backward_into(p, grad_norm_, stream_);
  }

  // To the dtypes of the parameters, all that are not yet by one launch.
  void convert_parameter_gradients() {
    Conversions all;
    m_.for_each_parameter([&](Kind kind, int k, int index) {
      if (in_.types[index] < 0 || (kind < kSingle && is_float(kind))) return;
      Conversion& c = all.each[all.count++] = {};
      const int64_t numel = m_.kinds[kind].numel();
      c.to = gradient(kind, index).data_ptr(), c.to_storage = Storage(in_.types[index]);
      c.columns = int(numel);
      // The k-th of sums that follow each other.
      const auto from_each = [&](const Buffer& sums) { c.from = scratch_.data(sums, k * numel); };
      // The k-th block on the diagonal of a product of all sets.
      const auto from_block = [&](const Buffer& product) {
        const auto [rows, columns, _] = m_.kinds[kind].sizes;
        const int64_t from_rows = product.size(0) / m_.sets, from_row = product.size(1);
        c.from = scratch_.data(product, k * (from_rows * from_row + from_row / m_.sets));
        c.rows = int(rows), c.columns = int(columns), c.from_row = int(from_row);
      };
      switch (kind) {
        case kConv: return from_each(b_.conv);
        case kConvBias: return from_each(b_.conv_bias);
        case kXProj: return from_block(b_.x_proj);
        case kDtProj: return from_block(b_.dt_proj);
        case kDtBias: return from_each(b_.set.dt_bias);
        case kD: return from_each(b_.set.D);
        case kALog:  // A is its own derivative by A_log
          from_each(b_.A);
          c.factor = saved_.floats(s_.parameters[kALog], k * numel);
          c.function = Conversion::product;
          return;
        default: return from_each(b_.singles[kind]);
      }
    });
    convert(all, stream_);
  }

  Tensors results() const {
    const auto none = [&] { return new_tensor(in_.x, {0}, m_.type); };
    Tensors results{grad_x_, in_.with_update ? grad_update_ : none(),
                    m_.normed ? grad_norm_ : none()};
    for (int i = 0; i < m_.parameters(); ++i)
      results.push_back(gradients_[i] ? *gradients_[i] : none());
    return results;
  }

  bool is_float(Kind single) const { return in_.types[single] == int64_t(Storage::float32); }
  // What a product writes of a parameter that there is once: where it is float32 itself, the result.
  Tensor float_gradient(Kind single) {
    if (is_float(single)) return gradient(single, single);
    const Buffer& b = b_.singles[single];
    if (m_.kinds[single].dims == 1) return scratch_.tensor(b, {b.numel()}, {1});
    return scratch_.matrix(b);
  }
  // Made when first asked for.
  const Tensor& gradient(Kind kind, int index) {
    const ParameterKind& p = m_.kinds[kind];
    std::optional<Tensor>& g = gradients_[index];
    if (!g) {
      const Integers sizes(p.sizes.begin(), p.sizes.begin() + p.dims);
      g = new_tensor(in_.x, sizes, kTypes[in_.types[index]]);
    }
    return *g;
  }

  const Mixer& m_;
  const BackwardInputs& in_;
  const SavedBuffers s_;
  const BackwardBuffers b_;
  const Workspace saved_, scratch_;
  const MixerArguments arguments_;
  void* const stream_;
  std::array<std::optional<Tensor>, kMaxParameters> gradients_;
  Tensor grad_x_, grad_update_, grad_norm_;
};

Tensors mixer_bwd(const Tensor& grad_out, const std::optional<Tensor>& grad_sum, const Tensor& x,
                  const std::optional<Tensor>& norm, const Tensors& saved, const Integers& sizes,
                  const Integers& types, bool with_update, int64_t method, const Integers& reverse,
                  double scale, const std::optional<Tensor>& reset) {
  expect_tokens(x, "x");
  expect_reset(reset, x);
  expect_tokens(grad_out, "grad_out");
  expect_contiguous(grad_out, "grad_out", x.sizes());
  if (grad_sum) {
    expect_contiguous(*grad_sum, "grad_sum", x.sizes());
    expect_type(*grad_sum, "grad_sum", {x.scalar_type()});
  }
  if (!norm) {
    STD_TORCH_CHECK(!grad_sum && !with_update, "vim_mm: an update without a norm");
    expect_type(grad_out, "grad_out", {x.scalar_type()});
  }
  STD_TORCH_CHECK(sizes.size() == 4, "vim_mm: expected H, N, R and W");
  const Mixer mixer({x.size(0), x.size(1), x.size(2)}, int64_t(types.size()),
                    {sizes[0], sizes[1], sizes[2], sizes[3]}, grad_out.scalar_type(),
                    norm.has_value(), method, int64_t(reverse.size()));
  mixer.for_each_parameter([&](Kind kind, int, int index) {
    STD_TORCH_CHECK(types[index] >= (mixer.kinds[kind].optional ? -1 : 0) &&
                        types[index] < int64_t(std::size(kTypes)),
                    "vim_mm: unknown dtype of ", mixer.kinds[kind].name);
  });
  expect_device(grad_out, "grad_out", x);
  if (grad_sum) expect_device(*grad_sum, "grad_sum", x);
  const DeviceGuard guard(x.get_device_index());
  const BackwardInputs inputs{
      grad_out, x, grad_sum, norm, saved, types, reverse, with_update, static_cast<float>(scale),
      reset};
  return Backward(mixer, inputs).run();
}

}  // namespace
}  // namespace vim_mm

STABLE_TORCH_LIBRARY_IMPL(vim_mm, CUDA, m) { m.impl("mixer_bwd", TORCH_BOX(&vim_mm::mixer_bwd)); }
