// How producer warps load windows of time and convert them.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../common/pipeline.cuh"
#include "splits.cuh"
#include "window.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// Calls f with the kind of a window's loads, as a constant. `Short`: windows that are whole have no code of their own.
template <bool Aligned, bool Short, class F>
__device__ __forceinline__ void start_loads(bool whole, const F& f) {
  using std::integral_constant;
  if constexpr (Aligned && Short) f(integral_constant<Loads, Loads::aligned>());
  else if constexpr (!Aligned) f(integral_constant<Loads, Loads::apart>());
  else if (whole) f(integral_constant<Loads, Loads::whole>());
  else f(integral_constant<Loads, Loads::aligned>());
}

// Calls f with whether quads can be moved at once, as a constant. Six channels and splits are chosen for aligned rows
// alone, and so is what is bounded.
template <class Shape, bool Bounded, class F>
__device__ __forceinline__ void specialize_alignment(const ScanArguments& scan, const F& f) {
  constexpr bool always = Shape::mixed || is_split<Shape> || Bounded;
  if (always || scan.aligned) f(std::true_type());
  else if constexpr (!always) f(std::false_type());
}

// What the threads of a group have of a scan: the rows that drive it, the step sizes, the gate and
// so many state matrices, window by window, all of them contiguous in time. `Aligned`: slots can be
// moved at once. `Summed`: of step sizes, the sums since the begin of their quad, and nothing that drives. `Short`: as
// start_loads has it.
template <class Shape, Layout layout, class Format, bool Aligned, int Matrices, bool Summed = false,
          bool Short = false>
struct WindowLoader {
  using Places = Slots<Shape::channels, Shape, layout>;
  using MatrixPlaces = Slots<kStateTile, Shape, layout>;
  using RowStream = Stream<float, Shape::channels, Shape, layout>;
  using MatrixStream = Stream<float, kStateTile, Shape, layout>;
  using Held = typename RowStream::Held;
  static constexpr int count = Places::count, width = Places::width;

  // A window as it was loaded.
  struct Raw {
    Held drive, delta, z;
    typename MatrixStream::Held matrix[Matrices];
  };

  const ScanArguments& scan;
  const Work& work;
  const View& driving;
  const View* matrices[Matrices];
  const bool needs_gate;
  const int whole;   // the first windows that are whole, in the tensors and in the block
  const int lowest;  // the window that is the first in memory
  const Places slots;
  const MatrixPlaces matrix_slots;
  RowStream drive, delta, z;  // at the lowest window
  MatrixStream matrix[Matrices];
  float bias[count];

  __device__ __forceinline__ WindowLoader(const ScanArguments& scan_, const Work& work_,
                                          const View& driving_, const View* const* matrices_,
                                          bool needs_gate_)
      : scan(scan_), work(work_), driving(driving_), needs_gate(needs_gate_),
        whole(work.channels == Shape::channels && scan.states == kStateTile
                  ? int(work.steps / kChunk)
                  : 0),
        lowest(Format::reversed ? int(work.windows) - 1 : 0), slots(driving, work),
        matrix_slots(driving, work) {
    drive.begin(driving, work.at(driving) + work.offset, slots, work, lowest);
    delta.begin(scan.delta, work.at(scan.delta) + work.offset, slots, work, lowest);
    z.begin(scan.z, work.at(scan.z) + work.offset, slots, work, lowest);
    drive.settle(), delta.settle(), z.settle();
#pragma unroll
    for (int i = 0; i < Matrices; ++i) {
      const View& v = *(matrices[i] = matrices_[i]);
      matrix[i].begin(v, v.data + work.b * v.batch + work.g * v.group + work.offset, matrix_slots,
                      work, lowest);
      matrix[i].settle();
    }
  }
  // Not before the first loads of rows: it waits for what it loads.
  __device__ __forceinline__ void load_bias() {
#pragma unroll
    for (int k = 0; k < count; ++k)
      bias[k] = channel_value(scan.delta_bias, scan, work.g, work.first_channel + slots.row(k));
  }

