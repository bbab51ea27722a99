// Launches the kernels of one method. Each scan_*.cu instantiates this for its method, so that
// methods compile side by side.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backward.cuh"
#include "errors.h"
#include "forward.cuh"
#include "methods.h"
#include "shapes.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

template <class Arguments>
void launch(void (*kernel)(Arguments), int64_t blocks, int threads, size_t shared_bytes,
            const Arguments& arguments, void* stream) {
  if (blocks == 0) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared_bytes)));
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes,
           static_cast<cudaStream_t>(stream)>>>(arguments);
  check(cudaGetLastError());
}

template <class Method>
void MethodKernels<Method>::forward(const ForwardArguments& p, void* stream) {
  dispatch_element(p.scan, [&](auto e) {
    using E = decltype(e);
    choose_forward<E>(p.scan, [&](auto shape, auto tiled) {
      using Block = decltype(shape);
      const int64_t sets = (p.scan.channels + Block::channels - 1) / Block::channels;
      launch(forward_kernel<Method, E, Block, decltype(tiled)::value>,
             p.scan.batch * p.scan.groups * sets, Block::threads, 2 * sizeof(ForwardTile<E, Block>),
             p, stream);
    });
  });
}

template <class Method>
void MethodKernels<Method>::backward(const BackwardArguments& p, void* stream) {
  dispatch_element(p.scan, [&](auto e) {
    using E = decltype(e);
    choose_backward<E>(p.scan, [&](auto shape, auto tiled) {
      using Block = decltype(shape);
      launch(backward_kernel<Method, E, Block, decltype(tiled)::value>,
             p.scan.batch * p.scan.groups * p.slabs, Block::threads,
             sizeof(BackwardShared<E, Block>), p, stream);
    });
  });
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
