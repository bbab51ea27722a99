// The backward scan of one block of channels, in two sweeps over the tiles of time: forwards, to
// keep the state before each tile, then from the last tile to the first, recomputing the states of
// a tile in registers and running the adjoint recurrence over them.
//
// Gradients of B and C are shared by channels: summed over the channels of a warp by shuffles, over
// warps in shared memory, over the channel sets of a block in its own slab of global memory, and
// over slabs by sum_in_order; every sum in a fixed order.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tile.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// An entry (channel, step) of a tile: what its gradients are multiplied with. grad_y is that of
// y + D u, in front of the gate.
struct alignas(16) BackwardEntry {
  float u, grad_y, gate_slope, dt_slope;
};

template <class E, class Shape>
struct BackwardShared {
  // Where a copy per warp does not fit, warps add to a single one in turn.
  static constexpr int warps = Shape::threads / 32;
  static constexpr int copies = Shape::padded_states <= 16 && sizeof(E) == 4 ? warps : 1;
  static constexpr int turns = warps / copies;
  using Tile = typename StateMatrix<E, Shape, true>::Tile;

  Rows<Shape> rows[2];  // the first sweep alternates, and has a barrier less for it
  float grad_y[Shape::channels][kRowStride];
  Tile B, C;
  LaneSums<Shape> y, grad_u, grad_dt;
  Tile grad_B[copies], grad_C[copies];
  // Each thread's own, here to save registers.
  BackwardEntry entries[Slots<Shape>::count][Shape::threads];
};

__device__ __forceinline__ float shuffle_xor(float x, int bit) {
  return __shfl_xor_sync(0xffffffffu, x, bit);
}
__device__ __forceinline__ Complex<float> shuffle_xor(Complex<float> x, int bit) {
  return {shuffle_xor(x.re, bit), shuffle_xor(x.im, bit)};
}

// Sums of a quad over the channels of a warp. Each halving exchanges the half of the entries that
// the other thread will own; afterwards a thread owns entries [first, first + count).
template <class E, class Shape>
struct ChannelSums {
  static constexpr int channels = 32 / Shape::lanes;
  static constexpr int count = channels >= kQuad ? 1 : kQuad / channels;
  int first = 0;
  bool owner = true;  // false where another thread owns the same entry

  __device__ __forceinline__ void reduce(E (&quad)[kQuad]) {
    first = 0;
    owner = true;
    int left = kQuad;
#pragma unroll
    for (int bit = 16; bit >= Shape::lanes; bit >>= 1) {
      const bool upper = threadIdx.x & bit;
      left /= 2;
      if (left == 0) {
        quad[0] = quad[0] + shuffle_xor(quad[0], bit);
        owner = owner && !upper;
        continue;
      }
#pragma unroll
      for (int i = 0; i < kQuad / 2; ++i) {
        if (i >= left) break;
        const E other = shuffle_xor(select(upper, quad[i], quad[i + left]), bit);
        quad[i] = select(upper, quad[i + left], quad[i]) + other;
      }
      if (upper) first += left;
    }
  }
};

template <class Method, class E, class Shape, bool Tiled>
class BackwardBlock {
  using Shared = BackwardShared<E, Shape>;
  using Matrix = StateMatrix<E, Shape, Tiled>;
  static constexpr int states = Shape::states, entries = Slots<Shape>::count;

 public:
  __device__ BackwardBlock(const BackwardArguments& p, Shared& shared, int64_t bg, int64_t slab,
                           int64_t first_channel, bool first_of_block)
      : p_(p), scan_(p.scan), shared_(shared), work_(p.scan, bg, first_channel),
        slots_(p.scan.u, work_), D_(p.scan.D, slots_, work_),
        bias_(p.scan.delta_bias, slots_, work_),
        B_(p.scan.B, p.scan.constant_B, p.scan.states, work_),
        C_(p.scan.C, p.scan.constant_C, p.scan.states, work_),
        slab_(slab * p.scan.batch * p.scan.groups + bg), c_(threadIdx.x / Shape::lanes),
        lane_(threadIdx.x % Shape::lanes), fresh_slab_(first_of_block) {
    load_A(scan_, work_, a_);
    starts_ = static_cast<E*>(p.starts) + blockIdx.x * work_.tiles * (Shape::threads * states) +
              threadIdx.x;
    clear(grad_a_);
    clear(grad_constant_B_);
    clear(grad_constant_C_);
#pragma unroll
    for (int k = 0; k < entries; ++k) grad_D_[k] = grad_bias_[k] = 0.0f;
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (int pass = 0; pass < (Method::causal ? 1 : 2); ++pass) {
      last_pass_ = Method::causal || pass == 1;
      if (pass == 1) work_.reverse = !work_.reverse;
      keep_starts();
      adjoint(pass == 0);
      fresh_slab_ = false;
      // What this pass wrote to slab and one_way, the next one reads in other threads.
      __syncthreads();
    }
    write_parameters();
    __syncthreads();  // shared memory is free for the next channels
  }

