// Of a chunk in backward: what comes in by rows (u, delta, z, grad_out), and the gradients of these that go out.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "chunk.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

template <class Method, class E, class Shape, Layout layout, bool Aligned, bool Bounded>
template <class Format>
__device__ __forceinline__ void
BackwardBlock<Method, E, Shape, layout, Aligned, Bounded>::commit_rows() {
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
      if (slots_.step(k) + (Aligned ? 0 : i) >= left_) dt[i] = dt_slope = 0.0f;
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

template <class Method, class E, class Shape, Layout layout, bool Aligned, bool Bounded>
__device__ __forceinline__ void BackwardBlock<Method, E, Shape, layout, Aligned,
                                              Bounded>::finish_rows(Gradients (&gradients)[count]) {
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
      const BackwardEntry at = entry(k, i);
      grad.u[i] *= Steps::of_u;
      grad.delta[i] *= Steps::of_dt;
      if (Steps::driven_by_dt) {
        grad.delta[i] += at.u * grad.u[i];
        grad.u[i] *= dt[i];
      }
      grad.u[i] += D_[k] * at.grad_y;
      grad.delta[i] *= at.dt_slope;
      grad.z[i] = at.gate_slope * (weight * y[i] + D_[k] * at.u);
      to_D += at.grad_y * at.u;
      to_bias += grad.delta[i];
    }
    grad.row_sum = sum_over_row(k, to_D, to_bias);
  }
}

template <class Method, class E, class Shape, Layout layout, bool Aligned, bool Bounded>
template <class Format>
__device__ __forceinline__ void
BackwardBlock<Method, E, Shape, layout, Aligned, Bounded>::store_rows(
    const Gradients (&gradients)[count]) {
  take_places();
  const auto store_all = [&](auto whole) {
#pragma unroll
    for (int k = 0; k < count; ++k) {
      const auto store = [&](auto& stream, const View& v, const float (&values)[width]) {
        if constexpr (Aligned)
          stream.template store_aligned<Format>(v, slots_, k, values, decltype(whole)::value,
                                                work_.channels, left_);
        else stream.template store<Format>(v, slots_, k, values, false, work_.channels, left_);
      };
      store(grad_u_, p_.grad_u, gradients[k].u);
      store(grad_delta_, p_.grad_delta, gradients[k].delta);
      if (scan_.gated) store(grad_z_, p_.grad_z, gradients[k].z);
      constexpr int half = Places::per_row / 2;
      if (fast && threadIdx.x % half == 0 && slots_.row(k) < work_.channels)
        write_channel_sum(threadIdx.x & half ? p_.grad_bias : p_.grad_D, slots_.row(k),
                          gradients[k].row_sum);
    }
  };
  // Where rows are not aligned both do the same; with one alone the compiler spills.
  if (is_whole(work_.channels)) store_all(std::true_type());
  else store_all(std::false_type());
  grad_u_.next(p_.next.grad_u), grad_delta_.next(p_.next.grad_delta);
  grad_z_.next(p_.next.grad_z);
  put_places();
}

template <class Method, class E, class Shape, Layout layout, bool Aligned, bool Bounded>
__device__ __forceinline__ float
BackwardBlock<Method, E, Shape, layout, Aligned, Bounded>::sum_over_row(int k, float to_D,
                                                                        float to_bias) {
  if constexpr (fast) {
    static_assert(Places::per_row <= 32, "threads of a row are in one warp");
    constexpr int half = Places::per_row / 2;
    const bool last = threadIdx.x & half;
    float sum = (last ? to_bias : to_D) + shuffle_xor(last ? to_D : to_bias, half);
#pragma unroll
    for (int bit = half / 2; bit > 0; bit /= 2) sum += shuffle_xor(sum, bit);
    return sum;
  } else {
    // In the place of what this thread has taken from there, till write_row_sums.
    *shared_.y[0].at(slots_.row(k), slots_.step(k)) = to_D;
    *shared_.grad_input[0].at(slots_.row(k), slots_.step(k)) = to_bias;
    return 0.0f;
  }
}

template <class Method, class E, class Shape, Layout layout, bool Aligned, bool Bounded>
__device__ __forceinline__ void
BackwardBlock<Method, E, Shape, layout, Aligned, Bounded>::write_row_sums(int channels) {
  if (fast || warp_ != 0) return;
  float D[steps], bias[steps];
  load_segment(shared_.y[0].segment_of_lane(0), D);
  load_segment(shared_.grad_input[0].segment_of_lane(0), bias);
  const float to_D = sum_over_segments<Shape>(sum(D));
  const float to_bias = sum_over_segments<Shape>(sum(bias));
  const int c = channel_of_lane<Shape>(0);
  if (segment_ > 0 || c >= channels) return;
  write_channel_sum(p_.grad_D, c, to_D);
  write_channel_sum(p_.grad_bias, c, to_bias);
}

template <class Method, class E, class Shape, Layout layout, bool Aligned, bool Bounded>
__device__ __forceinline__ void
BackwardBlock<Method, E, Shape, layout, Aligned, Bounded>::write_channel_sum(float* to, int c,
                                                                             float sum) {
  to[chunks_before() * scan_.channels + work_.first_channel + c] = sum;
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
