// Launches the backward scan, behind those of the adjoint at the edges of chunks.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "backward.cuh"
#include "launch.cuh"

namespace vim_mm {
namespace {

constexpr int64_t kGroupsOfLargeGpu = 264, kMaxSlabs = 4, kLeastChannels = 64;

Layout layout_of(const BackwardArguments& p) {
  const View& grad_z = p.scan.gated ? p.grad_z : p.grad_u;
  return layout_of(p.scan, {p.grad_out, p.grad_u, p.grad_delta, grad_z, p.grad_B, p.grad_C});
}

// The number that leaves the fewest multiprocessors of a large GPU idle in the last round; only
// sizes count, so that every GPU adds up in the same order.
template <class Shape>
int64_t count_slabs(const BackwardArguments& p) {
  constexpr int64_t at_once = kGroupsOfLargeGpu / Shape::groups;
  const int64_t blocks = std::max<int64_t>(1, p.scan.batch * p.scan.groups * p.chunks);
  int64_t best = 1;
  double least = 0.0;
  for (int64_t slabs = 1; slabs <= kMaxSlabs && (slabs - 1) * kLeastChannels < p.scan.channels;
       ++slabs) {
    const double rounds = double((slabs * blocks + at_once - 1) / at_once) / double(slabs);
    if (slabs > 1 && rounds > 0.95 * least) continue;
    best = slabs, least = rounds;
  }
  return best;
}

}  // namespace

Sharing share_channels(const BackwardArguments& p) {
  Sharing sharing{};
  dispatch_layout(p.scan, layout_of(p), [&](auto, auto layout) {
    choose_backward<layout()>([&](auto shape) {
      sharing.slabs = count_slabs<decltype(shape)>(p);
      sharing.parts = layout() == Layout::any || sharing.slabs > 1;
    });
  });
  return sharing;
}

void scan_backward(const BackwardArguments& p, void* stream) {
  const ScanArguments& scan = p.scan;
  scan_edges({scan, true, false, p.grad_out, p.grad_last_state, p.grad_edges, p.chunks}, stream);
  if (!is_causal(scan.method)) {
    const int64_t floats = scan.batch * scan.groups * scan.channels * p.chunks * scan.states *
                           (scan.is_complex ? 2 : 1);
    float* const others = static_cast<float*>(p.grad_edges) + floats;
    scan_edges({scan, true, true, p.grad_out, {}, others, p.chunks}, stream);
  }
  dispatch_method(scan.method, [&](auto method) {
    using Method = decltype(method);
    dispatch_layout(scan, layout_of(p), [&](auto e, auto layout) {
      using E = decltype(e);
      choose_backward<layout()>([&](auto shape) {
        using Block = decltype(shape);
        BackwardArguments q = p;
        const int64_t channels = p.slabs * Block::groups * Block::channels;
        q.next = {channels * scan.u.row,       channels * scan.delta.row, channels * scan.z.row,
                  channels * scan.A.row,       channels * p.grad_out.row, channels * p.grad_u.row,
                  channels * p.grad_delta.row, channels * p.grad_z.row,   channels * p.chunks};
        // Where shared memory does not suffice for all groups, one does the work of the others too.
        const size_t most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
        const int groups = backward_bytes<E, Block>(Block::groups) <= most ? Block::groups : 1;
        launch(backward_kernel<Method, E, Block, layout()>,
               scan.batch * scan.groups * p.chunks * p.slabs, groups * Block::threads,
               backward_bytes<E, Block>(groups), q, stream);
      });
    });
  });
}

}  // namespace vim_mm
