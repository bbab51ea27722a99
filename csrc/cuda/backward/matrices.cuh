// Of a chunk in backward: the gradients of B and C, which are sums over channels, lanes and blocks.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../common/arrival.cuh"
#include "chunk.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

template <class Method, class E, class Shape, Layout layout, bool Aligned, bool Bounded>
__device__ __forceinline__ E* BackwardBlock<Method, E, Shape, layout, Aligned, Bounded>::part(
    void* parts, int slab, int n, int step) const {
  const int64_t at = chunks_before() * p_.parts + slab;
  return static_cast<E*>(parts) + (at * scan_.states + n) * kChunk + step;
}

template <class Method, class E, class Shape, Layout layout, bool Aligned, bool Bounded>
__device__ __forceinline__ void
BackwardBlock<Method, E, Shape, layout, Aligned, Bounded>::add_to_part(void* parts, int n,
                                                                       E (&value)[steps],
                                                                       bool fresh) {
#pragma unroll
  for (int i = 0; i < steps; ++i) value[i] = sum_over_channels<Shape>(value[i]);
  if (channel_of_lane<Shape>(0) != 0 || n >= scan_.states) return;
  E* const to = part(parts, slab_, n, segment_ * steps);
#pragma unroll
  for (int i = 0; i < steps; ++i) to[i] = fresh ? value[i] : to[i] + value[i];
}

template <class Method, class E, class Shape, Layout layout, bool Aligned, bool Bounded>
__device__ __forceinline__ void BackwardBlock<Method, E, Shape, layout, Aligned, Bounded>::put_sums(
    StateTile<E, Shape>& tile, int n, E (&value)[steps]) {
#pragma unroll
  for (int i = 0; i < steps; ++i) value[i] = sum_over_channels<Shape>(value[i]);
  if (channel_of_lane<Shape>(0) == 0) store_segment(tile.at(n, segment_ * steps), value);
}

template <class Method, class E, class Shape, Layout layout, bool Aligned, bool Bounded>
__device__ __forceinline__ void
BackwardBlock<Method, E, Shape, layout, Aligned, Bounded>::write_matrices() {
  const MatrixPlaces B_slots(p_.grad_B, work_), C_slots(p_.grad_C, work_);
  if constexpr (fast) {
#pragma unroll
    for (int m = 0; m < states_of_warp; ++m) {
      put_sums(shared_.B, warp_ * states_of_warp + m, grad_B_[m]);
      put_sums(shared_.C, warp_ * states_of_warp + m, grad_C_[m]);
    }
    __syncthreads();
    if (slabs_ > 1) {
      leave_part(p_.B_parts, B_slots, shared_.B);
      leave_part(p_.C_parts, C_slots, shared_.C);
    }
  }
  if (slabs_ > 1 && !is_last_to_arrive(p_.counts + chunks_before(), slabs_)) return;
#pragma unroll 1
  for (int first = 0; first < (fast ? 1 : int(scan_.states)); first += kStateTile) {
    if (!B_.constant()) store_sum(p_.grad_B, p_.B_parts, B_slots, first, shared_.B);
    if (!C_.constant()) store_sum(p_.grad_C, p_.C_parts, C_slots, first, shared_.C);
  }
}

template <class Method, class E, class Shape, Layout layout, bool Aligned, bool Bounded>
__device__ __forceinline__ void BackwardBlock<Method, E, Shape, layout, Aligned, Bounded>::take(
    StateTile<E, Shape>& tile, const MatrixPlaces& slots, Entries& to) {
  if (!slots.has_any()) return;
#pragma unroll
  for (int k = 0; k < MatrixPlaces::count; ++k)
    load_segment(tile.at(slots.row(k), slots.step(k)), to.value[k]);
}

template <class Method, class E, class Shape, Layout layout, bool Aligned, bool Bounded>
__device__ __forceinline__ void BackwardBlock<Method, E, Shape, layout, Aligned,
                                              Bounded>::store_sum(const View& v, void* parts,
                                                                  const MatrixPlaces& slots,
                                                                  int first,
                                                                  StateTile<E, Shape>& tile) const {
  Entries sum;
  const bool alone = fast && slabs_ == 1;
  if (alone) take(tile, slots, sum);
#pragma unroll 1
  for (int slab = 0; slab < (alone ? 0 : slabs_); ++slab) {
#pragma unroll
    for (int k = 0; k < MatrixPlaces::count; ++k) {
      const int n = first + slots.row(k);
      if (n >= scan_.states) continue;
      const E* const from = part(parts, slab, n, slots.step(k));
      E value[MatrixPlaces::width];
      if constexpr (fast) load_segment(from, value);
      else value[0] = from[0];
#pragma unroll
      for (int i = 0; i < MatrixPlaces::width; ++i)
        sum.value[k][i] = slab == 0 ? value[i] : sum.value[k][i] + value[i];
    }
  }
  store_matrix(v, slots, first, sum);
}

template <class Method, class E, class Shape, Layout layout, bool Aligned, bool Bounded>
__device__ __forceinline__ void
BackwardBlock<Method, E, Shape, layout, Aligned, Bounded>::leave_part(
    void* parts, const MatrixPlaces& slots, StateTile<E, Shape>& tile) const {
  Entries from;
  take(tile, slots, from);
#pragma unroll
  for (int k = 0; k < MatrixPlaces::count; ++k)
    if (slots.row(k) < scan_.states)
      store_segment(part(parts, slab_, slots.row(k), slots.step(k)), from.value[k]);
}

template <class Method, class E, class Shape, Layout layout, bool Aligned, bool Bounded>
__device__ __forceinline__ void
BackwardBlock<Method, E, Shape, layout, Aligned, Bounded>::store_matrix(const View& v,
                                                                        const MatrixPlaces& slots,
                                                                        int first,
                                                                        const Entries& from) const {
  const int states = int(scan_.states) - first;
  const bool whole = Aligned && left_ == Shape::window && states == kStateTile;
  Stream<E, kStateTile, Shape, layout> to;
  to.begin(v, v.data + work_.b * v.batch + work_.g * v.group + first * v.row, slots, work_,
           window_);
  specialize<layout>(scan_.u.storage, work_.reverse, [&](auto format) {
    using Format = decltype(format);
#pragma unroll
    for (int k = 0; k < MatrixPlaces::count; ++k)
      to.template store<Format>(v, slots, k, from.value[k], whole, states, left_);
  });
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
