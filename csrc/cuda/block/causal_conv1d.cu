// The depthwise causal convolution and SiLU, for both directions of a block in one launch.
//
// A thread computes kSpan steps of a channel. Its registers hold a window: these steps and as many on
// either side as the filter has taps. The direction against time reads the same window mirrored.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "../common/errors.h"
#include "block.h"
#include "vectors.cuh"

namespace vim_mm {
namespace {

constexpr int kWarps = 8, kThreads = kWarp * kWarps, kSpan = 8;
// Blocks of forward: four for each multiprocessor. Each loads its filters once and loops
// over spans.
constexpr int64_t kBlocks = 4 * kMultiprocessors;

// Steps [first, first + Count) of a row, zeros outside of it; up to Width steps at once.
template <int Width, int Count, class T>
__device__ __forceinline__ void load_steps(const T* row, int first, int steps, float* out) {
  constexpr int width = Width < Count ? Width : Count;
#pragma unroll
  for (int i = 0; i < Count; i += width) {
    float values[width] = {};
    if (unsigned(first + i) < unsigned(steps)) load_vector(row + (first + i), values);
#pragma unroll
    for (int j = 0; j < width; ++j) out[i + j] = values[j];
  }
}
template <int Width, class T>
__device__ __forceinline__ void store_steps(T* row, int first, int steps,
                                            const float (&out)[kSpan]) {
#pragma unroll
  for (int i = 0; i < kSpan; i += Width) {
    float values[Width];
#pragma unroll
    for (int j = 0; j < Width; ++j) values[j] = out[i + j];
    if (first + i < steps) store_vector(row + (first + i), values);
  }
}
// A span and what the taps reach at either side.
template <int Width, int Taps, class T>
__device__ __forceinline__ void load_window(const T* row, int first, int steps,
                                            float (&window)[Taps + kSpan + Taps]) {
  load_steps<Width, Taps>(row, first - Taps, steps, window);
  load_steps<Width, kSpan>(row, first, steps, window + Taps);
  load_steps<Width, Taps>(row, first + kSpan, steps, window + Taps + kSpan);
}

// A window in the order of a direction.
template <bool Reverse, int Count>
__device__ __forceinline__ float at(const float (&window)[Count], int i) {
  return window[Reverse ? Count - 1 - i : i];
}

// Where the steps of a window, in the order of memory, begin a sequence: bit i of step i. Kernels are compiled for
// rows of several sequences (`Packed`), and for all others.
template <bool Packed, int Taps>
struct Boundaries {
  static constexpr int count = Taps + kSpan + Taps;
  static_assert(count < 32, "a bit each");
  uint32_t bits = 0;

  __device__ __forceinline__ Boundaries(const bool* row, int first, int steps) {
    if constexpr (Packed) {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const int step = first - Taps + i;
        if (unsigned(step) < unsigned(steps) && row[step]) bits |= 1u << i;
      }
    }
  }
  // In the order of a direction: whether tap w reads a step of the sequence that step i of the span is in.
  template <bool Reverse>
  __device__ __forceinline__ bool allows(int i, int w) const {
    if (!Packed) return true;
    const int from = i + 1 + w, to = i + Taps;  // of the window
    // Nothing may begin after `from`, up to `to`; mirrored, not at `from`, up to before `to`.
    const int least = Reverse ? count - to : from + 1;
    return (bits >> least & ((1u << (to - from)) - 1)) == 0;
  }
};

// The filter of a channel, padded with zeros at its far end to `Taps`. A direction that does not exist has
// the filter of the first one: with a branch the loads of the two directions would not overlap.
template <int Taps>
struct Filter {
  float weight[Taps], bias;

