// The backward scan of one chunk of time, given what crosses its edges: the states that enter it
// (kept by forward) and their adjoint (from segment_sweep_kernel). Chunks do not wait for each other.
//
// A block owns a chunk and goes over its share of the channels, a few at a time. Each lane
// recomputes the states of its segment and runs the adjoint recurrence over them, all in registers.
// Gradients of u and delta are sums over states: over those of a warp in registers, over warps in
// shared memory. Gradients of B and C are sums over channels: a warp always has the same states, so
// that each lane adds up in registers over all channels of the block, then lanes, then blocks: the
// last one to be done. Every sum has one order.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../common/arrival.cuh"
#include "../common/dependent_launch.cuh"
#include "segment_vjp.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// An entry (channel, step): what its gradients are multiplied with. grad_y is that of y + D u, in
// front of the gate.
struct alignas(16) BackwardEntry {
  float u, grad_y, gate_slope, dt_slope;
};

// Own: what a thread keeps here to save registers.
template <class E, class Shape, class Own>
struct BackwardShared {
  RowTile<Shape> dt, drive, grad_y;
  StateTile<E, Shape> B, C;
  RowTile<Shape> y[Shape::warps], grad_input[Shape::warps], grad_dt[Shape::warps];
  // A and the edges of the channels at hand, by channel and state; padded to spread channels, and
  // in the last one states, over the banks.
  E a[Shape::channels][kStateTile + 1];
  Edges<E> edges[Shape::channels][kStateTile + 1];
  // Of each segment: those of a channel are neighbours.
  alignas(16) E grad_a[kStateTile][Shape::channels * Shape::segments + kQuad];
  BackwardEntry entries[Shape::channels * Shape::window];  // each thread's own, too
  Own own;
  float bias[Shape::channels], D[Shape::channels];  // of the channels that come next
  // Of each thread that loads one of these: where the next one is, and how far from that the one after.
  struct {
    const char* at;  // null: there is none
    int64_t step;
  } parameters[2 * Shape::channels];
};

// Gradients of B and C stay in registers over all channels of the block, but with Layout::any each
// set of channels adds its part in memory.
template <class Method, class E, class Shape, Layout layout, bool Aligned, bool Bounded>
class BackwardBlock {
  static constexpr int steps = Shape::steps, segments = Shape::segments;
  static constexpr int states_of_warp = kStateTile / Shape::warps;
  static constexpr bool fast = layout != Layout::any;
  using Steps = typename Method::template Backward<accuracy_of(layout), E>;
  using Places = Slots<Shape::channels, Shape, layout>;
  using Rows = Stream<float, Shape::channels, Shape, layout, !Aligned>;
  static constexpr int count = Places::count, width = Places::width;
  static constexpr int channels_apart = Shape::threads / kStateTile;
  static constexpr int edges_of_thread =
      Shape::channels > channels_apart ? Shape::channels / channels_apart : 1;
  static_assert(kChunk % Shape::window == 0, "a block has the first window of a chunk");
  static constexpr bool is_tail = Shape::window < kChunk;  // blocks have the last chunk
  // Some methods leave few registers. Where rows wait in them for their turn, the compiler spills some, and
  // waits for what it spills. So they wait in shared memory, and in 16 bits so may the addresses of gradients.
  static constexpr bool copies = Method::Tuning::copies_rows && fast;
  static constexpr bool keeps_places =
      copies && layout == Layout::half && Method::Tuning::keeps_addresses;
  struct Copied {
    typename Rows::Held u[Shape::threads], delta[Shape::threads], z[Shape::threads],
        grad_out[Shape::threads];
  };
  struct KeptPlaces {
    char *grad_u[Shape::threads], *grad_delta[Shape::threads], *grad_z[Shape::threads];
  };
  template <int>
  struct Nothing {};
  struct Own : std::conditional<copies, Copied, Nothing<0>>::type,
               std::conditional<keeps_places, KeptPlaces, Nothing<1>>::type {};

 public:
  using Shared = BackwardShared<E, Shape, Own>;

