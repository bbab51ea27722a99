// Launches the backward scan, behind those of the adjoint at the edges of chunks.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../backward/chunk.cuh"
#include "../common/launch.cuh"
#include "boundary.cuh"
#include "configurations.cuh"
#include "scan_of_method.cuh"

namespace vim_mm {

template <class Method>
Layout layout_of(const BackwardArguments& p) {
  const View& grad_z = p.scan.gated ? p.grad_z : p.grad_u;
  return layout_of<Method>(p.scan, p.bounds.any(),
                           {p.grad_out, p.grad_u, p.grad_delta, grad_z, p.grad_B, p.grad_C});
}

// Calls f with the kernel for that share, its block's shape and its shared memory in bytes.
template <class Method, class F>
void choose_kernel(const BackwardArguments& p, bool is_tail, const F& f) {
  dispatch_layout(p.scan, layout_of<Method>(p), [&](auto e, auto layout) {
    using E = std::decay_t<decltype(e)>;  // else nvcc hands the host compiler a reference
    choose_backward<Method, layout()>(
        p.scan, p.bounds.any(), is_tail, [&](auto shape, auto aligned, auto bounded, const Row&) {
          using Block = decltype(shape);
          using Work = BackwardBlock<Method, E, Block, layout(), aligned(), bounded()>;
          f(backward_kernel<Method, E, Block, layout(), aligned(), bounded()>, shape,
            sizeof(typename Work::Shared));
        });
  });
}

// How many parts of each chunk blocks leave in memory: with Layout::any they add up there, otherwise in registers.
template <class Method>
int64_t count_parts(const BackwardArguments& p, const ChunkShare& share) {
  if (share.chunks == 0) return 0;
  return layout_of<Method>(p) == Layout::any || share.slabs > 1 ? share.slabs : 0;
}

template <class Method>
void scan_share(const BackwardArguments& p, const ChunkShare& share, bool is_tail, void* stream) {
  const ScanArguments& scan = p.scan;
  choose_kernel<Method>(p, is_tail, [&](auto kernel, auto shape, size_t bytes) {
    using Block = decltype(shape);
    BackwardArguments q = p;
    q.share = share;
    const int64_t channels = share.slabs * Block::channels;
    q.next = {
        channels * scan.u.row,       channels * scan.delta.row, channels * scan.z.row,
        channels * scan.A.row,       channels * p.grad_out.row, channels * p.grad_u.row,
        channels * p.grad_delta.row, channels * p.grad_z.row,   channels * p.chunks * scan.states};
    const int64_t blocks = scan.batch * scan.groups * share.chunks * share.slabs;
    launch(kernel, {grid_of(blocks), Block::threads, bytes}, stream, q);
  });
}

template <class Method>
void ScanOf<Method>::plan_backward(BackwardArguments& p) {
  const ScanArguments& scan = p.scan;
  p.splits = {};
  dispatch_layout(
      scan, layout_of<Method>(scan, p.bounds.any(), {p.grad_out}), [&](auto, auto layout) {
        choose_edges<Method, layout()>(scan, p.bounds.any(), [&](auto shape, auto, const Row&) {
          using Block = decltype(shape);
          if constexpr (is_split<Block>) p.splits = splits_of<Block>(scan);
        });
      });
  const int64_t all = scan.batch * scan.groups, left = scan.steps % kChunk;
  const int64_t chunks = p.chunks = chunks_of(scan);
  const int64_t slabs = count_slabs(all * chunks, scan.channels);
  p.body = {chunks, slabs}, p.tail = {0, 1};
  if (layout_of<Method>(p) != Layout::any && !p.bounds.any() && left > 0 &&
      left <= BackwardTail::window) {
    ChunkShare body{0, 1}, tail{1, count_slabs(all, scan.channels)};
    if (chunks > 1) {
      body = {chunks - 1, count_slabs(all * (chunks - 1), scan.channels)};
      tail.slabs = std::min(tail.slabs, body.slabs);  // or there would be more parts of every chunk
    }
    const double time =
        rounds(all * (chunks - 1), body.slabs) + kTailTime * rounds(all, tail.slabs);
    if (time <= 0.95 * rounds(all * chunks, slabs)) p.body = body, p.tail = tail;
  }
  p.parts = std::max(count_parts<Method>(p, p.body), count_parts<Method>(p, p.tail));
}

template <class Method>
void ScanOf<Method>::scan_backward(const BackwardArguments& p, void* stream) {
  const ScanArguments& scan = p.scan;
  EdgesArguments edges{scan,    p.grad_out, p.grad_last_state, p.grad_edges,
                       nullptr, p.chunks,   p.counts};
  if constexpr (!Method::causal) {
    const int64_t floats = rows_of(scan) * p.chunks * scan.states * (scan.is_complex ? 2 : 1);
    edges.other_edges = static_cast<float*>(p.grad_edges) + floats;
  }
  edges.step_sums = p.grad_bias;  // nothing is there yet
  edges.ends = p.ends;
  edges.grad_initial_state = p.grad_initial_state;
  launch_edges<Method, true>(edges, p.bounds, stream);
  scan_share<Method>(p, p.body, false, stream);
  scan_share<Method>(p, p.tail, true, stream);
}

}  // namespace vim_mm
