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

// So long that all warps of a block that wait have read its counter, which may become a state, before the
// first of any is done.
constexpr int64_t kFewestChunks = 32;

// With one to one and a half blocks per multiprocessor, those that share one take half as long again
// as those that are alone. So the last blocks, one of each pair, stop half way (of poly, half way back),
// and as many extra blocks go on from there on multiprocessors that have room. Blocks start in the order
// of their index: who waits has started after the one it waits for, and cannot keep it from starting.
template <class Shape>
void plan_relief(ForwardArguments& p, int64_t blocks, size_t shared_bytes, void* stream) {
  constexpr int64_t unit = 2 * Shape::stages;  // that many windows leave barriers as they were
  static_assert(kFewestChunks / 4 > Shape::stages, "warps are at most so many windows apart");
  const ScanArguments& scan = p.scan;
  const int64_t processors = device_attribute(cudaDevAttrMultiProcessorCount);
  const int64_t pairs = blocks - processors;
  if (p.chunks < kFewestChunks || pairs <= 0 || 2 * pairs > processors ||
      2 * int64_t(shared_bytes) > device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor))
    return;
  p.relief.blocks = int(pairs);
  p.relief.chunk = int((p.chunks / 2 + unit / 2) / unit * unit);
  if (p.relief.counts && pairs <= kMaxRelieved) return;
  // What will be the last state of a block's first row counts warps that have stopped until then.
  p.relief.counts = nullptr;
  const int64_t sets = blocks / (scan.batch * scan.groups), first = blocks - pairs;
  const int64_t row = first / sets * scan.channels + first % sets * Shape::channels;
  check(cudaMemsetAsync(static_cast<float*>(p.last_state) + row * scan.states, 0,
                        (rows_of(scan) - row) * scan.states * sizeof(float),
                        static_cast<cudaStream_t>(stream)));
}

// Calls f with an object of the type of a state and of the block, and the layout.
template <class Method, class F>
void choose_kernel(const ForwardArguments& p, const F& f) {
  dispatch_layout(p.scan, layout_of(p.scan, {p.out}), [&](auto e, auto layout) {
    choose_forward<Method, layout()>(p.scan, [&](auto shape) { f(e, shape, layout); });
  });
}

template <class Method>
BetweenWays ScanOf<Method>::count_between_ways(const ForwardArguments& p) {
  BetweenWays count{};
  choose_kernel<Method>(p, [&](auto, auto shape, auto) {
    using Block = decltype(shape);
    if constexpr (Block::sequential && !Method::causal)
      count = {blocks_of<Block>(p.scan) * p.chunks * (Block::channels * kChunk),
               rows_of(p.scan) * p.chunks * kPieces * p.scan.states};
  });
  return count;
}

template <class Method>
void ScanOf<Method>::scan_forward(const ForwardArguments& p, void* stream) {
  const ScanArguments& scan = p.scan;
  choose_kernel<Method>(p, [&](auto e, auto shape, auto layout) {
    using E = std::decay_t<decltype(e)>;  // else nvcc hands the host compiler a reference
    using Block = decltype(shape);
    const int64_t blocks = blocks_of<Block>(scan);
    if constexpr (Block::sequential) {
      constexpr size_t bytes = sizeof(ForwardShared<Block, layout()>);
      ForwardArguments arguments = p;
      if constexpr (Block::straight) plan_relief<Block>(arguments, blocks, bytes, stream);
      // What is relieved is chosen by where blocks go when all multiprocessors are free.
      launch(forward_kernel<Method, Block, layout()>,
             {grid_of(blocks + arguments.relief.blocks), Block::all_threads, bytes},
             arguments.relief.blocks > 0 ? Begin::in_turn : Begin::early, stream, arguments);
    } else {
      if constexpr (!Method::causal) {
        if (scan.steps > 0)
          launch_edges<Method, false>({scan, {}, {}, p.other_edges, nullptr, p.chunks}, stream);
      }
      launch(general_forward_kernel<Method, E, Block>,
             {grid_of(blocks), Block::threads,
              sizeof(GeneralForwardShared<E, Block>) +
                  CarriedStates<E, Block, layout()>::bytes(scan.states)},
             Begin::early, stream, p);
    }
  });
}

}  // namespace vim_mm
