// The gate of a block, after the sum over directions.
//
// SPDX-License-Identifier: Apache-2.0
#include <initializer_list>

#include "../common/errors.h"
#include "block.h"
#include "vectors.cuh"

namespace vim_mm {
namespace {

constexpr int kThreads = 256, kWidth = 8;

template <class T, int Width>
__global__ void __launch_bounds__(kThreads) gate_kernel(const __grid_constant__ Gate p) {
  const int64_t i = (blockIdx.x * int64_t(kThreads) + threadIdx.x) * Width;
  if (i >= p.count) return;
  const T* const y = static_cast<const T*>(p.y) + i;
  float sum[Width], other[Width], z[Width], out[Width];
  load_vector(y, sum);
  load_vector(static_cast<const T*>(p.z) + i, z);
  if (p.directions > 1) {
    load_vector(y + p.count, other);
#pragma unroll
    for (int j = 0; j < Width; ++j) sum[j] += other[j];
  }
#pragma unroll
  for (int j = 0; j < Width; ++j) sum[j] *= p.scale;
  to_floats(to_vector<T>(sum), sum);  // as backward will find it
#pragma unroll
  for (int j = 0; j < Width; ++j) out[j] = z[j] * sigmoid(z[j]) * sum[j];
  store_vector(static_cast<T*>(p.out) + i, out);
  if (p.sum) store_vector(static_cast<T*>(p.sum) + i, sum);
}

template <class T, int Width>
__global__ void __launch_bounds__(kThreads)
    gate_backward_kernel(const __grid_constant__ GateBackward p) {
  const int64_t i = (blockIdx.x * int64_t(kThreads) + threadIdx.x) * Width;
  if (i >= p.count) return;
  float grad[Width], sum[Width], z[Width], grad_y[Width], out[Width];
  load_vector(static_cast<const T*>(p.grad_out) + i, grad);
  load_vector(static_cast<const T*>(p.sum) + i, sum);
  load_vector(static_cast<const T*>(p.z) + i, z);
#pragma unroll
  for (int j = 0; j < Width; ++j) {
    const float s = sigmoid(z[j]), silu = z[j] * s;
    const float slope = s * (1.0f + z[j] * (1.0f - s));
    out[j] = silu * sum[j];
    grad_y[j] = silu * p.scale * grad[j];
    z[j] = slope * sum[j] * grad[j];
  }
  store_vector(static_cast<T*>(p.out) + i, out);
  store_vector(static_cast<T*>(p.grad_y) + i, grad_y);
  store_vector(static_cast<T*>(p.grad_z) + i, z);
}

// Calls f(blocks, element, width) for `count` entries of each tensor, `width` to a thread.
template <class F>
void dispatch(Storage storage, int64_t count, std::initializer_list<const void*> tensors,
              const F& f) {
  bool wide = count % kWidth == 0;
  for (const void* t : tensors) wide = wide && fits(t, storage, kWidth, 0);
  const int width = wide ? kWidth : 1;
  const int64_t blocks = (count / width + kThreads - 1) / kThreads;
  if (blocks == 0) return;
  if (blocks > INT32_MAX) throw std::runtime_error("vim_mm: too many entries for one launch");
  dispatch_storage(storage, [&](auto t) {
    const unsigned grid = static_cast<unsigned>(blocks);
    if (wide) f(grid, t, std::integral_constant<int, kWidth>());
    else f(grid, t, std::integral_constant<int, 1>());
  });
}

}  // namespace

void gate(const Gate& p, void* stream) {
  dispatch(p.storage, p.count, {p.y, p.z, p.out, p.sum}, [&](unsigned blocks, auto t, auto width) {
    enqueue(gate_kernel<decltype(t), width()>, blocks, kThreads, 0, stream, p);
  });
}

void gate_backward(const GateBackward& p, void* stream) {
  dispatch(p.storage, p.count, {p.grad_out, p.sum, p.z, p.grad_y, p.grad_z, p.out},
           [&](unsigned blocks, auto t, auto width) {
             enqueue(gate_backward_kernel<decltype(t), width()>, blocks, kThreads, 0, stream, p);
           });
}

}  // namespace vim_mm
