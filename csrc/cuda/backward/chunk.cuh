// A block's work on a chunk in backward (docs/kernels.md). Gradients of u and delta are sums over states: over those
// of a warp in registers, over warps in shared memory. Those of B and C are sums over channels: over all of the block
// in registers, then over lanes, then over blocks.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../common/dependent_launch.cuh"
#include "matrices.cuh"
#include "rows.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// Gradients of B and C stay in registers over all channels of the block, but with Layout::any each
// set of channels adds its part in memory.
template <class Method, class E, class Shape, Layout layout, bool Aligned, bool Bounded>
class BackwardBlock {
  static constexpr int steps = Shape::steps, segments = Shape::segments;
  static constexpr int states_of_warp = kStateTile / Shape::warps;
  static constexpr bool fast = layout != Layout::any;
  using Rows = BackwardRows<Method, E, Shape, layout, Aligned>;
  static constexpr int channels_apart = Shape::threads / kStateTile;
  static constexpr int edges_of_thread =
      Shape::channels > channels_apart ? Shape::channels / channels_apart : 1;

 public:
  using Shared = typename Rows::Shared;

  __device__ __forceinline__ BackwardBlock(const BackwardArguments& p, Shared& shared)
      : p_(p), scan_(p.scan), shared_(shared), at_(p), rows_(p, shared, at_),
        warp_(threadIdx.x / 32), segment_(segment_of_lane<Shape>()),
        B_(scan_.B, scan_.constant_B, at_.work), C_(scan_.C, scan_.constant_C, at_.work) {}

  __device__ __forceinline__ void run() {
    wait_for_previous();
    if constexpr (Bounded) find_cuts();
    if constexpr (fast) {
      load_matrices(0);
#pragma unroll
      for (int m = 0; m < states_of_warp; ++m) clear(grad_B_[m]), clear(grad_C_[m]);
    }
    const int channels = int(scan_.channels), stride = at_.slabs * Shape::channels;
    const int begins = at_.slab * Shape::channels;
    begin();
    rows_.load(at_, at_.work.channels);
    load_edges(at_.work.channels, 0, false);
    rows_.commit_parameters();
    __syncthreads();
    specialize<layout>(scan_.u.storage, at_.work.reverse,
                       [&](auto format) { rows_.template commit<decltype(format)>(at_); });
    commit_edges();
#pragma unroll 1
    for (int first = begins; first < channels; first += stride) {
      const int left = channels - first - stride;
      const int later = left < Shape::channels ? left : Shape::channels;
      __syncthreads();
      if (first > begins) rows_.write_sums(at_);
      at_.work.set_channels(scan_, first, Shape::channels);
      if (later > 0) {
        rows_.load(at_, later);
        if (fast) load_edges(later, 0, true);
      }
      advance(first == begins);
      rows_.commit_parameters();
      __syncthreads();
      write_grad_A(fast ? 0 : (int(scan_.states) - 1) / kStateTile * kStateTile);
      // Together, because each of the two waits often. After the last channels what is committed is
      // of no use.
      specialize<layout>(scan_.u.storage, at_.work.reverse, [&](auto format) {
        using Format = decltype(format);
        typename Rows::AllGradients gradients;
        rows_.finish(gradients);
        rows_.template commit<Format>(at_);
        rows_.template store<Format>(at_, gradients);
      });
      edge_ += p_.next.edges, A_ += p_.next.A;
      if (!fast && later > 0) load_edges(later, 0, false);
      commit_edges();
    }
    __syncthreads();
    rows_.write_sums(at_);
    if constexpr (fast) {
#pragma unroll
      for (int m = 0; m < states_of_warp; ++m) {
        put_sums(shared_.B, warp_ * states_of_warp + m, grad_B_[m]);
        put_sums(shared_.C, warp_ * states_of_warp + m, grad_C_[m]);
      }
      __syncthreads();
    }
    MatrixGradients<E, Shape, layout, Aligned>(p_, at_).write(shared_.B, shared_.C);
  }

