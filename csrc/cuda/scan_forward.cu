// Launches the forward scan.
//
// SPDX-License-Identifier: Apache-2.0
#include "forward.cuh"
#include "launch.cuh"
#include "march_forward.cuh"

namespace vim_mm {

void scan_forward(const ForwardArguments& p, void* stream) {
  const ScanArguments& scan = p.scan;
  if (!is_causal(scan.method) && scan.steps > 0)
    scan_edges({scan, false, false, {}, {}, p.other_edges, p.chunks}, stream);
  dispatch_method(scan.method, [&](auto method) {
    using Method = decltype(method);
    dispatch_layout(scan, layout_of(scan, {p.out}), [&](auto e, auto layout) {
      using E = std::decay_t<decltype(e)>;  // else nvcc hands the host compiler a reference
      choose_forward<Method, layout()>(scan, [&](auto shape) {
        using Block = decltype(shape);
        const int64_t blocks = blocks_of<Block>(scan);
        if constexpr (Block::marches)
          launch(forward_march_kernel<Method, Block, layout()>, blocks, Block::all_threads,
                 sizeof(ForwardMarchShared<Block, layout()>), p, stream);
        else
          launch(forward_kernel<Method, E, Block, layout()>, blocks, Block::threads,
                 sizeof(ForwardShared<E, Block>) +
                     CarriedStates<E, Block, layout()>::bytes(scan.states),
                 p, stream);
      });
    });
  });
}

}  // namespace vim_mm
