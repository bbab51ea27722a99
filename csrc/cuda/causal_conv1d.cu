// The short convolution and its activation, in both directions of a block at once.
//
// A thread has kSpan steps of a channel and what the taps reach at either side of them, in registers.
// A direction that runs against time sees the same window mirrored.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "block.h"
#include "errors.h"
#include "packs.cuh"

namespace vim_mm {
namespace {

constexpr int kThreads = 256, kSpan = 8;

// Steps [first, first + Count) of a row, zeros outside of it.
template <bool Aligned, int Count, class T>
__device__ __forceinline__ void load_steps(const T* row, int first, int steps,
                                           float (&out)[Count]) {
  constexpr int width = Aligned ? kQuad : 1;
#pragma unroll
  for (int i = 0; i < Count; i += width) {
    float values[width] = {};
    if (unsigned(first + i) < unsigned(steps)) load_pack(row + (first + i), values);
#pragma unroll
    for (int j = 0; j < width; ++j) out[i + j] = values[j];
  }
}
template <bool Aligned, class T>
__device__ __forceinline__ void store_steps(T* row, int first, int steps,
                                            const float (&out)[kSpan]) {
  constexpr int width = Aligned ? kQuad : 1;
#pragma unroll
  for (int i = 0; i < kSpan; i += width) {
    float values[width];
#pragma unroll
    for (int j = 0; j < width; ++j) values[j] = out[i + j];
    if (first + i < steps) store_pack(row + (first + i), values);
  }
}

// A window in the order of a direction.
template <bool Reverse, int Count>
__device__ __forceinline__ float at(const float (&window)[Count], int i) {
  return window[Reverse ? Count - 1 - i : i];
}

// The kernel of a channel; taps that it does not have are zeros, the farthest ones.
template <int Taps>
struct Kernel {
  float weight[Taps], bias;

  __device__ __forceinline__ Kernel() {}
  __device__ __forceinline__ Kernel(const Convolution& p, int k, int64_t channel) {
    const int64_t row = k * p.channels + channel;
#pragma unroll
    for (int w = 0; w < Taps; ++w) {
      const int tap = w - (Taps - p.taps);
      weight[w] = tap < 0 ? 0.0f : p.weight[row * p.taps + tap];
    }
    bias = p.bias[row];
  }
  // Before the activation, at step i of the span.
  template <bool Reverse, int Count>
  __device__ __forceinline__ float convolve(const float (&window)[Count], int i) const {
    float sum = bias;
#pragma unroll
    for (int w = 0; w < Taps; ++w) sum += weight[w] * at<Reverse>(window, i + 1 + w);
    return sum;
  }
};

template <bool Reverse, int Taps, int Count>
__device__ __forceinline__ void activate(const Kernel<Taps>& kernel, const float (&window)[Count],
                                         float (&out)[kSpan]) {
#pragma unroll
  for (int i = 0; i < kSpan; ++i) {
    const float x = kernel.template convolve<Reverse>(window, i);
    out[Reverse ? kSpan - 1 - i : i] = x * sigmoid(x);
  }
}

// Blocks are wide in time and, where there is little of it, high in rows (h, b).
template <class T, int Taps, bool Aligned>
__global__ void __launch_bounds__(kThreads) convolve_kernel(const __grid_constant__ Convolution p) {
  const int64_t row = blockIdx.x * int64_t(blockDim.y) + threadIdx.y;
  const int64_t rows = p.channels * p.batch;
  if (row >= rows) return;
  const int64_t channel = row / p.batch, b = row % p.batch;
  const T* const x = static_cast<const T*>(p.x) + channel * p.x_row + b * p.steps;
  Kernel<Taps> kernels[kMaxDirections];
#pragma unroll
  for (int k = 0; k < kMaxDirections; ++k)
    if (k < p.directions) kernels[k] = Kernel<Taps>(p, k, channel);

  const int steps = p.steps;
  for (int first = threadIdx.x * kSpan; first < steps; first += blockDim.x * kSpan) {
    float window[Taps + kSpan + Taps];
    load_steps<Aligned>(x, first - Taps, steps, window);
#pragma unroll
    for (int k = 0; k < kMaxDirections; ++k) {
      if (k >= p.directions) break;
      float out[kSpan];
      if (p.reverse[k]) activate<true>(kernels[k], window, out);
      else activate<false>(kernels[k], window, out);
      store_steps<Aligned>(static_cast<T*>(p.u) + (k * rows + row) * p.steps, first, steps, out);
    }
  }
}

// What a thread has of the gradients of a kernel: its weights, and last its bias.
template <int Taps>
struct KernelGradient {
  float value[Taps + 1] = {};
};

// Adds what the span gives to grad_x (in the order of memory) and to the kernel. Steps beyond the span
// count for grad_x as far as taps reach; their part of the kernel is their own thread's.
template <bool Reverse, int Taps, int Count>
__device__ __forceinline__ void differentiate(const Kernel<Taps>& kernel,
                                              const float (&window)[Count],
                                              const float (&grad_u)[kSpan + Taps],
                                              float (&grad_x)[kSpan], KernelGradient<Taps>& grad) {
  float slope[kSpan + Taps - 1];  // the gradient before the activation
#pragma unroll
  for (int i = 0; i < kSpan + Taps - 1; ++i) {
    const float x = kernel.template convolve<Reverse>(window, i), s = sigmoid(x);
    slope[i] = at<Reverse>(grad_u, i) * (s * (1.0f + x * (1.0f - s)));
  }
#pragma unroll
  for (int i = 0; i < kSpan; ++i) {
#pragma unroll
    for (int w = 0; w < Taps; ++w) {
      grad_x[Reverse ? kSpan - 1 - i : i] += kernel.weight[w] * slope[i + Taps - 1 - w];
      grad.value[w] += slope[i] * at<Reverse>(window, i + 1 + w);
    }
    grad.value[Taps] += slope[i];
  }
}

// A block has a channel, so that the gradients of its kernels are sums within the block.
template <class T, int Taps, bool Aligned>
__global__ void __launch_bounds__(kThreads)
    convolve_backward_kernel(const __grid_constant__ ConvolutionBackward p) {
  const Convolution& f = p.forward;
  const int64_t channel = blockIdx.x, rows = f.channels * f.batch;
  const T* const x = static_cast<const T*>(f.x) + channel * f.x_row;
  T* const grad_x = static_cast<T*>(p.grad_x) + channel * p.grad_x_row;
  Kernel<Taps> kernels[kMaxDirections];
  KernelGradient<Taps> grads[kMaxDirections];
#pragma unroll
  for (int k = 0; k < kMaxDirections; ++k)
    if (k < f.directions) kernels[k] = Kernel<Taps>(f, k, channel);

  const int steps = f.steps;
  const uint32_t spans = (steps + kSpan - 1) / kSpan, all = spans * f.batch;
  for (uint32_t i = threadIdx.x; i < all; i += kThreads) {
    const int64_t b = i / spans;
    const int first = i % spans * kSpan;
    float window[Taps + kSpan + Taps], sum[kSpan] = {};
    load_steps<Aligned>(x + b * f.steps, first - Taps, steps, window);
#pragma unroll
    for (int k = 0; k < kMaxDirections; ++k) {
      if (k >= f.directions) break;
      const T* const row =
          static_cast<const T*>(p.grad_u) + (k * rows + channel * f.batch + b) * f.steps;
      float grad_u[kSpan + Taps];
      load_steps<Aligned>(row, f.reverse[k] ? first - Taps : first, steps, grad_u);
      if (f.reverse[k]) differentiate<true>(kernels[k], window, grad_u, sum, grads[k]);
      else differentiate<false>(kernels[k], window, grad_u, sum, grads[k]);
    }
    store_steps<Aligned>(grad_x + b * f.steps, first, steps, sum);
  }

  constexpr int warps = kThreads / 32, values = kMaxDirections * (Taps + 1);
  __shared__ float parts[warps][values];
#pragma unroll
  for (int i = 0; i < values; ++i) {
    const float part = sum_over_warp(grads[i / (Taps + 1)].value[i % (Taps + 1)]);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32][i] = part;
  }
  __syncthreads();
  const int k = threadIdx.x / (Taps + 1), w = threadIdx.x % (Taps + 1);
  const int tap = w - (Taps - f.taps);
  if (k >= f.directions || tap < 0) return;
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < warps; ++i) total += parts[i][threadIdx.x];
  if (w == Taps) p.grad_bias[k * f.channels + channel] = total;
  else p.grad_weight[(k * f.channels + channel) * f.taps + tap] = total;
}

