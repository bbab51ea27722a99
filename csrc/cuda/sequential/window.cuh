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

// One value for each row and step of a window.
template <int Rows>
struct WindowTile {
  alignas(16) float values[Rows][kPitch];

  __device__ __forceinline__ float* at(int row, int step) { return values[row] + step; }
  __device__ __forceinline__ const float* at(int row, int step) const { return values[row] + step; }
};

// A state matrix of 16 bits as it is in memory, but in scan order. To widen it costs lanes of one
// state an instruction per element and saves them a fifth of what they read; with two states the
// instruction costs more than it saves.
struct HalfTile {
  alignas(16) uint32_t words[kStateTile][kPitch / 2];

  __device__ __forceinline__ const uint16_t* entries() const {
    return reinterpret_cast<const uint16_t*>(words[0]);
  }
};
template <class Shape, Layout layout>
using MatrixTile = typename std::conditional<layout == Layout::half && Shape::states == 1, HalfTile,
                                             WindowTile<kStateTile>>::type;

// What the lanes that scan read of a window.
template <class Shape, Layout layout, int Matrices, class Matrix = WindowTile<kStateTile>>
struct WindowInputs {
  WindowTile<Shape::channels> dt, drive;
  Matrix matrix[Matrices];
};

// The stride that begins there. `InOrder`: as load_by_two has it.
template <bool InOrder>
__device__ __forceinline__ void load_stride(const float* first, float (&to)[kStride]) {
#pragma unroll
  for (int i = 0; i < kStride; i += kQuad) {
    float (&quad)[kQuad] = reinterpret_cast<float (&)[kQuad]>(to[i]);
    if constexpr (InOrder) load_by_two(first + i, quad);
    else load_quad(first + i, quad);
  }
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
