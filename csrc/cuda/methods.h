// The kernels of each method, instantiated in scan_*.cu.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tile.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

template <class Method>
struct MethodKernels {
  static void forward(const ForwardArguments&, void* stream);
  static void backward(const BackwardArguments&, void* stream);
};

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
