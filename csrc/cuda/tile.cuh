// What forward and backward share: how a block covers its channels, and how tiles of time come from
// strided tensors of any dtype into shared memory.
//
// A block owns some channels of one (b, g). `Lanes` neighbouring threads share a channel, each with
// `States` of its states in registers: thread `lane` holds the states r * Lanes + lane. Time runs
// sequentially, in tiles of kSteps. Indices within tiles count in scan order; only loads and stores
// know the direction. Past the last step a tile holds dt = 0, u = 0: every method leaves the state
// as it is there.
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

constexpr int kQuad = 4;                    // steps read from shared memory at once
constexpr int kRowStride = kSteps + kQuad;  // the padding spreads rows over the banks

template <int Lanes, int States, int Threads, int MinBlocks = 1>
struct Shape {
  static constexpr int lanes = Lanes, states = States, threads = Threads;
  static constexpr int min_blocks = MinBlocks;  // per multiprocessor: a bound on registers
  static constexpr int channels = Threads / Lanes;
  static constexpr int padded_states = Lanes * States;
};

template <class E>
__device__ constexpr float output_weight() {
  return 1.0f;
}
template <>
__device__ constexpr float output_weight<Complex<float>>() {
  return 2.0f;
}

__device__ __forceinline__ float decode(uint32_t raw, Storage storage) {
  if (storage == Storage::float16) return __half2float(__ushort_as_half(uint16_t(raw)));
  return __uint_as_float(storage == Storage::bfloat16 ? raw << 16 : raw);
}

// A value of u, delta, z, B or C without its conversion, which would wait for the load.
__device__ __forceinline__ uint32_t load_raw(const char* p, Storage storage) {
  if (storage == Storage::float32) return *reinterpret_cast<const uint32_t*>(p);
  return *reinterpret_cast<const uint16_t*>(p);
}

__device__ __forceinline__ float load_real(const char* p, Storage storage) {
  if (storage == Storage::float64) return float(*reinterpret_cast<const double*>(p));
  return decode(load_raw(p, storage), storage);
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
  switch (storage) {
    case Storage::float32: *reinterpret_cast<float*>(p) = value; return;
    case Storage::float16: *reinterpret_cast<__half*>(p) = __float2half_rn(value); return;
    case Storage::bfloat16:
      *reinterpret_cast<__nv_bfloat16*>(p) = __float2bfloat16_rn(value);
      return;
    case Storage::float64: *reinterpret_cast<double*>(p) = value; return;
  }
}

// The same for what is never float64, without branches.
__device__ __forceinline__ void store_narrow(char* p, Storage storage, float value) {
  if (storage == Storage::float32) *reinterpret_cast<float*>(p) = value;
  const uint16_t half = __half_as_ushort(__float2half_rn(value));
  const uint16_t bfloat = __bfloat16_as_ushort(__float2bfloat16_rn(value));
  if (storage != Storage::float32)
    *reinterpret_cast<uint16_t*>(p) = storage == Storage::float16 ? half : bfloat;
}

// Four steps of a row of a tile.
__device__ __forceinline__ void load_quad(const float* p, float (&quad)[kQuad]) {
  const float4 v = *reinterpret_cast<const float4*>(p);
  quad[0] = v.x, quad[1] = v.y, quad[2] = v.z, quad[3] = v.w;
}
__device__ __forceinline__ void load_quad(const Complex<float>* p, Complex<float> (&quad)[kQuad]) {
  const float4 *v = reinterpret_cast<const float4*>(p), low = v[0], high = v[1];
  quad[0] = {low.x, low.y}, quad[1] = {low.z, low.w};
  quad[2] = {high.x, high.y}, quad[3] = {high.z, high.w};
}
__device__ __forceinline__ void store_quad(float* p, const float (&quad)[kQuad]) {
  *reinterpret_cast<float4*>(p) = make_float4(quad[0], quad[1], quad[2], quad[3]);
}

// The channels and the direction of a block.
template <class Shape>
struct Work {
  int64_t b, g, first_channel, channels;  // of the group, from first_channel on
  int64_t steps, tiles;
  bool reverse;

