// Launches the forward scan.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../common/launch.cuh"
#include "../forward/kernel.cuh"
#include "../general/forward.cuh"
#include "boundary.cuh"
#include "configurations.cuh"
#include "scan_of_method.cuh"

namespace vim_mm {

// Calls f with an object of the type of a state and of the block, the layout, and whether the scan is bounded.
template <class Method, class F>
void choose_kernel(const ForwardArguments& p, const F& f) {
  const bool bounded = p.bounds.any();
  const Layout layout = layout_of<Method>(p.scan, bounded, {p.out});
  dispatch_layout(p.scan, layout, [&](auto e, auto layout) {
    choose_forward<Method, layout()>(p.scan, bounded, [&](auto shape, auto bounded, const Row&) {
      f(e, shape, layout, bounded);
    });
  });
}

template <class Method>
ForwardScratch ScanOf<Method>::count_scratch(const ForwardArguments& p) {
  ForwardScratch count{};
  choose_kernel<Method>(p, [&](auto, auto shape, auto, auto) {
    using Block = decltype(shape);
    if constexpr (Block::sequential) {
      if constexpr (!Method::causal) {
        count.first_sums = blocks_of<Block>(p.scan) * p.chunks * (Block::channels * kChunk);
        count.across = rows_of(p.scan) * p.chunks * kPieces * p.scan.states;
      }
      if constexpr (is_split<Block>) {
        count.step_sums = rows_of(p.scan) * splits_of<Block>(p.scan).count;
        count.ends = count.step_sums * p.scan.states;
      }
    }
  });
  return count;
}

template <class Method>
void ScanOf<Method>::scan_forward(const ForwardArguments& p, void* stream) {
  const ScanArguments& scan = p.scan;
  choose_kernel<Method>(p, [&](auto e, auto shape, auto layout, auto bounded) {
    using E = std::decay_t<decltype(e)>;  // else nvcc hands the host compiler a reference
    using Block = decltype(shape);
    const int64_t blocks = blocks_of<Block>(scan);
    if constexpr (Block::sequential) {
      ForwardArguments q = p;
      if constexpr (is_split<Block>) {
        q.splits = splits_of<Block>(scan);
        launch(split_ends_kernel<Method, SplitEnds, layout()>,
               {grid_of(blocks_of<SplitEnds>(scan) * (q.splits.count - 1)), SplitEnds::threads,
                sizeof(SplitEndsShared<SplitEnds>)},
               stream, q);
      }
      constexpr size_t bytes = sizeof(ForwardShared<Block, layout()>);
      launch(forward_kernel<Method, Block, layout(), bounded()>,
             {grid_of(blocks), Block::all_threads, bytes}, stream, q);
    } else {
      if constexpr (!Method::causal) {
        if (scan.steps > 0)
          launch_edges<Method, false>({scan, {}, {}, p.other_edges, nullptr, p.chunks}, p.bounds,
                                      stream);
      }
      launch(general_forward_kernel<Method, E, Block, bounded()>,
             {grid_of(blocks), Block::threads,
              sizeof(GeneralForwardShared<E, Block>) +
                  CarriedStates<E, Block, layout()>::bytes(scan.states)},
             stream, p);
    }
  });
}

}  // namespace vim_mm
