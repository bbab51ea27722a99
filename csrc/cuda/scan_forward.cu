// Launches the forward scan.
//
// SPDX-License-Identifier: Apache-2.0
#include "launch.cuh"

namespace vim_mm {
namespace {

template <class Method, Layout layout>
void launch_march(const ForwardArguments& p, void* stream) {
  choose_march<Method, layout>(p.scan, [&](auto shape) {
    using Block = decltype(shape);
    launch(forward_march_kernel<Method, Block, layout>, blocks_of<Block>(p.scan),
           Block::all_threads, sizeof(ForwardMarchShared<Block>), p, stream);
  });
}

template <class Method, class E, Layout layout>
void launch_segments(const ForwardArguments& p, void* stream) {
  choose_segments<layout>(p.scan, [&](auto shape) {
    using Block = decltype(shape);
    launch(forward_kernel<Method, E, Block, layout>, blocks_of<Block>(p.scan), Block::threads,
           sizeof(ForwardShared<E, Block>) + CarriedStates<E, Block, layout>::bytes(p.scan.states),
           p, stream);
  });
}

}  // namespace

void scan_forward(const ForwardArguments& p, void* stream) {
  const ScanArguments& scan = p.scan;
  if (!is_causal(scan.method) && scan.steps > 0)
    scan_edges({scan, false, false, {}, {}, p.other_edges, p.chunks}, stream);
  dispatch_method(scan.method, [&](auto method) {
    using Method = decltype(method);
    dispatch_layout(scan, layout_of(scan, {p.out}), [&](auto e, auto layout) {
      if constexpr (Method::causal && layout() != Layout::any)
        launch_march<Method, layout()>(p, stream);
      else launch_segments<Method, decltype(e), layout()>(p, stream);
    });
  });
}

}  // namespace vim_mm