 private:
  static __device__ __forceinline__ void clear(E (&x)[states]) {
#pragma unroll
    for (int r = 0; r < states; ++r) x[r] = E(0.0f);
  }
  __device__ __forceinline__ E* start(int64_t tile, int r) const {
    return starts_ + (tile * states + r) * Shape::threads;
  }

  __device__ __forceinline__ void commit_rows(Rows<Shape>& rows, int steps) {
#pragma unroll
    for (int k = 0; k < entries; ++k) {
      if (!slots_.exists(k)) continue;
      const float dt = step_size(delta_.value(k), bias_.value[k], scan_.delta_softplus);
      slots_.in(rows.u, k) = u_.value(k);
      slots_.in(rows.dt, k) = slots_.step[k] < steps ? dt : 0.0f;
    }
  }

  __device__ __forceinline__ void keep_starts() {
    E x[states];
    clear(x);
    u_.begin(scan_.u, slots_, work_, 0, true);
    delta_.begin(scan_.delta, slots_, work_, 0, true);
    B_.begin(work_, 0, true);
    const auto load = [&] {  // all of these tiles but the last, which is not needed, are full
      u_.load(slots_, kSteps);
      delta_.load(slots_, kSteps);
      B_.load(kSteps);
    };
    if (work_.tiles > 1) load();
#pragma unroll 1
    for (int64_t tile = 0; tile < work_.tiles; ++tile) {
#pragma unroll
      for (int r = 0; r < states; ++r) *start(tile, r) = x[r];
      if (tile + 1 == work_.tiles) return;  // the adjoint sweep recomputes it in any case
      // The tile of C is not in use yet.
      auto& rows = shared_.rows[tile % 2];
      auto& b_tile = tile % 2 ? shared_.C : shared_.B;
      commit_rows(rows, kSteps);
      B_.commit(b_tile);
      __syncthreads();
      if (tile + 2 < work_.tiles) load();
#pragma unroll(Matrix::unroll_quads)
      for (int first = 0; first < kSteps; first += kQuad) {
        float dt[kQuad], u[kQuad];
        load_quad(&rows.dt[c_][first], dt);
        load_quad(&rows.u[c_][first], u);
#pragma unroll(Matrix::unroll_states)
        for (int r = 0; r < states; ++r) {
          E b[kQuad];
          B_.quad(b_tile, r, first, b);
#pragma unroll
          for (int i = 0; i < kQuad; ++i) {
            const Coefficients<E> k = Method::coefficients(dt[i], a_[r]);
            x[r] = k.a_bar * x[r] + (u[i] * k.beta) * b[i];
          }
        }
      }
    }
  }

  __device__ __forceinline__ void adjoint(bool with_last_state) {
    E grad_x[states];
    clear(grad_x);
    if (with_last_state && p_.grad_last_state.data && c_ < work_.channels) {
      const View& v = p_.grad_last_state;
#pragma unroll
      for (int r = 0; r < states; ++r) {
        const int n = r * Shape::lanes + lane_;
        if (n < scan_.states)
          grad_x[r] = load_element<E>(work_.at(v) + c_ * v.row + n * v.last, v.storage);
      }
    }
    const int64_t last = work_.tiles - 1;
    u_.begin(scan_.u, slots_, work_, last, false);
    delta_.begin(scan_.delta, slots_, work_, last, false);
    z_.begin(scan_.z, slots_, work_, last, false);
    grad_out_.begin(p_.grad_out, slots_, work_, last, false);
    B_.begin(work_, last, false);
    C_.begin(work_, last, false);
    grad_u_.begin(p_.grad_u, slots_, work_, last, false);
    grad_delta_.begin(p_.grad_delta, slots_, work_, last, false);
    grad_z_.begin(p_.grad_z, slots_, work_, last, false);
    begin_slab(last);
    load_adjoint(steps_of(work_, last), last);
    __syncthreads();  // the first sweep is over
#pragma unroll 1
    for (int64_t tile = last; tile >= 0; --tile) {
      const int steps = steps_of(work_, tile);
      commit_adjoint(steps);
      __syncthreads();
      E before[kSteps + 1][states];  // before[i]: the state before step i
#pragma unroll
      for (int r = 0; r < states; ++r) before[0][r] = start_[r];
      if (tile > 0) load_adjoint(kSteps, tile - 1);
      recompute(before);
      // Or the compiler would carry coefficients over in registers that it does not have.
      asm volatile("" ::: "memory");
      sweep(before, grad_x);
      __syncthreads();
      finish_rows(tile, steps);
      finish_matrices(steps);
    }
  }

