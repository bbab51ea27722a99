// The arguments of the scan operators as every backend takes them, and the checks of their shapes, dtypes
// and devices: whoever calls an operator by its name in torch.ops has had none before. Letters as in ops.cpp.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "methods/discretization.h"

namespace vim_mm {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline bool is_complex(const Tensor& t) {
  return t.scalar_type() == ScalarType::ComplexFloat ||
         t.scalar_type() == ScalarType::ComplexDouble;
}

inline void expect_device(const Tensor& t, const char* name, const Tensor& other) {
  STD_TORCH_CHECK(t.device() == other.device(), "vim_mm: expected ", name,
                  " on the device of the others");
}
inline void expect_type(const Tensor& t, const char* name,
                        std::initializer_list<ScalarType> types) {
  STD_TORCH_CHECK(std::find(types.begin(), types.end(), t.scalar_type()) != types.end(),
                  "vim_mm: wrong dtype of ", name);
}
template <class Sizes>
void expect_shape(const Tensor& t, const char* name, const Sizes& sizes) {
  const auto given = t.sizes();
  STD_TORCH_CHECK(
      given.size() == sizes.size() && std::equal(sizes.begin(), sizes.end(), given.begin()),
      "vim_mm: wrong shape of ", name);
}
inline void expect_shape(const Tensor& t, const char* name, std::initializer_list<int64_t> sizes) {
  expect_shape<std::initializer_list<int64_t>>(t, name, sizes);
}
inline void expect_method(int64_t method) {
  STD_TORCH_CHECK(method >= 0 && method < kMethods, "vim_mm: unknown discretization number ",
                  method);
}

constexpr int64_t kMaxStates = 256;  // MAX_STATES of vim_mm/ops/selective_scan.py
inline void expect_states(int64_t states) {
  STD_TORCH_CHECK(states >= 1 && states <= kMaxStates, "vim_mm: expected A with 1 to ", kMaxStates,
                  " states, got ", states);
}

// Whether everything that is counted of so many entries, in bytes and some times over, fits into 64 bits. A
// tensor that is expanded, or empty, has sizes that no memory holds.
inline void expect_countable(std::initializer_list<int64_t> sizes) {
  double entries = 1;  // which does not overflow
  for (const int64_t size : sizes) entries *= double(std::max<int64_t>(size, 1));
  STD_TORCH_CHECK(entries <= double(int64_t(1) << 52),
                  "vim_mm: the sizes of a scan are too large: ", entries, " states over all steps");
}

struct Inputs {
  const Tensor &u, &delta, &A, &B, &C;
  const std::optional<Tensor>&D, &z, &delta_bias, &initial_state, &reset;
  bool delta_softplus;
  int64_t method;
  const std::vector<int64_t>& reverse;
};

// Of the state: the precision of u, complex with A.
inline ScalarType state_type(const Inputs& in) {
  const bool wide = in.u.scalar_type() == ScalarType::Double;
  if (is_complex(in.A)) return wide ? ScalarType::ComplexDouble : ScalarType::ComplexFloat;
  return wide ? ScalarType::Double : ScalarType::Float;
}

// The sizes of a scan whose inputs are as they should be.
struct Sizes {
  int64_t batch, groups, channels, steps, states;  // B, G, H, L, N