  __device__ __forceinline__ Filter() {}
  __device__ __forceinline__ Filter(const Convolution& p, int k, int64_t channel) {
    const int64_t row = (k < p.directions ? k * p.channels : 0) + channel;
#pragma unroll
    for (int w = 0; w < Taps; ++w) {
      const int tap = w - (Taps - p.taps);
      weight[w] = tap < 0 ? 0.0f : p.weight[row * p.taps + tap];
    }
    bias = p.bias[row];
  }
  // Before the activation, at step i of the span.
  template <bool Reverse, bool Packed, int Count>
  __device__ __forceinline__ float convolve(const float (&window)[Count],
                                            const Boundaries<Packed, Taps>& boundaries,
                                            int i) const {
    float sum = bias;
#pragma unroll
    for (int w = 0; w < Taps; ++w)
      if (boundaries.template allows<Reverse>(i, w))
        sum += weight[w] * at<Reverse>(window, i + 1 + w);
    return sum;
  }
};

template <bool Reverse, bool Packed, int Taps, int Count>
__device__ __forceinline__ void activate(const Filter<Taps>& filter, const float (&window)[Count],
                                         const Boundaries<Packed, Taps>& boundaries,
                                         float (&out)[kSpan]) {
#pragma unroll
  for (int i = 0; i < kSpan; ++i) {
    const float x = filter.template convolve<Reverse>(window, boundaries, i);
    out[Reverse ? kSpan - 1 - i : i] = x * sigmoid(x);
  }
}

// Spans of a channel, counted over all rows (one row for each b).
struct Spans {
  uint32_t steps, of_row, count;

  __device__ __forceinline__ explicit Spans(const Convolution& p)
      : steps(p.steps), of_row((steps + kSpan - 1) / kSpan), count(of_row * uint32_t(p.batch)) {}
  // From the first row to that of span i, and the span's first step.
  __device__ __forceinline__ uint32_t row(uint32_t i) const { return i / of_row * steps; }
  __device__ __forceinline__ int first(uint32_t i) const { return i % of_row * kSpan; }
};

// A warp has spans of one channel. If the whole block had one channel, as in backward, the compiler would
// keep the filters in uniform registers, and wait for them before it loads the first window.
template <class T, int Taps, int Width, bool Packed>
__global__ void __launch_bounds__(kThreads) convolve_kernel(const __grid_constant__ Convolution p) {
  const int64_t channel = blockIdx.x * kWarps + threadIdx.x / kWarp, size = p.batch * p.steps;
  if (channel >= p.channels) return;
  const T* const x = static_cast<const T*>(p.x) + channel * p.x_row;
  T* const u = static_cast<T*>(p.u) + channel * size;
  Filter<Taps> filters[kMaxDirections];
#pragma unroll
  for (int k = 0; k < kMaxDirections; ++k) filters[k] = Filter<Taps>(p, k, channel);

  const Spans spans(p);
  const int steps = p.steps;
  for (uint32_t i = blockIdx.y * kWarp + threadIdx.x % kWarp; i < spans.count;
       i += gridDim.y * kWarp) {
    const uint32_t row = spans.row(i);
    const int first = spans.first(i);
    float window[Taps + kSpan + Taps];
    load_window<Width, Taps>(x + row, first, steps, window);
    const Boundaries<Packed, Taps> boundaries(p.reset + row, first, steps);
#pragma unroll
    for (int k = 0; k < kMaxDirections; ++k) {
      if (k >= p.directions) break;
      float out[kSpan];
      if (p.reverse[k]) activate<true>(filters[k], window, boundaries, out);
      else activate<false>(filters[k], window, boundaries, out);
      store_steps<Width>(u + k * p.channels * size + row, first, steps, out);
    }
  }
}

// A thread's part of the gradients of a filter: the weights, then the bias.
template <int Taps>
struct FilterGradient {
  float value[Taps + 1] = {};
};

// The incoming gradient of one direction, in its order: a span, and as many steps behind it as the filter
// has taps.
template <int Taps>
struct Incoming {
  float span[kSpan], behind[Taps];

