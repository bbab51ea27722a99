// Launches the scans that keep only what crosses the edges of chunks.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../boundary/segments.cuh"
#include "../boundary/sweep.cuh"
#include "../common/launch.cuh"
#include "configurations.cuh"

namespace vim_mm {

// Without the adjoint always the general kernel: forward asks for that where it does not scan sequentially itself.
template <class Method, bool Adjoint>
void launch_edges(EdgesArguments p, const Bounds& bounds, void* stream) {
  const ScanArguments& scan = p.scan;
  p.cuts = bounds.cuts;
  const auto run = [&](auto e, auto layout) {
    using E = std::decay_t<decltype(e)>;  // else nvcc hands the host compiler a reference
    choose_edges<Method, layout()>(scan, bounds.any(), [&](auto shape, auto bounded, const Row&) {
      using Block = decltype(shape);
      const unsigned grid = grid_of(blocks_of<Block>(scan));
      if constexpr (Block::sequential) {
        if constexpr (is_split<Block>) p.splits = splits_of<Block>(scan);
        launch(sweep_kernel<Method, Block, layout(), bounded()>,
               {grid, Block::all_threads, sizeof(SweepShared<Block, layout()>)}, stream, p);
        if constexpr (is_split<Block>) {
          const int64_t threads = rows_of(scan) * scan.states * (p.splits.count - 1);
          launch(enter_splits_kernel<Method>,
                 {grid_of((threads + kEnterThreads - 1) / kEnterThreads), kEnterThreads, 0}, stream,
                 p);
        }
      } else {
        const LaunchSize size{grid, Block::threads,
                              sizeof(SegmentSweepShared<E, Block>) +
                                  CarriedStates<E, Block, layout()>::bytes(scan.states)};
        launch(segment_sweep_kernel<Method, E, Block, layout(), Adjoint, false, bounded()>, size,
               stream, p);
        if constexpr (Adjoint && !Method::causal) {
          EdgesArguments other = p;
          other.edges = p.other_edges, other.grad_last_state = {}, other.counts = nullptr;
          launch(segment_sweep_kernel<Method, E, Block, layout(), true, true, bounded()>, size,
                 stream, other);
        }
      }
    });
  };
  using std::integral_constant;
  if constexpr (Adjoint)
    dispatch_layout(scan, layout_of<Method>(scan, bounds.any(), {p.grad_out}), run);
  else if (scan.is_complex) run(Complex<float>(), integral_constant<Layout, Layout::any>());
  else run(float(), integral_constant<Layout, Layout::any>());
}

}  // namespace vim_mm
