// Residual add and RMSNorm in one kernel. A warp computes one row at a time. It reads the row twice, the
// second time from the cache, because rows of any length do not fit in registers. The first blocks of
// the forward launch convert the parameters of the mixer, which saves a launch.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "../common/launch.cuh"
#include "parameters.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

constexpr int kForwardWarps = 8, kBackwardWarps = 16;
// Shared memory of a block, the same on every GPU, so that sums have one order.
constexpr int64_t kBackwardMemory = 96 << 10;

// Calls f(c) with the first channel of each vector that this lane has of a row. All lanes leave the loop
// together, and nvcc must not unroll it: it would store the vectors entry by entry.
template <int Width, class F>
__device__ __forceinline__ void for_each_vector(int channels, const F& f) {
#pragma unroll 1
  for (int start = 0; start < channels; start += kWarp * Width) {
    const int c = start + threadIdx.x % kWarp * Width;
    if (c < channels) f(c);
  }
}

// R: type of the residual stream, T: of the mixer's activations, W: of the weight.
template <class R, class T, class W, int Width>
__global__ void __launch_bounds__(kWarp* kForwardWarps)
    add_rms_norm_kernel(const __grid_constant__ AddRmsNorm p,
                        const __grid_constant__ ConversionBlocks beside) {
  static_assert(kWarp * kForwardWarps == kConversionThreads, "both have such blocks");
  let_next_begin();
  wait_for_previous();
  if (blockIdx.x < beside.count) return convert_block(beside, blockIdx.x);
  const int64_t row = int64_t(blockIdx.x - beside.count) * kForwardWarps + threadIdx.x / kWarp;
  if (row >= p.rows) return;
  const int channels = p.channels;
  const R* const residual = static_cast<const R*>(p.residual) + row * channels;
  const T* const update = static_cast<const T*>(p.update) + row * channels;
  const auto load_sum = [&](int c, float (&x)[Width]) {
    load_vector(residual + c, x);
    if (!p.update) return;
    float added[Width];
    load_vector(update + c, added);
#pragma unroll
    for (int i = 0; i < Width; ++i) x[i] = to_float(from_float<R>(x[i] + added[i]));
  };

  float squares = 0.0f;
  for_each_vector<Width>(channels, [&](int c) {
    float x[Width];
    load_sum(c, x);
    if (p.update) store_vector(static_cast<R*>(p.sum) + row * channels + c, x);
#pragma unroll
    for (int i = 0; i < Width; ++i) squares += x[i] * x[i];
  });
  const float rstd = rsqrtf(sum_over_warp(squares) / float(channels) + p.eps);
  if (threadIdx.x % kWarp == 0) p.rstd[row] = rstd;
  for_each_vector<Width>(channels, [&](int c) {
    float x[Width], weight[Width];
    load_sum(c, x);
    load_vector(static_cast<const W*>(p.weight) + c, weight);
#pragma unroll
    for (int i = 0; i < Width; ++i) x[i] *= rstd * weight[i];
    store_vector(static_cast<T*>(p.normed) + row * channels + c, x);
  });
}

