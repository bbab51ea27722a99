// What the scan kernels share, and how those that scan by segments cover channels, time and states.
//
// Steps count in scan order; only loads and stores know the direction. Past the last step a window holds
// dt = 0, u = 0, which leaves every state as it is. By segments, every lane of a warp has one channel and one
// segment of the window, in registers, and the warps of a block divide the states among them.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "methods.cuh"
#include "scan_arguments.h"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// For a lambda, behind its parameters. Of one that is large or called in several places nvcc may else make a
// function, and what that shares with the code around it goes through memory.
#define VIM_MM_INLINED __attribute__((always_inline))

constexpr int kQuad = 4;        // entries read or written at once, where their layout allows it
constexpr int kStateTile = 16;  // states whose B and C are in shared memory at once

#if defined(__CUDACC__)
// As instructions of shared memory take it.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return uint32_t(__cvta_generic_to_shared(p));
}
#endif

// `Sets`: how many times as many channels as a warp has lanes for come into shared memory at once.
template <int Segments, int Steps, int Warps, int MinBlocks = 1, int Sets = 1>
struct Shape {
  static constexpr bool sequential = false;
  static constexpr int segments = Segments, steps = Steps, warps = Warps, sets = Sets;
  static constexpr int min_blocks = MinBlocks;  // per multiprocessor: a bound on registers
  static constexpr int threads = 32 * Warps, window = Segments * Steps;
  static constexpr int channels_of_set = 32 / Segments, channels = channels_of_set * Sets;
};

// Lanes of one segment are neighbours: they read the same entries of B and C, and neighbours that
// do cost shared memory half of what others cost.
template <class Shape>
__device__ __forceinline__ int channel_of_lane(int set) {
  return set * Shape::channels_of_set + threadIdx.x % Shape::channels_of_set;
}
template <class Shape>
__device__ __forceinline__ int segment_of_lane() {
  return threadIdx.x % 32 / Shape::channels_of_set;
}

// One value for each channel and step of a window, by segments. Eight lanes at a time read or write
// 16 bytes each: in the scan those of neighbouring channels, then of the next segments, in loads
// and stores eight in a row. The gaps put both kinds of eight on different banks, but for loads and
// stores with 16 segments of 16 steps, two of which share one.
template <class Shape>
struct RowTile {
  static constexpr int quads = Shape::steps / kQuad;
  static constexpr bool paired = Shape::channels_of_set >= 4 && quads == 2;
  static constexpr int odd_channels = Shape::channels / 2 * 4 + 1;  // where `paired`
  static constexpr int remainder = Shape::channels_of_set < 4 || paired ? 2 : 4;
  static constexpr int least = Shape::channels * (paired ? 4 : quads + 1);
  static constexpr int segment_pitch = (least + (8 + remainder - least % 8) % 8) * kQuad;
  alignas(16) float values[Shape::segments * segment_pitch];

  // In floats.
  static __device__ __forceinline__ int place(int channel, int segment) {
    const int quad = paired ? channel / 2 * 4 + channel % 2 * odd_channels : channel * (quads + 1);
    return segment * segment_pitch + quad * kQuad;
  }
  __device__ __forceinline__ float* segment(int channel, int segment) {
    return values + place(channel, segment);
  }
  __device__ __forceinline__ const float* segment(int channel, int segment) const {
    return values + place(channel, segment);
  }
  __device__ __forceinline__ float* segment_of_lane(int set) {
    return segment(channel_of_lane<Shape>(set), cuda::segment_of_lane<Shape>());
  }
  __device__ __forceinline__ const float* segment_of_lane(int set) const {
    return segment(channel_of_lane<Shape>(set), cuda::segment_of_lane<Shape>());
  }
  __device__ __forceinline__ float* at(int channel, int step) {
    return segment(channel, step / Shape::steps) + step % Shape::steps;
  }
  __device__ __forceinline__ const float* at(int channel, int step) const {
    return segment(channel, step / Shape::steps) + step % Shape::steps;
  }
};

// One for each state and step. Padded where eight lanes read more than two segments.
template <class E, class Shape>
struct StateTile {
  static constexpr int pitch = Shape::steps + (Shape::channels_of_set < 4 ? kQuad : 0);
  alignas(16) E values[kStateTile][Shape::segments * pitch];

  __device__ __forceinline__ const E* segment(int state, int segment) const {
    return values[state] + segment * pitch;
  }
  __device__ __forceinline__ E* at(int state, int step) {
    return values[state] + step / Shape::steps * pitch + step % Shape::steps;
  }
  __device__ __forceinline__ const E* at(int state, int step) const {
    return values[state] + step / Shape::steps * pitch + step % Shape::steps;
  }
};

