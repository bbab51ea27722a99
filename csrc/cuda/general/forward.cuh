// The forward scan by segments, for Layout::any, window by window: every lane scans its segment from zero, the lanes of a
// channel combine what they found, and every lane scans again from the state that enters there.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../common/dependent_launch.cuh"
#include "../common/state_matrix.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// The states that a lane carries from window to window and A, of its warp's states: in registers,
// or where there may be many states in shared memory.
template <class E, class Shape, Layout layout>
class CarriedStates {
 public:
  static constexpr int of_warp = kStateTile / Shape::warps;

  // `memory`: bytes(states) in shared memory.
  __device__ __forceinline__ CarriedStates(const ScanArguments& scan, const Work& work,
                                           void* memory)
      : memory_(static_cast<E*>(memory)), states_(int(scan.states)) {
    const int channel = channel_of_lane<Shape>(0);
    each([&](int m, int n) {
      E a = E(0.0f);
      if (channel < work.channels)
        a = load_element<E>(work.at(scan.A) + channel * scan.A.row + n * scan.A.last,
                            scan.A.storage);
      if constexpr (fast) a_[m] = a;
      else at(0, n) = a;
      put(m, n, E(0.0f));
    });
    if constexpr (!fast) __syncwarp();
  }
  static __host__ __device__ size_t bytes(int64_t states) {
    return fast ? 0 : 2 * states * Shape::channels * sizeof(E);
  }

  // Carries these in, [B, G, H, N], where there are any.
  __device__ __forceinline__ void begin(const View& v, const Work& work) {
    const int channel = channel_of_lane<Shape>(0);
    if (!v.data || channel >= work.channels) return;
    each([&](int m, int n) {
      put(m, n, load_element<E>(work.at(v) + channel * v.row + n * v.last, v.storage));
    });
  }
  // Writes them to contiguous [B, G, H, N].
  __device__ __forceinline__ void write(E* rows, const ScanArguments& scan,
                                        const Work& work) const {
    const int channel = channel_of_lane<Shape>(0);
    if (channel >= work.channels || segment_of_lane<Shape>() != 0) return;
    E* const row = rows + work.row(scan, channel) * states_;
    each([&](int m, int n) { row[n] = x(m, n); });
  }

  // State n, the m-th of this warp in its tile.
  __device__ __forceinline__ E a(int m, int n) const { return fast ? a_[m] : at(0, n); }
  __device__ __forceinline__ E x(int m, int n) const { return fast ? x_[m] : at(1, n); }
  // `x` of the lane that has the window's last segment; every lane of the warp takes part.
  __device__ __forceinline__ void carry(int m, int n, E x, int last_segment) {
    x = from_segment<Shape>(x, last_segment);
    if constexpr (fast) {
      x_[m] = x;
    } else {
      __syncwarp();
      at(1, n) = x;
      __syncwarp();
    }
  }

 private:
  static constexpr bool fast = layout != Layout::any;
  // Calls f(m, n) for each state n of this warp, the m-th in its tile.
  template <class F>
  __device__ __forceinline__ void each(const F& f) const {
#pragma unroll 1
    for (int first = 0; first < (fast ? 1 : states_); first += kStateTile) {
#pragma unroll(fast ? of_warp : 1)
      for (int m = 0; m < of_warp; ++m) {
        const int n = first + int(threadIdx.x / 32) * of_warp + m;
        if (n < states_) f(m, n);
      }
    }
  }
  __device__ __forceinline__ void put(int m, int n, E x) {
    if constexpr (fast) x_[m] = x;
    else at(1, n) = x;
  }
  __device__ __forceinline__ E& at(int kind, int n) const {
    return memory_[(kind * states_ + n) * Shape::channels + channel_of_lane<Shape>(0)];
  }

  E* const memory_;
  const int states_;
  static_assert(Shape::sets == 1, "a lane has one channel");
  E a_[fast ? of_warp : 1] = {}, x_[fast ? of_warp : 1] = {};
};

template <class E, class Shape>
struct GeneralForwardShared {
  RowTile<Shape> dt, drive;
  StateTile<E, Shape> B, C;
  RowTile<Shape> y[Shape::warps];
  float D[Shape::channels], bias[Shape::channels];
};

// dt and what drives the states, of a lane's segment.
template <class Shape>
struct Driving {
  float dt[Shape::steps], drive[Shape::steps], total_dt;

  __device__ __forceinline__ void load(const RowTile<Shape>& dt_tile,
                                       const RowTile<Shape>& drive_tile) {
    load_segment(dt_tile.segment_of_lane(0), dt);
    load_segment(drive_tile.segment_of_lane(0), drive);
    total_dt = sum(dt);
  }
};

