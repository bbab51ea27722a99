// The forward scan: a block marches over time, window by window, with the states of its channels in
// shared memory. Within a window each lane scans its segment from zero, the lanes of a channel
// combine what they found, and each scans its segment again from the state that enters it.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tile.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// Behind it in memory: A, the states at the window's beginning, and those of the other direction at
// its end, each [N][channels].
template <class E, class Shape>
struct ForwardShared {
  RowTile<Shape> dt, drive;
  StateTile<E, Shape> B, C;
  RowTile<Shape> y[Shape::warps];
  float D[Shape::channels], bias[Shape::channels];

  static size_t bytes(int64_t states) {
    return sizeof(ForwardShared) + 3 * states * Shape::channels * sizeof(E);
  }
};

// One value per channel (D, delta_bias), 0 where there is none.
__device__ __forceinline__ float channel_value(const View& v, const Work& work, int c) {
  return v.data && c < work.channels ? load_real(work.at(v) + c * v.row, v.storage) : 0.0f;
}

// A of the block's channels, and states of zero; ends with a barrier.
template <class E, class Shape>
__device__ __forceinline__ void fill_states(const ScanArguments& scan, const Work& work, E* a,
                                            E* x) {
  for (int i = threadIdx.x; i < scan.states * Shape::channels; i += Shape::threads) {
    const int c = i % Shape::channels, n = i / Shape::channels;
    a[i] = E(0.0f);
    if (c < work.channels)
      a[i] = load_element<E>(work.at(scan.A) + c * scan.A.row + n * scan.A.last, scan.A.storage);
    x[i] = E(0.0f);
  }
  __syncthreads();
}