__device__ __forceinline__ void load_quad(const float* p, float (&quad)[kQuad]) {
  const float4 v = *reinterpret_cast<const float4*>(p);
  quad[0] = v.x, quad[1] = v.y, quad[2] = v.z, quad[3] = v.w;
}
__device__ __forceinline__ void load_quad(const Complex<float>* p, Complex<float> (&quad)[kQuad]) {
  const float4 *v = reinterpret_cast<const float4*>(p), low = v[0], high = v[1];
  quad[0] = {low.x, low.y}, quad[1] = {low.z, low.w};
  quad[2] = {high.x, high.y}, quad[3] = {high.z, high.w};
}
template <class E, int Steps>
__device__ __forceinline__ void load_segment(const E* p, E (&segment)[Steps]) {
  if constexpr (Steps % kQuad > 0) {
#pragma unroll
    for (int i = 0; i < Steps; ++i) segment[i] = p[i];
  } else {
#pragma unroll
    for (int i = 0; i < Steps; i += kQuad)
      load_quad(p + i, reinterpret_cast<E(&)[kQuad]>(segment[i]));
  }
}
// The same from shared memory, in the order of volatile instructions, as waits for a barrier and the tensor
// core's are; so what others wrote before that barrier is seen. ptxas makes one load of two all the same: what
// this changes is where loads stand (docs/kernels.md).
template <int Steps>
__device__ __forceinline__ void load_by_two(const float* p, float (&segment)[Steps]) {
#pragma unroll
  for (int i = 0; i < Steps; i += 2) {
#if defined(__CUDA_ARCH__)
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(segment[i]), "=f"(segment[i + 1])
                 : "r"(shared_address(p + i)));
#else
    segment[i] = p[i], segment[i + 1] = p[i + 1];
#endif
  }
}
template <int Steps>
__device__ __forceinline__ void store_segment(float* p, const float (&segment)[Steps]) {
#pragma unroll
  for (int i = 0; i < Steps; i += kQuad)
    *reinterpret_cast<float4*>(p + i) =
        make_float4(segment[i], segment[i + 1], segment[i + 2], segment[i + 3]);
}

// Has x in a register from now on. The compiler would rather compute it anew.
__device__ __forceinline__ void settle(int& x) {
#if defined(__CUDA_ARCH__)
  asm("" : "+r"(x));
#endif
}

// What the sum over states is multiplied with: conjugate pairs count twice, directions half each.
template <class Method, class E>
__device__ constexpr float output_weight() {
  return (sizeof(E) == sizeof(float) ? 1.0f : 2.0f) * (Method::causal ? 1.0f : 0.5f);
}

