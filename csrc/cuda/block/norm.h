// Residual add and RMSNorm of the CUDA operators; shapes and letters as in ops.cpp.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "../ops/tensors.h"
#include "block.h"

namespace vim_mm {

// What the kernel takes of these tensors, which are checked; the caller sets what it fills.
AddRmsNorm norm_arguments(const Tensor& residual, const std::optional<Tensor>& update,
                          const Tensor& weight, double eps, ScalarType dtype);
// Likewise, where `dtype` is that of grad_normed.
AddRmsNormBackward norm_backward_arguments(const Tensor& sum, const Tensor& weight,
                                           ScalarType dtype);
// Floats of its scratch memory, which is for `grad_weight`.
int64_t count_parts(const AddRmsNormBackward& p);
// Runs it, and sums what it leaves into the gradient of weight.
void norm_backward_into(const AddRmsNormBackward& p, const Tensor& grad_weight, void* stream);

}  // namespace vim_mm