template <class Method, class E, class Shape, bool Tiled>
__global__ void __launch_bounds__(Shape::threads, Shape::min_blocks)
    forward_kernel(const __grid_constant__ ForwardArguments p) {
  constexpr int steps = Shape::steps, segments = Shape::segments;
  using Shared = ForwardShared<E, Shape>;
  using Places = Slots<Shape::channels, Shape>;
  constexpr int count = Places::count, width = Places::width;
  extern __shared__ float4 memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  const ScanArguments& scan = p.scan;
  const int states = int(scan.states);
  E* const a_of = reinterpret_cast<E*>(&shared + 1);
  E* const x_of = a_of + states * Shape::channels;
  E* const other_x_of = x_of + states * Shape::channels;

  const int64_t sets = (scan.channels + Shape::channels - 1) / Shape::channels;
  Work work(scan, blockIdx.x / sets, Shape::window);
  work.set_channels(scan, blockIdx.x % sets * Shape::channels, Shape::channels);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int channel = lane / segments, segment = lane % segments;
  if (threadIdx.x < Shape::channels) {
    shared.D[threadIdx.x] = channel_value(scan.D, work, threadIdx.x);
    shared.bias[threadIdx.x] = channel_value(scan.delta_bias, work, threadIdx.x);
  }
  fill_states<E, Shape>(scan, work, a_of, x_of);

  const Places slots(scan.u, work);
  Stream<float, Shape::channels, Shape> u, delta, z, out;
  u.begin(scan.u, work.at(scan.u), slots, work, 0);
  delta.begin(scan.delta, work.at(scan.delta), slots, work, 0);
  z.begin(scan.z, work.at(scan.z), slots, work, 0);
  out.begin(p.out, work.at(p.out), slots, work, 0);
  StateMatrix<E, Shape, Tiled> B(scan.B, scan.constant_B, work), C(scan.C, scan.constant_C, work);
  B.begin(work, 0);
  C.begin(work, 0);
  const auto load_rows = [&](int left) {
    u.load(scan.u, slots, work.channels, left);
    delta.load(scan.delta, slots, work.channels, left);
    z.load(scan.z, slots, work.channels, left);
  };
  load_rows(work.steps_from(0, Shape::window));
  B.load(0, states, work.steps_from(0, Shape::window));
  C.load(0, states, work.steps_from(0, Shape::window));

  E* const edges = static_cast<E*>(p.edges) + work.row(scan, channel) * p.chunks * states;
#pragma unroll 1
  for (int64_t window = 0; window < work.windows; ++window) {
    const int left = work.steps_from(window, Shape::window);
    float u_now[count][width], z_now[count][width];
#pragma unroll
    for (int k = 0; k < count; ++k) {
      float dt[width], drive[width];
      u.values(scan.u, slots, k, u_now[k]);
      z.values(scan.z, slots, k, z_now[k]);
      delta.values(scan.delta, slots, k, dt);
#pragma unroll
      for (int i = 0; i < width; ++i) {
        dt[i] = step_size(dt[i], shared.bias[slots.row(k, i)], scan.delta_softplus);
        if (slots.step(k, i) >= left) dt[i] = 0.0f;
        drive[i] = Method::beta_is_step ? dt[i] * u_now[k][i] : u_now[k][i];
      }
      put(shared.dt, slots, k, dt);
      put(shared.drive, slots, k, drive);
    }
    if constexpr (!Method::causal) {
      // What enters the window's last chunk from the other side.
      const int64_t chunk = (window + 1) * Shape::window / kChunk - 1;
      for (int i = threadIdx.x; i < states * Shape::channels; i += Shape::threads) {
        const int c = i % Shape::channels, n = i / Shape::channels;
        const E* const other = static_cast<const E*>(p.other_edges);
        other_x_of[i] = E(0.0f);
        if (c < work.channels && chunk < p.chunks)
          other_x_of[i] = other[(work.row(scan, c) * p.chunks + chunk) * states + n];
      }
    }

    float dt[steps], drive[steps], y[steps] = {}, total_dt = 0.0f;
#pragma unroll 1
    for (int first = 0; first < states; first += kStateTile) {
      B.commit(shared.B);
      C.commit(shared.C);
      __syncthreads();
      if (first == 0) {
        load_segment(shared.dt.segment[lane], dt);
        load_segment(shared.drive.segment[lane], drive);
        total_dt = sum(dt);
      }
      // The next tile comes while this one is at work.
      const bool last_tile = first + kStateTile >= states;
      const int next_left = last_tile ? work.steps_from(window + 1, Shape::window) : left;
      if (last_tile) {
        u.next(Shape::window * slots.to_step(scan.u));
        delta.next(Shape::window * slots.to_step(scan.delta));
        z.next(Shape::window * slots.to_step(scan.z));
        B.next(1), C.next(1);
        load_rows(next_left);
      }
      B.load(last_tile ? 0 : first + kStateTile, states, next_left);
      C.load(last_tile ? 0 : first + kStateTile, states, next_left);
      const int tile_states = states - first < kStateTile ? states - first : kStateTile;
#pragma unroll 1
      for (int m = warp; m < tile_states; m += Shape::warps) {
        const int n = first + m;
        const E a = a_of[n * Shape::channels + channel];
        E& x_carried = x_of[n * Shape::channels + channel];
        const auto b_of = segment_of(B, shared.B, work, channel, segment, m, n);
        const auto c_of = segment_of(C, shared.C, work, channel, segment, m, n);
        E a_bar[steps], input[steps], x = E(0.0f);
#pragma unroll
        for (int i = 0; i < steps; i += kQuad) {
          E b[kQuad];
          b_of.quad(i, b);
#pragma unroll
          for (int j = 0; j < kQuad; ++j) {
            const Coefficients<E> k = Method::coefficients(dt[i + j], a);
            a_bar[i + j] = k.a_bar;
            input[i + j] = input_of<Method>(drive[i + j], k, b[j]);
            if (segments > 1) x = a_bar[i + j] * x + input[i + j];
          }
        }
        E transition = E(0.0f);
        if (segments > 1) transition = transition_of<Method>(total_dt, a_bar, a);
        x = enter_segments<true, segments>(transition, x, x_carried);
        const int64_t step = window * Shape::window + segment * steps;
        if (step % kChunk == 0 && step < work.steps && channel < work.channels)
          edges[step / kChunk * states + n] = x;
        E other_x = E(0.0f), local = E(0.0f);
        if constexpr (!Method::causal) {
#pragma unroll
          for (int i = steps - 1; i >= 0; --i) local = a_bar[i] * local + input[i];
          other_x = enter_segments<false, segments>(transition, local,
                                                    other_x_of[n * Shape::channels + channel]);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < steps; i += kQuad) {
          E c[kQuad];
          c_of.quad(i, c);
#pragma unroll
          for (int j = 0; j < kQuad; ++j) {
            x = a_bar[i + j] * x + input[i + j];
            y[i + j] += real(c[j] * x);
          }
        }
        if (segment == segments - 1) x_carried = x;
        if constexpr (!Method::causal) {
#pragma unroll
          for (int i = steps - kQuad; i >= 0; i -= kQuad) {
            E c[kQuad];
            c_of.quad(i, c);
#pragma unroll
            for (int j = kQuad - 1; j >= 0; --j) {
              other_x = a_bar[i + j] * other_x + input[i + j];
              y[i + j] += real(c[j] * other_x);
            }
          }
        }
      }
      if (!last_tile) __syncthreads();
    }
    store_segment(shared.y[warp].segment[lane], y);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < count; ++k) {
      constexpr float weight = output_weight<E>() * (Method::causal ? 1.0f : 0.5f);
      float value[width];
#pragma unroll
      for (int i = 0; i < width; ++i) {
        const int row = slots.row(k, i), step = slots.step(k, i);
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < Shape::warps; ++w) total += shared.y[w].at(row, step);
        value[i] = weight * total + shared.D[row] * u_now[k][i];
        if (scan.z.data) value[i] *= z_now[k][i] * sigmoid(z_now[k][i]);
      }
      out.store(p.out, slots, k, value, work.channels, left);
    }
    out.next(Shape::window * slots.to_step(p.out));
  }

  E* const last_state = static_cast<E*>(p.last_state);
  for (int i = threadIdx.x; i < states * Shape::channels; i += Shape::threads) {
    const int c = i % Shape::channels, n = i / Shape::channels;
    if (c < work.channels) last_state[work.row(scan, c) * states + n] = x_of[i];
  }
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
