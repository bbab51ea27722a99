// The arguments of the scan operators as every backend takes them, and the checks of their shapes.
// Letters as in ops.cpp.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "discretization.h"

namespace vim_mm {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline bool is_complex(const Tensor& t) {
  return t.scalar_type() == ScalarType::ComplexFloat ||
         t.scalar_type() == ScalarType::ComplexDouble;
}

struct Inputs {
  const Tensor &u, &delta, &A, &B, &C;
  const std::optional<Tensor>&D, &z, &delta_bias;
  bool delta_softplus;
  int64_t method;
  const std::vector<int64_t>& reverse;
};

struct Sizes {
  int64_t batch, groups, channels, steps, states;  // B, G, H, L, N

  explicit Sizes(const Inputs& in) {
    STD_TORCH_CHECK(in.u.dim() == 4 && in.A.dim() == 3,
                    "vim_mm: expected u [B, G, H, L] and A [G, H, N]");
    batch = in.u.size(0), groups = in.u.size(1), channels = in.u.size(2), steps = in.u.size(3);
    states = in.A.size(2);
    const std::vector<int64_t> bghl{batch, groups, channels, steps}, gh{groups, channels};
    const auto expect = [&](const Tensor& t, const char* name, const std::vector<int64_t>& sizes) {
      const auto given = t.sizes();
      STD_TORCH_CHECK(
          given.size() == sizes.size() && std::equal(sizes.begin(), sizes.end(), given.begin()),
          "vim_mm: wrong shape of ", name);
      STD_TORCH_CHECK(t.device() == in.u.device(), "vim_mm: expected ", name, " where u is");
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
    STD_TORCH_CHECK(int64_t(in.reverse.size()) == groups,
                    "vim_mm: expected one reverse flag per group");
    STD_TORCH_CHECK(in.method >= 0 && in.method < kMethods,
                    "vim_mm: unknown discretization number ", in.method);
  }

  int64_t rows() const { return batch * groups * channels; }
};

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

}  // namespace vim_mm
