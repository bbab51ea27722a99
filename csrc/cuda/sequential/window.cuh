// Tiles in shared memory that hold a window of time.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "shape.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// From one row of a tile to the next, in entries. With this gap neither threads that load nor lanes that
// scan meet on a bank.
constexpr int kPitch = kChunk + 8;

// One value for each row and step of a window. `Split`: of quads those of even number come first, and
// odd ones behind a gap. So threads that have two neighbouring quads do not meet on a bank either.
template <int Rows, bool Split>
struct WindowTile {
  static_assert(!Split || kStride == 2 * kQuad, "a stride has a quad of each kind");
  alignas(16) float values[Rows][kPitch];

  // Where a step is in a row; that of a stride and a step in it is the sum of both.
  static __device__ __forceinline__ constexpr int place(int step) {
    if (!Split) return step;
    return step / kStride * kQuad + step / kQuad % 2 * (kPitch / 2) + step % kQuad;
  }
  __device__ __forceinline__ float* at(int row, int step) { return values[row] + place(step); }
  __device__ __forceinline__ const float* at(int row, int step) const {
    return values[row] + place(step);
  }
};
template <int Rows, class Shape, Layout layout>
using SlotTile = WindowTile<Rows, Slots<Rows, Shape, layout>::octets>;

// A state matrix of 16 bits as it is in memory, but in scan order. To widen it costs lanes of one
// state an instruction per element and saves them a fifth of what they read; with two states the
// instruction costs more than it saves.
struct HalfTile {
  alignas(16) uint32_t words[kStateTile][kPitch / 2];

  static __device__ __forceinline__ constexpr int place(int step) { return step; }
  __device__ __forceinline__ const uint16_t* entries() const {
    return reinterpret_cast<const uint16_t*>(words[0]);
  }
};
template <class Shape, Layout layout>
using MatrixTile = typename std::conditional<layout == Layout::half && Shape::states == 1, HalfTile,
                                             SlotTile<kStateTile, Shape, layout>>::type;

// What the lanes that scan read of a window.
template <class Shape, Layout layout, int Matrices,
          class Matrix = SlotTile<kStateTile, Shape, layout>>
struct WindowInputs {
  SlotTile<Shape::channels, Shape, layout> dt, drive;
  Matrix matrix[Matrices];
};

// The stride of a tile that begins there. `InOrder`: as load_by_two has it.
template <bool InOrder, int Rows, bool Split>
__device__ __forceinline__ void load_stride(const WindowTile<Rows, Split>& tile, const float* first,
                                            float (&to)[kStride]) {
#pragma unroll
  for (int i = 0; i < kStride; i += kQuad) {
    float (&quad)[kQuad] = reinterpret_cast<float (&)[kQuad]>(to[i]);
    if constexpr (InOrder) load_by_two(first + tile.place(i), quad);
    else load_quad(first + tile.place(i), quad);
  }
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
