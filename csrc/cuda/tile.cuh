// What the scan kernels share: how a block covers channels, time and states, and how tiles come from
// strided tensors of any dtype into shared memory.
//
// A block advances some channels of one (b, g) by a window of time at once. In a warp every lane has
// one channel and one segment of the window: `Steps` consecutive steps, held in registers. The warps
// of a block divide the states among them. Steps count in scan order; only loads and stores know the
// direction. Past the last step a window holds dt = 0, u = 0, which leaves every state as it is.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#define VIM_MM_ISA cuda

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../discretization.h"
#include "kernels.h"

namespace vim_mm {
inline namespace VIM_MM_ISA {

constexpr int kQuad = 4;         // entries read or written at once, where their layout allows it
constexpr int kStateTile = 16;   // states whose B and C are in shared memory at once

template <int Segments, int Steps, int Warps, int MinBlocks = 1>
struct Shape {
  static constexpr int segments = Segments, steps = Steps, warps = Warps;
  static constexpr int min_blocks = MinBlocks;  // per multiprocessor: a bound on registers
  static constexpr int threads = 32 * Warps, channels = 32 / Segments, window = Segments * Steps;
  // A segment in shared memory. The padding spreads the segments of eight lanes over all banks.
  static constexpr int pitch = Steps + kQuad;
};

// One value for each entry (row, step) of a window, by segments: rows are channels or states.
template <class V, int Rows, class Shape>
struct Tile {
  V segment[Rows * Shape::segments][Shape::pitch];

  __device__ __forceinline__ V& at(int row, int step) {
    return segment[row * Shape::segments + step / Shape::steps][step % Shape::steps];
  }
};
template <class Shape>
using RowTile = Tile<float, Shape::channels, Shape>;
template <class E, class Shape>
using StateTile = Tile<E, kStateTile, Shape>;

__device__ __forceinline__ void load_quad(const float* p, float (&quad)[kQuad]) {
  const float4 v = *reinterpret_cast<const float4*>(p);
  quad[0] = v.x, quad[1] = v.y, quad[2] = v.z, quad[3] = v.w;
}
__device__ __forceinline__ void load_quad(const Complex<float>* p, Complex<float> (&quad)[kQuad]) {
  const float4 *v = reinterpret_cast<const float4*>(p), low = v[0], high = v[1];
  quad[0] = {low.x, low.y}, quad[1] = {low.z, low.w};
  quad[2] = {high.x, high.y}, quad[3] = {high.z, high.w};
}
template <int Steps>
__device__ __forceinline__ void load_segment(const float* p, float (&segment)[Steps]) {
#pragma unroll
  for (int i = 0; i < Steps; i += kQuad) {
    const float4 v = *reinterpret_cast<const float4*>(p + i);
    segment[i] = v.x, segment[i + 1] = v.y, segment[i + 2] = v.z, segment[i + 3] = v.w;
  }
}
template <int Steps>
__device__ __forceinline__ void store_segment(float* p, const float (&segment)[Steps]) {
#pragma unroll
  for (int i = 0; i < Steps; i += kQuad)
    *reinterpret_cast<float4*>(p + i) =
        make_float4(segment[i], segment[i + 1], segment[i + 2], segment[i + 3]);
}

template <class E>
__device__ constexpr float output_weight() {
  return 1.0f;
}
template <>
__device__ constexpr float output_weight<Complex<float>>() {
  return 2.0f;
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
  if (storage == Storage::float64) return float(*reinterpret_cast<const double*>(p));
  if (storage == Storage::float32) return *reinterpret_cast<const float*>(p);
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

// The channels and the direction of a block.
struct Work {
  int64_t b, g, first_channel, steps, windows;
  int channels;  // of the group, from first_channel on, no more than the block has
  bool reverse;

  __device__ __forceinline__ Work(const ScanArguments& scan, int64_t bg, int window)
      : b(bg / scan.groups), g(bg % scan.groups), first_channel(0), steps(scan.steps),
        windows((scan.steps + window - 1) / window), channels(0) {
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

// Which entries (row, step) of a tile a thread loads, converts and stores: `count` times `width`
// neighbours. Neighbouring threads take neighbouring addresses, along time or along rows.
template <int Rows, class Shape>
struct Slots {
  static constexpr int entries = Rows * Shape::window / Shape::threads;
  static constexpr int width = entries < kQuad ? entries : kQuad, count = entries / width;
  static constexpr int per_row = Shape::window / width, per_step = Rows < width ? 1 : Rows / width;
  static_assert(entries > 0 && (count == 1 || Shape::threads % per_row == 0), "uneven tiles");
  bool along_time, reverse;

  __device__ __forceinline__ Slots(const View& v, const Work& work)
      : along_time(Rows < width || v.last <= v.row), reverse(work.reverse) {}
  __device__ __forceinline__ int row(int k) const {
    const int i = threadIdx.x + k * Shape::threads;
    return along_time ? i / per_row : i % per_step * width;
  }
  __device__ __forceinline__ int step(int k) const {
    const int i = threadIdx.x + k * Shape::threads;
    return along_time ? i % per_row * width : i / per_step;
  }
  __device__ __forceinline__ int row(int k, int i) const { return row(k) + (along_time ? 0 : i); }
  __device__ __forceinline__ int step(int k, int i) const { return step(k) + (along_time ? i : 0); }

  // Distances in bytes: of steps, of a slot's entries, of slots.
  __device__ __forceinline__ int64_t to_step(const View& v) const {
    return reverse ? -v.last : v.last;
  }
  __device__ __forceinline__ int64_t to_next(const View& v) const {
    return along_time ? to_step(v) : v.row;
  }
  __device__ __forceinline__ int64_t to_slot(const View& v) const {
    return along_time ? Shape::threads / per_row * v.row : Shape::threads / per_step * to_step(v);
  }
  // Whether a slot's entries go against the order of memory.
  __device__ __forceinline__ bool backwards() const { return along_time && reverse; }
};

// A thread's entries of one tensor, [.., rows, L], tile by tile. Loads stay unconverted until
// `values`, or the conversion would wait for them. What follows from the view is not kept: kernel
// parameters are as near as registers, and there are fewer of those.
template <class E, int Rows, class Shape>
class Stream {
 public:
  using Places = Slots<Rows, Shape>;
  static constexpr int width = Places::width, count = Places::count;

  // At the first row of `base`, in that window.
  __device__ __forceinline__ void begin(const View& v, const char* base, const Places& slots,
                                        const Work& work, int64_t window) {
    const int64_t first = window * Shape::window + slots.step(0);
    p_ = const_cast<char*>(base) + slots.row(0) * v.row +
         (work.reverse ? work.steps - 1 - first : first) * v.last;
    const int64_t item = v.storage == Storage::float32 ? 4 : 2;
    const int64_t others = v.batch | v.group | (slots.along_time ? v.row : v.last) |
                           reinterpret_cast<int64_t>(v.data) |
                           (slots.backwards() ? work.steps * item : 0);
    packed_ = !is_complex && width > 1 && (slots.along_time ? v.last : v.row) == item &&
              others % (item * width) == 0;
  }
  __device__ __forceinline__ void next(int64_t bytes) { p_ += bytes; }

  // Starts the loads of the tile at hand, `offset` bytes further, of which there are so many rows
  // and steps.
  __device__ __forceinline__ void load(const View& v, const Places& slots, int rows, int steps,
                                       int64_t offset = 0) {
    const bool wide = v.storage == Storage::float32;
#pragma unroll
    for (int k = 0; k < count; ++k) {
      uint32_t* const raw = raw_ + k * width * words;
      const int inside = v.data ? count_inside(slots, k, rows, steps) : 0;
      const char* const p = p_ + (k * slots.to_slot(v) + offset);
      if (packed_ && inside == width) {
        load_packed(lowest(p, v, slots), wide, raw);
        continue;
      }
#pragma unroll
      for (int i = 0; i < width; ++i) {
        const char* const q = p + i * slots.to_next(v);
#pragma unroll
        for (int w = 0; w < words; ++w) {
          raw[i * words + w] = 0;
          if (i < inside && wide) raw[i * words + w] = reinterpret_cast<const uint32_t*>(q)[w];
          if (i < inside && !wide) raw[i * words + w] = *reinterpret_cast<const uint16_t*>(q);
        }
      }
      if (packed_) pack(raw, wide, slots.backwards());
    }
  }

  __device__ __forceinline__ void values(const View& v, const Places& slots, int k,
                                         E (&out)[width]) const {
    const uint32_t* const raw = raw_ + k * width * words;
    if constexpr (is_complex) {
#pragma unroll
      for (int i = 0; i < width; ++i)
        out[i] = {__uint_as_float(raw[2 * i]), __uint_as_float(raw[2 * i + 1])};
    } else {
      const bool halves = packed_ && v.storage != Storage::float32;
#pragma unroll
      for (int i = 0; i < width; ++i) {
        const uint32_t half = i % 2 ? raw[i / 2] >> 16 : raw[i / 2] & 0xffffu;
        out[i] = decode(halves ? half : raw[i], v.storage);
      }
      if (packed_ && slots.backwards()) reverse(out);
    }
  }

  __device__ __forceinline__ void store(const View& v, const Places& slots, int k,
                                        const float (&values)[width], int rows, int steps) {
    const int inside = count_inside(slots, k, rows, steps);
    char* const p = p_ + k * slots.to_slot(v);
    if (packed_ && inside == width) {
      float ordered[width];
#pragma unroll
      for (int i = 0; i < width; ++i) ordered[i] = values[i];
      if (slots.backwards()) reverse(ordered);
      store_packed(const_cast<char*>(lowest(p, v, slots)), v.storage, ordered);
      return;
    }
#pragma unroll
    for (int i = 0; i < width; ++i) {
      if (i < inside) store_real(p + i * slots.to_next(v), v.storage, values[i]);
    }
  }

 private:
  static constexpr int words = sizeof(E) / sizeof(uint32_t);
  static constexpr bool is_complex = words == 2;

  // How many of a slot's entries, the first ones, lie in the tensor.
  static __device__ __forceinline__ int count_inside(const Places& slots, int k, int rows,
                                                     int steps) {
    const int in_rows = rows - slots.row(k), in_steps = steps - slots.step(k);
    const int along = slots.along_time ? in_steps : in_rows;
    if (in_rows <= 0 || in_steps <= 0) return 0;
    return along < width ? along : width;
  }
  // The lowest address of a slot whose first entry is at p.
  static __device__ __forceinline__ const char* lowest(const char* p, const View& v,
                                                       const Places& slots) {
    return slots.backwards() ? p - (width - 1) * v.last : p;
  }
  template <class V>
  static __device__ __forceinline__ void reverse(V (&x)[width]) {
#pragma unroll
    for (int i = 0; i < width / 2; ++i) {
      const V other = x[i];
      x[i] = x[width - 1 - i], x[width - 1 - i] = other;
    }
  }
  static __device__ __forceinline__ void load_packed(const char* p, bool wide, uint32_t* raw) {
    if constexpr (width == 4) {
      if (wide) {
        const uint4 v = *reinterpret_cast<const uint4*>(p);
        raw[0] = v.x, raw[1] = v.y, raw[2] = v.z, raw[3] = v.w;
      } else {
        const uint2 v = *reinterpret_cast<const uint2*>(p);
        raw[0] = v.x, raw[1] = v.y;
      }
    } else if constexpr (width == 2) {
      if (wide) {
        const uint2 v = *reinterpret_cast<const uint2*>(p);
        raw[0] = v.x, raw[1] = v.y;
      } else {
        raw[0] = *reinterpret_cast<const uint32_t*>(p);
      }
    }
  }
  // What was loaded entry by entry, as if it had been packed: in the order of memory.
  static __device__ __forceinline__ void pack(uint32_t* raw, bool wide, bool backwards) {
    uint32_t v[width];
#pragma unroll
    for (int i = 0; i < width; ++i) v[i] = raw[i];
    if (backwards) reverse(v);
#pragma unroll
    for (int i = 0; i < width; ++i) raw[i] = v[i];
    if (wide) return;
#pragma unroll
    for (int i = 0; i < width / 2; ++i) raw[i] = v[2 * i] | v[2 * i + 1] << 16;
  }
  static __device__ __forceinline__ void store_packed(char* p, Storage storage,
                                                      const float (&v)[width]) {
    if (storage == Storage::float32) {
      if constexpr (width == 4)
        *reinterpret_cast<float4*>(p) = make_float4(v[0], v[1], v[2], v[3]);
      else if constexpr (width == 2) *reinterpret_cast<float2*>(p) = make_float2(v[0], v[1]);
      return;
    }
    uint32_t raw[width];
#pragma unroll
    for (int i = 0; i + 1 < width; i += 2)
      raw[i / 2] = encode_16_bits(v[i], storage) | uint32_t(encode_16_bits(v[i + 1], storage)) << 16;
    if constexpr (width == 4) *reinterpret_cast<uint2*>(p) = make_uint2(raw[0], raw[1]);
    else if constexpr (width == 2) *reinterpret_cast<uint32_t*>(p) = raw[0];
  }

  char* p_;  // the first entry of the first slot, in the tile at hand
  bool packed_;  // a slot's entries are neighbours in memory, and aligned
  uint32_t raw_[count * width * words];
};

// Writes a slot's values to a tile in shared memory.
template <class V, int Rows, class Shape>
__device__ __forceinline__ void put(Tile<V, Rows, Shape>& tile, const Slots<Rows, Shape>& slots,
                                    int k, const V (&values)[Slots<Rows, Shape>::width]) {
#pragma unroll
  for (int i = 0; i < Slots<Rows, Shape>::width; ++i)
    tile.at(slots.row(k, i), slots.step(k, i)) = values[i];
}

// B or C as a stream of state tiles; `Tiled` is known when compiled, else it may be constant in
// time: then each lane reads the constant of its channel.
template <class E, class Shape, bool Tiled>
class StateMatrix {
 public:
  using Memory = StateTile<E, Shape>;

  __device__ __forceinline__ StateMatrix(const View& v, bool constant, const Work& work)
      : view_(v), slots_(v, work), constant_(!Tiled && constant) {}
  __device__ __forceinline__ bool constant() const { return !Tiled && constant_; }

  __device__ __forceinline__ void begin(const Work& work, int64_t window) {
    if (constant()) return;
    const char* const base = view_.data + work.b * view_.batch + work.g * view_.group;
    stream_.begin(view_, base, slots_, work, window);
  }
  __device__ __forceinline__ void next(int windows) {
    if (!constant()) stream_.next(windows * Shape::window * slots_.to_step(view_));
  }
  // Starts the loads of states [first, first + kStateTile) of the window at hand, which has so many
  // steps.
  __device__ __forceinline__ void load(int first, int states, int steps) {
    if (!constant()) stream_.load(view_, slots_, states - first, steps, first * view_.row);
  }
  __device__ __forceinline__ void commit(Memory& to) const {
    if (constant()) return;
#pragma unroll
    for (int k = 0; k < Places::count; ++k) {
      E values[Places::width];
      stream_.values(view_, slots_, k, values);
      put(to, slots_, k, values);
    }
  }
  // Of state n for the lane's channel, where it is constant.
  __device__ __forceinline__ E value(const Work& work, int channel, int n) const {
    if (!constant() || channel >= work.channels) return E(0.0f);
    return load_element<E>(work.at(view_) + channel * view_.row + n * view_.last, view_.storage);
  }

 private:
  using Places = Slots<kStateTile, Shape>;
  const View& view_;
  const Places slots_;
  const bool constant_;
  Stream<E, kStateTile, Shape> stream_;
};

// A segment of B or C: of shared memory, or the same value at every step.
template <class E>
struct SegmentOf {
  const E* p;  // null: constant
  E value;

  __device__ __forceinline__ void quad(int first, E (&out)[kQuad]) const {
    if (p) {
      load_quad(p + first, out);
    } else {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) out[i] = value;
    }
  }
};
template <class E, class Shape, bool Tiled>
__device__ __forceinline__ SegmentOf<E> segment_of(const StateMatrix<E, Shape, Tiled>& matrix,
                                                   const StateTile<E, Shape>& tile,
                                                   const Work& work, int channel, int segment,
                                                   int tile_state, int n) {
  if (matrix.constant()) return {nullptr, matrix.value(work, channel, n)};
  return {tile.segment[tile_state * Shape::segments + segment], E(0.0f)};
}

__device__ __forceinline__ float shuffle_up(float x, int by, int width) {
  return __shfl_up_sync(0xffffffffu, x, by, width);
}
__device__ __forceinline__ float shuffle_down(float x, int by, int width) {
  return __shfl_down_sync(0xffffffffu, x, by, width);
}
__device__ __forceinline__ float shuffle_xor(float x, int bit) {
  return __shfl_xor_sync(0xffffffffu, x, bit);
}
__device__ __forceinline__ Complex<float> shuffle_up(Complex<float> x, int by, int width) {
  return {shuffle_up(x.re, by, width), shuffle_up(x.im, by, width)};
}
__device__ __forceinline__ Complex<float> shuffle_down(Complex<float> x, int by, int width) {
  return {shuffle_down(x.re, by, width), shuffle_down(x.im, by, width)};
}
__device__ __forceinline__ Complex<float> shuffle_xor(Complex<float> x, int bit) {
  return {shuffle_xor(x.re, bit), shuffle_xor(x.im, bit)};
}

// The state that enters each segment, `carry` being that which enters the first one; each segment
// makes transition * state + local of it. `Up`: segments follow each other in the order of lanes.
// `local` becomes what leaves the segment.
template <bool Up, int Segments, class E>
__device__ __forceinline__ E enter_segments(E transition, E& local, E carry) {
  if constexpr (Segments == 1) {
    local = transition * carry + local;
    return carry;
  }
  const int lane = threadIdx.x % Segments, position = Up ? lane : Segments - 1 - lane;
  const auto shuffle = [](E x, int by) {
    return Up ? shuffle_up(x, by, Segments) : shuffle_down(x, by, Segments);
  };
  if (position == 0) local = transition * carry + local;
#pragma unroll
  for (int by = 1; by < Segments; by *= 2) {
    const E before = shuffle(local, by);
    if (position >= by) local = transition * before + local;
    if (2 * by < Segments) {
      const E transition_before = shuffle(transition, by);
      if (position >= by) transition = transition_before * transition;
    }
  }
  const E before = shuffle(local, 1);
  return position == 0 ? carry : before;
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

// beta B u, where `drive` is u, or dt u for methods whose beta is dt.
template <class Method, class E>
__device__ __forceinline__ E input_of(float drive, const Coefficients<E>& k, E b) {
  if constexpr (Method::beta_is_step) return drive * b;
  return (drive * b) * k.beta;
}

__device__ __forceinline__ float step_size(float raw_delta, float bias, bool with_softplus) {
  const float x = raw_delta + bias, y = softplus(x);
  return with_softplus ? y : x;
}

template <int Steps>
__device__ __forceinline__ float sum(const float (&x)[Steps]) {
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < Steps; ++i) total += x[i];
  return total;
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
