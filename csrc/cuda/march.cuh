// The scans that march: a lane has one channel and few states and takes one step after the other,
// while other warps of its block load and convert the next window of time and finish the last one.
//
// Of a warp that scans, every four neighbouring lanes share a channel and have different states:
// then the sum over states, with C, is what a tensor core computes of the states of eight steps.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "stream.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

constexpr int kStride = 8;  // steps that a lane has in registers at once

// `States`: of a lane, 1, 2 or 4. `Octets`: of channels; a warp has eight. `RowWarps`: those that
// load and store. `MinBlocks`: per multiprocessor, a bound on registers. `Strides`: how many of
// them a lane of the forward scan takes together. `Ahead`: windows on their way from memory.
template <int States, int Octets, int RowWarps, int MinBlocks, int Strides, int Ahead>
struct MarchShape {
  static constexpr bool marches = true;
  static constexpr int states = States, min_blocks = MinBlocks, strides = Strides, ahead = Ahead;
  static constexpr int parts = kStateTile / (4 * States);  // warps that share eight channels
  static constexpr int channels = 8 * Octets, window = kChunk;
  static constexpr int threads = 32 * RowWarps;  // that load and store; they come first
  static constexpr int all_threads = threads + 32 * parts * Octets;
};

// One value for each row and step of a window. With this gap neither threads that load nor lanes
// that scan meet on a bank.
template <int Rows>
struct WindowTile {
  alignas(16) float values[Rows][kChunk + 8];

  __device__ __forceinline__ float* at(int row, int step) { return values[row] + step; }
  __device__ __forceinline__ const float* at(int row, int step) const { return values[row] + step; }
};

// What the lanes that scan read of a window.
template <class Shape, int Matrices>
struct MarchInputs {
  WindowTile<Shape::channels> dt, drive;
  WindowTile<kStateTile> matrix[Matrices];
};

// Which channel and states a lane has that scans.
template <class Shape>
struct MarchLane {
  static constexpr int states = Shape::states;
  int row_in_octet, column, channel, part;

  __device__ __forceinline__ MarchLane() {
    const int thread = threadIdx.x - Shape::threads, warp = thread / 32;
    row_in_octet = thread % 32 / 4, column = thread % 4;
    channel = warp / Shape::parts * 8 + row_in_octet, part = warp % Shape::parts;
  }
  __device__ __forceinline__ int state(int m) const { return 4 * (part * states + m) + column; }
};

