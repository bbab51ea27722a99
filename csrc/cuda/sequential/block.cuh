// The scans that march: a lane has one channel and few states and takes one step after the other,
// while other warps of its block load and convert what it needs and finish what it found, windows
// of time ahead and behind.
//
// Of a warp that scans, every four neighbouring lanes share a channel and have different states:
// then the sum over states, with C, is what a tensor core computes of the states of eight steps.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../common/pipeline.cuh"
#include "../common/tile_stream.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

constexpr int kStride = 8;  // steps that are loaded, and summed over states, together

// `States`: of a lane, 1 or 2. `Warps`: those with different channels, eight each. `Stages`: windows in
// shared memory. `Groups`, of `RowWarps` warps each, load and store rows, one window in turn each:
// the more there are, the longer may a window take them. `MinBlocks`: per multiprocessor, a bound on
// registers. `Strides`: of how many a lane of the causal forward scan has the inputs at once. `Straight`: whole
// windows are one piece of code, whose parts overlap, and blocks may be relieved. That is for so few
// rows that a scheduler has few warps, or one; it takes registers. `Octets`: eight neighbours of 16 bits
// can be moved at once, and are where a thread has so many.
template <int States, int Warps, int Stages, int Groups, int RowWarps, int MinBlocks, int Strides,
          bool Straight = false, bool Octets = false>
struct MarchShape {
  static constexpr bool marches = true, straight = Straight, octets = Octets;
  using OfOctets =
      MarchShape<States, Warps, Stages, Groups, RowWarps, MinBlocks, Strides, Straight, true>;
  static constexpr int states = States, min_blocks = MinBlocks, strides = Strides;
  static constexpr int stages = Stages, groups = Groups;
  static constexpr int parts = kStateTile / (4 * States);  // of the states; a warp has one
  static constexpr int channels = 8 * Warps, window = kChunk;
  static constexpr int threads = 32 * RowWarps;         // of a group
  static constexpr int row_threads = Groups * threads;  // they come first
  static constexpr int scan_threads = 32 * parts * Warps;
  static constexpr int all_threads = row_threads + scan_threads;
  static_assert(Stages % Groups == 0, "each stage has its group");
  static_assert(window % (kStride * Strides) == 0, "strides end with the window");
  static_assert(!Straight || (States == 1 && Strides <= 2),
                "what overlapping parts are written for");

  static constexpr bool mixed = false;
  static constexpr int entries_of_C = States;  // that a lane needs of a stride

  // What a warp does. Those that load and store rows come first.
  static __device__ __forceinline__ bool has_rows() { return threadIdx.x < row_threads; }
  static __device__ __forceinline__ bool is_idle() { return false; }
  static __device__ __forceinline__ int group() { return int(threadIdx.x / threads); }
  static __device__ __forceinline__ int scan_thread() { return int(threadIdx.x) - row_threads; }
};

// For blocks that have a multiprocessor each: six channels, with three warps that scan. Every fourth warp of
// a block is on the same scheduler. Three schedulers have one each that scans and, beside it, warps that do
// nothing; the fourth has all that load and store rows. So no warp that scans shares its scheduler, as it
// would with eight channels and four of them, and there are a third more blocks. Of the 16 states there are
// four parts, but three warps, with eight channels' lanes each (`mixed`):
//
//   row_of_warp   channel        part
//   0 to 5        all six        0, 1 or 2: the warp's own
//   6 and 7       two of six     3
//
// Three stages for three groups of one row warp, which moves octets of B and C, and quads of all else.
template <int Strides>
struct SixShape : MarchShape<1, 1, 3, 3, 1, 1, Strides, true, true> {
  using OfOctets = SixShape;
  static constexpr int schedulers = 4, scanning = 3, channels = 6;
  static constexpr int scan_threads = 32 * scanning, all_threads = 32 * schedulers * 3;
  static constexpr bool mixed = true;
  static constexpr int entries_of_C = 2;  // one for each half of a stride: see OutputSums

  static __device__ __forceinline__ int warp() { return int(threadIdx.x / 32); }
  static __device__ __forceinline__ bool has_rows() { return warp() % schedulers == scanning; }
  static __device__ __forceinline__ bool is_idle() { return warp() > scanning && !has_rows(); }
  static __device__ __forceinline__ int group() { return warp() / schedulers; }
  static __device__ __forceinline__ int scan_thread() { return int(threadIdx.x); }
};

