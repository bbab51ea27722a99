// SPDX-License-Identifier: Apache-2.0
#include "mixer_layout.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <string>
#include <tuple>

#include "../../methods/discretization.h"

namespace vim_mm {

Mixer::Mixer(std::array<int64_t, 3> x, int64_t parameters, const InnerSizes& inner, ScalarType type,
             bool normed, int64_t method, int64_t directions)
    : batch(x[0]), steps(x[1]), outer(x[2]), channels(inner.channels), states(inner.states),
      rank(inner.rank), taps(inner.taps), sets(int(parameters - kSingle - directions) / kEach),
      directions(int(directions)), method(int(method)), normed(normed), type(type) {
  STD_TORCH_CHECK(directions >= 1 && directions <= kMaxDirections &&
                      (sets == 1 || sets == directions) && parameters == this->parameters(),
                  "vim_mm: expected 1 or 2 directions, and one set of parameters or one for each");
  STD_TORCH_CHECK(taps >= 1 && taps <= kMaxTaps,
                  "vim_mm: expected convolutions [H, 1, W], W <= ", kMaxTaps);
  STD_TORCH_CHECK(method >= 0 && method < kMethods, "vim_mm: unknown discretization number ",
                  method);
  STD_TORCH_CHECK(
      type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16,
      "vim_mm: expected activations of float32, float16 or bfloat16");
  constexpr bool optional = true;
  kinds = {{{"in_proj", 1, 2, {2 * channels, outer}},
            {"in_bias", 1, 1, {2 * channels}, optional},
            {"out_proj", 1, 2, {outer, channels}},
            {"out_bias", 1, 1, {outer}, optional},
            {"conv", sets, 3, {channels, 1, taps}},
            {"conv_bias", sets, 1, {channels}, optional},
            {"x_proj", sets, 2, {rows(), channels}},
            {"dt_proj", sets, 2, {channels, rank}},
            {"dt_bias", sets, 1, {channels}},
            {"D", sets, 1, {channels}},
            {"A_log", this->directions, 2, {channels, states}}}};
  for (const ParameterKind& kind : kinds)
    STD_TORCH_CHECK(kind.numel() <= INT32_MAX, "vim_mm: too large a parameter");
}

SavedBuffers::SavedBuffers(const Mixer& m, bool for_backward) {
  const ScalarType narrow = m.type, wide = ScalarType::Float;
  const int64_t outer = m.outer, channels = m.channels, tokens = m.tokens();
  const auto add = [&](Kind kind, ScalarType type, std::initializer_list<int64_t> sizes) {
    parameters[kind] = layout.add(m.kinds[kind].name, type, sizes);
  };
  add(kInProj, narrow, {2 * channels, outer});
  add(kInBias, narrow, {2 * channels});
  add(kOutProj, narrow, {outer, channels});
  add(kOutBias, narrow, {outer});
  add(kConv, wide, {m.sets, channels, m.taps});
  add(kConvBias, wide, {m.sets, channels});
  add(kXProj, narrow, {m.sets, m.rows(), channels});
  add(kDtProj, narrow, {m.sets, m.rank, channels});
  add(kDtBias, wide, {m.sets, channels});
  add(kD, wide, {m.sets, channels});
  parameters[kALog] = layout.add("A", wide, {m.directions, channels, m.states});
  normed = layout.add("normed", narrow, {m.normed ? tokens : 0, outer});
  rstd = layout.add("rstd", wide, {m.normed ? tokens : 0});
  xz = layout.add("xz", narrow, {2, channels, tokens});
  dt_B_C = layout.add("dt_B_C", narrow, {m.sets, m.rows(), tokens});
  // Methods that are not causal have states of both directions of time.
  const int64_t ways = is_causal(m.method) ? 1 : 2, chunks = (m.steps + kChunk - 1) / kChunk;
  edges = layout.add("edges", wide, {ways, m.batch * m.directions * channels, chunks, m.states});
  sum = layout.add("sum", narrow, {for_backward ? channels : 0, tokens});
}

ForwardBuffers::ForwardBuffers(const Mixer& m) {
  const int64_t channels = m.channels, tokens = m.tokens();
  u = layout.add("u", m.type, {m.sets, channels, tokens});
  delta = layout.add("delta", m.type, {m.sets, channels, tokens});
  y = layout.add("y", m.type, {m.directions, channels, tokens});
  last_state =
      layout.add("last_state", ScalarType::Float, {m.batch, m.directions, channels, m.states});
  gated = layout.replace(u, "gated", {channels, tokens});
}

BackwardBuffers::BackwardBuffers(const Mixer& m, const Integers& types) {
  const ScalarType narrow = m.type, wide = ScalarType::Float;
  const int64_t channels = m.channels, rows = m.rows(), tokens = m.tokens();
  const int64_t sets = m.sets, directions = m.directions;
  grad_and_gated = layout.add("grad_and_gated", narrow, {2, channels, tokens});
  grad_u = layout.replace(grad_and_gated, "grad_u", {directions, channels, tokens});
  grad_y = layout.add("grad_y", narrow, {channels, tokens});
  grad_xz = layout.add("grad_xz", narrow, {2, channels, tokens});
  u = layout.add("u", narrow, {sets, channels, tokens});
  delta = layout.add("delta", narrow, {sets, channels, tokens});
  grad_delta = layout.add("grad_delta", narrow, {directions, channels, tokens});
  grad_dt_B_C = layout.add("grad_dt_B_C", narrow, {directions, rows, tokens});
  for (int i = 0; i < kSingle; ++i) {
    const ParameterKind& kind = m.kinds[i];
    const bool converted = types[i] >= 0 && types[i] != int64_t(Storage::float32);
    const int64_t columns = kind.dims == 1 ? 1 : kind.sizes[1];
    singles[i] = layout.add(kind.name, wide, {converted ? kind.sizes[0] : 0, columns});
  }
  conv = layout.add("conv", wide, {sets, channels, m.taps});
  conv_bias = layout.add("conv_bias", wide, {sets, channels});
  x_proj = layout.add("x_proj", wide, {sets * rows, sets * channels});
  dt_proj = layout.add("dt_proj", wide, {sets * channels, sets * rows});
  D = layout.add("D", wide, {directions, channels});
  dt_bias = layout.add("dt_bias", wide, {directions, channels});
  A = layout.add("A", wide, {directions, channels, m.states});
  set = {grad_u, grad_delta, grad_dt_B_C, D, dt_bias};
  if (m.shares()) {
    set.grad_u = layout.add("sum_of_grad_u", narrow, {1, channels, tokens});
    set.grad_delta = layout.add("sum_of_grad_delta", narrow, {1, channels, tokens});
    set.grad_dt_B_C = layout.add("sum_of_grad_dt_B_C", narrow, {1, rows, tokens});
    set.D = layout.add("sum_of_D", wide, {1, channels});
    set.dt_bias = layout.add("sum_of_dt_bias", wide, {1, channels});
  }
  grad_normed = layout.add("grad_normed", narrow, {m.normed ? tokens : 0, m.outer});
  norm_parts =
      layout.add("norm_parts", wide, {m.normed ? rms_norm_backward_blocks(tokens) : 0, m.outer});
}

namespace {

// See ops.cpp.
std::tuple<int64_t, std::string, Integers, Integers, Integers> mixer_workspace(
    std::string part, int64_t batch, int64_t steps, int64_t outer, Integers sizes, Integers types,
    ScalarType dtype, bool normed, int64_t method, int64_t directions) {
  STD_TORCH_CHECK(sizes.size() == 4, "vim_mm: expected H, N, R and W");
  const Mixer mixer({batch, steps, outer}, int64_t(types.size()),
                    {sizes[0], sizes[1], sizes[2], sizes[3]}, dtype, normed, method, directions);
  STD_TORCH_CHECK(part == "saved" || part == "forward" || part == "backward",
                  "vim_mm: a mixer's workspace is saved, forward or backward, not ", part);
  const WorkspaceLayout layout = part == "saved"     ? SavedBuffers(mixer, true).layout
                                 : part == "forward" ? ForwardBuffers(mixer).layout
                                                     : BackwardBuffers(mixer, types).layout;
  std::string names;
  Integers offsets, bytes, replaced;
  for (const Buffer& b : layout.buffers()) {
    names += names.empty() ? b.name : std::string(" ") + b.name;
    offsets.push_back(separate_buffers() ? 0 : b.offset);
    bytes.push_back(b.bytes()), replaced.push_back(b.replaced);
  }
  return {separate_buffers() ? 0 : WorkspaceLayout::kAlignment, names, offsets, bytes, replaced};
}

}  // namespace
}  // namespace vim_mm

STABLE_TORCH_LIBRARY_IMPL(vim_mm, CompositeExplicitAutograd, m) {
  m.impl("mixer_workspace", TORCH_BOX(&vim_mm::mixer_workspace));
}