 private:
  static __device__ __forceinline__ void clear(E (&x)[steps]) {
#pragma unroll
    for (int i = 0; i < steps; ++i) x[i] = E(0.0f);
  }

  __device__ __forceinline__ void find_cuts() {
    const Cuts<Bounded> cuts(p_.bounds, at_.work, p_.chunks);
    cuts_ = {cuts.before(at_.chunk)};
    if (!Method::causal) other_cuts_ = {cuts.behind(at_.chunk)};
  }
  __device__ __forceinline__ void begin() {
    at_.work.set_channels(scan_, at_.slab * Shape::channels, Shape::channels);
    rows_.begin(at_);
    const int c = threadIdx.x / kStateTile, n = threadIdx.x % kStateTile;
    edge_ = edge_at(at_.work.first_channel + c, n);
    A_ = at_.work.at(scan_.A) + c * scan_.A.row + n * scan_.A.last;
  }
  __device__ __forceinline__ void load_matrices(int first_state) {
    const int states = int(scan_.states);
    B_.begin(at_.work, at_.window);
    C_.begin(at_.work, at_.window);
    B_.load(first_state, states, at_.left);
    C_.load(first_state, states, at_.left);
    specialize<layout>(scan_.u.storage, at_.work.reverse, [&](auto format) {
      using Format = decltype(format);
      B_.template commit<Format>(shared_.B);
      C_.template commit<Format>(shared_.C);
    });
  }

  // Calls f(i, c, n) for the i-th (channel, state) that a thread has of a set of channels and a tile of states;
  // the last ones of the threads may have channels that are not there.
  template <class F>
  static __device__ __forceinline__ void each_edge(const F& f) {
#pragma unroll
    for (int i = 0; i < edges_of_thread; ++i)
      f(i, i * channels_apart + int(threadIdx.x / kStateTile), int(threadIdx.x % kStateTile));
  }
  // Starts the loads of A and of what enters the chunk, for a tile of states of so many channels,
  // those at hand or the next ones.
  __device__ __forceinline__ void load_edges(int channels, int first_state, bool next) {
    const View& A = scan_.A;
    const int64_t all = scan_.batch * scan_.groups * scan_.channels * p_.chunks * scan_.states;
    each_edge([&](int i, int c, int n) VIM_MM_INLINED {
      E& own_a = a_[i];
      Edges<E>& edges = edges_[i];
      own_a = E(0.0f);
      edges = {E(0.0f), E(0.0f), E(0.0f), E(0.0f)};
      const char* const a =
          A_ + first_state * A.last + i * channels_apart * A.row + (next ? p_.next.A : 0);
      const bool inside = c < channels && first_state + n < scan_.states;
      // Asked first, and of all threads alike: most are float32.
      if (A.storage == Storage::float32) {
        if (inside) own_a = load_element<E>(a, Storage::float32);
      } else if (inside) {
        own_a = load_element<E>(a, A.storage);
      }
      if (!inside) return;
      const int64_t at = edge_ + first_state + i * channels_apart * p_.chunks * scan_.states +
                         (next ? p_.next.edges : 0);
      const E* const x = static_cast<const E*>(p_.edges) + at;
      const E* const grad_x = static_cast<const E*>(p_.grad_edges) + at;
      edges.x = x[0], edges.grad_x = grad_x[0];
      if (!Method::causal) edges.other_x = x[all], edges.other_grad_x = grad_x[all];
    });
  }
  // In [B, G, H, chunks, N], for channel h of the group.
  __device__ __forceinline__ int64_t edge_at(int64_t h, int n) const {
    return ((first_row_ + h) * p_.chunks + at_.chunk) * scan_.states + n;
  }
  __device__ __forceinline__ void commit_edges() {
    each_edge([&](int i, int c, int n) VIM_MM_INLINED {
      if (ChunkPlace<Shape>::is_tail || c < Shape::channels)
        shared_.a[c][n] = a_[i], shared_.edges[c][n] = edges_[i];
    });
  }

