// Launches the kernels of one method. Each scan_*.cu instantiates this for its method, so that
// methods compile side by side.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backward.cuh"
#include "edges.cuh"
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

template <class Shape>
int64_t blocks_of(const ScanArguments& scan) {
  return scan.batch * scan.groups * ((scan.channels + Shape::channels - 1) / Shape::channels);
}

template <class Method, bool Adjoint, bool Ascending>
void launch_edges(const EdgesArguments& p, void* stream) {
  const View& driving = Adjoint ? p.grad_out : p.scan.u;
  dispatch_layout(p.scan, layout_of(p.scan, {driving}), [&](auto e, auto layout) {
    using E = decltype(e);
    choose_edges<layout()>(p.scan, [&](auto shape) {
      using Block = decltype(shape);
      launch(edges_kernel<Method, E, Block, layout(), Adjoint, Ascending>,
             blocks_of<Block>(p.scan), Block::threads,
             sizeof(EdgesShared<E, Block>) +
                 CarriedStates<E, Block, layout()>::bytes(p.scan.states),
             p, stream);
    });
  });
}

template <class Method>
void MethodKernels<Method>::forward(const ForwardArguments& p, void* stream) {
  if constexpr (!Method::causal)
    launch_edges<Method, false, false>({p.scan, {}, {}, p.other_edges, p.chunks}, stream);
  dispatch_layout(p.scan, layout_of(p.scan, {p.out}), [&](auto e, auto layout) {
    using E = decltype(e);
    choose_forward<Method, layout()>(p.scan, [&](auto shape) {
      using Block = decltype(shape);
      launch(forward_kernel<Method, E, Block, layout()>, blocks_of<Block>(p.scan), Block::threads,
             sizeof(ForwardShared<E, Block>) +
                 CarriedStates<E, Block, layout()>::bytes(p.scan.states),
             p, stream);
    });
  });
}

template <class Method>
void MethodKernels<Method>::backward(const BackwardArguments& p, void* stream) {
  const int64_t all = p.scan.batch * p.scan.groups * p.scan.channels * p.chunks * p.scan.states;
  launch_edges<Method, true, false>(
      {p.scan, p.grad_out, p.grad_last_state, p.grad_edges, p.chunks}, stream);
  const View& grad_z = p.scan.gated ? p.grad_z : p.grad_u;
  const Layout layout = layout_of(p.scan, {p.grad_out, p.grad_u, p.grad_delta, grad_z});
  dispatch_layout(p.scan, layout, [&](auto e, auto layout) {
    using E = decltype(e);
    if constexpr (!Method::causal)
      launch_edges<Method, true, true>(
          {p.scan, p.grad_out, {}, static_cast<E*>(p.grad_edges) + all, p.chunks}, stream);
    choose_backward<layout()>([&](auto shape) {
      using Block = decltype(shape);
      launch(backward_kernel<Method, E, Block, layout()>,
             p.scan.batch * p.scan.groups * p.chunks * p.slabs, Block::threads,
             sizeof(BackwardShared<E, Block>), p, stream);
    });
  });
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
