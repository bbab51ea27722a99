// The selective scan on CUDA tensors that its caller allocated; shapes and letters as in ops.cpp.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <tuple>

#include "../arguments.h"

namespace vim_mm {

// Fills `out`; returns the last state and the edges that backward takes. `zeros`: kMaxRelieved words
// on the device, fresh ones for every call, which spare the launch of a memset.
std::tuple<Tensor, Tensor> scan_into(const Tensor& out, const Inputs& in, void* zeros = nullptr);

// Fills the gradients of all inputs that there are.
void scan_backward_into(const Gradients& grads, const std::optional<Tensor>& grad_out,
                        const std::optional<Tensor>& grad_last_state, const Tensor& edges,
                        const Inputs& in);

}  // namespace vim_mm
