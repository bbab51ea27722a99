// The mixer of a block on CUDA tensors, and the norm before it: forward. Shapes and letters as in
// ops.cpp, buffers in mixer_layout.h.
//
// Everything between in_proj and out_proj is rows of channels, time contiguous: nothing is
// transposed. A convolution, projections and scans of all directions are one launch each.
//
// What a layer takes of the CPU decides how fast it trains. So memory comes in few allocations, kernels
// get addresses, and tensors are made only for torch's matrix products.
//
// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "../block/norm.h"
#include "mixer_arguments.h"
#include "products.h"

namespace vim_mm {
namespace {

using torch::stable::accelerator::DeviceGuard;
using MaybeTensors = std::vector<std::optional<Tensor>>;

InnerSizes sizes_of(const MaybeTensors& parameters) {
  STD_TORCH_CHECK(parameters.size() > kSingle + kEach, "vim_mm: wrong number of parameters");
  const auto get = [](const std::optional<Tensor>& t, const char* name,
                      int64_t dims) -> const Tensor& {
    STD_TORCH_CHECK(t && t->dim() == dims, "vim_mm: wrong shape of ", name);
    return *t;
  };
  const Tensor& A_log = get(parameters.back(), "A_log", 2);
  return {A_log.size(0), A_log.size(1), get(parameters[kDtProj], "dt_proj", 2).size(1),
          get(parameters[kConv], "conv", 3).size(2)};
}

struct ForwardInputs {
  const Tensor& x;  // the residual stream where there is a norm
  const std::optional<Tensor>&update, &norm;
  double eps;
  const MaybeTensors& parameters;
  const Integers& reverse;
  float scale;
  const std::optional<Tensor>& reset;
};

class Forward {
 public:
  Forward(const Mixer& mixer, const ForwardInputs& inputs, bool for_backward)
      : m_(mixer), in_(inputs), for_backward_(for_backward), s_(mixer, for_backward), f_(mixer),
        saved_(s_.layout, inputs.x), scratch_(f_.layout, inputs.x),
        arguments_(mixer, s_, saved_, inputs.reverse, inputs.reset),
        stream_(current_stream(inputs.x)) {}

  std::tuple<Tensor, Tensor, Tensors> run() {
    normalize_and_convert_parameters();
    project_input();
    convolve_input();
    project_to_dt_B_C();
    project_to_delta();
    scan();
    gate_scan_output();
    project_output();
    return {out_, sum_, for_backward_ ? saved_.memory() : Tensors()};
  }

 private:
  // One launch for both, or the latter alone.
  void normalize_and_convert_parameters() {
    sum_ = in_.update ? new_tensor(in_.x) : new_tensor(in_.x, {0}, in_.x.scalar_type());
    if (!in_.norm) return convert(conversions(), stream_);
    AddRmsNorm p = norm_arguments(in_.x, in_.update, *in_.norm, in_.eps, m_.type);
    p.normed = saved_.data(s_.normed), p.rstd = saved_.floats(s_.rstd);
    if (in_.update) p.sum = sum_.data_ptr();
    add_rms_norm(p, conversions(), stream_);
  }

  void project_input() {
    const int64_t rows = 2 * m_.channels, tokens = m_.tokens(), outer = m_.outer;
    std::optional<Tensor> bias;
    if (in_.parameters[kInBias])
      bias = saved_.tensor(s_.parameters[kInBias], {rows, tokens}, {1, 0});
    multiply_add_into(
        saved_.matrix(s_.xz), bias, saved_.matrix(s_.parameters[kInProj]),
        in_.norm ? saved_.transposed(s_.normed) : view(in_.x, {outer, tokens}, {1, outer}));
  }

  void convolve_input() { convolve(arguments_.convolution(scratch_.data(f_.u)), stream_); }

  void project_to_dt_B_C() {
    multiply_into(saved_.batch(s_.dt_B_C), saved_.batch(s_.parameters[kXProj]),
                  scratch_.batch(f_.u));
  }

  void project_to_delta() {
    project_steps(arguments_.step_projection(scratch_.data(f_.delta)), stream_);
  }

  void scan() {
    const OwnBounds bounds(in_.reset, m_.batch, m_.steps, in_.x, stream_);
    scan_into(arguments_.scan(scratch_.data(f_.u), scratch_.data(f_.delta)),
              arguments_.activations(scratch_.data(f_.y), m_.channels), saved_.data(s_.edges),
              scratch_.data(f_.last_state), in_.x, stream_, bounds);
  }

