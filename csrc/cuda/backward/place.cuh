// Where a block of the backward scan is at work: which chunk, and which share of its channels.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../common/tile.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

template <class Shape>
struct ChunkPlace {
  static_assert(kChunk % Shape::window == 0, "a block has the first window of a chunk");
  static constexpr bool is_tail = Shape::window < kChunk;  // blocks have the last chunk

  const BackwardArguments& p;
  const int slabs, slab, chunk;
  const int64_t window;  // the chunk's first
  Work work;
  const int left;  // steps from there on, no more than a window's

  __device__ __forceinline__ ChunkPlace(const BackwardArguments& p_)
      : p(p_), slabs(int(p.share.slabs)), slab(blockIdx.x % uint32_t(slabs)),
        chunk(is_tail ? int(p.chunks) - 1
                      : int(blockIdx.x / uint32_t(slabs) % uint32_t(p.share.chunks))),
        window(int64_t(chunk) * (kChunk / Shape::window)),
        work(p.scan, blockIdx.x / uint32_t(slabs) / uint32_t(p.share.chunks), Shape::window),
        left(work.steps_from(window, Shape::window)) {}

  // In [B, G, chunks].
  __device__ __forceinline__ int64_t chunks_before() const {
    return (work.b * p.scan.groups + work.g) * p.chunks + chunk;
  }
  // What the block of that slab has of B's or C's gradient in this chunk, in scan order.
  template <class E>
  __device__ __forceinline__ E* part(void* parts, int of_slab, int n, int step) const {
    const int64_t at = chunks_before() * p.parts + of_slab;
    return static_cast<E*>(parts) + (at * p.scan.states + n) * kChunk + step;
  }
};

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