  __device__ __forceinline__ BackwardBlock(const BackwardArguments& p, Shared& shared)
      : p_(p), scan_(p.scan), shared_(shared), slabs_(int(p.share.slabs)),
        slab_(blockIdx.x % uint32_t(slabs_)),
        chunk_(is_tail ? int(p.chunks) - 1
                       : int(blockIdx.x / uint32_t(slabs_) % uint32_t(p.share.chunks))),
        window_(int64_t(chunk_) * (kChunk / Shape::window)),
        work_(scan_, blockIdx.x / uint32_t(slabs_) / uint32_t(p.share.chunks), Shape::window),
        slots_(scan_.u, work_), warp_(threadIdx.x / 32), segment_(segment_of_lane<Shape>()),
        left_(work_.steps_from(window_, Shape::window)), B_(scan_.B, scan_.constant_B, work_),
        C_(scan_.C, scan_.constant_C, work_) {}

  __device__ __forceinline__ void run() {
    wait_for_previous();
    if constexpr (Bounded) find_cuts();
    if constexpr (fast) {
      load_matrices(0);
#pragma unroll
      for (int m = 0; m < states_of_warp; ++m) clear(grad_B_[m]), clear(grad_C_[m]);
    }
    const int channels = int(scan_.channels), stride = slabs_ * Shape::channels;
    const int begins = slab_ * Shape::channels;
    begin();
    load_rows(work_.channels);
    load_edges(work_.channels, 0, false);
    commit_parameters();
    __syncthreads();
    specialize<layout>(scan_.u.storage, work_.reverse,
                       [&](auto format) { commit_rows<decltype(format)>(); });
    commit_edges();
#pragma unroll 1
    for (int first = begins; first < channels; first += stride) {
      const int left = channels - first - stride;
      const int later = left < Shape::channels ? left : Shape::channels;
      __syncthreads();
      if (first > begins) write_row_sums(work_.channels);
      work_.set_channels(scan_, first, Shape::channels);
      if (later > 0) {
        load_rows(later);
        if (fast) load_edges(later, 0, true);
      }
      advance(first == begins);
      commit_parameters();
      __syncthreads();
      write_grad_A(fast ? 0 : (int(scan_.states) - 1) / kStateTile * kStateTile);
      // Together, because each of the two waits often. After the last channels what is committed is
      // of no use.
      specialize<layout>(scan_.u.storage, work_.reverse, [&](auto format) {
        using Format = decltype(format);
        Gradients gradients[count];
        finish_rows(gradients);
        commit_rows<Format>();
        store_rows<Format>(gradients);
      });
      edge_ += p_.next.edges, A_ += p_.next.A;
      if (!fast && later > 0) load_edges(later, 0, false);
      commit_edges();
    }
    __syncthreads();
    write_row_sums(work_.channels);
    write_matrices();
  }

 private:
  // Of a thread's entries of a row, and what sum_over_row makes of them.
  struct Gradients {
    float u[width], delta[width], z[width], row_sum;
  };

  static __device__ __forceinline__ void clear(E (&x)[steps]) {
#pragma unroll
    for (int i = 0; i < steps; ++i) x[i] = E(0.0f);
  }

