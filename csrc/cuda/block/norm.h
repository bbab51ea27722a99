// Residual add and RMSNorm of the CUDA operators; shapes and letters as in ops.cpp.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "../ops/tensors.h"
#include "block.h"

namespace vim_mm {

// Checks the tensors and returns the kernel's arguments. The caller adds the outputs.
AddRmsNorm norm_arguments(const Tensor& residual, const std::optional<Tensor>& update,
                          const Tensor& weight, double eps, ScalarType dtype);
// Likewise, where `dtype` is that of grad_normed.
AddRmsNormBackward norm_backward_arguments(const Tensor& sum, const Tensor& weight,
                                           ScalarType dtype);
// How many floats `grad_weight` needs, which is scratch memory.
int64_t count_parts(const AddRmsNormBackward& p);
// Runs the kernel and sums its partial sums into the gradient of weight.
void norm_backward_into(const AddRmsNormBackward& p, const Tensor& grad_weight, void* stream);

}  // namespace vim_mm
