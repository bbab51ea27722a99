// The sum of the residual stream and a layer's update, and its RMSNorm. A warp has a row at a time.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "block.h"
#include "errors.h"
#include "packs.cuh"

namespace vim_mm {
namespace {

constexpr int kWarp = 32, kWarps = 8;

template <int Width>
__global__ void __launch_bounds__(kWarp * kWarps)
    add_rms_norm_kernel(const __grid_constant__ AddRmsNorm p) {
  const int64_t row = blockIdx.x * int64_t(kWarps) + threadIdx.x / kWarp;
  if (row >= p.rows) return;
  const int64_t start = row * p.channels;
  const int first = threadIdx.x % kWarp * Width;
  float squares = 0.0f;
  for (int64_t c = first; c < p.channels; c += kWarp * Width) {
    float x[Width], update[Width];
    load_entries(p.residual.data, p.residual.storage, start + c, x);
    if (p.update.data) {
      load_entries(p.update.data, p.update.storage, start + c, update);
#pragma unroll
      for (int i = 0; i < Width; ++i) x[i] += update[i];
      store_entries(p.sum.data, p.sum.storage, start + c, x);
      // As it was rounded.
      load_entries(p.sum.data, p.sum.storage, start + c, x);
    }
#pragma unroll
    for (int i = 0; i < Width; ++i) squares += x[i] * x[i];
  }
  const float rstd = rsqrtf(sum_over_warp(squares) / float(p.channels) + float(p.eps));
  if (threadIdx.x % kWarp == 0) p.rstd[row] = rstd;
  // A second read, from the cache, costs less than the registers for rows of any length.
  const Parameter from = p.update.data ? Parameter{p.sum.data, p.sum.storage} : p.residual;
  for (int64_t c = first; c < p.channels; c += kWarp * Width) {
    float x[Width];
    load_entries(from.data, from.storage, start + c, x);
#pragma unroll
    for (int i = 0; i < Width; ++i) x[i] *= rstd * load_entry(p.weight, c + i);
    store_entries(p.normed.data, p.normed.storage, start + c, x);
  }
}

// Rows go round robin over all warps; each warp adds up its part of the weight's gradient in shared
// memory, so that the order of the sum depends on sizes only.
template <int Width>
__global__ void __launch_bounds__(kWarp * kWarps)
    add_rms_norm_backward_kernel(const __grid_constant__ AddRmsNormBackward p) {
  extern __shared__ float grad_weight[];  // [warps, channels]
  const int warps = blockDim.x / kWarp, warp = threadIdx.x / kWarp;
  float* const mine = grad_weight + warp * p.channels;
  const int first = threadIdx.x % kWarp * Width;
  for (int64_t c = first; c < p.channels; c += kWarp * Width)
#pragma unroll
    for (int i = 0; i < Width; ++i) mine[c + i] = 0.0f;

  for (int64_t row = blockIdx.x * int64_t(warps) + warp; row < p.rows;
       row += gridDim.x * int64_t(warps)) {
    const int64_t start = row * p.channels;
    const float rstd = p.rstd[row];
    float dot = 0.0f;
    for (int64_t c = first; c < p.channels; c += kWarp * Width) {
      float x[Width], grad[Width];
      load_entries(p.sum.data, p.sum.storage, start + c, x);
      load_entries(p.grad_normed.data, p.grad_normed.storage, start + c, grad);
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        const float along = grad[i] * x[i] * rstd;
        mine[c + i] += along;
        dot += along * load_entry(p.weight, c + i);
      }
    }
    dot = sum_over_warp(dot) / float(p.channels);
    for (int64_t c = first; c < p.channels; c += kWarp * Width) {
      float x[Width], grad[Width], passed[Width] = {};
      load_entries(p.sum.data, p.sum.storage, start + c, x);
      load_entries(p.grad_normed.data, p.grad_normed.storage, start + c, grad);
      if (p.grad_sum.data) load_entries(p.grad_sum.data, p.grad_sum.storage, start + c, passed);
#pragma unroll
      for (int i = 0; i < Width; ++i)
        passed[i] += rstd * (grad[i] * load_entry(p.weight, c + i) - x[i] * rstd * dot);
      store_entries(p.grad_residual.data, p.grad_residual.storage, start + c, passed);
      if (p.grad_update.data)
        store_entries(p.grad_update.data, p.grad_update.storage, start + c, passed);
    }
  }

  __syncthreads();
  for (int64_t c = threadIdx.x; c < p.channels; c += blockDim.x) {
    float total = 0.0f;
    for (int w = 0; w < warps; ++w) total += grad_weight[w * p.channels + c];
    p.grad_weight[blockIdx.x * p.channels + c] = total;
  }
}

template <class... Tensors>
bool is_aligned(int64_t channels, const Tensors&... tensors) {
  return (fits(tensors.data, tensors.storage, kQuad, channels) && ...);
}

}  // namespace

void add_rms_norm(const AddRmsNorm& p, void* stream) {
  const int64_t blocks = (p.rows + kWarps - 1) / kWarps;
  if (blocks == 0 || p.channels == 0) return;
  if (blocks > INT32_MAX) throw std::runtime_error("vim_mm: too many rows for one launch");
  const bool aligned = is_aligned(p.channels, p.residual, p.update, p.normed, p.sum);
  const auto kernel = aligned ? add_rms_norm_kernel<kQuad> : add_rms_norm_kernel<1>;
  kernel<<<static_cast<unsigned>(blocks), kWarp * kWarps, 0, static_cast<cudaStream_t>(stream)>>>(
      p);
  check(cudaGetLastError());
}

void add_rms_norm_backward(const AddRmsNormBackward& p, void* stream) {
  if (p.channels == 0) return;
  const bool aligned = is_aligned(p.channels, p.grad_normed, p.grad_sum, p.sum, p.grad_residual,
                                  p.grad_update);
  const auto kernel =
      aligned ? add_rms_norm_backward_kernel<kQuad> : add_rms_norm_backward_kernel<1>;
  // As many warps as have room for a row each.
  int device = 0, most = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  const int64_t row = p.channels * int64_t(sizeof(float));
  const int64_t warps = std::min<int64_t>(kWarps, most / row);
  if (warps == 0) throw std::runtime_error("vim_mm: too many channels for the RMSNorm's backward");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(warps * row)));
  kernel<<<p.blocks, static_cast<unsigned>(kWarp * warps), warps * row,
           static_cast<cudaStream_t>(stream)>>>(p);
  check(cudaGetLastError());
}

}  // namespace vim_mm