  // In bytes, from the lowest window. Streams stay there: to add a product is one instruction, to go on
  // by a window two, and to subtract a product three.
  __device__ __forceinline__ int64_t offset_of(int window) const {
    return int64_t(Format::reversed ? lowest - window : window) * (kChunk * item_of(layout));
  }
  // How many steps a window has.
  __device__ __forceinline__ int steps_of(int window) const {
    return work.steps_from(window, kChunk);
  }
  // Calls f(stream, view, slots, rows, registers) for all that a window has.
  template <class F>
  __device__ __forceinline__ void each(Raw& to, const F& f) {
    if constexpr (!Summed) f(drive, driving, slots, work.channels, to.drive);
    f(delta, scan.delta, slots, work.channels, to.delta);
    if (needs_gate) f(z, scan.z, slots, work.channels, to.z);
#pragma unroll
    for (int i = 0; i < Matrices; ++i)
      f(matrix[i], *matrices[i], matrix_slots, int(scan.states), to.matrix[i]);
  }
  // Starts the loads of that window, if there is such a one. `is_whole`: it is known to be whole.
  __device__ __forceinline__ void load(int window, Raw& to, bool is_whole = false) {
    if (!is_whole && (window < 0 || window >= int(work.windows))) return;
    const int steps = steps_of(window);
    start_loads<Aligned, Short>(is_whole || window < whole, [&](auto how) {
      each(to, [&](auto& stream, const View& v, const auto& slots, int rows, auto& held) {
        stream.template load<decltype(how)::value>(v, slots, rows, steps, offset_of(window), held);
      });
    });
  }
  __device__ __forceinline__ void put_matrix(WindowTile<kStateTile>& to, int i, int k,
                                             const Raw& raw) const {
    float entry[MatrixPlaces::width];
    matrix[i].template values<Format>(*matrices[i], k, raw.matrix[i], entry);
    put(to, matrix_slots, k, entry);
  }
  __device__ __forceinline__ void put_matrix(HalfTile& to, int i, int k, const Raw& raw) const {
    constexpr int pairs = MatrixPlaces::width / 2;
    struct alignas(4 * pairs) {
      uint32_t word[pairs];
    } words;
#pragma unroll
    for (int j = 0; j < pairs; ++j) {
      const uint32_t word = raw.matrix[i].raw[k * pairs + (Format::reversed ? pairs - 1 - j : j)];
      words.word[j] = Format::reversed ? word << 16 | word >> 16 : word;
    }
    uint32_t* const p = to.words[matrix_slots.row(k)] + matrix_slots.step(k) / 2;
    *reinterpret_cast<decltype(words)*>(p) = words;
  }
  // Converts that window, of which `to` has the last matrices. driven(dt, value, gate) makes of a slot's values
  // what drives the states.
  template <class Inputs, class F>
  __device__ __forceinline__ void fill(Inputs& to, int window, const Raw& raw, const F& driven,
                                       bool is_whole = false) const {
#pragma unroll
    for (int k = 0; k < count; ++k) {
      float dt[width], value[width], gate[width];
      if constexpr (!Summed) drive.template values<Format>(driving, k, raw.drive, value);
      delta.template values<Format>(scan.delta, k, raw.delta, dt);
      if (needs_gate) z.template values<Format>(scan.z, k, raw.z, gate);
#pragma unroll
      for (int i = 0; i < width; ++i)
        dt[i] = step_size<accuracy_of(layout)>(dt[i], bias[k], scan.delta_softplus);
#pragma unroll
      for (int i = 0; i < width; ++i)
        if (!is_whole && slots.step(k) + (Aligned ? 0 : i) >= steps_of(window)) dt[i] = 0.0f;
      if constexpr (Summed) {
#pragma unroll
        for (int i = 0; i < width; ++i)
          if (i % kQuad > 0) dt[i] += dt[i - 1];
      } else {
#pragma unroll
        for (int i = 0; i < width; ++i) value[i] = driven(dt[i], value[i], gate[i]);
        put(to.drive, slots, k, value);
      }
      put(to.dt, slots, k, dt);
    }
    constexpr int unread = std::extent<decltype(to.matrix)>::value - Matrices;
#pragma unroll
    for (int i = 0; i < Matrices; ++i) {
#pragma unroll
      for (int k = 0; k < MatrixPlaces::count; ++k) put_matrix(to.matrix[unread + i], i, k, raw);
    }
  }
};

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