// Calls f(element, taps, aligned) with an object of the type and constants.
template <class F>
void dispatch(const Convolution& p, bool aligned, const F& f) {
  using std::integral_constant;
  dispatch_storage(p.storage, [&](auto t) {
    const auto with_taps = [&](auto taps) {
      if (aligned) f(t, taps, std::true_type());
      else f(t, taps, std::false_type());
    };
    if (p.taps <= 4) with_taps(integral_constant<int, 4>());
    else with_taps(integral_constant<int, kMaxTaps>());
  });
}

bool is_aligned(const Convolution& p) {
  return p.steps % kQuad == 0 && fits(p.x, p.storage, kQuad, p.x_row) &&
         fits(p.u, p.storage, kQuad, 0);
}

// Within a channel 32 bits count steps.
unsigned checked_blocks(int64_t blocks, const Convolution& p) {
  if (blocks > INT32_MAX || p.batch * (p.steps + kSpan) > INT32_MAX / 2)
    throw std::runtime_error("vim_mm: too many channels or steps for one launch");
  return static_cast<unsigned>(blocks);
}

}  // namespace

void convolve(const Convolution& p, void* stream) {
  const int64_t rows = p.channels * p.batch, spans = (p.steps + kSpan - 1) / kSpan;
  if (rows * spans == 0) return;
  int width = 8;
  while (width < spans && width < kThreads) width *= 2;
  const dim3 threads(width, kThreads / width);
  dispatch(p, is_aligned(p), [&](auto t, auto taps, auto aligned) {
    enqueue(convolve_kernel<decltype(t), taps(), aligned()>,
            checked_blocks((rows + threads.y - 1) / threads.y, p), threads, 0, stream, p);
  });
}

void convolve_backward(const ConvolutionBackward& p, void* stream) {
  const Convolution& f = p.forward;
  if (f.channels == 0) return;
  const bool aligned = is_aligned(f) && fits(p.grad_u, f.storage, kQuad, 0) &&
                       fits(p.grad_x, f.storage, kQuad, p.grad_x_row);
  dispatch(f, aligned, [&](auto t, auto taps, auto aligned) {
    enqueue(convolve_backward_kernel<decltype(t), taps(), aligned()>, checked_blocks(f.channels, f),
            kThreads, 0, stream, p);
  });
}

}  // namespace vim_mm
