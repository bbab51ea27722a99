// What the kernels that forward and backward both launch take of a mixer's buffers.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../ops/selective_scan.h"
#include "../ops/tensors.h"
#include "../ops/workspace.h"
#include "mixer_layout.h"

namespace vim_mm {

using Tensors = std::vector<Tensor>;

constexpr ScalarType kTypes[] = {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16,
                                 ScalarType::Double};  // by number of Storage

inline void expect_tokens(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.dim() == 3 && t.is_cuda() && t.is_contiguous(), "vim_mm: expected ", name,
                  " [B, L, C], contiguous on CUDA");
  expect_narrow(t, name);
}

// `reset` of a mixer for x [B, L, C].
inline void expect_reset(const std::optional<Tensor>& reset, const Tensor& x) {
  if (!reset) return;
  expect_contiguous(*reset, "reset", {x.size(0), x.size(1)});
  expect_type(*reset, "reset", {ScalarType::Bool});
  expect_device(*reset, "reset", x);
}

class MixerArguments {
 public:
  MixerArguments(const Mixer& mixer, const SavedBuffers& buffers, const Workspace& saved,
                 const Integers& reverse, const std::optional<Tensor>& reset)
      : m_(mixer), b_(buffers), saved_(saved), reverse_(reverse),
        reset_(reset ? static_cast<const bool*>(reset->data_ptr()) : nullptr),
        storage_(storage_of(mixer.type)) {}

  // Rows of activations as the scan reads or writes them: time contiguous, those of a direction after those of
  // the one before, or 0 rows after them where directions share them.
  View activations(void* data, int64_t rows_of_direction) const {
    const int64_t item = bytes_of(m_.type), row = m_.tokens() * item;
    View v;
    v.data = static_cast<char*>(data), v.storage = storage_;
    v.batch = m_.steps * item, v.group = rows_of_direction * row, v.row = row, v.last = item;
    return v;
  }
  // Floats [K, H, columns], or [H, columns] that directions share.
  View floats(float* data, bool shared, int64_t columns = 1) const {
    View v;
    v.data = reinterpret_cast<char*>(data);
    v.group = shared ? 0 : m_.channels * columns * kFloat;
    v.row = columns * kFloat, v.last = kFloat;
    return v;
  }

  Convolution convolution(void* u) const {
    Convolution p{};
    p.storage = storage_;
    p.channels = m_.channels, p.batch = m_.batch, p.steps = m_.steps;
    p.directions = m_.sets, p.taps = int(m_.taps);
    for (int k = 0; k < m_.sets; ++k) p.reverse[k] = reverse_[k] != 0;
    p.weight = saved_.floats(b_.parameters[kConv]),
    p.bias = saved_.floats(b_.parameters[kConvBias]);
    p.x = saved_.data(b_.xz), p.x_row = m_.tokens();
    p.u = u;
    p.reset = reset_;
    return p;
  }
  StepProjection step_projection(void* delta) const {
    StepProjection p{};
    p.storage = storage_;
    p.sets = m_.sets, p.rank = int(m_.rank);
    p.channels = m_.channels, p.tokens = m_.tokens();
    p.weight = saved_.data(b_.parameters[kDtProj]);
    p.dt = saved_.data(b_.dt_B_C), p.dt_set = b_.dt_B_C.stride(0);
    p.delta = delta;
    return p;
  }
  // Without a gate, which comes after the sum over directions.
  ScanArguments scan(void* u, void* delta) const {
    ScanArguments s{};
    s.delta_softplus = true;
    s.batch = m_.batch, s.groups = m_.directions, s.channels = m_.channels;
    s.steps = m_.steps, s.states = m_.states, s.method = m_.method;
    set_directions(s, reverse_);
    const bool shared = m_.shares();
    const auto of_sets = [&](void* data, int64_t rows) {
      return activations(data, shared ? 0 : rows);
    };
    s.u = s.z = of_sets(u, m_.channels);
    s.delta = of_sets(delta, m_.channels);
    s.B = of_sets(saved_.data(b_.dt_B_C, m_.rank * m_.tokens()), m_.rows());
    s.C = of_sets(saved_.data(b_.dt_B_C, (m_.rank + m_.states) * m_.tokens()), m_.rows());
    s.A = floats(saved_.floats(b_.parameters[kALog]), false, m_.states);
    s.D = floats(saved_.floats(b_.parameters[kD]), shared);
    s.delta_bias = floats(saved_.floats(b_.parameters[kDtBias]), shared);
    return s;
  }
  Storage storage() const { return storage_; }

 private:
  const Mixer& m_;
  const SavedBuffers& b_;
  const Workspace& saved_;
  const Integers& reverse_;
  const bool* const reset_;
  const Storage storage_;
};

}  // namespace vim_mm