// A_bar and the inputs of a segment; returns the state that leaves it where zero enters.
template <class Method, class E, int Steps, class Cuts>
__device__ __forceinline__ E scan_from_zero(const float (&dt)[Steps], const float (&drive)[Steps],
                                            E a, const SegmentOf<E, Layout::any>& b_of,
                                            const Cuts& cuts, E (&a_bar)[Steps],
                                            E (&input)[Steps]) {
  const Recurrence<Method, Accuracy::full, E> recurrence(a);
  E x = E(0.0f);
#pragma unroll
  for (int first = 0; first < Steps; first += kQuad) {
    E b[kQuad];
    b_of.quad(first, b);
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      const int i = first + j;
      const Coefficients<E> k = recurrence.coefficients(dt[i]);
      a_bar[i] = k.a_bar;
      input[i] = recurrence.input(drive[i], k, b[j]);
      x = i == 0 || cuts.at(i) ? input[i] : a_bar[i] * x + input[i];
    }
  }
  return x;
}

// One state over a segment: adds what it gives to y, and returns what leaves the segment. `carry`
// enters the window; what enters the segment goes to `keep`. `other_carry` enters the window from
// the other side, for methods that are not causal, and `other_cuts` are those behind steps.
template <class Method, class E, class Shape, class Cuts, class Keep>
__device__ __forceinline__ E advance(const Driving<Shape>& driving, E a,
                                     const SegmentOf<E, Layout::any>& b_of,
                                     const SegmentOf<E, Layout::any>& c_of, const Cuts& cuts,
                                     const Cuts& other_cuts, E carry, E other_carry,
                                     const Keep& keep, float (&y)[Shape::steps]) {
  constexpr int steps = Shape::steps;
  E a_bar[steps], input[steps];
  E x = scan_from_zero<Method>(driving.dt, driving.drive, a, b_of, cuts, a_bar, input);
  const E transition = transition_of<Method>(driving.total_dt, a_bar, a);
  x = enter_segments<true, Shape>(transition, x, carry, cuts);
  keep(x);
  E other_x = E(0.0f), local = input[steps - 1];
  if constexpr (!Method::causal) {
#pragma unroll
    for (int i = steps - 2; i >= 0; --i)
      local = other_cuts.at(i) ? input[i] : a_bar[i] * local + input[i];
    other_x = enter_segments<false, Shape>(transition, local, other_carry, other_cuts);
  }
#pragma unroll
  for (int i = 0; i < steps; i += kQuad) {
    E c[kQuad];
    c_of.quad(i, c);
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      x = cuts.at(i + j) ? input[i + j] : a_bar[i + j] * x + input[i + j];
      y[i + j] += real(c[j] * x);
    }
  }
  if constexpr (!Method::causal) {
#pragma unroll
    for (int i = steps - kQuad; i >= 0; i -= kQuad) {
      E c[kQuad];
      c_of.quad(i, c);
#pragma unroll
      for (int j = kQuad - 1; j >= 0; --j) {
        other_x = other_cuts.at(i + j) ? input[i + j] : a_bar[i + j] * other_x + input[i + j];
        y[i + j] += real(c[j] * other_x);
      }
    }
  }
  return x;
}