  __device__ __forceinline__ void load_adjoint(int steps, int64_t tile) {
#pragma unroll
    for (int r = 0; r < states; ++r) start_[r] = *start(tile, r);
    u_.load(slots_, steps);
    delta_.load(slots_, steps);
    z_.load(slots_, steps);
    grad_out_.load(slots_, steps);
    B_.load(steps);
    C_.load(steps);
  }

  __device__ __forceinline__ void commit_adjoint(int steps) {
    constexpr float weight = output_weight<E>() * (Method::causal ? 1.0f : 0.5f);
    commit_rows(shared_.rows[0], steps);
    B_.commit(shared_.B);
    C_.commit(shared_.C);
#pragma unroll
    for (int k = 0; k < entries; ++k) {
      const float z = z_.value(k), s = sigmoid(z), x = delta_.value(k) + bias_.value[k];
      const float grad_out = grad_out_.value(k);
      const bool gated = scan_.z.data;
      if (!slots_.exists(k)) continue;
      const float dt = slots_.in(shared_.rows[0].dt, k);
      const float grad_y = gated ? grad_out * (z * s) : grad_out;
      shared_.entries[k][threadIdx.x] = {u_.value(k), grad_y,
                                         grad_out * (s * (1.0f + z * (1.0f - s))),
                                         scan_.delta_softplus ? softplus_slope(x, dt) : 1.0f};
      slots_.in(shared_.grad_y, k) = weight * grad_y;
    }
  }

  __device__ __forceinline__ void recompute(E (&before)[kSteps + 1][states]) {
#pragma unroll(Matrix::unroll_quads)
    for (int first = 0; first < kSteps; first += kQuad) {
      float dt[kQuad], u[kQuad], y[kQuad] = {};
      load_quad(&shared_.rows[0].dt[c_][first], dt);
      load_quad(&shared_.rows[0].u[c_][first], u);
#pragma unroll(Matrix::unroll_states)
      for (int r = 0; r < states; ++r) {
        E b[kQuad], c[kQuad];
        B_.quad(shared_.B, r, first, b);
        C_.quad(shared_.C, r, first, c);
#pragma unroll
        for (int i = 0; i < kQuad; ++i) {
          const Coefficients<E> k = Method::coefficients(dt[i], a_[r]);
          const E x = k.a_bar * before[first + i][r] + (u[i] * k.beta) * b[i];
          before[first + i + 1][r] = x;
          y[i] += real(c[i] * x);
        }
      }
      if (scan_.z.data) shared_.y.put(first, y);  // only the gate's gradient needs y
    }
  }