// d += a b: d is 16 x 8, a 16 x 4, b 4 x 8, in fragments as the instruction wants them. Of a and b
// only the upper 19 bits count.
__device__ __forceinline__ void multiply_add(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
#if defined(__CUDA_ARCH__)
  asm volatile(
      "mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
#else  // the same by shuffles, for tests/emulation
  const auto seen = [](uint32_t bits) { return __uint_as_float(bits & 0xffffe000u); };
  const int row = threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
  for (int k = 0; k < 4; ++k) {
    const float upper = shuffle(seen(a0), 4 * row + k), lower = shuffle(seen(a1), 4 * row + k);
    for (int j = 0; j < 2; ++j) {
      const float right = shuffle(seen(b), 4 * (column + j) + k);
      d[j] += upper * right;
      d[2 + j] += lower * right;
    }
  }
#endif
}

// How states become operands of the tensor core, which sees 11 bits. `split`: in two parts, as C
// is, for float32; what is infinite gives NaN. `rounded`: to nearest, for float16, whose C has no
// more bits. `cut`, for bfloat16: cut off, with the mean of what is lost put back: 0.36 of the last
// bit, where mantissas are distributed as those of products are. That leaves 2e-4, a tenth of what
// rounding the output costs.
enum class Operand { split, rounded, cut };
constexpr float kCutBack = 1.0f + 0.3607f / 1024;

// The sum over states of C x for eight steps. One instruction multiplies the states of two steps,
// 2 j and 2 j + 1, in all channels of the warp with the entries of C of all eight steps; of what
// that gives only the two columns that belong to these steps are meant.
struct OutputSums {
  float d[kStride / 2][4] = {};

  template <Operand operand>
  __device__ __forceinline__ void add(const float (&x)[kStride], float c) {
    const uint32_t c_high = __float_as_uint(c);
#pragma unroll
    for (int j = 0; j < kStride / 2; ++j) {
      const float even = x[2 * j], odd = x[2 * j + 1];
      if constexpr (operand == Operand::split) {
        const uint32_t high_even = __float_as_uint(even), high_odd = __float_as_uint(odd);
        // The product of both low parts is less than a last bit.
        multiply_add(d[j], low(even), low(odd), c_high);
        multiply_add(d[j], high_even, high_odd, low(c));
        multiply_add(d[j], high_even, high_odd, c_high);
      } else if constexpr (operand == Operand::rounded) {
        multiply_add(d[j], rounded(even), rounded(odd), c_high);
      } else {
        multiply_add(d[j], __float_as_uint(even), __float_as_uint(odd), c_high);
      }
    }
  }
  // Of steps 2 column and 2 column + 1.
  __device__ __forceinline__ float2 of(int column) const {
    const auto choose = [&](int k) {
      const float first = column & 1 ? d[1][k] : d[0][k], last = column & 1 ? d[3][k] : d[2][k];
      return column & 2 ? last : first;
    };
    return make_float2(choose(0), choose(3));
  }

 private:
  // What the tensor core does not see of v.
  static __device__ __forceinline__ uint32_t low(float v) {
    return __float_as_uint(v - __uint_as_float(__float_as_uint(v) & 0xffffe000u));
  }
  static __device__ __forceinline__ uint32_t rounded(float v) {
    uint32_t bits;
#if !defined(__CUDA_ARCH__)
    bits = __float_as_uint(v);
    bits = (bits + 0xfff + (bits >> 13 & 1)) & 0xffffe000u;
#elif __CUDA_ARCH__ >= 900
    asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(bits) : "f"(v));
#else
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(v));
#endif
    return bits;
  }
};

// What the threads that load have of a scan: the rows that drive it, the step sizes, the gate and
// so many state matrices, window by window, all of them contiguous in time.
template <class Shape, Layout layout, class Format, int Matrices>
struct MarchRows {
  using Places = Slots<Shape::channels, Shape, layout>;
  using MatrixPlaces = Slots<kStateTile, Shape, layout>;
  using RowStream = Stream<float, Shape::channels, Shape, layout>;
  using MatrixStream = Stream<float, kStateTile, Shape, layout>;
  using Held = typename RowStream::Held;
  static constexpr int count = Places::count, width = Places::width;
  static constexpr int window_bytes = kChunk * item_of(layout) * (Format::reversed ? -1 : 1);

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
  const int whole;  // the first windows that are whole and aligned
  const Places slots;
  const MatrixPlaces matrix_slots;
  RowStream drive, delta, z;  // at the window that is loaded next
  MatrixStream matrix[Matrices];
  float bias[count];

  __device__ __forceinline__ MarchRows(const ScanArguments& scan_, const Work& work_,
                                       const View& driving_,
                                       const View* const (&matrices_)[Matrices], bool needs_gate_,
                                       int first_window)
      : scan(scan_), work(work_), driving(driving_), needs_gate(needs_gate_),
        whole(scan.aligned && work.channels == Shape::channels && scan.states == kStateTile
                  ? int(work.steps / kChunk)
                  : 0),
        slots(driving, work), matrix_slots(driving, work) {
    drive.begin(driving, work.at(driving), slots, work, first_window);
    delta.begin(scan.delta, work.at(scan.delta), slots, work, first_window);
    z.begin(scan.z, work.at(scan.z), slots, work, first_window);
#pragma unroll
    for (int i = 0; i < Matrices; ++i) {
      const View& v = *(matrices[i] = matrices_[i]);
      matrix[i].begin(v, v.data + work.b * v.batch + work.g * v.group, matrix_slots, work,
                      first_window);
    }
#pragma unroll
    for (int k = 0; k < count; ++k)
      bias[k] = channel_value(scan.delta_bias, scan, work.g, work.first_channel + slots.row(k));
  }