// Rows go round robin over all warps. Each warp sums its part of the weight's gradient in shared memory,
// so that the order of the sum depends on sizes alone.
template <class R, class T, class W, int Width>
__global__ void __launch_bounds__(kWarp* kBackwardWarps)
    add_rms_norm_backward_kernel(const __grid_constant__ AddRmsNormBackward p) {
  extern __shared__ float4 memory[];  // [warps, channels]
  const int channels = p.channels;
  const int warps = blockDim.x / kWarp, warp = threadIdx.x / kWarp;
  float* const grad_weight = reinterpret_cast<float*>(memory);
  float* const mine = grad_weight + warp * channels;
  for_each_vector<Width>(channels, [&](int c) {
    const float zeros[Width] = {};
    store_vector(mine + c, zeros);
  });

  for (int64_t row = blockIdx.x * int64_t(warps) + warp; row < p.rows;
       row += gridDim.x * int64_t(warps)) {
    const R* const sum = static_cast<const R*>(p.sum) + row * channels;
    const T* const grad_normed = static_cast<const T*>(p.grad_normed) + row * channels;
    const float rstd = p.rstd[row];
    float dot = 0.0f;
    for_each_vector<Width>(channels, [&](int c) {
      float x[Width], grad[Width], weight[Width], total[Width];
      load_vector(sum + c, x);
      load_vector(grad_normed + c, grad);
      load_vector(static_cast<const W*>(p.weight) + c, weight);
      load_vector(mine + c, total);
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        const float along = grad[i] * x[i] * rstd;
        total[i] += along;
        dot += along * weight[i];
      }
      store_vector(mine + c, total);
    });
    dot = sum_over_warp(dot) / float(channels);
    for_each_vector<Width>(channels, [&](int c) {
      float x[Width], grad[Width], weight[Width], passed[Width] = {};
      load_vector(sum + c, x);
      load_vector(grad_normed + c, grad);
      load_vector(static_cast<const W*>(p.weight) + c, weight);
      if (p.grad_sum) load_vector(static_cast<const R*>(p.grad_sum) + row * channels + c, passed);
#pragma unroll
      for (int i = 0; i < Width; ++i) passed[i] += rstd * (grad[i] * weight[i] - x[i] * rstd * dot);
      store_vector(static_cast<R*>(p.grad_residual) + row * channels + c, passed);
      if (p.grad_update) store_vector(static_cast<T*>(p.grad_update) + row * channels + c, passed);
    });
  }

  __syncthreads();
  for (int c = threadIdx.x; c < channels; c += blockDim.x) {
    float total = 0.0f;
    for (int w = 0; w < warps; ++w) total += grad_weight[w * channels + c];
    p.grad_weight[blockIdx.x * int64_t(channels) + c] = total;
  }
}

}  // namespace VIM_MM_ISA

namespace {

// Calls f(R(), T(), W(), width) with the types of the arguments and the width of their vectors.
template <class P, class F>
void dispatch(const P& p, std::initializer_list<const void*> residuals,
              std::initializer_list<const void*> others, const F& f) {
  if (p.channels > INT32_MAX) throw std::runtime_error("vim_mm: too many channels");
  bool aligned = fits(p.weight, p.weight_storage, kQuad, 0);
  for (const void* t : residuals)
    aligned = aligned && fits(t, p.residual_storage, kQuad, p.channels);
  for (const void* t : others) aligned = aligned && fits(t, p.storage, kQuad, p.channels);
  const auto with_width = [&](auto residual, auto t, auto weight) {
    if (aligned) f(residual, t, weight, std::integral_constant<int, kQuad>());
    else f(residual, t, weight, std::integral_constant<int, 1>());
  };
  dispatch_storage(p.storage, [&](auto t) {
    const auto with_weight = [&](auto residual) {
      if (p.weight_storage == Storage::float32) with_width(residual, t, float());
      else with_width(residual, t, t);
    };
    if (p.residual_storage == Storage::float32) with_weight(float());
    else with_weight(t);
  });
}

}  // namespace

void add_rms_norm(const AddRmsNorm& p, const Conversions& beside, void* stream) {
  if (p.rows == 0 || p.channels == 0) return convert(beside, stream);
  const ConversionBlocks conversions = conversion_blocks(beside);
  const int64_t blocks = conversions.count + (p.rows + kForwardWarps - 1) / kForwardWarps;
  dispatch(p, {p.residual, p.sum}, {p.update, p.normed},
           [&](auto residual, auto t, auto weight, auto width) {
             launch(add_rms_norm_kernel<decltype(residual), decltype(t), decltype(weight), width()>,
                    {grid_of(blocks), kWarp * kForwardWarps}, stream, p, conversions);
           });
}

void add_rms_norm_backward(const AddRmsNormBackward& p, void* stream) {
  if (p.channels == 0) return;
  // As many warps as shared memory has room for, one row of sums each.
  const int64_t row = p.channels * int64_t(sizeof(float));
  const int warps = static_cast<int>(std::min<int64_t>(kBackwardWarps, kBackwardMemory / row));
  if (warps == 0) throw std::runtime_error("vim_mm: too many channels for the RMSNorm's backward");
  dispatch(
      p, {p.sum, p.grad_sum, p.grad_residual}, {p.grad_normed, p.grad_update},
      [&](auto residual, auto t, auto weight, auto width) {
        const auto kernel = add_rms_norm_backward_kernel<decltype(residual), decltype(t),
                                                         decltype(weight), width()>;
        const int bytes = static_cast<int>(warps * row);
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
        enqueue(kernel, p.blocks, kWarp * warps, bytes, stream, p);
      });
}

}  // namespace vim_mm
