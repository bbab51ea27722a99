// The kernel of the backward scan: a block has a chunk, or a share of its channels.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../common/dependent_launch.cuh"
#include "chunk.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// `Aligned`: quads can be moved at once; with Layout::any it is not asked.
template <class Method, class E, class Shape, Layout layout, bool Aligned, bool Bounded>
__global__ void __launch_bounds__(Shape::threads, Shape::min_blocks)
    backward_kernel(const __grid_constant__ BackwardArguments p) {
  extern __shared__ float4 memory[];
  using Block = BackwardBlock<Method, E, Shape, layout, Aligned, Bounded>;
  let_next_begin();
  Block(p, *reinterpret_cast<typename Block::Shared*>(memory)).run();
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