  __device__ Work(const ScanArguments& scan, int64_t bg, int64_t first)
      : b(bg / scan.groups), g(bg % scan.groups), first_channel(first),
        channels(scan.channels - first), steps(scan.steps),
        tiles((scan.steps + kSteps - 1) / kSteps) {
    const int64_t flag = scan.same_direction ? 0 : g;
    reverse = scan.directions.bits[flag / 32] >> (flag % 32) & 1;
  }
  __device__ __forceinline__ int64_t time(int64_t i) const { return reverse ? steps - 1 - i : i; }
  __device__ const char* at(const View& v) const {
    return v.data + b * v.batch + g * v.group + first_channel * v.row;
  }
  // The row of channel c in contiguous [B, G, H, ...].
  __device__ __forceinline__ int64_t row(const ScanArguments& scan, int c) const {
    return (b * scan.groups + g) * scan.channels + first_channel + c;
  }
};

// Which entries (channel, step) of a tile a thread loads, converts and stores. Neighbouring threads
// take neighbouring addresses, along time or along channels.
template <class Shape>
struct Slots {
  static constexpr int entries = Shape::channels * kSteps;
  static constexpr int count = (entries + Shape::threads - 1) / Shape::threads;
  static constexpr int never = 1 << 30;
  bool along_time;
  int step[count];  // `never` where there is no such entry or channel
  int channel[count];

  __device__ Slots(const View& v, const Work<Shape>& work) : along_time(v.last <= v.row) {
#pragma unroll
    for (int k = 0; k < count; ++k) {
      const int index = threadIdx.x + k * Shape::threads;
      channel[k] = along_time ? index / kSteps : index % Shape::channels;
      step[k] = along_time ? index % kSteps : index / Shape::channels;
      if (index >= entries) channel[k] = step[k] = never;
      if (channel[k] >= work.channels) step[k] |= never;
    }
  }
  __device__ __forceinline__ bool exists(int k) const {
    return entries % Shape::threads == 0 || channel[k] != never;
  }
  // The entry in a tile of shared memory.
  __device__ __forceinline__ float& in(float (&tile)[Shape::channels][kRowStride], int k) const {
    return tile[channel[k]][step[k] & (kSteps - 1)];
  }
};

// How many steps of a tile there are.
template <class Shape>
__device__ __forceinline__ int steps_of(const Work<Shape>& work, int64_t tile) {
  const int64_t left = work.steps - tile * kSteps;
  return left < kSteps ? int(left) : kSteps;
}

// Where a thread's entries lie in a tensor [B, G, H, L], tile by tile.
template <class Shape>
struct RowPointers {
  char* p;           // the first entry
  int64_t to_entry;  // from one entry to the next: in channels or in steps, but always as far
  int64_t to_tile;
  Storage storage;

  __device__ __forceinline__ void begin(const View& v, const Slots<Shape>& slots,
                                        const Work<Shape>& work, int64_t tile, bool ascending) {
    storage = v.storage;
    const int64_t forwards = work.reverse ? -v.last : v.last;
    to_entry = slots.along_time ? Shape::threads / kSteps * v.row
                                : Shape::threads / Shape::channels * forwards;
    to_tile = ascending ? kSteps * forwards : -kSteps * forwards;
    const int64_t t = work.time(tile * kSteps + (slots.step[0] & (kSteps - 1)));
    p = const_cast<char*>(work.at(v)) + slots.channel[0] * v.row + t * v.last;
  }
  __device__ __forceinline__ void next() { p += to_tile; }
  __device__ __forceinline__ void store(int k, float value) const {
    store_narrow(p + k * to_entry, storage, value);
  }
};

// The same with the values of a tile, not yet converted: that would wait for their loads.
template <class Shape>
struct RowTile : RowPointers<Shape> {
  uint32_t raw[Slots<Shape>::count];
  bool present;