template <class Method, class E, class Shape, bool Bounded>
__global__ void __launch_bounds__(Shape::threads, Shape::min_blocks)
    general_forward_kernel(const __grid_constant__ ForwardArguments p) {
  constexpr Layout layout = Layout::any;
  constexpr int steps = Shape::steps, segments = Shape::segments;
  constexpr float weight = output_weight<Method, E>();
  static_assert(Shape::window % kChunk == 0, "a window has whole chunks");
  static_assert(!Bounded || Shape::window == kChunk, "a window has one word of cuts");
  using States = CarriedStates<E, Shape, layout>;
  using Places = Slots<Shape::channels, Shape, layout>;
  constexpr int count = Places::count, width = Places::width;
  extern __shared__ float4 memory[];
  auto& shared = *reinterpret_cast<GeneralForwardShared<E, Shape>*>(memory);
  const ScanArguments& scan = p.scan;
  const int states = int(scan.states);
  let_next_begin();
  wait_for_previous();

  const Work work = work_of_block<Shape>(scan);
  const int warp = threadIdx.x / 32;
  const int channel = channel_of_lane<Shape>(0), segment = segment_of_lane<Shape>();
  if (threadIdx.x < Shape::channels) {
    const int64_t h = work.first_channel + threadIdx.x;
    shared.D[threadIdx.x] = channel_value(scan.D, scan, work.g, h);
    shared.bias[threadIdx.x] = channel_value(scan.delta_bias, scan, work.g, h);
  }
  States carried(scan, work, &shared + 1);
  if constexpr (Bounded) carried.begin(p.bounds.initial_state, work);
  const Cuts<Bounded> cuts(p.bounds, work, p.chunks);
  __syncthreads();

  const Places slots(scan.u, work);
  Stream<float, Shape::channels, Shape, layout> u, delta, z, out;
  u.begin(scan.u, work.at(scan.u), slots, work, 0);
  delta.begin(scan.delta, work.at(scan.delta), slots, work, 0);
  z.begin(scan.z, work.at(scan.z), slots, work, 0);
  out.begin(p.out, work.at(p.out), slots, work, 0);
  StateMatrix<E, Shape, layout> B(scan.B, scan.constant_B, work), C(scan.C, scan.constant_C, work);
  B.begin(work, 0);
  C.begin(work, 0);
  const auto load_matrices = [&](int first, int left) {
    B.load(first, states, left);
    C.load(first, states, left);
  };
  // Starts the loads of a window that has so many steps.
  const auto load_window = [&](int left) {
    u.template load<Loads::apart>(scan.u, slots, work.channels, left);
    delta.template load<Loads::apart>(scan.delta, slots, work.channels, left);
    if (scan.gated) z.template load<Loads::apart>(scan.z, slots, work.channels, left);
    load_matrices(0, left);
  };
  load_window(work.steps_from(0, Shape::window));

  // Of the chunk that begins with this lane's segment, where one does.
  const int64_t row = work.row(scan, channel);
  E* edges = static_cast<E*>(p.edges) + (row * p.chunks + segment * steps / kChunk) * states;
#pragma unroll 1
  for (int64_t window = 0; window < work.windows; ++window) {
    const int left = work.steps_from(window, Shape::window);
#pragma unroll
    for (int k = 0; k < count; ++k) {
      float dt[width], drive[width];
      u.template values<Unknown>(scan.u, k, drive);
      delta.template values<Unknown>(scan.delta, k, dt);
      const float bias = shared.bias[slots.row(k)];
#pragma unroll
      for (int i = 0; i < width; ++i) {
        dt[i] = step_size<Accuracy::full>(dt[i], bias, scan.delta_softplus);
        if (slots.step(k) + i >= left) dt[i] = 0.0f;
        drive[i] = Recurrence<Method, Accuracy::full, E>::drive(dt[i], drive[i]);
      }
      put(shared.dt, slots, k, dt);
      put(shared.drive, slots, k, drive);
    }
    B.template commit<Unknown>(shared.B);
    C.template commit<Unknown>(shared.C);
    const auto u_now = u.held(), z_now = z.held();

    const int64_t step = window * Shape::window + segment * steps;
    const bool keeps_edge = step % kChunk == 0 && step < work.steps && channel < work.channels;
    // What enters the window's last chunk from the other side, for methods that are not causal.
    const int64_t last_chunk = (window + 1) * Shape::window / kChunk - 1;
    const bool has_other = !Method::causal && last_chunk < p.chunks && channel < work.channels;
    const E* const other =
        static_cast<const E*>(p.other_edges) + (row * p.chunks + last_chunk) * states;

    using OfLane = CutsOfSegment<Bounded, Shape>;
    const OfLane cuts_before(cuts.before(window));
    const OfLane cuts_behind(Method::causal ? 0 : cuts.behind(window));
    Driving<Shape> driving;
    float y[steps] = {};
#pragma unroll 1
    for (int first = 0; first < states; first += kStateTile) {
      if (first > 0) {
        B.template commit<Unknown>(shared.B);
        C.template commit<Unknown>(shared.C);
      }
      __syncthreads();
      if (first == 0) driving.load(shared.dt, shared.drive);
      // The next tile comes while this one is at work.
      const bool last_tile = first + kStateTile >= states;
      if (last_tile) {
        u.next(Shape::window * slots.to_step(scan.u));
        delta.next(Shape::window * slots.to_step(scan.delta));
        z.next(Shape::window * slots.to_step(scan.z));
        B.next(1), C.next(1);
        load_window(work.steps_from(window + 1, Shape::window));
      } else {
        load_matrices(first + kStateTile, left);
      }
#pragma unroll 1
      for (int m = 0; m < States::of_warp; ++m) {
        const int in_tile = warp * States::of_warp + m, n = first + in_tile;
        if (n >= states) break;
        const auto b_of = B.segment(shared.B, work, channel, segment, in_tile, n);
        const auto c_of = C.segment(shared.C, work, channel, segment, in_tile, n);
        const E other_carry = has_other ? other[n] : E(0.0f);
        const auto keep = [&](E x) {
          if (keeps_edge) edges[n] = x;
        };
        const E x = advance<Method, E, Shape>(driving, carried.a(m, n), b_of, c_of, cuts_before,
                                              cuts_behind, carried.x(m, n), other_carry, keep, y);
        carried.carry(m, n, x, segments - 1);
      }
      if (!last_tile) __syncthreads();
    }
    store_segment(shared.y[warp].segment_of_lane(0), y);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < count; ++k) {
      float value[width], u_of[width], z_of[width];
      get_sum(shared.y, slots, k, value);
      u.template values<Unknown>(scan.u, k, u_now, u_of);
      z.template values<Unknown>(scan.z, k, z_now, z_of);
      const float D = shared.D[slots.row(k)];
#pragma unroll
      for (int i = 0; i < width; ++i) {
        value[i] *= weight;
        if (scan.D.data) value[i] += D * u_of[i];  // 0 times what is infinite would be NaN
        if (scan.gated) value[i] *= z_of[i] * sigmoid(z_of[i]);
      }
      out.template store<Unknown>(p.out, slots, k, value, false, work.channels, left);
    }
    out.next(Shape::window * slots.to_step(p.out));
    edges += Shape::window / kChunk * states;
  }

  carried.write(static_cast<E*>(p.last_state), scan, work);
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
