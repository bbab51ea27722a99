// A kernel of the block as an operator of its own: on a GPU it is a part of the mixer's. And one kernel that does
// what CUDA forbids.
//
// SPDX-License-Identifier: Apache-2.0
#include "../../csrc/cuda/block/block.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "../../csrc/cuda/common/launch.cuh"
#include "../../csrc/cuda/ops/tensors.h"

namespace vim_mm {
namespace {

// Two warps, of which one reads what the other has written. `apart`: each has a barrier of its own on the way,
// which a GPU may take for one.
void two_warps(float* x, bool apart) {
  wait_for_previous();
  const bool writes = threadIdx.x < 32;
  if (writes) {
    if (threadIdx.x == 0) x[0] = 1.0f;
    if (apart) __syncthreads();
  }
  if (!apart) __syncthreads();
  if (!writes) {
    if (apart) __syncthreads();
    if (threadIdx.x == 32) x[1] = x[0];
  }
}
void run_two_warps(const Tensor& x, bool apart) {
  launch(two_warps, {1, 64}, nullptr, static_cast<float*>(x.data_ptr()), apart);
}

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
  m.def("two_warps(Tensor(a!) x, bool apart) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(vim_mm, CPU, m) {
  m.impl("step_projection", TORCH_BOX(&vim_mm::step_projection));
  m.impl("two_warps", TORCH_BOX(&vim_mm::run_two_warps));
}