// From one row of a tile to the next, in entries. With this gap neither threads that load nor lanes that
// scan meet on a bank.
constexpr int kPitch = kChunk + 8;

// One value for each row and step of a window. `Split`: of quads those of even number come first, and
// odd ones behind a gap. So threads that have two neighbouring quads do not meet on a bank either.
template <int Rows, bool Split>
struct WindowTile {
  static_assert(!Split || kStride == 2 * kQuad, "a stride has a quad of each kind");
  alignas(16) float values[Rows][kPitch];

  // Where a step is in a row; that of a stride and a step in it is the sum of both.
  static __device__ __forceinline__ constexpr int place(int step) {
    if (!Split) return step;
    return step / kStride * kQuad + step / kQuad % 2 * (kPitch / 2) + step % kQuad;
  }
  __device__ __forceinline__ float* at(int row, int step) { return values[row] + place(step); }
  __device__ __forceinline__ const float* at(int row, int step) const {
    return values[row] + place(step);
  }
};
template <int Rows, class Shape, Layout layout>
using SlotTile = WindowTile<Rows, Slots<Rows, Shape, layout>::octets>;

// A state matrix of 16 bits as it is in memory, but in scan order. To unpack it costs lanes of one
// state an instruction per element and saves them a fifth of what they read; with two states the
// instruction costs more than it saves.
struct PackedTile {
  alignas(16) uint32_t words[kStateTile][kPitch / 2];

  static __device__ __forceinline__ constexpr int place(int step) { return step; }
  __device__ __forceinline__ const uint16_t* entries() const {
    return reinterpret_cast<const uint16_t*>(words[0]);
  }
};
template <class Shape, Layout layout>
using MatrixTile = typename std::conditional<layout == Layout::half && Shape::states == 1,
                                             PackedTile, SlotTile<kStateTile, Shape, layout>>::type;

// What the lanes that scan read of a window.
template <class Shape, Layout layout, int Matrices,
          class Matrix = SlotTile<kStateTile, Shape, layout>>
struct MarchInputs {
  SlotTile<Shape::channels, Shape, layout> dt, drive;
  Matrix matrix[Matrices];
};

// The stride of a tile that begins there. `InOrder`: as load_by_two has it.
template <bool InOrder, int Rows, bool Split>
__device__ __forceinline__ void load_stride(const WindowTile<Rows, Split>& tile, const float* first,
                                            float (&to)[kStride]) {
#pragma unroll
  for (int i = 0; i < kStride; i += kQuad) {
    float (&quad)[kQuad] = reinterpret_cast<float (&)[kQuad]>(to[i]);
    if constexpr (InOrder) load_by_two(first + tile.place(i), quad);
    else load_quad(first + tile.place(i), quad);
  }
}

// Which channel and states a lane has that scans.
template <class Shape>
struct MarchLane {
  static constexpr int states = Shape::states, last_part = Shape::parts - 1;
  int row_of_warp, column, channel, part;
  int row, state_row;  // where its channel and its first state begin in a tile, in entries

  __device__ __forceinline__ MarchLane() {
    const int warp = Shape::scan_thread() / 32;
    row_of_warp = threadIdx.x % 32 / 4, column = threadIdx.x % 4;
    channel = warp / Shape::parts * 8 + row_of_warp, part = warp % Shape::parts;
    if constexpr (Shape::mixed) {
      const int beyond = row_of_warp - Shape::channels;
      if (beyond >= 0) channel = 2 * warp + beyond, part = last_part;
      // So that rows 4 and 5 of this warp read what 6 and 7 do: they would meet on banks.
      else if (warp == 0) channel = (row_of_warp + 2) % Shape::channels;
    }
    row = channel * kPitch, state_row = state(0) * kPitch;
    if constexpr (Shape::straight) settle(row), settle(state_row);
  }
  __device__ __forceinline__ int state(int m) const { return 4 * (part * states + m) + column; }
};

// The turns that a block takes, a window each. Where one block relieves another, `stopped` counts the warps
// that have written what the other one goes on with; null where none does.
struct Span {
  int begin, end;
  uint32_t* stopped;
};

template <class Method, Layout layout>
using MarchRecurrence = typename Method::template Short<accuracy_of(layout)>;