  explicit Sizes(const Inputs& in) {
    STD_TORCH_CHECK(in.u.dim() == 4 && in.A.dim() == 3,
                    "vim_mm: expected u [B, G, H, L] and A [G, H, N]");
    expect_types(in);
    batch = in.u.size(0), groups = in.u.size(1), channels = in.u.size(2), steps = in.u.size(3);
    states = in.A.size(2);
    expect_states(states);
    expect_countable({batch, groups, channels, steps, states});
    const std::initializer_list<int64_t> bghl{batch, groups, channels, steps}, gh{groups, channels};
    const auto expect = [&](const Tensor& t, const char* name,
                            std::initializer_list<int64_t> sizes) {
      expect_shape(t, name, sizes);
      expect_device(t, name, in.u);
    };
    expect(in.delta, "delta", bghl);
    expect(in.A, "A", {groups, channels, states});
    for (const auto& [name, t] : {std::pair("B", &in.B), std::pair("C", &in.C)}) {
      if (t->dim() == 3) expect(*t, name, {groups, channels, states});
      else expect(*t, name, {batch, groups, states, steps});
    }
    if (in.D) expect(*in.D, "D", gh);
    if (in.z) expect(*in.z, "z", bghl);
    if (in.delta_bias) expect(*in.delta_bias, "delta_bias", gh);
    if (in.initial_state)
      expect(*in.initial_state, "initial_state", {batch, groups, channels, states});
    if (in.reset) expect(*in.reset, "reset", {batch, steps});
    STD_TORCH_CHECK(int64_t(in.reverse.size()) == groups,
                    "vim_mm: expected one reverse flag per group");
    expect_method(in.method);
    STD_TORCH_CHECK(!in.initial_state || is_causal(in.method),
                    "vim_mm: a method that is not causal takes no initial_state");
  }

  int64_t rows() const { return batch * groups * channels; }

 private:
  static void expect_types(const Inputs& in) {
    const bool wide = in.u.scalar_type() == ScalarType::Double;
    // What varies over batch and time.
    const auto expect_signal = [&](const Tensor& t, const char* name) {
      if (wide) expect_type(t, name, {ScalarType::Double});
      else expect_type(t, name, {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16});
    };
    const auto expect_real = [](const std::optional<Tensor>& t, const char* name) {
      if (!t) return;
      expect_type(*t, name,
                  {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16, ScalarType::Double});
    };
    expect_signal(in.u, "u"), expect_signal(in.delta, "delta");
    if (in.z) expect_signal(*in.z, "z");
    if (!is_complex(in.A)) expect_real(in.A, "A");
    for (const auto& [name, t] : {std::pair("B", &in.B), std::pair("C", &in.C)}) {
      if (is_complex(in.A)) expect_type(*t, name, {state_type(in)});
      else expect_signal(*t, name);
    }
    expect_real(in.D, "D"), expect_real(in.delta_bias, "delta_bias");
    if (in.initial_state) expect_type(*in.initial_state, "initial_state", {state_type(in)});
    if (in.reset) expect_type(*in.reset, "reset", {ScalarType::Bool});
  }
};

// The gradients of out and of last_state, either of which may be missing. Autograd makes them so.
inline void expect_gradients(const Inputs& in, const Sizes& sizes,
                             const std::optional<Tensor>& grad_out,
                             const std::optional<Tensor>& grad_last_state) {
  if (grad_out) {
    expect_shape(*grad_out, "grad_out", in.u.sizes());
    expect_type(*grad_out, "grad_out", {in.u.scalar_type()});
    expect_device(*grad_out, "grad_out", in.u);
  }
  if (grad_last_state) {
    expect_shape(*grad_last_state, "grad_last_state",
                 {sizes.batch, sizes.groups, sizes.channels, sizes.states});
    expect_type(*grad_last_state, "grad_last_state", {state_type(in)});
    expect_device(*grad_last_state, "grad_last_state", in.u);
  }
}

// What `discretize` takes.
inline void expect_discretizable(const Tensor& delta, const Tensor& A, int64_t method) {
  expect_type(delta, "delta", {ScalarType::Float, ScalarType::Double});
  if (delta.scalar_type() == ScalarType::Double)
    expect_type(A, "A", {ScalarType::Double, ScalarType::ComplexDouble});
  else expect_type(A, "A", {ScalarType::Float, ScalarType::ComplexFloat});
  expect_shape(delta, "delta", A.sizes());
  expect_device(delta, "delta", A);
  STD_TORCH_CHECK(delta.is_contiguous() && A.is_contiguous(),
                  "vim_mm: expected contiguous delta and A");
  expect_method(method);
}

// Of all inputs that are differentiable, in their order.
using Gradients =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

}  // namespace vim_mm
