// A kernel of the block as an operator of its own: on a GPU it is a part of the mixer's.
//
// SPDX-License-Identifier: Apache-2.0
#include "../../csrc/cuda/block/block.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "../../csrc/cuda/ops/tensors.h"

namespace vim_mm {
namespace {

// delta [K, H, T] of a parameter [K, H, R] and of dt, the first R rows of [K, .., T].
Tensor step_projection(const Tensor& parameter, const Tensor& rows) {
  StepProjection p{};
  p.storage = storage_of(rows);
  p.sets = int(parameter.size(0)), p.rank = int(parameter.size(2));
  p.channels = parameter.size(1), p.tokens = rows.size(2);
  const Tensor weight = torch::stable::new_empty(rows, {p.sets, p.rank, p.channels});
  const Tensor delta = torch::stable::new_empty(rows, {p.sets, p.channels, p.tokens});
  Conversions all;
  for (int k = 0; k < p.sets; ++k) {
    Conversion c;
    const int64_t offset = k * p.rank * p.channels;
    c.from_storage = storage_of(parameter), c.to_storage = p.storage;
    c.from = static_cast<char*>(parameter.data_ptr()) + offset * parameter.element_size();
    c.to = static_cast<char*>(weight.data_ptr()) + offset * weight.element_size();
    c.rows = p.rank, c.columns = int(p.channels), c.from_row = 1, c.from_column = p.rank;
    all.each[all.count++] = c;
  }
  convert(all, nullptr);
  p.weight = weight.data_ptr(), p.delta = delta.data_ptr();
  p.dt = rows.data_ptr(), p.dt_set = rows.size(1) * p.tokens;
  project_steps(p, nullptr);
  return delta;
}

}  // namespace
}  // namespace vim_mm

STABLE_TORCH_LIBRARY_FRAGMENT(vim_mm, m) {
  m.def("step_projection(Tensor parameter, Tensor rows) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(vim_mm, CPU, m) {
  m.impl("step_projection", TORCH_BOX(&vim_mm::step_projection));
}