// Calls f with the kind of a window's loads, as a constant.
template <bool Aligned, class F>
__device__ __forceinline__ void start_loads(bool whole, const F& f) {
  using std::integral_constant;
  if constexpr (!Aligned) f(integral_constant<Loads, Loads::apart>());
  else if (whole) f(integral_constant<Loads, Loads::whole>());
  else f(integral_constant<Loads, Loads::aligned>());
}

// Calls f with whether slots can be moved at once, as a constant.
template <class Shape, class F>
__device__ __forceinline__ void specialize_alignment(const ScanArguments& scan, const F& f) {
  if (Shape::octets || scan.together >= kQuad) f(std::true_type());
  else if constexpr (!Shape::octets) f(std::false_type());
}

// What the threads of a group have of a scan: the rows that drive it, the step sizes, the gate and
// so many state matrices, window by window, all of them contiguous in time. `Aligned`: slots can be
// moved at once. `Summed`: of step sizes, the sums since the begin of their quad, and nothing that drives.
template <class Shape, Layout layout, class Format, bool Aligned, int Matrices, bool Summed = false>
struct MarchRows {
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

  __device__ __forceinline__ MarchRows(const ScanArguments& scan_, const Work& work_,
                                       const View& driving_, const View* const* matrices_,
                                       bool needs_gate_)
      : scan(scan_), work(work_), driving(driving_), needs_gate(needs_gate_),
        whole(work.channels == Shape::channels && scan.states == kStateTile
                  ? int(work.steps / kChunk)
                  : 0),
        lowest(Format::reversed ? int(work.windows) - 1 : 0), slots(driving, work),
        matrix_slots(driving, work) {
    drive.begin(driving, work.at(driving), slots, work, lowest);
    delta.begin(scan.delta, work.at(scan.delta), slots, work, lowest);
    z.begin(scan.z, work.at(scan.z), slots, work, lowest);
    drive.settle(), delta.settle(), z.settle();
#pragma unroll
    for (int i = 0; i < Matrices; ++i) {
      const View& v = *(matrices[i] = matrices_[i]);
      matrix[i].begin(v, v.data + work.b * v.batch + work.g * v.group, matrix_slots, work, lowest);
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
    start_loads<Aligned>(is_whole || window < whole, [&](auto how) {
      each(to, [&](auto& stream, const View& v, const auto& slots, int rows, auto& held) {
        stream.template load<decltype(how)::value>(v, slots, rows, steps, offset_of(window), held);
      });
    });
  }
  template <bool Split>
  __device__ __forceinline__ void put_matrix(WindowTile<kStateTile, Split>& to, int i, int k,
                                             const Raw& raw) const {
    float entry[MatrixPlaces::width];
    matrix[i].template values<Format>(*matrices[i], k, raw.matrix[i], entry);
    put(to, matrix_slots, k, entry);
  }
  __device__ __forceinline__ void put_matrix(PackedTile& to, int i, int k, const Raw& raw) const {
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

// A lane's states, and A.
template <class Shape>
struct MarchStates {
  static constexpr int count = Shape::states;
  const MarchLane<Shape>& lane;
  const int channels, states;
  float a[count], x[count];

  // `begin`: the states at first, or nothing.
  __device__ __forceinline__ MarchStates(const ScanArguments& scan, const Work& work,
                                         const MarchLane<Shape>& lane_, const View& begin)
      : lane(lane_), channels(work.channels), states(int(scan.states)) {
    const auto entry = [&](const View& v, int n) {
      if (!v.data || lane.channel >= channels || n >= states) return 0.0f;
      return load_real(work.at(v) + lane.channel * v.row + n * v.last, v.storage);
    };
#pragma unroll
    for (int m = 0; m < count; ++m)
      a[m] = entry(scan.A, lane.state(m)), x[m] = entry(begin, lane.state(m));
  }
  // Reads the states, or others of the same kind, from a row of [.., N].
  __device__ __forceinline__ void load(const float* row) { load(row, x); }
  __device__ __forceinline__ void load(const float* row, float (&values)[count]) const {
    if (lane.channel >= channels) return;
#pragma unroll
    for (int m = 0; m < count; ++m)
      if (lane.state(m) < states) values[m] = row[lane.state(m)];
  }
  // Writes them there.
  __device__ __forceinline__ void store(float* row) const { store(row, x); }
  __device__ __forceinline__ void store(float* row, const float (&values)[count]) const {
    if (lane.channel >= channels) return;
#pragma unroll
    for (int m = 0; m < count; ++m)
      if (lane.state(m) < states) row[lane.state(m)] = values[m];
  }
};

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
