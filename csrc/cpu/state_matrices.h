// A, B and C as the kernels of a row read them, and their gradients, summed in one order whatever the
// thread count. Letters as in ops.cpp.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "../arguments.h"
#include "rows.h"

namespace vim_mm {

using torch::stable::empty_like;
using torch::stable::parallel_for;

// B or C as the row kernel reads it: [B, G, L, padded N], or [G, H, padded N] where constant.
template <class E>
class StateMatrix {
 public:
  StateMatrix(const Tensor& t, const Sizes& sizes, int64_t padded)
      : constant_(t.dim() == 3), sizes_(sizes), padded_(padded), data_(elements()) {
    const RowView view(t);
    data_.zero();
    if (constant_) {
      for (int64_t row = 0; row < view.rows(); ++row) view.read(row, data_.data() + row * padded);
      return;
    }
    parallel_for(0, sizes.batch * sizes.groups, 1, [&](int64_t begin, int64_t end) {
      Buffer<E> row(sizes.steps);
      for (int64_t bg = begin; bg < end; ++bg)
        for (int64_t n = 0; n < sizes.states; ++n) {
          view.read(bg * sizes.states + n, row.data());
          E* to = data_.data() + bg * sizes.steps * padded + n;
          for (int64_t t = 0; t < sizes.steps; ++t) to[t * padded] = row.data()[t];
        }
    });
  }

  const E* at(int64_t bg, int64_t gh) const {
    return data_.data() + (constant_ ? gh * padded_ : bg * sizes_.steps * padded_);
  }
  int64_t step() const { return constant_ ? 0 : padded_; }

 private:
  int64_t elements() const {
    return padded_ * (constant_ ? sizes_.groups * sizes_.channels
                                : sizes_.batch * sizes_.groups * sizes_.steps);
  }
  bool constant_;
  Sizes sizes_;
  int64_t padded_;
  Buffer<E> data_;
};

// The gradient of a parameter [G, H(, N)] from one value per batch entry [B, G, H(, padded N)]: of none zeros.
template <class E>
Tensor reduce_parameter(const Tensor& like, const Buffer<E>& per_batch, int64_t batch,
                        int64_t padded) {
  const Tensor out = empty_like(like);
  const RowView view(out);
  Buffer<E> total(view.rows() * padded);
  total.zero();
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t i = 0; i < view.rows() * padded; ++i)
      total.data()[i] = total.data()[i] + per_batch.data()[b * view.rows() * padded + i];
  for (int64_t row = 0; row < view.rows(); ++row) view.write(row, total.data() + row * padded);
  return out;
}

// The gradient of B or C. Channels of a group share it, so they are summed in slabs: a slab is the
// work of one thread at a time, and slabs are added in their order, whatever the thread count.
template <class E>
class StateMatrixGradient {
 public:
  StateMatrixGradient(const Tensor& like, const Sizes& sizes, int64_t padded, int64_t slabs)
      : like_(like), constant_(like.dim() == 3), sizes_(sizes), padded_(padded), slabs_(slabs),
        data_(elements()) {
    data_.zero();
  }

  // [L, padded N] of a slab, or [padded N] of a batch entry and channel where constant.
  E* at(int64_t bg, int64_t slab, int64_t row) const {
    return data_.data() +
           (constant_ ? row * padded_ : (bg * slabs_ + slab) * sizes_.steps * padded_);
  }

  Tensor reduce() const {
    if (constant_) return reduce_parameter(like_, data_, sizes_.batch, padded_);
    const Tensor out = empty_like(like_);
    const RowView view(out);
    parallel_for(0, sizes_.batch * sizes_.groups, 1, [&](int64_t begin, int64_t end) {
      Buffer<E> row(sizes_.steps);
      for (int64_t bg = begin; bg < end; ++bg) {
        E* total = at(bg, 0, 0);
        for (int64_t slab = 1; slab < slabs_; ++slab)
          for (int64_t i = 0; i < sizes_.steps * padded_; ++i)
            total[i] = total[i] + at(bg, slab, 0)[i];
        for (int64_t n = 0; n < sizes_.states; ++n) {
          for (int64_t t = 0; t < sizes_.steps; ++t) row.data()[t] = total[t * padded_ + n];
          view.write(bg * sizes_.states + n, row.data());
        }
      }
    });
    return out;
  }

 private:
  int64_t elements() const {
    return padded_ *
           (constant_ ? sizes_.rows() : sizes_.batch * sizes_.groups * slabs_ * sizes_.steps);
  }
  const Tensor& like_;
  bool constant_;
  Sizes sizes_;
  int64_t padded_, slabs_;
  Buffer<E> data_;
};

// A [G, H, N] in the compute type. The states of the padding repeat the last one: coefficients
// that overflow there and nowhere else would turn the zeros of B and C into NaN.
template <class E>
Buffer<E> read_A(const Tensor& t, int64_t padded) {
  const RowView view(t);
  const int64_t states = view.length();
  Buffer<E> data(view.rows() * padded);
  for (int64_t row = 0; row < view.rows(); ++row) {
    E* to = data.data() + row * padded;
    view.read(row, to);
    std::fill(to + states, to + padded, to[states - 1]);
  }
  return data;
}

}  // namespace vim_mm