  __device__ __forceinline__ void sweep(const E (&before)[kSteps + 1][states],
                                        E (&grad_x)[states]) {
#pragma unroll(Matrix::unroll_quads)
    for (int first = kSteps - kQuad; first >= 0; first -= kQuad) {
      float dt[kQuad], u[kQuad], grad_y[kQuad], grad_u[kQuad] = {}, grad_dt[kQuad] = {};
      load_quad(&shared_.rows[0].dt[c_][first], dt);
      load_quad(&shared_.rows[0].u[c_][first], u);
      load_quad(&shared_.grad_y[c_][first], grad_y);
#pragma unroll(Matrix::unroll_states)
      for (int r = 0; r < states; ++r) {
        E b[kQuad], c[kQuad], grad_b[kQuad], grad_c[kQuad];
        B_.quad(shared_.B, r, first, b);
        C_.quad(shared_.C, r, first, c);
#pragma unroll
        for (int i = kQuad - 1; i >= 0; --i) {
          const Coefficients<E> k = Method::coefficients(dt[i], a_[r]);
          const Derivatives<E> d = Method::derivatives(dt[i], a_[r]);
          grad_c[i] = grad_y[i] * conj(before[first + i + 1][r]);
          grad_x[r] = grad_x[r] + grad_y[i] * conj(c[i]);
          grad_b[i] = grad_x[r] * conj(u[i] * k.beta);
          const E driven = grad_x[r] * conj(b[i]);
          grad_u[i] += real(driven * conj(k.beta));
          const E grad_a_bar = grad_x[r] * conj(before[first + i][r]);
          const E grad_beta = u[i] * driven;
          grad_dt[i] += real(grad_a_bar * conj(d.a_bar_dt) + grad_beta * conj(d.beta_dt));
          grad_a_[r] = grad_a_[r] + (grad_a_bar * conj(d.a_bar_a) + grad_beta * conj(d.beta_a));
          grad_x[r] = grad_x[r] * conj(k.a_bar);
        }
        collect(B_, grad_b, shared_.grad_B, grad_constant_B_[r], r, first);
        collect(C_, grad_c, shared_.grad_C, grad_constant_C_[r], r, first);
      }
      shared_.grad_u.put(first, grad_u);
      shared_.grad_dt.put(first, grad_dt);
    }
  }