  __device__ __forceinline__ void advance(bool first_of_block) {
#pragma unroll 1
    for (int set = 0; set < Shape::sets; ++set) {
      Segment<Shape> lane;
      load_segment(shared_.dt.segment_of_lane(set), lane.dt);
      load_segment(shared_.drive.segment_of_lane(set), lane.drive);
      load_segment(shared_.grad_y.segment_of_lane(set), lane.grad_y);
      const auto dt_around =
          around<Shape>(sum(lane.dt), [](float one, float other) { return one + other; });
#pragma unroll
      for (int i = 0; i < steps; ++i) lane.y[i] = lane.grad_input[i] = lane.grad_dt[i] = 0.0f;
      if constexpr (fast) {
        vjp_of_states(lane, dt_around, set);
      } else {
        vjp_of_all_states(lane, dt_around, first_of_block);
      }
      store_segment(shared_.y[warp_].segment_of_lane(set), lane.y);
      store_segment(shared_.grad_input[warp_].segment_of_lane(set), lane.grad_input);
      store_segment(shared_.grad_dt[warp_].segment_of_lane(set), lane.grad_dt);
    }
  }

  __device__ __forceinline__ void vjp_of_states(Segment<Shape>& lane,
                                                const Around<float, Shape>& dt_around, int set) {
    // A state's shuffles have its predecessor's arithmetic to wait with.
    auto state = enter(lane, dt_around, set, 0, 0);
#pragma unroll
    for (int m = 0; m < states_of_warp; ++m) {
      decltype(state) next;
      if (m + 1 < states_of_warp) next = enter(lane, dt_around, set, 0, m + 1);
      leave(lane, state, set, m, grad_B_[m], grad_C_[m]);
      state = next;
    }
  }
  __device__ __forceinline__ void vjp_of_all_states(Segment<Shape>& lane,
                                                    const Around<float, Shape>& dt_around,
                                                    bool first_of_block) {
    static_assert(fast || Shape::sets == 1, "tiles of states pass once");
#pragma unroll 1
    for (int first = 0; first < scan_.states; first += kStateTile) {
      if (first > 0) {
        __syncthreads();
        write_grad_A(first - kStateTile);
        load_edges(at_.work.channels, first, false);
        commit_edges();
      }
      load_matrices(first);
      __syncthreads();
#pragma unroll 1
      for (int m = 0; m < states_of_warp; ++m) {
        E grad_b[steps], grad_c[steps];
        clear(grad_b), clear(grad_c);
        const int n = first + warp_ * states_of_warp + m;
        if (n < scan_.states)
          leave(lane, enter(lane, dt_around, 0, first, m), 0, m, grad_b, grad_c);
        if (B_.constant()) write_row_gradient(p_.B_parts, n, sum(grad_b));
        else add_to_part(p_.B_parts, n, grad_b, first_of_block);
        if (C_.constant()) write_row_gradient(p_.C_parts, n, sum(grad_c));
        else add_to_part(p_.C_parts, n, grad_c, first_of_block);
      }
    }
  }

  // The m-th of the warp's states, in the tile that begins at state `first`, of a set of channels.
  __device__ __forceinline__ StateSegment<Method, accuracy_of(layout), E, Shape> enter(
      const Segment<Shape>& lane, const Around<float, Shape>& dt_around, int set, int first,
      int m) const {
    const int in_tile = warp_ * states_of_warp + m, n = first + in_tile;
    const int channel = channel_of_lane<Shape>(set);
    return enter_state<Method, E, Shape, layout>(
        lane, dt_around, shared_.a[channel][in_tile],
        B_.segment(shared_.B, at_.work, channel, segment_, in_tile, n),
        C_.segment(shared_.C, at_.work, channel, segment_, in_tile, n),
        shared_.edges[channel][in_tile], cuts_, other_cuts_);
  }
  __device__ __forceinline__ void leave(
      Segment<Shape>& lane, const StateSegment<Method, accuracy_of(layout), E, Shape>& state,
      int set, int m, E (&grad_b)[steps], E (&grad_c)[steps]) {
    const int place = set * 32 + channel_of_lane<Shape>(0) * segments + segment_;
    shared_.grad_a[warp_ * states_of_warp + m][place] =
        segment_vjp<Method, accuracy_of(layout)>(lane, state, cuts_, other_cuts_, grad_b, grad_c);
  }

