// Of a chunk in backward: what comes in by rows (u, delta, z, grad_out), and the gradients of these that go out.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "place.cuh"
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

// The rows of a few channels at a time. Registers are few: the compiler would spill some of the next rows, and wait for
// what it spills. So these wait for their turn in shared memory, and so do addresses of gradients, where a method's
// Tuning does not say otherwise; with Layout::any in registers.
template <class Method, class E, class Shape, Layout layout, bool Aligned>
class BackwardRows {
  static constexpr bool fast = layout != Layout::any;
  static constexpr bool copies =
      fast && !(Aligned && layout == Layout::half && Method::Tuning::holds_rows);
  static constexpr bool keeps_places = layout == Layout::half && Method::Tuning::keeps_addresses;
  static constexpr int steps = Shape::steps;
  using Steps = typename Method::template Backward<accuracy_of(layout), E>;
  using Places = Slots<Shape::channels, Shape, layout>;
  using Rows = Stream<float, Shape::channels, Shape, layout, !Aligned>;
  static constexpr int count = Places::count, width = Places::width;
  struct Copied {
    typename Rows::Held u[Shape::threads], delta[Shape::threads], z[Shape::threads],
        grad_out[Shape::threads];
  };
  struct KeptPlaces {
    char *grad_u[Shape::threads], *grad_delta[Shape::threads], *grad_z[Shape::threads];
  };
  template <int>
  struct Nothing {};
  struct Own : std::conditional_t<copies, Copied, Nothing<0>>,
               std::conditional_t<keeps_places, KeptPlaces, Nothing<1>> {};

 public:
  using Shared = BackwardShared<E, Shape, Own>;
  // Of a thread's entries of a row, and what sum_over_row makes of them.
  struct Gradients {
    float u[width], delta[width], z[width], row_sum;
  };
  using AllGradients = Gradients[count];

  // With the channels at hand. A reference to it among the members would put all of them into memory.
  using Place = ChunkPlace<Shape>;

  __device__ __forceinline__ BackwardRows(const BackwardArguments& p, Shared& shared,
                                          const Place& at)
      : p_(p), scan_(p.scan), shared_(shared), slots_(scan_.u, at.work) {}