  __device__ __forceinline__ void begin(const View& v, const Slots<Shape>& slots,
                                        const Work<Shape>& work, int64_t tile, bool ascending) {
    present = v.data;
    RowPointers<Shape>::begin(v, slots, work, tile, ascending);
  }
  // Starts the loads of the next `steps` steps.
  __device__ __forceinline__ void load(const Slots<Shape>& slots, int steps) {
#pragma unroll
    for (int k = 0; k < Slots<Shape>::count; ++k) {
      raw[k] = 0;
      // Two conditions of one instruction each, where nested ones would be a branch.
      const bool used = present && slots.step[k] < steps;
      const bool wide = this->storage == Storage::float32;
      const char* const p = this->p + k * this->to_entry;
      if (used && wide) raw[k] = *reinterpret_cast<const uint32_t*>(p);
      if (used && !wide) raw[k] = *reinterpret_cast<const uint16_t*>(p);
    }
    this->next();
  }
  __device__ __forceinline__ float value(int k) const { return decode(raw[k], this->storage); }
};

// What a tile of steps has per channel, in shared memory.
template <class Shape>
struct Rows {
  float dt[Shape::channels][kRowStride];
  float u[Shape::channels][kRowStride];
};

// One value per channel (D, delta_bias) for each of a thread's entries; 0 where there is none.
template <class Shape>
struct ChannelValues {
  float value[Slots<Shape>::count];

  __device__ ChannelValues(const View& v, const Slots<Shape>& slots, const Work<Shape>& work) {
#pragma unroll
    for (int k = 0; k < Slots<Shape>::count; ++k) {
      const int c = slots.channel[k];
      value[k] = v.data && c < work.channels ? load_real(work.at(v) + c * v.row, v.storage) : 0.0f;
    }
  }
};

// B or C: tiles of [N, kSteps] in shared memory, one for all channels of the block, or a constant of
// each channel in registers. `Tiled`: known not to be constant when compiled.
template <class E, class Shape, bool Tiled>
class StateMatrix {
 public:
  using Tile = E[Shape::padded_states][kRowStride];
  // How far the loops over a tile unroll. In the usual case entirely, to keep states in registers;
  // elsewhere code size counts, and states lie in local memory.
  static constexpr int unroll_quads = Tiled ? kSteps / kQuad : 1;
  static constexpr int unroll_states = Tiled ? Shape::states : 1;

  __device__ StateMatrix(const View& view, bool is_constant, int64_t states,
                         const Work<Shape>& work)
      : view_(view), constant_(!Tiled && is_constant), states_(states) {
    if (!constant_) return;
    const int c = threadIdx.x / Shape::lanes, lane = threadIdx.x % Shape::lanes;
#pragma unroll
    for (int r = 0; r < Shape::states; ++r) {
      const int n = r * Shape::lanes + lane;
      value_[r] = E(0.0f);
      if (c < work.channels && n < states)
        value_[r] = load_element<E>(work.at(view) + c * view.row + n * view.last, view.storage);
    }
  }

  __device__ __forceinline__ bool constant() const { return !Tiled && constant_; }

