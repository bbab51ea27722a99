// The forward scan of one block of channels.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tile.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// What belongs to one tile; there are two, so that a tile is finished while the next one advances,
// with one barrier for both.
template <class E, class Shape>
struct ForwardTile {
  Rows<Shape> rows;
  typename StateMatrix<E, Shape, true>::Tile B, C;
  LaneSums<Shape> y;
};

// A tile of steps for the states of one thread: advances x, leaves the thread's part of y.
template <class Method, class E, class Shape, class Matrix>
__device__ __forceinline__ void advance(ForwardTile<E, Shape>& shared, const Matrix& B,
                                        const Matrix& C, const E (&a)[Shape::states],
                                        E (&x)[Shape::states]) {
  const int c = threadIdx.x / Shape::lanes;
#pragma unroll(Matrix::unroll_quads)
  for (int first = 0; first < kSteps; first += kQuad) {
    float dt[kQuad], u[kQuad], y[kQuad] = {};
    load_quad(&shared.rows.dt[c][first], dt);
    load_quad(&shared.rows.u[c][first], u);
#pragma unroll(Matrix::unroll_states)
    for (int r = 0; r < Shape::states; ++r) {
      E b[kQuad], out[kQuad];
      B.quad(shared.B, r, first, b);
      C.quad(shared.C, r, first, out);
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        const Coefficients<E> k = Method::coefficients(dt[i], a[r]);
        x[r] = k.a_bar * x[r] + (u[i] * k.beta) * b[i];
        y[i] += real(out[i] * x[r]);
      }
    }
    shared.y.put(first, y);
  }
}

template <class Method, class E, class Shape, bool Tiled>
__global__ void __launch_bounds__(Shape::threads, Shape::min_blocks)
    forward_kernel(const __grid_constant__ ForwardArguments p) {
  extern __shared__ float4 memory[];
  auto* const tiles = reinterpret_cast<ForwardTile<E, Shape>*>(memory);
  const ScanArguments& scan = p.scan;
  const int64_t blocks = (scan.channels + Shape::channels - 1) / Shape::channels;
  Work<Shape> work(scan, blockIdx.x / blocks, blockIdx.x % blocks * Shape::channels);
  const Slots<Shape> slots(scan.u, work);
  const ChannelValues<Shape> D(scan.D, slots, work), bias(scan.delta_bias, slots, work);
  const int c = threadIdx.x / Shape::lanes;
  E a[Shape::states];
  load_A(scan, work, a);
  StateMatrix<E, Shape, Tiled> B(scan.B, scan.constant_B, scan.states, work);
  StateMatrix<E, Shape, Tiled> C(scan.C, scan.constant_C, scan.states, work);
  constexpr int count = Slots<Shape>::count;
  constexpr float weight = output_weight<E>() * (Method::causal ? 1.0f : 0.5f);

#pragma unroll 1
  for (int pass = 0; pass < (Method::causal ? 1 : 2); ++pass) {
    const bool last_pass = Method::causal || pass == 1;
    if (pass == 1) work.reverse = !work.reverse;
    E x[Shape::states];
#pragma unroll
    for (int r = 0; r < Shape::states; ++r) x[r] = E(0.0f);

    RowTile<Shape> u, delta, z;
    RowPointers<Shape> out;
    u.begin(scan.u, slots, work, 0, true);
    delta.begin(scan.delta, slots, work, 0, true);
    z.begin(scan.z, slots, work, 0, true);
    out.begin(p.out, slots, work, 0, true);
    B.begin(work, 0, true);
    C.begin(work, 0, true);
    const auto load = [&](int steps) {
      u.load(slots, steps);
      delta.load(slots, steps);
      if (last_pass) z.load(slots, steps);
      B.load(steps);
      C.load(steps);
    };
    float u_of[3][count], z_of[3][count];  // of the tile before, at hand, and next
    const auto commit = [&](ForwardTile<E, Shape>& to, int steps) {
#pragma unroll
      for (int k = 0; k < count; ++k) {
        u_of[2][k] = u.value(k);
        z_of[2][k] = z.value(k);
        if (!slots.exists(k)) continue;
        const float dt = step_size(delta.value(k), bias.value[k], scan.delta_softplus);
        slots.in(to.rows.u, k) = u_of[2][k];
        slots.in(to.rows.dt, k) = slots.step[k] < steps ? dt : 0.0f;
      }
      B.commit(to.B);
      C.commit(to.C);
    };
    load(steps_of(work, 0));
    commit(tiles[0], steps_of(work, 0));
    load(steps_of(work, 1));
    // Between two barriers lie three tiles, and none waits for another: the next one is converted,
    // the one at hand advances, and the one before is finished.
#pragma unroll 1
    for (int64_t tile = 0; tile <= work.tiles; ++tile) {
      auto &now = tiles[tile % 2], &other_tile = tiles[(tile + 1) % 2];
      __syncthreads();
#pragma unroll
      for (int k = 0; k < count; ++k) {
        u_of[0][k] = u_of[1][k], u_of[1][k] = u_of[2][k];
        z_of[0][k] = z_of[1][k], z_of[1][k] = z_of[2][k];
      }
      commit(other_tile, steps_of(work, tile + 1));
      load(steps_of(work, tile + 2));
      if (tile < work.tiles) advance<Method>(now, B, C, a, x);
      if (tile > 0) {
        const int steps_before = steps_of(work, tile - 1);
#pragma unroll
        for (int k = 0; k < count; ++k) {
          if (slots.step[k] >= steps_before) continue;
          float y = weight * other_tile.y.get(slots, k);
          if (!Method::causal) {
            const int64_t t = work.time((tile - 1) * kSteps + slots.step[k]);
            float& other = p.one_way[work.row(scan, slots.channel[k]) * work.steps + t];
            if (!last_pass) {
              other = y;
              continue;
            }
            y += other;
          }
          y += D.value[k] * u_of[0][k];
          if (scan.z.data) y *= z_of[0][k] * sigmoid(z_of[0][k]);
          out.store(k, y);
        }
        out.next();
      }
    }

    if (pass == 0 && c < work.channels) {
      E* last = static_cast<E*>(p.last_state) + work.row(scan, c) * scan.states;
#pragma unroll
      for (int r = 0; r < Shape::states; ++r) {
        const int n = r * Shape::lanes + threadIdx.x % Shape::lanes;
        if (n < scan.states) last[n] = x[r];
      }
    }
    // What this pass wrote to one_way, the next one reads in other threads; and its tiles are free.
    if (!Method::causal) __syncthreads();
  }
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
