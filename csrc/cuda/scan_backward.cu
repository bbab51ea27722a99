// Launches the backward scan, behind those of the adjoint at the edges of chunks.
//
// SPDX-License-Identifier: Apache-2.0
#include "backward.cuh"
#include "launch.cuh"
#include "shapes.cuh"

namespace vim_mm {
namespace {

Layout layout_of(const BackwardArguments& p) {
  const View& grad_z = p.scan.gated ? p.grad_z : p.grad_u;
  return layout_of(p.scan, {p.grad_out, p.grad_u, p.grad_delta, grad_z, p.grad_B, p.grad_C});
}

// Calls f with the kernel, its block's shape, its shared memory in bytes, and how many blocks are a cluster.
// That is for two, which have room wherever one has: of more, parts of a GPU may have none left where there are
// still multiprocessors. Where rows are not aligned ptxas makes slower code of it.
template <class F>
void choose_kernel(const BackwardArguments& p, const F& f) {
  dispatch_method(p.scan.method, [&](auto method) {
    using Method = decltype(method);
    dispatch_layout(p.scan, layout_of(p), [&](auto e, auto layout) {
      using E = std::decay_t<decltype(e)>;  // else nvcc hands the host compiler a reference
      choose_backward<layout()>([&](auto shape) {
        using Block = decltype(shape);
        constexpr size_t bytes = sizeof(BackwardShared<E, Block>);
        const auto alone = [&](auto aligned) {
          f(backward_kernel<Method, E, Block, layout(), aligned(), false>, shape, bytes, 1u);
        };
        if constexpr (layout() == Layout::any) {
          alone(std::false_type());
        } else if (p.scan.together < kQuad) {
          alone(std::false_type());
        } else {
          const auto pair = backward_kernel<Method, E, Block, layout(), true, true>;
          if (p.slabs == 2 && is_for_90(pair)) f(pair, shape, bytes, 2u);
          else alone(std::true_type());
        }
      });
    });
  });
}

}  // namespace

// With Layout::any a block adds up in memory, otherwise in registers, and the last one needs no part; nor does
// the other one of a pair.
int64_t count_parts(const BackwardArguments& p) {
  if (layout_of(p) == Layout::any) return p.slabs;
  bool paired = false;
  choose_kernel(p, [&](auto, auto, size_t, unsigned cluster) { paired = cluster > 1; });
  return paired ? 0 : p.slabs - 1;
}

void scan_backward(const BackwardArguments& p, void* stream) {
  const ScanArguments& scan = p.scan;
  scan_edges({scan, true, false, p.grad_out, p.grad_last_state, p.grad_edges, p.chunks, p.counts},
             stream);
  if (!is_causal(scan.method)) {
    const int64_t floats = scan.batch * scan.groups * scan.channels * p.chunks * scan.states *
                           (scan.is_complex ? 2 : 1);
    float* const others = static_cast<float*>(p.grad_edges) + floats;
    scan_edges({scan, true, true, p.grad_out, {}, others, p.chunks}, stream);
  }
  choose_kernel(p, [&](auto kernel, auto shape, size_t bytes, unsigned cluster) {
    using Block = decltype(shape);
    BackwardArguments q = p;
    const int64_t channels = p.slabs * Block::channels;
    q.next = {
        channels * scan.u.row,       channels * scan.delta.row, channels * scan.z.row,
        channels * scan.A.row,       channels * p.grad_out.row, channels * p.grad_u.row,
        channels * p.grad_delta.row, channels * p.grad_z.row,   channels * p.chunks * scan.states};
    const int64_t blocks = scan.batch * scan.groups * p.chunks * p.slabs;
    launch(kernel, {grid_of(blocks), Block::threads, bytes, cluster}, Begin::early, stream, q);
  });
}

}  // namespace vim_mm