// 16 bits, or 32 for float32.
__device__ __forceinline__ float decode(uint32_t raw, Storage storage) {
  if (storage == Storage::float16) return __half2float(__ushort_as_half(uint16_t(raw)));
  return __uint_as_float(storage == Storage::bfloat16 ? raw << 16 : raw);
}
__device__ __forceinline__ uint16_t encode_16_bits(float value, Storage storage) {
  return storage == Storage::float16 ? __half_as_ushort(__float2half_rn(value))
                                     : __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

__device__ __forceinline__ float load_real(const char* p, Storage storage) {
  if (storage == Storage::float32) return *reinterpret_cast<const float*>(p);
  if (storage == Storage::float64) return float(*reinterpret_cast<const double*>(p));
  return decode(*reinterpret_cast<const uint16_t*>(p), storage);
}
template <class E>
__device__ __forceinline__ E load_element(const char* p, Storage storage);
template <>
__device__ __forceinline__ float load_element<float>(const char* p, Storage storage) {
  return load_real(p, storage);
}
template <>
__device__ __forceinline__ Complex<float> load_element<Complex<float>>(const char* p,
                                                                       Storage storage) {
  const int part = storage == Storage::float64 ? 8 : 4;
  return {load_real(p, storage), load_real(p + part, storage)};
}

__device__ __forceinline__ void store_real(char* p, Storage storage, float value) {
  if (storage == Storage::float64) *reinterpret_cast<double*>(p) = value;
  else if (storage == Storage::float32) *reinterpret_cast<float*>(p) = value;
  else *reinterpret_cast<uint16_t*>(p) = encode_16_bits(value, storage);
}

__device__ __forceinline__ void store_element(char* p, Storage storage, float value) {
  store_real(p, storage, value);
}
__device__ __forceinline__ void store_element(char* p, Storage storage, Complex<float> value) {
  store_real(p, storage, value.re);
  store_real(p + (storage == Storage::float64 ? 8 : 4), storage, value.im);
}

// The channels and the direction of a block.
struct Work {
  int64_t b, g, first_channel, steps, windows;
  int channels;  // of the group, from first_channel on, no more than the block has
  bool reverse;
  // Of a block that has but a split of time: which one, and where in memory its steps begin, in bytes.
  int64_t split = 0, offset = 0;

  // 32 bits where they suffice: division is slow.
  __device__ __forceinline__ Work(const ScanArguments& scan, uint32_t bg, int window)
      : b(bg / uint32_t(scan.groups)), g(bg % uint32_t(scan.groups)), first_channel(0),
        steps(scan.steps), windows((scan.steps + window - 1) / window), channels(0) {
    const int64_t flag = scan.same_direction ? 0 : g;
    reverse = scan.directions.bits[flag / 32] >> (flag % 32) & 1;
  }
  __device__ __forceinline__ void set_channels(const ScanArguments& scan, int64_t first, int most) {
    first_channel = first;
    channels = scan.channels - first < most ? int(scan.channels - first) : most;
  }
  __device__ __forceinline__ const char* at(const View& v) const {
    return v.data + b * v.batch + g * v.group + first_channel * v.row;
  }
  // How many steps there are from that window on, where more than a window's do not matter.
  __device__ __forceinline__ int steps_from(int64_t window, int size) const {
    const int64_t left = steps - window * size;
    return left < size ? int(left) : size;
  }
  // The row of channel c in contiguous [B, G, H, ...].
  __device__ __forceinline__ int64_t row(const ScanArguments& scan, int c) const {
    return (b * scan.groups + g) * scan.channels + first_channel + c;
  }
};

// That of a block which has channels of its own, in the grid of blocks_of (dispatch/configurations.cuh).
template <class Shape>
__device__ __forceinline__ Work work_of_block(const ScanArguments& scan) {
  const uint32_t sets = (scan.channels + Shape::channels - 1) / Shape::channels;
  Work work(scan, blockIdx.x / sets, Shape::window);
  work.set_channels(scan, blockIdx.x % sets * Shape::channels, Shape::channels);
  return work;
}

// Where no state passes in time (Bounds): of a block's batch entry and direction a word for each chunk, in scan order.
template <bool Bounded>
struct Cuts {
  __device__ __forceinline__ Cuts(const Bounds&, const Work&, int64_t) {}
  __device__ __forceinline__ uint64_t before(int64_t) const { return 0; }
  __device__ __forceinline__ uint64_t behind(int64_t) const { return 0; }
};
template <>
struct Cuts<true> {
  const uint64_t* words;  // null: it passes everywhere

  __device__ __forceinline__ Cuts(const Bounds& bounds, const Work& work, int64_t chunks)
      : words(bounds.cuts) {
    if (words) words += (work.b * 2 + work.reverse) * (chunks + 1);
  }
  // Bit i: between step i and the one before it. Behind the last chunk there is one more.
  __device__ __forceinline__ uint64_t before(int64_t chunk) const {
    return words ? words[chunk] : 0;
  }
  // Bit i: between step i and the one after it.
  __device__ __forceinline__ uint64_t behind(int64_t chunk) const {
    return words ? words[chunk] >> 1 | words[chunk + 1] << (kChunk - 1) : 0;
  }
};

// What a lane that has a segment of a chunk knows of such a word: the bits of its steps, and which segments have any.
struct NoCuts {
  __device__ __forceinline__ NoCuts(uint64_t = 0) {}
  __device__ __forceinline__ constexpr bool at(int) const { return false; }
  __device__ __forceinline__ constexpr bool any_in(int, int) const { return false; }
};
template <class Shape>
struct SegmentCuts {
  static_assert(Shape::window == kChunk && Shape::steps + Shape::segments <= 32, "one word each");
  uint32_t bits = 0;

  __device__ __forceinline__ SegmentCuts(uint64_t word) {
    constexpr uint32_t all = (1u << Shape::steps) - 1;
#pragma unroll
    for (int segment = 0; segment < Shape::segments; ++segment) {
      const uint32_t steps = uint32_t(word >> segment * Shape::steps) & all;
      if (steps) bits |= 1u << (Shape::steps + segment);
      if (segment == segment_of_lane<Shape>()) bits |= steps;
    }
  }
  __device__ __forceinline__ bool at(int step) const { return bits >> step & 1; }
  __device__ __forceinline__ bool any_in(int first_segment, int segments) const {
    return bits >> (Shape::steps + first_segment) & ((1u << segments) - 1);
  }
};
template <bool Bounded, class Shape>
using CutsOfSegment = std::conditional_t<Bounded, SegmentCuts<Shape>, NoCuts>;

// D or delta_bias of channel h of a group, 0 where there is none.
__device__ __forceinline__ float channel_value(const View& v, const ScanArguments& scan, int64_t g,
                                               int64_t h) {
  return v.data && h < scan.channels ? load_real(v.data + g * v.group + h * v.row, v.storage)
                                     : 0.0f;
}

__device__ __forceinline__ float shuffle_up(float x, int by) {
  return __shfl_up_sync(0xffffffffu, x, by);
}
__device__ __forceinline__ float shuffle_down(float x, int by) {
  return __shfl_down_sync(0xffffffffu, x, by);
}
__device__ __forceinline__ float shuffle(float x, int lane) {
  return __shfl_sync(0xffffffffu, x, lane);
}
__device__ __forceinline__ float shuffle_xor(float x, int bit) {
  return __shfl_xor_sync(0xffffffffu, x, bit);
}
__device__ __forceinline__ Complex<float> shuffle_up(Complex<float> x, int by) {
  return {shuffle_up(x.re, by), shuffle_up(x.im, by)};
}
__device__ __forceinline__ Complex<float> shuffle_down(Complex<float> x, int by) {
  return {shuffle_down(x.re, by), shuffle_down(x.im, by)};
}
__device__ __forceinline__ Complex<float> shuffle(Complex<float> x, int lane) {
  return {shuffle(x.re, lane), shuffle(x.im, lane)};
}
__device__ __forceinline__ Complex<float> shuffle_xor(Complex<float> x, int bit) {
  return {shuffle_xor(x.re, bit), shuffle_xor(x.im, bit)};
}

// That of the lane which has a segment of this lane's channel.
template <class Shape, class E>
__device__ __forceinline__ E from_segment(E x, int segment) {
  return shuffle(x, segment * Shape::channels_of_set + threadIdx.x % Shape::channels_of_set);
}
template <class Shape, class E>
__device__ __forceinline__ E sum_over_segments(E x) {
#pragma unroll
  for (int bit = Shape::channels_of_set; bit < 32; bit *= 2) x = x + shuffle_xor(x, bit);
  return x;
}
template <class Shape, class E>
__device__ __forceinline__ E sum_over_channels(E x) {
#pragma unroll
  for (int bit = 1; bit < Shape::channels_of_set; bit *= 2) x = x + shuffle_xor(x, bit);
  return x;
}

// The state that enters each segment, `carry` being that which enters the first one; each segment
// makes transition * state + local of it. `Up`: segments follow each other in the order of lanes.
// `local` becomes what leaves the segment. Nothing passes over segments that have cuts.
template <bool Up, class Shape, class E, class Cuts = NoCuts>
__device__ __forceinline__ E enter_segments(E transition, E& local, E carry,
                                            const Cuts& cuts = Cuts()) {
  constexpr int segments = Shape::segments;
  const int segment = segment_of_lane<Shape>(), position = Up ? segment : segments - 1 - segment;
  const auto before = [](E x, int by) {
    by *= Shape::channels_of_set;
    return Up ? shuffle_up(x, by) : shuffle_down(x, by);
  };
  const auto passes = [&](int by) { return !cuts.any_in(Up ? segment - by + 1 : segment, by); };
  if (position == 0 && passes(1)) local = transition * carry + local;
#pragma unroll
  for (int by = 1; by < segments; by *= 2) {
    const E local_before = before(local, by);
    if (position >= by && passes(by)) local = transition * local_before + local;
    if (2 * by < segments) {
      const E transition_before = before(transition, by);
      if (position >= by) transition = transition_before * transition;
    }
  }
  const E entering = before(local, 1);
  return position == 0 ? carry : entering;
}

// The product of A_bar over a segment.
template <class Method, class E, int Steps>
__device__ __forceinline__ E transition_of(float total_dt, const E (&a_bar)[Steps], E a) {
  if constexpr (Method::exponential) return exp_of_product(total_dt, a);
  E product = a_bar[0];
#pragma unroll
  for (int i = 1; i < Steps; ++i) product = product * a_bar[i];
  return product;
}

template <Accuracy accuracy>
__device__ __forceinline__ float step_size(float raw_delta, float bias, bool with_softplus) {
  const float x = raw_delta + bias, y = softplus<accuracy>(x);
  return with_softplus ? y : x;
}

template <class E, int Count>
__device__ __forceinline__ E sum(const E (&x)[Count]) {
  E total = x[0];
#pragma unroll
  for (int i = 1; i < Count; ++i) total = total + x[i];
  return total;
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