  // How many steps a window has.
  __device__ __forceinline__ int steps_of(int window) const {
    return work.steps_from(window, kChunk);
  }
  // Starts the loads of that window, if there is such a one, and goes on by so many.
  __device__ __forceinline__ void load(int window, int windows, Raw& to) {
    if (window >= 0 && window < whole) {
      drive.load_whole(driving, slots, 0, to.drive);
      delta.load_whole(scan.delta, slots, 0, to.delta);
      if (needs_gate) z.load_whole(scan.z, slots, 0, to.z);
#pragma unroll
      for (int i = 0; i < Matrices; ++i)
        matrix[i].load_whole(*matrices[i], matrix_slots, 0, to.matrix[i]);
    } else if (window >= 0 && window < int(work.windows)) {
      const int left = steps_of(window);
      drive.load(driving, slots, work.channels, left, 0, to.drive);
      delta.load(scan.delta, slots, work.channels, left, 0, to.delta);
      if (needs_gate) z.load(scan.z, slots, work.channels, left, 0, to.z);
#pragma unroll
      for (int i = 0; i < Matrices; ++i)
        matrix[i].load(*matrices[i], matrix_slots, int(scan.states), left, 0, to.matrix[i]);
    }
    const int64_t bytes = windows * window_bytes;
    drive.next(bytes), delta.next(bytes), z.next(bytes);
#pragma unroll
    for (int i = 0; i < Matrices; ++i) matrix[i].next(bytes);
  }
  // Converts that window and loads another one into its registers. driven(dt, value, gate) makes of
  // a slot's values what drives the states.
  template <class F>
  __device__ __forceinline__ void commit(MarchInputs<Shape, Matrices>& to, int window, Raw& raw,
                                         int next, int windows, const F& driven) {
    float dt[count][width], value[count][width], gate[count][width];
#pragma unroll
    for (int k = 0; k < count; ++k) {
      drive.template values<Format>(driving, k, raw.drive, value[k]);
      delta.template values<Format>(scan.delta, k, raw.delta, dt[k]);
      if (needs_gate) z.template values<Format>(scan.z, k, raw.z, gate[k]);
    }
#pragma unroll
    for (int i = 0; i < Matrices; ++i) {
#pragma unroll
      for (int k = 0; k < MatrixPlaces::count; ++k) {
        float entry[MatrixPlaces::width];
        matrix[i].template values<Format>(*matrices[i], k, raw.matrix[i], entry);
        put(to.matrix[i], matrix_slots, k, entry);
      }
    }
    load(next, windows, raw);
#pragma unroll
    for (int k = 0; k < count; ++k) {
#pragma unroll
      for (int i = 0; i < width; ++i)
        dt[k][i] = step_size<accuracy_of(layout)>(dt[k][i], bias[k], scan.delta_softplus);
      if (window >= whole) {
#pragma unroll
        for (int i = 0; i < width; ++i)
          if (slots.step(k) + i >= steps_of(window)) dt[k][i] = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < width; ++i) value[k][i] = driven(dt[k][i], value[k][i], gate[k][i]);
      put(to.dt, slots, k, dt[k]);
      put(to.drive, slots, k, value[k]);
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
  // Writes the states to a row of [.., N].
  __device__ __forceinline__ void store(float* row) const {
    if (lane.channel >= channels) return;
#pragma unroll
    for (int m = 0; m < count; ++m)
      if (lane.state(m) < states) row[lane.state(m)] = x[m];
  }
};

template <class Shape>
struct ForwardMarchShared {
  MarchInputs<Shape, 2> inputs[2];  // of this window and of the next one
  WindowTile<Shape::channels> y[2][Shape::parts];
};

// The half of a block that loads, and stores what the other half found. While that one scans window
// w from one of two buffers, this one fills the other with w + 1 and finishes w - 1: as many
// barriers as there are windows, and one before and one behind.
template <class Method, class Shape, Layout layout, class Format>
__device__ __forceinline__ void forward_rows(const ForwardArguments& p, const Work& work,
                                             ForwardMarchShared<Shape>& shared) {
  const ScanArguments& scan = p.scan;
  using Rows = MarchRows<Shape, layout, Format, 2>;
  constexpr int count = Rows::count, width = Rows::width;
  const View* const matrices[] = {&scan.B, &scan.C};
  Rows rows(scan, work, scan.u, matrices, scan.gated, 0);
  typename Rows::RowStream out;
  out.begin(p.out, work.at(p.out), rows.slots, work, 0);
  float D[count];
#pragma unroll
  for (int k = 0; k < count; ++k)
    D[k] = channel_value(scan.D, scan, work.g, work.first_channel + rows.slots.row(k));
  const int windows = int(work.windows);
  const auto commit = [&](int window, typename Rows::Raw& raw) {
    rows.commit(shared.inputs[window % 2], window, raw, window + Shape::ahead, 1,
                [](float dt, float u, float) {
                  return Recurrence<Method, accuracy_of(layout), float>::drive(dt, u);
                });
  };
  // At a time when the streams are `ahead` windows further.
  const auto load_again = [&](int window, int ahead, typename Rows::Held& u,
                              typename Rows::Held& z) {
    const int64_t offset = -ahead * Rows::window_bytes;
    if (window < rows.whole) {
      rows.drive.load_whole(scan.u, rows.slots, offset, u);
      if (scan.gated) rows.z.load_whole(scan.z, rows.slots, offset, z);
    } else {
      const int left = rows.steps_of(window);
      rows.drive.load(scan.u, rows.slots, work.channels, left, offset, u);
      if (scan.gated) rows.z.load(scan.z, rows.slots, work.channels, left, offset, z);
    }
  };
  constexpr float weight = layout == Layout::half && Format::bfloat ? kCutBack : 1.0f;
  const auto finish = [&](int window, const typename Rows::Held& u, const typename Rows::Held& z) {
#pragma unroll
    for (int k = 0; k < count; ++k) {
      float value[width], u_of[width], z_of[width];
      get_sum(shared.y[window % 2], rows.slots, k, value);
      rows.drive.template values<Format>(scan.u, k, u, u_of);
      rows.z.template values<Format>(scan.z, k, z, z_of);
#pragma unroll
      for (int i = 0; i < width; ++i) value[i] = weight * value[i] + D[k] * u_of[i];
      if (scan.gated) {
#pragma unroll
        for (int i = 0; i < width; ++i) value[i] *= z_of[i] * sigmoid(z_of[i]);
      }
      out.template store<Format>(p.out, rows.slots, k, value, window < rows.whole, work.channels,
                                 rows.steps_of(window));
    }
    out.next(Rows::window_bytes);
  };

  typename Rows::Raw raw[Shape::ahead];
#pragma unroll
  for (int i = 0; i < Shape::ahead; ++i) rows.load(i, 1, raw[i]);
  commit(0, raw[0]);
  __syncthreads();
  // u and z of the window that is scanned, once more: to keep them takes more registers.
  typename Rows::Held u, z;
  const auto turn = [&](int window, typename Rows::Raw& next) {
    if (window + 1 < windows) commit(window + 1, next);
    else rows.load(windows, 1, next);
    if (window > 0) finish(window - 1, u, z);
    if (window < windows) load_again(window, 2 + Shape::ahead, u, z);
    __syncthreads();
  };
#pragma unroll 1
  for (int window = 0; window <= windows; window += Shape::ahead) {
#pragma unroll
    for (int i = 0; i < Shape::ahead; ++i)
      if (window + i <= windows) turn(window + i, raw[(i + 1) % Shape::ahead]);
  }
}

// What a lane needs for a stride of steps.
template <class Shape>
struct MarchStride {
  static constexpr int states = Shape::states;
  float dt[kStride], drive[kStride], b[states][kStride], c[states];

  __device__ __forceinline__ void load(const MarchInputs<Shape, 2>& in,
                                       const MarchLane<Shape>& lane, int step) {
    load_segment(in.dt.at(lane.channel, step), dt);
    load_segment(in.drive.at(lane.channel, step), drive);
#pragma unroll
    for (int m = 0; m < states; ++m) {
      load_segment(in.matrix[0].at(lane.state(m), step), b[m]);
      c[m] = *in.matrix[1].at(lane.state(m), step + lane.row_in_octet);
    }
  }
};

// The half that scans.
template <class Method, class Shape, Layout layout, Operand operand>
__device__ __forceinline__ void forward_states(const ForwardArguments& p, const Work& work,
                                               ForwardMarchShared<Shape>& shared) {
  const MarchLane<Shape> lane;
  MarchStates<Shape> of(p.scan, work, lane, View());
  using Steps = Recurrence<Method, accuracy_of(layout), float>;
  Steps recurrence[Shape::states];
#pragma unroll
  for (int m = 0; m < Shape::states; ++m) recurrence[m] = Steps(of.a[m]);
  const int64_t row = work.row(p.scan, lane.channel), states = p.scan.states;
  float* edges = static_cast<float*>(p.edges) + row * p.chunks * states;
  const int windows = int(work.windows);
  __syncthreads();
#pragma unroll 1
  for (int window = 0; window < windows; ++window) {
    const MarchInputs<Shape, 2>& in = shared.inputs[window % 2];
    of.store(edges);
    edges += states;
    float* const y = shared.y[window % 2][lane.part].at(lane.channel, 2 * lane.column);
    // Several strides at once, or the lane would wait for its own results.
    constexpr int together = Shape::strides;
#pragma unroll 1
    for (int step = 0; step < kChunk; step += together * kStride) {
      MarchStride<Shape> inputs[together];
      float2 sum[together];
#pragma unroll
      for (int j = 0; j < together; ++j) inputs[j].load(in, lane, step + j * kStride);
#pragma unroll
      for (int j = 0; j < together; ++j) {
        const MarchStride<Shape>& at = inputs[j];
        OutputSums sums;
#pragma unroll
        for (int m = 0; m < Shape::states; ++m) {
          float x[kStride];
#pragma unroll
          for (int i = 0; i < kStride; ++i) {
            of.x[m] = recurrence[m].advance(of.x[m], at.dt[i], at.drive[i], at.b[m][i]);
            x[i] = of.x[m];
          }
          sums.template add<operand>(x, at.c[m]);
        }
        sum[j] = sums.of(lane.column);
      }
#pragma unroll
      for (int j = 0; j < together; ++j)
        *reinterpret_cast<float2*>(y + step + j * kStride) = sum[j];
    }
    __syncthreads();
  }
  __syncthreads();
  of.store(static_cast<float*>(p.last_state) + row * states);
}

template <class Method, class Shape, Layout layout>
__global__ void __launch_bounds__(Shape::all_threads, Shape::min_blocks)
    forward_march_kernel(const __grid_constant__ ForwardArguments p) {
  extern __shared__ float4 memory[];
  auto& shared = *reinterpret_cast<ForwardMarchShared<Shape>*>(memory);
  const Work work = work_of_block<Shape>(p.scan);
  if (threadIdx.x < Shape::threads) {
    specialize<layout>(p.scan.u.storage, work.reverse, [&](auto format) {
      forward_rows<Method, Shape, layout, decltype(format)>(p, work, shared);
    });
  } else {
    if constexpr (layout == Layout::single)
      forward_states<Method, Shape, layout, Operand::split>(p, work, shared);
    else if (p.scan.u.storage == Storage::bfloat16)
      forward_states<Method, Shape, layout, Operand::cut>(p, work, shared);
    else forward_states<Method, Shape, layout, Operand::rounded>(p, work, shared);
  }
}

template <class Shape>
struct EdgesMarchShared {
  MarchInputs<Shape, 1> inputs[2];
};

template <class Method, class Shape, Layout layout, class Format, bool Adjoint, bool Ascending>
__device__ __forceinline__ void edges_rows(const EdgesArguments& p, const Work& work,
                                           EdgesMarchShared<Shape>& shared) {
  constexpr float weight = output_weight<Method, float>();
  const ScanArguments& scan = p.scan;
  using Rows = MarchRows<Shape, layout, Format, 1>;
  const View* const matrices[] = {Adjoint ? &scan.C : &scan.B};
  const int windows = int(work.windows);
  const auto window_of = [&](int i) { return Ascending ? i : windows - 1 - i; };
  const bool gated = Adjoint && scan.gated;
  Rows rows(scan, work, Adjoint ? p.grad_out : scan.u, matrices, gated, window_of(0));
  constexpr int forth = Ascending ? 1 : -1;
  typename Rows::Raw raw[Shape::ahead];
#pragma unroll
  for (int i = 0; i < Shape::ahead; ++i) rows.load(window_of(i), forth, raw[i]);
  const auto turn = [&](int i, typename Rows::Raw& raw) {
    rows.commit(shared.inputs[i % 2], window_of(i), raw, window_of(i + Shape::ahead), forth,
                [&](float dt, float value, float z) {
                  if (gated) value *= z * sigmoid(z);
                  if (Adjoint) return weight * value;
                  return Recurrence<Method, accuracy_of(layout), float>::drive(dt, value);
                });
    __syncthreads();
  };
#pragma unroll 1
  for (int i = 0; i < windows; i += Shape::ahead) {
#pragma unroll
    for (int j = 0; j < Shape::ahead; ++j)
      if (i + j < windows) turn(i + j, raw[j]);
  }
  __syncthreads();
}

// What enters each chunk: see edges_kernel.
template <class Method, class Shape, Layout layout, bool Adjoint, bool Ascending>
__global__ void __launch_bounds__(Shape::all_threads, Shape::min_blocks)
    edges_march_kernel(const __grid_constant__ EdgesArguments p) {
  extern __shared__ float4 memory[];
  auto& shared = *reinterpret_cast<EdgesMarchShared<Shape>*>(memory);
  const Work work = work_of_block<Shape>(p.scan);
  if (threadIdx.x < Shape::threads) {
    specialize<layout>(p.scan.u.storage, work.reverse, [&](auto format) {
      edges_rows<Method, Shape, layout, decltype(format), Adjoint, Ascending>(p, work, shared);
    });
    return;
  }
  const MarchLane<Shape> lane;
  MarchStates<Shape> of(p.scan, work, lane, p.grad_last_state);
  using Steps = Recurrence<Method, accuracy_of(layout), float>;
  Steps recurrence[Shape::states];
#pragma unroll
  for (int m = 0; m < Shape::states; ++m) recurrence[m] = Steps(of.a[m]);
  const int64_t row = work.row(p.scan, lane.channel), states = p.scan.states;
  const int windows = int(work.windows);
  float* edges =
      static_cast<float*>(p.edges) + (row * p.chunks + (Ascending ? 0 : windows - 1)) * states;
  __syncthreads();
#pragma unroll 1
  for (int i_window = 0; i_window < windows; ++i_window) {
    const MarchInputs<Shape, 1>& in = shared.inputs[i_window % 2];
    of.store(edges);
    edges += Ascending ? states : -states;
    // The adjoint is A_bar times the gradient of the state: `factor` is the A_bar that is due.
    float factor[Shape::states];
#pragma unroll
    for (int m = 0; m < Shape::states; ++m) factor[m] = 1.0f;
#pragma unroll 1
    for (int i_step = 0; i_step < kChunk; i_step += kStride) {
      const int step = Ascending ? i_step : kChunk - kStride - i_step;
      float dt[kStride], drive[kStride];
      load_segment(in.dt.at(lane.channel, step), dt);
      load_segment(in.drive.at(lane.channel, step), drive);
#pragma unroll
      for (int m = 0; m < Shape::states; ++m) {
        float entry[kStride];
        load_segment(in.matrix[0].at(lane.state(m), step), entry);
        if constexpr (Adjoint) {
#pragma unroll
          for (int j = 0; j < kStride; ++j) {
            const int i = Ascending ? j : kStride - 1 - j;
            of.x[m] = factor[m] * of.x[m] + drive[i] * entry[i];
            factor[m] = recurrence[m].coefficients(dt[i]).a_bar;
          }
        } else {
#pragma unroll
          for (int j = 0; j < kStride; ++j) {
            const int i = Ascending ? j : kStride - 1 - j;
            of.x[m] = recurrence[m].advance(of.x[m], dt[i], drive[i], entry[i]);
          }
        }
      }
    }
    if constexpr (Adjoint) {
#pragma unroll
      for (int m = 0; m < Shape::states; ++m) of.x[m] *= factor[m];
    }
    __syncthreads();
  }
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
