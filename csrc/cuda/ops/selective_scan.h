// The selective scan of the CUDA operators, for whoever has taken its tensors apart; shapes and letters
// as in ops.cpp.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "../../arguments.h"
#include "../common/scan_arguments.h"

namespace vim_mm {

// One flag per group.
void set_directions(ScanArguments& scan, const std::vector<int64_t>& reverse);

// Floats of the edges that forward fills for backward.
int64_t count_edges(const ScanArguments& scan);

// What bounds a scan, and the memory of its cuts, for a `reset` [B, L] that there may be.
struct OwnBounds : Bounds {
  std::optional<Tensor> memory;

  OwnBounds(const std::optional<Tensor>& reset, int64_t batch, int64_t steps, const Tensor& like,
            void* stream);
};

// Fills `out`, the edges and the last state, both contiguous floats or complex floats. Takes scratch memory where
// `like` is.
void scan_into(ScanArguments scan, const View& out, void* edges, void* last_state,
               const Tensor& like, void* stream, const Bounds& bounds = {});

// The gradients that come in, each of which may be missing, and those of all inputs there are.
struct ScanGradients {
  View out, last_state;
  View u, delta, A, B, C, D, z, delta_bias;
  void* initial_state = nullptr;  // contiguous
};
// Fills the latter. Takes scratch memory where `like` is.
void scan_backward_into(ScanArguments scan, const ScanGradients& gradients, const void* edges,
                        const Tensor& like, void* stream, const Bounds& bounds = {});

}  // namespace vim_mm
