// A scan that keeps only what crosses the edges of chunks: the adjoint of the states for backward,
// or the states of poly's other direction for its forward. With both at hand, chunks are independent.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "forward.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// Behind it in memory: A and what crosses the window's edge, each [N][channels].
template <class E, class Shape>
struct EdgesShared {
  RowTile<Shape> dt, drive;
  StateTile<E, Shape> matrix;
  float bias[Shape::channels];

  static size_t bytes(int64_t states) {
    return sizeof(EdgesShared) + 2 * states * Shape::channels * sizeof(E);
  }
};

// What enters each chunk, in edges [B, G, H, chunks, N]. `Adjoint`: h of
// h <- conj(A_bar) (h + conj(C) grad_y), else x of x <- A_bar x + beta B u. `Ascending`: in scan
// order, entering a chunk at its first step, else against it, entering at the last step.
template <class Method, class E, class Shape, bool Tiled, bool Adjoint, bool Ascending>
__global__ void __launch_bounds__(Shape::threads, Shape::min_blocks)
    edges_kernel(const __grid_constant__ EdgesArguments p) {
  constexpr int steps = Shape::steps, segments = Shape::segments;
  constexpr float weight = output_weight<E>() * (Method::causal ? 1.0f : 0.5f);
  static_assert(Shape::window % kChunk == 0, "a window has whole chunks");
  using Shared = EdgesShared<E, Shape>;
  using Places = Slots<Shape::channels, Shape>;
  constexpr int count = Places::count, width = Places::width;
  extern __shared__ float4 memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  const ScanArguments& scan = p.scan;
  const int states = int(scan.states);
  E* const a_of = reinterpret_cast<E*>(&shared + 1);
  E* const x_of = a_of + states * Shape::channels;

  const int64_t sets = (scan.channels + Shape::channels - 1) / Shape::channels;
  Work work(scan, blockIdx.x / sets, Shape::window);
  work.set_channels(scan, blockIdx.x % sets * Shape::channels, Shape::channels);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int channel = lane / segments, segment = lane % segments;
  if (threadIdx.x < Shape::channels)
    shared.bias[threadIdx.x] = channel_value(scan.delta_bias, work, threadIdx.x);
  fill_states<E, Shape>(scan, work, a_of, x_of);
  if (p.grad_last_state.data) {
    const View& v = p.grad_last_state;
    for (int i = threadIdx.x; i < states * Shape::channels; i += Shape::threads) {
      const int c = i % Shape::channels, n = i / Shape::channels;
      if (c < work.channels)
        x_of[i] = load_element<E>(work.at(v) + c * v.row + n * v.last, v.storage);
    }
    __syncthreads();
  }

  const View& driving = Adjoint ? p.grad_out : scan.u;
  const Places slots(scan.u, work);
  constexpr int stride = Ascending ? 1 : -1;
  const int64_t first_window = Ascending ? 0 : work.windows - 1;
  Stream<float, Shape::channels, Shape> drive, delta, z;
  drive.begin(driving, work.at(driving), slots, work, first_window);
  delta.begin(scan.delta, work.at(scan.delta), slots, work, first_window);
  z.begin(scan.z, work.at(scan.z), slots, work, first_window);
  const View& matrix_view = Adjoint ? scan.C : scan.B;
  StateMatrix<E, Shape, Tiled> matrix(matrix_view, Adjoint ? scan.constant_C : scan.constant_B,
                                      work);
  matrix.begin(work, first_window);
  const auto load_rows = [&](int left) {
    drive.load(driving, slots, work.channels, left);
    delta.load(scan.delta, slots, work.channels, left);
    if (Adjoint) z.load(scan.z, slots, work.channels, left);
  };
  load_rows(work.steps_from(first_window, Shape::window));
  matrix.load(0, states, work.steps_from(first_window, Shape::window));

  E* const edges = static_cast<E*>(p.edges) + work.row(scan, channel) * p.chunks * states;
#pragma unroll 1
  for (int64_t i_window = 0; i_window < work.windows; ++i_window) {
    const int64_t window = Ascending ? i_window : work.windows - 1 - i_window;
    const int left = work.steps_from(window, Shape::window);
#pragma unroll
    for (int k = 0; k < count; ++k) {
      float dt[width], value[width], gate[width];
      drive.values(driving, slots, k, value);
      delta.values(scan.delta, slots, k, dt);
      if (Adjoint) z.values(scan.z, slots, k, gate);
#pragma unroll
      for (int i = 0; i < width; ++i) {
        dt[i] = step_size(dt[i], shared.bias[slots.row(k, i)], scan.delta_softplus);
        if (slots.step(k, i) >= left) dt[i] = 0.0f;
        if (Adjoint) {
          if (scan.z.data) value[i] *= gate[i] * sigmoid(gate[i]);
          value[i] *= weight;
        } else if (Method::beta_is_step) {
          value[i] *= dt[i];
        }
      }
      put(shared.dt, slots, k, dt);
      put(shared.drive, slots, k, value);
    }

    float dt[steps], value[steps], total_dt = 0.0f;
#pragma unroll 1
    for (int first = 0; first < states; first += kStateTile) {
      matrix.commit(shared.matrix);
      __syncthreads();
      if (first == 0) {
        load_segment(shared.dt.segment[lane], dt);
        load_segment(shared.drive.segment[lane], value);
        total_dt = sum(dt);
      }
      const bool last_tile = first + kStateTile >= states, more = i_window + 1 < work.windows;
      if (!last_tile) {
        matrix.load(first + kStateTile, states, left);
      } else if (more) {
        const int next_left = work.steps_from(window + stride, Shape::window);
        drive.next(stride * Shape::window * slots.to_step(driving));
        delta.next(stride * Shape::window * slots.to_step(scan.delta));
        z.next(stride * Shape::window * slots.to_step(scan.z));
        matrix.next(stride);
        load_rows(next_left);
        matrix.load(0, states, next_left);
      }
      const int tile_states = states - first < kStateTile ? states - first : kStateTile;
#pragma unroll 1
      for (int m = warp; m < tile_states; m += Shape::warps) {
        const int n = first + m;
        const E a = a_of[n * Shape::channels + channel];
        E& carried = x_of[n * Shape::channels + channel];
        const auto matrix_of = segment_of(matrix, shared.matrix, work, channel, segment, m, n);
        E x = E(0.0f), transition = E(1.0f);
#pragma unroll
        for (int quad = 0; quad < steps; quad += kQuad) {
          const int i = Ascending ? quad : steps - kQuad - quad;
          E entry[kQuad];
          matrix_of.quad(i, entry);
#pragma unroll
          for (int jj = 0; jj < kQuad; ++jj) {
            const int j = Ascending ? jj : kQuad - 1 - jj;
            const Coefficients<E> k = Method::coefficients(dt[i + j], a);
            if (Adjoint) x = conj(k.a_bar) * (x + value[i + j] * conj(entry[j]));
            else x = k.a_bar * x + input_of<Method>(value[i + j], k, entry[j]);
            if (!Method::exponential) transition = transition * k.a_bar;
          }
        }
        if (Method::exponential) transition = exp_of_product(total_dt, a);
        if (Adjoint) transition = conj(transition);
        const E entering = enter_segments<Ascending, segments>(transition, x, carried);
        __syncwarp();
        const int64_t step = window * Shape::window + segment * steps;
        const bool at_edge = (Ascending ? step : step + steps) % kChunk == 0;
        if (at_edge && step / kChunk < p.chunks && channel < work.channels)
          edges[step / kChunk * states + n] = entering;
        if (segment == (Ascending ? segments - 1 : 0)) carried = x;
      }
      __syncthreads();
    }
  }
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