  __device__ __forceinline__ void find_cuts() {
    const Cuts<Bounded> cuts(p_.bounds, work_, p_.chunks);
    cuts_ = {cuts.before(chunk_)};
    if (!Method::causal) other_cuts_ = {cuts.behind(chunk_)};
  }
  __device__ __forceinline__ void begin() {
    work_.set_channels(scan_, slab_ * Shape::channels, Shape::channels);
    const auto begin = [&](auto& stream, const View& v) {
      stream.begin(v, work_.at(v), slots_, work_, window_);
    };
    begin(u_, scan_.u), begin(delta_, scan_.delta), begin(z_, scan_.z);
    begin(grad_out_, p_.grad_out), begin(grad_u_, p_.grad_u), begin(grad_delta_, p_.grad_delta);
    begin(grad_z_, p_.grad_z);
    put_places();
    // What is read, if for nothing, where there is no gate.
    if constexpr (copies) shared_.own.z[threadIdx.x] = {};
    if (threadIdx.x < 2 * Shape::channels) begin_parameters();
    const int c = threadIdx.x / kStateTile, n = threadIdx.x % kStateTile;
    edge_ = edge_at(work_.first_channel + c, n);
    A_ = work_.at(scan_.A) + c * scan_.A.row + n * scan_.A.last;
  }
  __device__ __forceinline__ void put_places() {
    if constexpr (keeps_places) {
      Own& own = shared_.own;
      own.grad_u[threadIdx.x] = grad_u_.place(), own.grad_delta[threadIdx.x] = grad_delta_.place();
      own.grad_z[threadIdx.x] = grad_z_.place();
    }
  }
  __device__ __forceinline__ void take_places() {
    if constexpr (keeps_places) {
      const Own& own = shared_.own;
      grad_u_.place() = own.grad_u[threadIdx.x], grad_delta_.place() = own.grad_delta[threadIdx.x];
      grad_z_.place() = own.grad_z[threadIdx.x];
    }
  }
  __device__ __forceinline__ bool is_whole(int channels) const {
    return left_ == Shape::window && channels == Shape::channels;
  }
  // Starts the loads of so many channels, which are next in the streams.
  __device__ __forceinline__ void load_rows(int channels) {
    const auto each = [&](auto how) {
      constexpr Loads loads = decltype(how)::value;
      if constexpr (copies) {
        Own& own = shared_.own;
        const auto copy = [&](const auto& stream, const View& v, auto& to) {
          stream.template copy<loads>(v, slots_, channels, left_, to[threadIdx.x]);
        };
        copy(u_, scan_.u, own.u), copy(delta_, scan_.delta, own.delta);
        if (scan_.gated) copy(z_, scan_.z, own.z);
        copy(grad_out_, p_.grad_out, own.grad_out);
      } else {
        const auto load = [&](auto& stream, const View& v) {
          stream.template load<loads>(v, slots_, channels, left_);
        };
        load(u_, scan_.u), load(delta_, scan_.delta);
        if (scan_.gated) load(z_, scan_.z);
        load(grad_out_, p_.grad_out);
      }
    };
    using std::integral_constant;
    if constexpr (Aligned && copies) each(integral_constant<Loads, Loads::aligned>());
    else if (fast && is_whole(channels))
      each(integral_constant<Loads, Aligned ? Loads::whole : Loads::shifted>());
    else each(integral_constant<Loads, Loads::apart>());
    u_.next(p_.next.u), delta_.next(p_.next.delta), z_.next(p_.next.z);
    grad_out_.next(p_.next.grad_out);
    if (threadIdx.x < 2 * Shape::channels) load_parameter(channels);
  }
  __device__ __forceinline__ void begin_parameters() {
    const View& v = threadIdx.x < Shape::channels ? scan_.delta_bias : scan_.D;
    const int64_t channel = work_.first_channel + threadIdx.x % Shape::channels;
    auto& parameter = shared_.parameters[threadIdx.x];
    parameter = {nullptr, 0};
    if (v.data)
      parameter = {v.data + work_.g * v.group + channel * v.row, slabs_ * Shape::channels * v.row};
  }
  __device__ __forceinline__ void load_parameter(int channels) {
    auto& parameter = shared_.parameters[threadIdx.x];
    const char* const at = parameter.at;
    const bool inside = at && int(threadIdx.x % Shape::channels) < channels;
    parameter.at = at + parameter.step;
    parameter_ = 0.0f;
    if (scan_.delta_bias.storage == Storage::float32 && scan_.D.storage == Storage::float32) {
      if (inside) parameter_ = *reinterpret_cast<const float*>(at);
    } else if (inside) {
      const View& v = threadIdx.x < Shape::channels ? scan_.delta_bias : scan_.D;
      parameter_ = load_real(at, v.storage);
    }
  }
  __device__ __forceinline__ void commit_parameters() {
    float* const to = threadIdx.x < Shape::channels ? shared_.bias : shared_.D;
    if (threadIdx.x < 2 * Shape::channels) to[threadIdx.x % Shape::channels] = parameter_;
  }

  __device__ __forceinline__ void load_matrices(int first_state) {
    const int states = int(scan_.states);
    B_.begin(work_, window_);
    C_.begin(work_, window_);
    B_.load(first_state, states, left_);
    C_.load(first_state, states, left_);
    specialize<layout>(scan_.u.storage, work_.reverse, [&](auto format) {
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
  // In [B, G, chunks].
  __device__ __forceinline__ int64_t chunks_before() const {
    return (work_.b * scan_.groups + work_.g) * p_.chunks + chunk_;
  }
  // In [B, G, H, chunks, N], for channel h of the group.
  __device__ __forceinline__ int64_t edge_at(int64_t h, int n) const {
    return ((first_row_ + h) * p_.chunks + chunk_) * scan_.states + n;
  }
  __device__ __forceinline__ void commit_edges() {
    each_edge([&](int i, int c, int n) VIM_MM_INLINED {
      if (is_tail || c < Shape::channels) shared_.a[c][n] = a_[i], shared_.edges[c][n] = edges_[i];
    });
  }

  __device__ __forceinline__ BackwardEntry& entry(int k, int i) {
    return shared_.entries[(k * width + i) * Shape::threads + threadIdx.x];
  }
  template <class Format>
  __device__ __forceinline__ void commit_rows();

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
        load_edges(work_.channels, first, false);
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
        B_.segment(shared_.B, work_, channel, segment_, in_tile, n),
        C_.segment(shared_.C, work_, channel, segment_, in_tile, n),
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
      if (c >= work_.channels || first_state + n >= scan_.states) return;
      const int64_t apart = i * channels_apart * p_.chunks * scan_.states;
      static_cast<E*>(p_.grad_edges)[edge_ + first_state + apart] = total;
    });
  }