  template <int Width, class T>
  __device__ __forceinline__ void load(const T* row, int first, int steps, bool reverse) {
    load_steps<Width, kSpan>(row, first, steps, span);
    load_steps<Width, Taps>(row, reverse ? first - Taps : first + kSpan, steps, behind);
  }
  template <bool Reverse>
  __device__ __forceinline__ float at_step(int i) const {
    return i < kSpan ? at<Reverse>(span, i) : at<Reverse>(behind, i - kSpan);
  }
};

// Adds the span's part to grad_x (in the order of memory) and to the filter's gradient. Steps behind the
// span contribute to grad_x only: the filter's gradient from them belongs to another thread.
template <bool Reverse, bool Packed, int Taps, int Count>
__device__ __forceinline__ void differentiate(const Filter<Taps>& filter,
                                              const float (&window)[Count],
                                              const Boundaries<Packed, Taps>& boundaries,
                                              const Incoming<Taps>& grad_u, float (&grad_x)[kSpan],
                                              FilterGradient<Taps>& grad) {
  float slope[kSpan + Taps - 1];  // the gradient before the activation
#pragma unroll
  for (int i = 0; i < kSpan + Taps - 1; ++i) {
    const float x = filter.template convolve<Reverse>(window, boundaries, i), s = sigmoid(x);
    slope[i] = grad_u.template at_step<Reverse>(i) * (s * (1.0f + x * (1.0f - s)));
  }
#pragma unroll
  for (int i = 0; i < kSpan; ++i) {
#pragma unroll
    for (int w = 0; w < Taps; ++w) {
      const int reader = i + Taps - 1 - w;  // the step whose tap w reads step i
      if (boundaries.template allows<Reverse>(reader, w))
        grad_x[Reverse ? kSpan - 1 - i : i] += filter.weight[w] * slope[reader];
      if (boundaries.template allows<Reverse>(i, w))
        grad.value[w] += slope[i] * at<Reverse>(window, i + 1 + w);
    }
    grad.value[Taps] += slope[i];
  }
}

// A block has all spans of a channel, so that the gradients of its filters are summed within the block.
template <class T, int Taps, int Width, bool Packed>
__global__ void __launch_bounds__(kThreads, Taps == 4 ? 3 : 2)
    convolve_backward_kernel(const __grid_constant__ ConvolutionBackward p) {
  const Convolution& f = p.forward;
  const int64_t channel = blockIdx.x, size = f.batch * f.steps;
  const T* const x = static_cast<const T*>(f.x) + channel * f.x_row;
  const T* const grad_u = static_cast<const T*>(p.grad_u) + channel * size;
  T* const grad_x = static_cast<T*>(p.grad_x) + channel * p.grad_x_row;
  Filter<Taps> filters[kMaxDirections];
  FilterGradient<Taps> grads[kMaxDirections];
#pragma unroll
  for (int k = 0; k < kMaxDirections; ++k) filters[k] = Filter<Taps>(f, k, channel);

  const Spans spans(f);
  const int steps = f.steps;
  for (uint32_t i = threadIdx.x; i < spans.count; i += kThreads) {
    const uint32_t row = spans.row(i);
    const int first = spans.first(i);
    float window[Taps + kSpan + Taps], sum[kSpan] = {};
    Incoming<Taps> incoming[kMaxDirections];
    load_window<Width, Taps>(x + row, first, steps, window);
    const Boundaries<Packed, Taps> boundaries(f.reset + row, first, steps);
#pragma unroll
    for (int k = 0; k < kMaxDirections; ++k)  // without a branch: one wait for all loads
      incoming[k].template load<Width>(grad_u + k * f.channels * size + row, first,
                                       k < f.directions ? steps : 0, f.reverse[k]);
#pragma unroll
    for (int k = 0; k < kMaxDirections; ++k) {
      if (k >= f.directions) break;
      if (f.reverse[k])
        differentiate<true>(filters[k], window, boundaries, incoming[k], sum, grads[k]);
      else differentiate<false>(filters[k], window, boundaries, incoming[k], sum, grads[k]);
    }
    store_steps<Width>(grad_x + row, first, steps, sum);
  }

  constexpr int values = kMaxDirections * (Taps + 1);
  static __shared__ float parts[kWarps][values];
#pragma unroll
  for (int i = 0; i < values; ++i) {
    const float part = sum_over_warp(grads[i / (Taps + 1)].value[i % (Taps + 1)]);
    if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp][i] = part;
  }
  __syncthreads();
  const int k = threadIdx.x / (Taps + 1), w = threadIdx.x % (Taps + 1);
  const int tap = w - (Taps - f.taps);
  if (k >= f.directions || tap < 0) return;
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) total += parts[i][threadIdx.x];
  if (w == Taps) p.grad_bias[k * f.channels + channel] = total;
  else p.grad_weight[(k * f.channels + channel) * f.taps + tap] = total;
}

