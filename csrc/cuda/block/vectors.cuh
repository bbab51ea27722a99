// Vector loads and stores: neighbours in memory, moved at once and computed with as float.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>
#include <type_traits>

#include "../common/tile.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

constexpr __host__ __device__ int item_of(Storage storage) {
  return storage == Storage::float64 ? 8 : storage == Storage::float32 ? 4 : 2;
}

template <class T, int Width>
struct alignas(sizeof(T) * Width < 16 ? sizeof(T) * Width : 16) Vector {
  T item[Width];
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float(float x) {
  return __float2bfloat16_rn(x);
}

template <class T>
__device__ __forceinline__ auto pair_from_floats(float x, float y) {
  if constexpr (std::is_same_v<T, __half>) return __floats2half2_rn(x, y);
  else return __floats2bfloat162_rn(x, y);
}

template <class T, int Width>
__device__ __forceinline__ Vector<T, Width> to_vector(const float (&values)[Width]) {
  Vector<T, Width> vector;
  if constexpr (sizeof(T) == 2 && Width % 2 == 0) {
    // One instruction converts a pair.
#pragma unroll
    for (int i = 0; i < Width; i += 2) {
      const auto pair = pair_from_floats<T>(values[i], values[i + 1]);
      vector.item[i] = pair.x, vector.item[i + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < Width; ++i) vector.item[i] = from_float<T>(values[i]);
  }
  return vector;
}
template <class T, int Width>
__device__ __forceinline__ void to_floats(const Vector<T, Width>& vector, float (&values)[Width]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> && Width % 2 == 0) {
    // Two instructions for a pair, where the compiler takes three.
#pragma unroll
    for (int i = 0; i < Width; i += 2) {
      uint32_t pair;
      memcpy(&pair, vector.item + i, sizeof pair);
      values[i] = __uint_as_float(pair << 16), values[i + 1] = __uint_as_float(pair & 0xffff0000);
    }
  } else {
#pragma unroll
    for (int i = 0; i < Width; ++i) values[i] = to_float(vector.item[i]);
  }
}
template <class T, int Width>
__device__ __forceinline__ void load_vector(const T* p, float (&values)[Width]) {
  const Vector<T, Width> vector = *reinterpret_cast<const Vector<T, Width>*>(p);
  to_floats(vector, values);
}
template <class T, int Width>
__device__ __forceinline__ void store_vector(T* p, const float (&values)[Width]) {
  *reinterpret_cast<Vector<T, Width>*>(p) = to_vector<T>(values);
}

// Calls f with a T of that storage type; on the host or on the device, as f itself.
#pragma nv_exec_check_disable
template <class F>
VIM_MM_INLINE void dispatch_storage(Storage storage, const F& f) {
  if (storage == Storage::float32) f(float());
  else if (storage == Storage::float16) f(__half());
  else f(__nv_bfloat16());
}

constexpr int kWarp = 32;

__device__ __forceinline__ float sum_over_warp(float x) {
#pragma unroll
  for (int bit = kWarp / 2; bit > 0; bit /= 2) x += shuffle_xor(x, bit);
  return x;
}

// Whether rows at this address, `row` entries apart, are aligned for vectors of `width` entries.
inline bool fits(const void* p, Storage storage, int width, int64_t row) {
  const int64_t item = item_of(storage), bytes = item * width < 16 ? item * width : 16;
  return (reinterpret_cast<int64_t>(p) | row * item) % bytes == 0;
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