  // To [B, G, H, chunks, N], summed over the segments.
  __device__ __forceinline__ void write_row_gradient(void* to, int n, E value) {
    const int channel = channel_of_lane<Shape>(0);
    value = sum_over_segments<Shape>(value);
    if (segment_ == 0 && channel < work_.channels && n < scan_.states)
      static_cast<E*>(to)[edge_at(work_.first_channel + channel, n)] = value;
  }
  // What the block of that slab has of B's or C's gradient in this chunk, in scan order.
  __device__ __forceinline__ E* part(void* parts, int slab, int n, int step) const;
  // To this block's own part, summed over the channels.
  __device__ __forceinline__ void add_to_part(void* parts, int n, E (&value)[steps], bool fresh);
  // To shared memory, in the place of B or C, summed over the channels.
  __device__ __forceinline__ void put_sums(StateTile<E, Shape>& tile, int n, E (&value)[steps]);

  // The gradients of B and C over the chunk: this block's, or where others share it, by the last of them to come
  // here, those of all in the order of slabs.
  __device__ __forceinline__ void write_matrices();
  // A thread's entries of a tile of B's or C's gradient.
  using MatrixPlaces = Slots<kStateTile, Shape, layout>;
  struct Entries {
    E value[MatrixPlaces::count][MatrixPlaces::width];
  };
  static __device__ __forceinline__ void take(StateTile<E, Shape>& tile, const MatrixPlaces& slots,
                                              Entries& to);
  // The sum over slabs, of the tile that begins with that state; of a block that shares nothing it is in `tile`.
  __device__ __forceinline__ void store_sum(const View& v, void* parts, const MatrixPlaces& slots,
                                            int first, StateTile<E, Shape>& tile) const;
  __device__ __forceinline__ void leave_part(void* parts, const MatrixPlaces& slots,
                                             StateTile<E, Shape>& tile) const;
  __device__ __forceinline__ void store_matrix(const View& v, const MatrixPlaces& slots, int first,
                                               const Entries& from) const;

  __device__ __forceinline__ void finish_rows(Gradients (&gradients)[count]);
  template <class Format>
  __device__ __forceinline__ void store_rows(const Gradients (&gradients)[count]);

  // The gradients of D and of delta_bias over the chunk, from those of threads that share a row: the first of
  // them gets that of D, the one in the middle the other.
  __device__ __forceinline__ float sum_over_row(int k, float to_D, float to_bias);
  // By the warp that stores the next sums there.
  __device__ __forceinline__ void write_row_sums(int channels);
  __device__ __forceinline__ void write_channel_sum(float* to, int c, float sum);

  const BackwardArguments& p_;
  const ScanArguments& scan_;
  Shared& shared_;
  const int slabs_, slab_, chunk_;
  const int64_t window_;  // the chunk's first
  Work work_;
  const Places slots_;
  const int warp_, segment_, left_;
  CutsOfSegment<Bounded, Shape> cuts_{0}, other_cuts_{0};  // before steps and behind them
  StateMatrix<E, Shape, layout> B_, C_;
  Rows u_, delta_, z_, grad_out_, grad_u_, grad_delta_, grad_z_;
  float parameter_ = 0.0f, D_[count];
  const int64_t first_row_ = (work_.b * scan_.groups + work_.g) * scan_.channels;
  // A thread's first channel and state, in the first tile of states.
  int64_t edge_;
  const char* A_;
  E a_[edges_of_thread];
  Edges<E> edges_[edges_of_thread];
  E grad_B_[fast ? states_of_warp : 1][steps], grad_C_[fast ? states_of_warp : 1][steps];
};

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