// Calls f(T(), taps, width, packed) with the widest vectors for which is_aligned(width) holds.
template <class P, class F>
void dispatch(const Convolution& p, const P& is_aligned, const F& f) {
  using std::integral_constant;
  dispatch_storage(p.storage, [&](auto t) {
    const auto with_taps = [&](auto taps) {
      constexpr int widest = 16 / sizeof(t);
      const auto with_width = [&](auto width) {
        if (p.reset) f(t, taps, width, std::true_type());
        else f(t, taps, width, std::false_type());
      };
      if (is_aligned(widest)) with_width(integral_constant<int, widest>());
      else if (is_aligned(kQuad)) with_width(integral_constant<int, kQuad>());
      else with_width(integral_constant<int, 1>());
    };
    if (p.taps <= 4) with_taps(integral_constant<int, 4>());
    else with_taps(integral_constant<int, kMaxTaps>());
  });
}

bool is_aligned(const Convolution& p, int width) {
  return p.steps % width == 0 && fits(p.x, p.storage, width, p.x_row) &&
         fits(p.u, p.storage, width, 0);
}

// The kernels count the steps of a channel in 32 bits.
unsigned checked_channels(const Convolution& p) {
  if (p.channels > INT32_MAX || p.batch * (p.steps + kSpan) > INT32_MAX / 2)
    throw std::runtime_error("vim_mm: too many channels or steps for one launch");
  return static_cast<unsigned>(p.channels);
}

}  // namespace

void convolve(const Convolution& p, void* stream) {
  const unsigned channels = checked_channels(p);
  const int64_t spans = (p.steps + kSpan - 1) / kSpan * p.batch;
  if (channels == 0 || spans == 0) return;
  const unsigned rows = (channels + kWarps - 1) / kWarps;
  const int64_t most = (spans + kWarp - 1) / kWarp;
  const dim3 blocks(rows, std::clamp<int64_t>(kBlocks / rows, 1, most));
  dispatch(
      p, [&](int width) { return is_aligned(p, width); },
      [&](auto t, auto taps, auto width, auto packed) {
        enqueue(convolve_kernel<decltype(t), taps(), width(), packed()>, blocks, kThreads, 0,
                stream, p);
      });
}

void convolve_backward(const ConvolutionBackward& p, void* stream) {
  const Convolution& f = p.forward;
  const unsigned channels = checked_channels(f);
  if (channels == 0) return;
  dispatch(
      f,
      [&](int width) {
        return is_aligned(f, width) && fits(p.grad_u, f.storage, width, 0) &&
               fits(p.grad_x, f.storage, width, p.grad_x_row);
      },
      [&](auto t, auto taps, auto width, auto packed) {
        enqueue(convolve_backward_kernel<decltype(t), taps(), width(), packed()>, channels,
                kThreads, 0, stream, p);
      });
}

}  // namespace vim_mm