  __device__ __forceinline__ void begin(const Place& at) {
    const auto begin = [&](auto& stream, const View& v) {
      stream.begin(v, at.work.at(v), slots_, at.work, at.window);
    };
    begin(u_, scan_.u), begin(delta_, scan_.delta), begin(z_, scan_.z);
    begin(grad_out_, p_.grad_out), begin(grad_u_, p_.grad_u), begin(grad_delta_, p_.grad_delta);
    begin(grad_z_, p_.grad_z);
    put_places();
    // What is read, if for nothing, where there is no gate.
    if constexpr (copies) shared_.own.z[threadIdx.x] = {};
    if (threadIdx.x < 2 * Shape::channels) begin_parameters(at);
  }
  // Starts the loads of so many channels, which are next in the streams.
  __device__ __forceinline__ void load(const Place& at, int channels) {
    if constexpr (Aligned && copies) load<Loads::aligned>(at, channels);
    else if (fast && is_whole(at, channels))
      load<copies ? Loads::shifted : Loads::whole>(at, channels);
    else load<Loads::apart>(at, channels);
    u_.next(p_.next.u), delta_.next(p_.next.delta), z_.next(p_.next.z);
    grad_out_.next(p_.next.grad_out);
    if (threadIdx.x < 2 * Shape::channels) load_parameter(channels);
  }
  __device__ __forceinline__ void commit_parameters() {
    float* const to = threadIdx.x < Shape::channels ? shared_.bias : shared_.D;
    if (threadIdx.x < 2 * Shape::channels) to[threadIdx.x % Shape::channels] = parameter_;
  }
  template <class Format>
  __device__ __forceinline__ void commit(const Place& at) {
    constexpr float weight = output_weight<Method, E>();
    const bool gated = scan_.gated;
    if constexpr (copies) wait_for_all_copies();
#pragma unroll
    for (int k = 0; k < count; ++k) {
      float u[width], dt[width], z[width], grad_y[width], drive[width], weighted[width];
      if constexpr (copies) {
        const Own& own = shared_.own;
        const auto get = [&](const auto& stream, const View& v, const auto& from,
                             float (&to)[width]) {
          stream.template values<Format>(v, k, stream.arrived(from[threadIdx.x]), to);
        };
        get(u_, scan_.u, own.u, u), get(delta_, scan_.delta, own.delta, dt);
        get(z_, scan_.z, own.z, z), get(grad_out_, p_.grad_out, own.grad_out, grad_y);
      } else {
        u_.template values<Format>(scan_.u, k, u);
        delta_.template values<Format>(scan_.delta, k, dt);
        z_.template values<Format>(scan_.z, k, z);
        grad_out_.template values<Format>(p_.grad_out, k, grad_y);
      }
      const float bias = shared_.bias[slots_.row(k)];
      D_[k] = shared_.D[slots_.row(k)];
#pragma unroll
      for (int i = 0; i < width; ++i) {
        const float x = dt[i] + bias;
        dt[i] = step_size<accuracy_of(layout)>(dt[i], bias, scan_.delta_softplus);
        float dt_slope = scan_.delta_softplus ? softplus_slope(x, dt[i]) : 1.0f;
        const float s = sigmoid(z[i]), zs = z[i] * s;
        const float gate_slope = grad_y[i] * (s + zs * (1.0f - s));
        if (slots_.step(k) + (Aligned ? 0 : i) >= at.left) dt[i] = dt_slope = 0.0f;
        grad_y[i] *= gated ? zs : 1.0f;
        weighted[i] = weight * grad_y[i];
        drive[i] = Steps::of_u * (Steps::driven_by_dt ? dt[i] * u[i] : u[i]);
        entry(k, i) = {u[i], grad_y[i], gate_slope, dt_slope};
      }
      put(shared_.dt, slots_, k, dt);
      put(shared_.drive, slots_, k, drive);
      put(shared_.grad_y, slots_, k, weighted);
    }
  }
  __device__ __forceinline__ void finish(AllGradients& gradients) {
    constexpr float weight = output_weight<Method, E>();
#pragma unroll
    for (int k = 0; k < count; ++k) {
      Gradients& grad = gradients[k];
      float y[width];
      get_sum(shared_.y, slots_, k, y);
      get_sum(shared_.grad_input, slots_, k, grad.u);
      get_sum(shared_.grad_dt, slots_, k, grad.delta);
      const float* const dt = shared_.dt.at(slots_.row(k), slots_.step(k));
      float to_D = 0.0f, to_bias = 0.0f;
#pragma unroll
      for (int i = 0; i < width; ++i) {
        const BackwardEntry own = entry(k, i);
        grad.u[i] *= Steps::of_u;
        grad.delta[i] *= Steps::of_dt;
        if (Steps::driven_by_dt) {
          grad.delta[i] += own.u * grad.u[i];
          grad.u[i] *= dt[i];
        }
        grad.u[i] += D_[k] * own.grad_y;
        grad.delta[i] *= own.dt_slope;
        grad.z[i] = own.gate_slope * (weight * y[i] + D_[k] * own.u);
        to_D += own.grad_y * own.u;
        to_bias += grad.delta[i];
      }
      grad.row_sum = sum_over_row(k, to_D, to_bias);
    }
  }
  template <class Format>
  __device__ __forceinline__ void store(const Place& at, const AllGradients& gradients) {
    take_places();
    const auto store_all = [&](auto whole) {
#pragma unroll
      for (int k = 0; k < count; ++k) {
        const auto store = [&](auto& stream, const View& v, const float (&values)[width]) {
          if constexpr (Aligned)
            stream.template store_aligned<Format>(v, slots_, k, values, decltype(whole)::value,
                                                  at.work.channels, at.left);
          else
            stream.template store<Format>(v, slots_, k, values, false, at.work.channels, at.left);
        };
        store(grad_u_, p_.grad_u, gradients[k].u);
        store(grad_delta_, p_.grad_delta, gradients[k].delta);
        if (scan_.gated) store(grad_z_, p_.grad_z, gradients[k].z);
        constexpr int half = Places::per_row / 2;
        if (fast && threadIdx.x % half == 0 && slots_.row(k) < at.work.channels)
          write_channel_sum(at, threadIdx.x & half ? p_.grad_bias : p_.grad_D, slots_.row(k),
                            gradients[k].row_sum);
      }
    };
    if (Aligned && is_whole(at, at.work.channels)) store_all(std::true_type());
    else store_all(std::false_type());
    grad_u_.next(p_.next.grad_u), grad_delta_.next(p_.next.grad_delta);
    grad_z_.next(p_.next.grad_z);
    put_places();
  }
  // By the warp that stores the next sums there.
  __device__ __forceinline__ void write_sums(const Place& at) {
    if (fast || threadIdx.x / 32 != 0) return;
    float D[steps], bias[steps];
    load_segment(shared_.y[0].segment_of_lane(0), D);
    load_segment(shared_.grad_input[0].segment_of_lane(0), bias);
    const float to_D = sum_over_segments<Shape>(sum(D));
    const float to_bias = sum_over_segments<Shape>(sum(bias));
    const int c = channel_of_lane<Shape>(0);
    if (segment_of_lane<Shape>() > 0 || c >= at.work.channels) return;
    write_channel_sum(at, p_.grad_D, c, to_D);
    write_channel_sum(at, p_.grad_bias, c, to_bias);
  }