  void gate_scan_output() {
    Gate g{};
    g.storage = arguments_.storage(), g.count = m_.channels * m_.tokens();
    g.scale = in_.scale, g.directions = m_.directions;
    g.y = scratch_.data(f_.y), g.z = saved_.data(s_.xz, s_.xz.stride(0));
    if (for_backward_) g.sum = saved_.data(s_.sum);
    g.out = scratch_.data(f_.gated);
    gate(g, stream_);
  }

  void project_output() {
    const int64_t tokens = m_.tokens(), outer = m_.outer;
    std::optional<Tensor> bias;
    if (in_.parameters[kOutBias])
      bias = saved_.tensor(s_.parameters[kOutBias], {tokens, outer}, {0, 1});
    out_ = new_tensor(in_.x, in_.x.sizes(), m_.type);
    multiply_add_into(view(out_, {tokens, outer}, {outer, 1}), bias, scratch_.transposed(f_.gated),
                      saved_.transposed(s_.parameters[kOutProj]));
  }

  // What is saved of the parameters.
  Conversions conversions() const {
    Conversions all;
    m_.for_each_parameter([&](Kind kind, int k, int index) {
      const ParameterKind& expected = m_.kinds[kind];
      const Buffer& to = s_.parameters[kind];
      const std::optional<Tensor>& t = in_.parameters[index];
      STD_TORCH_CHECK(t || expected.optional, "vim_mm: expected ", expected.name);
      if (!t && kind < kSingle)
        return;  // the products do without that bias, the convolution takes zeros
      Conversion& c = all.each[all.count++] = {};
      if (t) {
        check_parameter(*t, expected);
        c.from = t->data_ptr(), c.from_storage = storage_of(*t);
      }
      c.to = saved_.data(to, k * expected.numel()), c.to_storage = storage_of(to.type);
      c.columns = int(expected.numel());
      if (kind == kALog) {
        c.function = Conversion::negative_exp;
      } else if (kind == kDtProj) {  // transposed
        c.rows = int(m_.rank), c.columns = int(m_.channels);
        c.from_row = 1, c.from_column = int(m_.rank);
      }
    });
    return all;
  }
  void check_parameter(const Tensor& t, const ParameterKind& expected) const {
    const auto sizes = t.sizes();
    STD_TORCH_CHECK(sizes.size() == size_t(expected.dims) &&
                        std::equal(sizes.begin(), sizes.end(), expected.sizes.begin()),
                    "vim_mm: wrong shape of ", expected.name);
    STD_TORCH_CHECK(t.is_contiguous(), "vim_mm: expected ", expected.name, " contiguous");
    expect_device(t, expected.name, in_.x);
    expect_type(t, expected.name,
                {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16, ScalarType::Double});
  }

  const Mixer& m_;
  const ForwardInputs& in_;
  const bool for_backward_;
  const SavedBuffers s_;
  const ForwardBuffers f_;
  const Workspace saved_, scratch_;
  const MixerArguments arguments_;
  void* const stream_;
  Tensor out_, sum_;
};

std::tuple<Tensor, Tensor, Tensors> mixer_fwd(const Tensor& x, const std::optional<Tensor>& update,
                                              const std::optional<Tensor>& norm, double eps,
                                              ScalarType dtype, const MaybeTensors& parameters,
                                              int64_t method, const Integers& reverse, double scale,
                                              bool keep, const std::optional<Tensor>& reset) {
  expect_tokens(x, "x");
  expect_reset(reset, x);
  if (!norm) {
    STD_TORCH_CHECK(!update, "vim_mm: an update without a norm");
    expect_type(x, "x", {dtype});
  }
  const Mixer mixer({x.size(0), x.size(1), x.size(2)}, int64_t(parameters.size()),
                    sizes_of(parameters), dtype, norm.has_value(), method, int64_t(reverse.size()));
  const DeviceGuard guard(x.get_device_index());
  const ForwardInputs inputs{
      x, update, norm, eps, parameters, reverse, static_cast<float>(scale), reset};
  return Forward(mixer, inputs, keep).run();
}

}  // namespace
}  // namespace vim_mm

STABLE_TORCH_LIBRARY_IMPL(vim_mm, CUDA, m) { m.impl("mixer_fwd", TORCH_BOX(&vim_mm::mixer_fwd)); }
