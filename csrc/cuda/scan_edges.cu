// Launches the scans that keep only what crosses the edges of chunks.
//
// SPDX-License-Identifier: Apache-2.0
#include "edges.cuh"
#include "launch.cuh"

namespace vim_mm {
namespace {

template <class Method, Layout layout, bool Adjoint, bool Ascending>
void launch_march(const EdgesArguments& p, void* stream) {
  choose_march<Method, layout>(p.scan, [&](auto shape) {
    using Block = decltype(shape);
    launch(edges_march_kernel<Method, Block, layout, Adjoint, Ascending>, blocks_of<Block>(p.scan),
           Block::all_threads, sizeof(EdgesMarchShared<Block>), p, stream);
  });
}

template <class Method, class E, Layout layout, bool Adjoint, bool Ascending>
void launch_segments(const EdgesArguments& p, void* stream) {
  choose_segments<layout>(p.scan, [&](auto shape) {
    using Block = decltype(shape);
    launch(edges_kernel<Method, E, Block, layout, Adjoint, Ascending>, blocks_of<Block>(p.scan),
           Block::threads,
           sizeof(EdgesShared<E, Block>) + CarriedStates<E, Block, layout>::bytes(p.scan.states), p,
           stream);
  });
}

template <class Method, bool Adjoint, bool Ascending>
void launch_edges(const EdgesArguments& p, void* stream) {
  const View& driving = Adjoint ? p.grad_out : p.scan.u;
  dispatch_layout(p.scan, layout_of(p.scan, {driving}), [&](auto e, auto layout) {
    using E = decltype(e);
    if constexpr (layout() != Layout::any) {
      if (edges_march(p.scan)) return launch_march<Method, layout(), Adjoint, Ascending>(p, stream);
    }
    launch_segments<Method, E, layout(), Adjoint, Ascending>(p, stream);
  });
}

}  // namespace

void scan_edges(const EdgesArguments& p, void* stream) {
  dispatch_method(p.scan.method, [&](auto method) {
    using Method = decltype(method);
    if constexpr (!Method::causal) {
      if (!p.adjoint) return launch_edges<Method, false, false>(p, stream);
      if (p.ascending) return launch_edges<Method, true, true>(p, stream);
    }
    launch_edges<Method, true, false>(p, stream);
  });
}

}  // namespace vim_mm