 private:
  static __device__ __forceinline__ bool is_whole(const Place& at, int channels) {
    return at.left == Shape::window && channels == Shape::channels;
  }
  template <Loads loads>
  __device__ __forceinline__ void load(const Place& at, int channels) {
    if constexpr (copies) {
      Own& own = shared_.own;
      const auto copy = [&](const auto& stream, const View& v, auto& to) {
        stream.template copy<loads>(v, slots_, channels, at.left, to[threadIdx.x]);
      };
      copy(u_, scan_.u, own.u), copy(delta_, scan_.delta, own.delta);
      if (scan_.gated) copy(z_, scan_.z, own.z);
      copy(grad_out_, p_.grad_out, own.grad_out);
    } else {
      const auto load = [&](auto& stream, const View& v) {
        stream.template load<loads>(v, slots_, channels, at.left);
      };
      load(u_, scan_.u), load(delta_, scan_.delta);
      if (scan_.gated) load(z_, scan_.z);
      load(grad_out_, p_.grad_out);
    }
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
  __device__ __forceinline__ void begin_parameters(const Place& at) {
    const View& v = threadIdx.x < Shape::channels ? scan_.delta_bias : scan_.D;
    const int64_t channel = at.work.first_channel + threadIdx.x % Shape::channels;
    auto& parameter = shared_.parameters[threadIdx.x];
    parameter = {nullptr, 0};
    if (v.data)
      parameter = {v.data + at.work.g * v.group + channel * v.row,
                   at.slabs * Shape::channels * v.row};
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
  __device__ __forceinline__ BackwardEntry& entry(int k, int i) {
    return shared_.entries[(k * width + i) * Shape::threads + threadIdx.x];
  }
  // The gradients of D and of delta_bias over the chunk, from those of threads that share a row: the first of
  // them gets that of D, the one in the middle the other.
  __device__ __forceinline__ float sum_over_row(int k, float to_D, float to_bias) {
    if constexpr (fast) {
      static_assert(Places::per_row <= 32, "threads of a row are in one warp");
      constexpr int half = Places::per_row / 2;
      const bool last = threadIdx.x & half;
      float sum = (last ? to_bias : to_D) + shuffle_xor(last ? to_D : to_bias, half);
#pragma unroll
      for (int bit = half / 2; bit > 0; bit /= 2) sum += shuffle_xor(sum, bit);
      return sum;
    } else {
      // In the place of what this thread has taken from there, till write_sums.
      *shared_.y[0].at(slots_.row(k), slots_.step(k)) = to_D;
      *shared_.grad_input[0].at(slots_.row(k), slots_.step(k)) = to_bias;
      return 0.0f;
    }
  }
  __device__ __forceinline__ void write_channel_sum(const Place& at, float* to, int c, float sum) {
    to[at.chunks_before() * scan_.channels + at.work.first_channel + c] = sum;
  }

  const BackwardArguments& p_;
  const ScanArguments& scan_;
  Shared& shared_;
  const Places slots_;
  Rows u_, delta_, z_, grad_out_, grad_u_, grad_delta_, grad_z_;
  float parameter_ = 0.0f, D_[count];
};

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
