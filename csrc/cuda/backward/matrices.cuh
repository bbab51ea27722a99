// Of a chunk in backward: the gradients of B and C, which are sums over channels, lanes and blocks.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../common/arrival.cuh"
#include "../common/tile_stream.cuh"
#include "place.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// Writes them at a block's end: this block's, which `B` and `C` hold, or where others share the chunk, by the last of
// them to come here, those of all in the order of slabs. With Layout::any all are in memory.
template <class E, class Shape, Layout layout, bool Aligned>
class MatrixGradients {
  static constexpr bool fast = layout != Layout::any;
  using Tile = StateTile<E, Shape>;
  using Places = Slots<kStateTile, Shape, layout>;
  static constexpr int count = Places::count, width = Places::width;
  struct Entries {  // those of a thread
    E value[count][width];
  };

  const BackwardArguments& p_;
  const ScanArguments& scan_;
  const ChunkPlace<Shape>& at_;

 public:
  __device__ __forceinline__ MatrixGradients(const BackwardArguments& p,
                                             const ChunkPlace<Shape>& at)
      : p_(p), scan_(p.scan), at_(at) {}

  __device__ __forceinline__ void write(const Tile& B, const Tile& C) const {
    const Places B_slots(p_.grad_B, at_.work), C_slots(p_.grad_C, at_.work);
    const bool is_shared = at_.slabs > 1;
    if constexpr (fast) {
      if (is_shared) leave_part(p_.B_parts, B_slots, B), leave_part(p_.C_parts, C_slots, C);
    }
    if (is_shared && !is_last_to_arrive(p_.counts + at_.chunks_before(), at_.slabs)) return;
#pragma unroll 1
    for (int first = 0; first < (fast ? 1 : int(scan_.states)); first += kStateTile) {
      if (fast || !scan_.constant_B) store_sum(p_.grad_B, p_.B_parts, B_slots, first, B);
      if (fast || !scan_.constant_C) store_sum(p_.grad_C, p_.C_parts, C_slots, first, C);
    }
  }

 private:
  static __device__ __forceinline__ void take(const Tile& tile, const Places& slots, Entries& to) {
    if (!slots.has_any()) return;
#pragma unroll
    for (int k = 0; k < count; ++k) load_segment(tile.at(slots.row(k), slots.step(k)), to.value[k]);
  }
  __device__ __forceinline__ void leave_part(void* parts, const Places& slots,
                                             const Tile& tile) const {
    Entries from;
    take(tile, slots, from);
#pragma unroll
    for (int k = 0; k < count; ++k)
      if (slots.row(k) < scan_.states)
        store_segment(at_.template part<E>(parts, at_.slab, slots.row(k), slots.step(k)),
                      from.value[k]);
  }
  // Of the tile that begins with that state.
  __device__ __forceinline__ void store_sum(const View& v, void* parts, const Places& slots,
                                            int first, const Tile& tile) const {
    Entries sum;
    const bool alone = fast && at_.slabs == 1;
    if (alone) take(tile, slots, sum);
#pragma unroll 1
    for (int slab = 0; slab < (alone ? 0 : at_.slabs); ++slab) {
#pragma unroll
      for (int k = 0; k < count; ++k) {
        const int n = first + slots.row(k);
        if (n >= scan_.states) continue;
        const E* const from = at_.template part<E>(parts, slab, n, slots.step(k));
        E value[width];
        if constexpr (fast) load_segment(from, value);
        else value[0] = from[0];
#pragma unroll
        for (int i = 0; i < width; ++i)
          sum.value[k][i] = slab == 0 ? value[i] : sum.value[k][i] + value[i];
      }
    }
    const int states = int(scan_.states) - first;
    const bool whole = Aligned && at_.left == Shape::window && states == kStateTile;
    Stream<E, kStateTile, Shape, layout> to;
    to.begin(v, v.data + at_.work.b * v.batch + at_.work.g * v.group + first * v.row, slots,
             at_.work, at_.window);
    specialize<layout>(scan_.u.storage, at_.work.reverse, [&](auto format) {
#pragma unroll
      for (int k = 0; k < count; ++k)
        to.template store<decltype(format)>(v, slots, k, sum.value[k], whole, states, at_.left);
    });
  }
};

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