  // A quad of one channel's gradient of B or C on its way to the sum over channels.
  __device__ __forceinline__ void collect(const Matrix& matrix, E (&quad)[kQuad],
                                          typename Shared::Tile* copies, E& constant, int r,
                                          int first) {
    if (matrix.constant()) {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) constant = constant + quad[i];
      return;
    }
    using Sums = ChannelSums<E, Shape>;
    const int warp = threadIdx.x / 32;
    Sums sums;
    sums.reduce(quad);
    E* to = &copies[warp / Shared::turns][r * Shape::lanes + lane_][first + sums.first];
#pragma unroll 1
    for (int turn = 0; turn < Shared::turns; ++turn) {
      if (warp % Shared::turns == turn && sums.owner) {
#pragma unroll
        for (int i = 0; i < Sums::count; ++i) to[i] = turn == 0 ? quad[i] : to[i] + quad[i];
      }
      if (Shared::turns > 1) __syncthreads();
    }
  }

  __device__ __forceinline__ void finish_rows(int64_t tile, int steps) {
#pragma unroll
    for (int k = 0; k < entries; ++k) {
      if (slots_.step[k] >= steps) continue;
      const BackwardEntry entry = shared_.entries[k][threadIdx.x];
      const bool gated = scan_.z.data;
      constexpr float weight = output_weight<E>() * (Method::causal ? 1.0f : 0.5f);
      float y = gated ? weight * shared_.y.get(slots_, k) : 0.0f;
      float grad_u = shared_.grad_u.get(slots_, k), grad_dt = shared_.grad_dt.get(slots_, k);
      if (!Method::causal) {
        const int64_t all = scan_.batch * scan_.groups * scan_.channels * work_.steps;
        const int64_t t = work_.time(tile * kSteps + slots_.step[k]);
        float* other = p_.one_way + work_.row(scan_, slots_.channel[k]) * work_.steps + t;
        if (!last_pass_) {
          other[0] = y, other[all] = grad_u, other[2 * all] = grad_dt;
          continue;
        }
        y += other[0], grad_u += other[all], grad_dt += other[2 * all];
      }
      if (gated) grad_z_.store(k, entry.gate_slope * (y + D_.value[k] * entry.u));
      grad_dt *= entry.dt_slope;
      grad_u_.store(k, grad_u + D_.value[k] * entry.grad_y);
      grad_delta_.store(k, grad_dt);
      grad_D_[k] += entry.grad_y * entry.u;
      grad_bias_[k] += grad_dt;
    }
    grad_u_.next();
    grad_delta_.next();
    grad_z_.next();
  }

  static constexpr int slab_entries = Shape::padded_states * kSteps / Shape::threads;

  // Where this thread's entries of the slabs of dB and dC lie, in the tile at hand.
  __device__ __forceinline__ void begin_slab(int64_t tile) {
#pragma unroll
    for (int k = 0; k < slab_entries; ++k) {
      const int index = threadIdx.x + k * Shape::threads, n = index / kSteps, i = index % kSteps;
      slab_offset_[k] = (slab_ * scan_.states + n) * work_.steps + work_.time(tile * kSteps + i);
    }
  }
  __device__ __forceinline__ void finish_matrices(int steps) {
#pragma unroll
    for (int k = 0; k < slab_entries; ++k) {
      const int index = threadIdx.x + k * Shape::threads, n = index / kSteps, i = index % kSteps;
      if (n < scan_.states && i < steps) {
        if (!B_.constant()) add_to_slab(p_.grad_B, k, shared_.grad_B, n, i);
        if (!C_.constant()) add_to_slab(p_.grad_C, k, shared_.grad_C, n, i);
      }
      slab_offset_[k] += work_.reverse ? kSteps : -kSteps;
    }
  }
  __device__ __forceinline__ void add_to_slab(void* slabs, int k,
                                              const typename Shared::Tile* copies, int n, int i) {
    E sum = copies[0][n][i];
#pragma unroll
    for (int copy = 1; copy < Shared::copies; ++copy) sum = sum + copies[copy][n][i];
    E& to = static_cast<E*>(slabs)[slab_offset_[k]];
    to = fresh_slab_ ? sum : to + sum;
  }

  __device__ __forceinline__ void write_parameters() {
    if (c_ < work_.channels) {
      const int64_t row = work_.row(scan_, c_) * scan_.states;
#pragma unroll
      for (int r = 0; r < states; ++r) {
        const int n = r * Shape::lanes + lane_;
        if (n >= scan_.states) continue;
        static_cast<E*>(p_.grad_A)[row + n] = grad_a_[r];
        if (B_.constant()) static_cast<E*>(p_.grad_B)[row + n] = grad_constant_B_[r];
        if (C_.constant()) static_cast<E*>(p_.grad_C)[row + n] = grad_constant_C_[r];
      }
    }
    write_channels(grad_D_, p_.grad_D);
    write_channels(grad_bias_, p_.grad_bias);
  }
  // Sums the entries' values over the steps of a tile, for each channel.
  __device__ __forceinline__ void write_channels(const float (&value)[entries], float* to) {
    __syncthreads();
#pragma unroll
    for (int k = 0; k < entries; ++k)
      if (slots_.exists(k)) slots_.in(shared_.rows[0].dt, k) = value[k];
    __syncthreads();
    if (threadIdx.x < Shape::channels && threadIdx.x < work_.channels) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) sum += shared_.rows[0].dt[threadIdx.x][i];
      to[work_.row(scan_, threadIdx.x)] = sum;
    }
  }

  const BackwardArguments& p_;
  const ScanArguments& scan_;
  Shared& shared_;
  Work<Shape> work_;
  const Slots<Shape> slots_;
  const ChannelValues<Shape> D_, bias_;
  Matrix B_, C_;
  const int64_t slab_;  // of this b, g
  const int c_, lane_;
  bool fresh_slab_;  // nothing is in the slab yet
  bool last_pass_ = true;
  E* starts_;
  RowTile<Shape> u_, delta_, z_, grad_out_;  // of the next tile
  RowPointers<Shape> grad_u_, grad_delta_, grad_z_;
  int64_t slab_offset_[slab_entries];
  E start_[states];  // of the next tile
  E a_[states], grad_a_[states], grad_constant_B_[states], grad_constant_C_[states];
  float grad_D_[entries], grad_bias_[entries];
};

template <class Method, class E, class Shape, bool Tiled>
__global__ void __launch_bounds__(Shape::threads, Shape::min_blocks)
    backward_kernel(const __grid_constant__ BackwardArguments p) {
  extern __shared__ float4 memory[];
  auto& shared = *reinterpret_cast<BackwardShared<E, Shape>*>(memory);
  const int64_t bg = blockIdx.x / p.slabs, slab = blockIdx.x % p.slabs;
  const int64_t stride = p.slabs * Shape::channels;
#pragma unroll 1
  for (int64_t first = slab * Shape::channels; first < p.scan.channels; first += stride) {
    const bool first_of_block = first < stride;
    BackwardBlock<Method, E, Shape, Tiled>(p, shared, bg, slab, first, first_of_block).run();
  }
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