  __device__ __forceinline__ void begin(const Work<Shape>& work, int64_t tile, bool ascending) {
    if (constant()) return;
#pragma unroll
    for (int k = 0; k < (early ? count : 0); ++k) {
      entry_[k] = state(k) * kRowStride + step(k);
      step_[k] = state(k) < states_ ? step(k) : Slots<Shape>::never;
    }
    to_step_ = work.reverse ? -view_.last : view_.last;
    to_tile_ = ascending ? kSteps * to_step_ : -kSteps * to_step_;
    to_entry_ = along_time() ? Shape::threads / kSteps * view_.row
                             : Shape::threads / Shape::padded_states * to_step_;
    p_ = view_.data + work.b * view_.batch + work.g * view_.group +
         work.time(tile * kSteps) * view_.last;
    if (early) p_ += state(0) * view_.row + step(0) * to_step_;
  }
  // Starts the loads of the next `steps` steps, where registers can hold them until the commit.
  __device__ __forceinline__ void load(int steps) {
    if (constant()) return;
    steps_ = steps;
    if constexpr (early) {
#pragma unroll
      for (int k = 0; k < count; ++k) {
        raw_[k] = Raw{};
        if (step_[k] < steps) raw_[k] = fetch(p_ + k * to_entry_);
      }
      p_ += to_tile_;
    }
  }
  __device__ __forceinline__ void commit(Tile& to) {
    if (constant()) return;
    if constexpr (early) {
#pragma unroll
      for (int k = 0; k < count; ++k) to[0][entry_[k]] = decoded(raw_[k]);
    } else {
      for (int k = 0; k < count; ++k) {
        Raw raw{};
        if (state(k) < states_ && step(k) < steps_)
          raw = fetch(p_ + state(k) * view_.row + step(k) * to_step_);
        to[state(k)][step(k)] = decoded(raw);
      }
      p_ += to_tile_;
    }
  }
  __device__ __forceinline__ void quad(const Tile& tile, int r, int first_step,
                                       E (&out)[kQuad]) const {
    if (constant()) {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) out[i] = value_[r];
    } else {
      load_quad(&tile[r * Shape::lanes + threadIdx.x % Shape::lanes][first_step], out);
    }
  }

 private:
  struct Pair {
    float re, im;
  };
  static constexpr bool complex = sizeof(E) == sizeof(Pair);
  static constexpr int count = Shape::padded_states * kSteps / Shape::threads;
  static constexpr bool early = Tiled;

  struct Raw {
    uint32_t part[complex ? 2 : 1];
  };

  __device__ __forceinline__ int index(int k) const { return threadIdx.x + k * Shape::threads; }
  __device__ __forceinline__ bool along_time() const { return view_.last <= view_.row; }
  __device__ __forceinline__ int state(int k) const {
    return along_time() ? index(k) / kSteps : index(k) % Shape::padded_states;
  }
  __device__ __forceinline__ int step(int k) const {
    return along_time() ? index(k) % kSteps : index(k) / Shape::padded_states;
  }

  __device__ __forceinline__ Raw fetch(const char* p) const {
    Raw raw;
    raw.part[0] = load_raw(p, view_.storage);
    if constexpr (complex) raw.part[1] = load_raw(p + sizeof(float), view_.storage);
    return raw;
  }
  __device__ __forceinline__ E decoded(Raw raw) const {
    if constexpr (complex) return {__uint_as_float(raw.part[0]), __uint_as_float(raw.part[1])};
    else return decode(raw.part[0], view_.storage);
  }

  const View& view_;
  bool constant_;
  int64_t states_;
  E value_[Shape::states];
  int entry_[early ? count : 1], step_[early ? count : 1];  // step_: `never` past the last state
  const char* p_;  // this thread's first entry with `early`, else the tile
  int64_t to_entry_, to_step_, to_tile_;
  Raw raw_[early ? count : 1];
  int steps_;
};

// Sums over the lanes of a channel: each thread leaves its part, then any thread adds up those of
// one (channel, step), always in the same order. The padding of a channel keeps two neighbouring
// channels out of each other's banks.
template <class Shape>
struct LaneSums {
  static constexpr int channel_stride = Shape::lanes * kRowStride + (Shape::lanes > 4 ? 16 : 0);
  float part[Shape::channels * channel_stride];

  __device__ __forceinline__ void put(int first_step, const float (&quad)[kQuad]) {
    const int c = threadIdx.x / Shape::lanes, lane = threadIdx.x % Shape::lanes;
    store_quad(&part[c * channel_stride + lane * kRowStride + first_step], quad);
  }
  __device__ __forceinline__ float get(const Slots<Shape>& slots, int k) const {
    const float* p = &part[slots.channel[k] * channel_stride + slots.step[k]];
    float sum[kQuad] = {};  // several chains, to wait less
#pragma unroll
    for (int lane = 0; lane < Shape::lanes; ++lane) sum[lane % kQuad] += p[lane * kRowStride];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }
};

// The states of a thread: A, zero where there is no such channel or state.
template <class E, class Shape>
__device__ __forceinline__ void load_A(const ScanArguments& scan, const Work<Shape>& work,
                                       E (&a)[Shape::states]) {
  const int c = threadIdx.x / Shape::lanes, lane = threadIdx.x % Shape::lanes;
#pragma unroll
  for (int r = 0; r < Shape::states; ++r) {
    const int n = r * Shape::lanes + lane;
    a[r] = E(0.0f);
    if (c < work.channels && n < scan.states)
      a[r] = load_element<E>(work.at(scan.A) + c * scan.A.row + n * scan.A.last, scan.A.storage);
  }
}

__device__ __forceinline__ float step_size(float raw_delta, float bias, bool with_softplus) {
  const float x = raw_delta + bias, y = softplus(x);
  return with_softplus ? y : x;
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