  // A's gradient over the chunk, of a tile of states: takes the place of the adjoint that entered,
  // which nobody reads again.
  __device__ __forceinline__ void write_grad_A(int first_state) {
    each_edge([&](int i, int c, int n) VIM_MM_INLINED {
      if (Shape::channels < channels_apart && c >= Shape::channels) return;
      E parts[segments];
      load_segment(&shared_.grad_a[n][c * segments], parts);
      const E total = sum(parts);
      if (c >= at_.work.channels || first_state + n >= scan_.states) return;
      const int64_t apart = i * channels_apart * p_.chunks * scan_.states;
      static_cast<E*>(p_.grad_edges)[edge_ + first_state + apart] = total;
    });
  }

  // To [B, G, H, chunks, N], summed over the segments.
  __device__ __forceinline__ void write_row_gradient(void* to, int n, E value) {
    const int channel = channel_of_lane<Shape>(0);
    value = sum_over_segments<Shape>(value);
    if (segment_ == 0 && channel < at_.work.channels && n < scan_.states)
      static_cast<E*>(to)[edge_at(at_.work.first_channel + channel, n)] = value;
  }
  // To this block's own part, summed over the channels.
  __device__ __forceinline__ void add_to_part(void* parts, int n, E (&value)[steps], bool fresh) {
#pragma unroll
    for (int i = 0; i < steps; ++i) value[i] = sum_over_channels<Shape>(value[i]);
    if (channel_of_lane<Shape>(0) != 0 || n >= scan_.states) return;
    E* const to = at_.template part<E>(parts, at_.slab, n, segment_ * steps);
#pragma unroll
    for (int i = 0; i < steps; ++i) to[i] = fresh ? value[i] : to[i] + value[i];
  }
  // To shared memory, in the place of B or C, summed over the channels.
  __device__ __forceinline__ void put_sums(StateTile<E, Shape>& tile, int n, E (&value)[steps]) {
#pragma unroll
    for (int i = 0; i < steps; ++i) value[i] = sum_over_channels<Shape>(value[i]);
    if (channel_of_lane<Shape>(0) == 0) store_segment(tile.at(n, segment_ * steps), value);
  }

  const BackwardArguments& p_;
  const ScanArguments& scan_;
  Shared& shared_;
  ChunkPlace<Shape> at_;  // with the channels at hand
  Rows rows_;
  const int warp_, segment_;
  CutsOfSegment<Bounded, Shape> cuts_{0}, other_cuts_{0};  // before steps and behind them
  StateMatrix<E, Shape, layout> B_, C_;
  const int64_t first_row_ = (at_.work.b * scan_.groups + at_.work.g) * scan_.channels;
  // A thread's first channel and state, in the first tile of states.
  int64_t edge_;
  const char* A_;
  E a_[edges_of_thread];
  Edges<E> edges_[edges_of_thread];
  E grad_B_[fast ? states_of_warp : 1][steps], grad_C_[fast ? states_of_warp : 1][steps];
};

// `Aligned`: quads can be moved at once; with Layout::any it is not asked.
template <class Method, class E, class Shape, Layout layout, bool Aligned, bool Bounded>
__global__ void __launch_bounds__(Shape::threads, Shape::min_blocks)
    backward_kernel(const __grid_constant__ BackwardArguments p) {
  extern __shared__ float4 memory[];
  using Block = BackwardBlock<Method, E, Shape, layout, Aligned, Bounded>;
  let_next_begin();
  Block(p, *reinterpret_cast<typename Block::Shared*>(memory)).run();
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
