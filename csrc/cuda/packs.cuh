// Neighbours in memory, moved at once and computed with as float.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string.h>

#include <stdexcept>
#include <utility>

#include "block.h"
#include "tile.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

constexpr __host__ __device__ int item_of(Storage storage) {
  return storage == Storage::float64 ? 8 : storage == Storage::float32 ? 4 : 2;
}

template <class T, int Width>
struct alignas(sizeof(T) * Width < 16 ? sizeof(T) * Width : 16) Pack {
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

template <class T, int Width>
__device__ __forceinline__ void load_pack(const T* p, float (&values)[Width]) {
  const Pack<T, Width> pack = *reinterpret_cast<const Pack<T, Width>*>(p);
#pragma unroll
  for (int i = 0; i < Width; ++i) values[i] = to_float(pack.item[i]);
}
template <class T, int Width>
__device__ __forceinline__ void store_pack(T* p, const float (&values)[Width]) {
  Pack<T, Width> pack;
#pragma unroll
  for (int i = 0; i < Width; ++i) pack.item[i] = from_float<T>(values[i]);
  *reinterpret_cast<Pack<T, Width>*>(p) = pack;
}

// Calls f with a T of that storage type; on the host or on the device, as f itself.
#pragma nv_exec_check_disable
template <class F>
VIM_MM_INLINE void dispatch_storage(Storage storage, const F& f) {
  if (storage == Storage::float32) f(float());
  else if (storage == Storage::float16) f(__half());
  else f(__nv_bfloat16());
}

// Entries [index, index + Width) of a tensor, 16 or 32 bits each.
template <int Width>
__device__ __forceinline__ void load_entries(const void* p, Storage storage, int64_t index,
                                             float (&values)[Width]) {
  dispatch_storage(storage, [&](auto t) {
    load_pack(static_cast<const decltype(t)*>(p) + index, values);
  });
}
template <int Width>
__device__ __forceinline__ void store_entries(void* p, Storage storage, int64_t index,
                                              const float (&values)[Width]) {
  dispatch_storage(storage,
                   [&](auto t) { store_pack(static_cast<decltype(t)*>(p) + index, values); });
}

// Entry `index` of a parameter, whatever its type.
__device__ __forceinline__ float load_entry(const Parameter& p, int64_t index) {
  return load_real(static_cast<const char*>(p.data) + index * item_of(p.storage), p.storage);
}

__device__ __forceinline__ float sum_over_warp(float x) {
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) x += shuffle_xor(x, bit);
  return x;
}

// Whether packs of Width entries can be moved at these addresses, row by row.
inline bool fits(const void* p, Storage storage, int width, int64_t row) {
  const int64_t item = item_of(storage), bytes = item * width < 16 ? item * width : 16;
  return (reinterpret_cast<int64_t>(p) | row * item) % bytes == 0;
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
