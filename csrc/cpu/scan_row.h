// The scan of one row on the CPU, for one instruction set: states lie across the lanes, time runs
// sequentially. Included by scan_row_*.cpp, which name the instruction set.
//
// Time is cut into chunks whose states fit the cache. Forward keeps one chunk of coefficients;
// backward keeps the state at the start of each chunk, and goes through the chunks from the last,
// recomputing each. Memory is therefore linear in L, for one row at a time.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../methods/discretization.h"
#include "lanes.h"
#include "scan_params.h"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// For complex states the field's convention y = 2 Re(sum C x) stands for conjugate pairs.
template <class V>
struct OutputWeight {
  static constexpr int value = 1;
};
template <class S>
struct OutputWeight<Complex<S>> {
  static constexpr int value = 2;
};

template <class V>
class RowScan {
 public:
  using S = ScalarOf<V>;
  using R = RealOf<V>;
  using E = typename Layout<V>::Element;
  static constexpr int lanes = Layout<V>::lanes;

  static int64_t scratch_bytes(int64_t steps, int64_t states) {
    const int64_t chunk = chunk_steps(states), chunks = (steps + chunk - 1) / chunk;
    return (3 * chunk * states + (chunks + 2) * states) * sizeof(E) + 2 * chunk * sizeof(R);
  }

  static void forward(const ScanRow<S, E>& row, const ScanRowOutput<S, E>& out, void* scratch) {
    for (int64_t t = 0; t < row.steps; ++t) out.y[t] = S(0);
    dispatch_method(row.method, [&](auto method) {
      using Method = decltype(method);
      RowScan scan(row, row.reverse, Method::causal ? S(1) : S(0.5), scratch);
      scan.template run_forward<Method>(row.initial_state, out.y, out.last_state);
      if (!Method::causal) {
        RowScan other(row, !row.reverse, S(0.5), scratch);
        other.template run_forward<Method>(nullptr, out.y, nullptr);
      }
    });
  }

  static void backward(const ScanRow<S, E>& row, const ScanRowGradient<S, E>& grad, void* scratch) {
    if (grad.recomputed_y)
      for (int64_t t = 0; t < row.steps; ++t) grad.recomputed_y[t] = S(0);
    dispatch_method(row.method, [&](auto method) {
      using Method = decltype(method);
      RowScan scan(row, row.reverse, Method::causal ? S(1) : S(0.5), scratch);
      scan.template run_backward<Method>(grad, row.initial_state, grad.last_state);
      if (grad.initial_state) scan.copy(scan.grad_state_, grad.initial_state);
      if (!Method::causal) {
        RowScan other(row, !row.reverse, S(0.5), scratch);
        other.template run_backward<Method>(grad, nullptr, nullptr);
      }
    });
  }

  static void discretize(int64_t n, int method, const S* dt, const E* a, E* const out[6]) {
    dispatch_method(method, [&](auto m) {
      for (int64_t i = 0; i < n; i += lanes) {
        const R dt_i = load<R>(dt + i);
        const V a_i = load<V>(a + i);
        const Coefficients<V> c = decltype(m)::coefficients(dt_i, a_i);
        const auto d = decltype(m)::derivatives(dt_i, a_i, c);
        const V values[6] = {c.a_bar,
                             c.beta,
                             a_i * d.a_bar_z,
                             dt_i * d.a_bar_z,
                             value_of<V>(d.beta_dt),
                             value_of<V>(d.beta_a)};
        for (int k = 0; k < 6; ++k) store<V>(out[k] + i, values[k]);
      }
    });
  }

 private:
  static int64_t chunk_steps(int64_t states) {
    const int64_t steps = (64 << 10) / (states * int64_t(sizeof(E)));
    return steps < 32 ? 32 : steps;
  }

  RowScan(const ScanRow<S, E>& row, bool reverse, S weight, void* scratch)
      : row_(row), reverse_(reverse), weight_(weight * S(OutputWeight<V>::value)),
        chunk_(chunk_steps(row.states)), chunks_((row.steps + chunk_ - 1) / chunk_) {
    reduced_ = static_cast<R*>(scratch);
    reduced_too_ = reduced_ + chunk_;
    a_bar_ = reinterpret_cast<E*>(reduced_too_ + chunk_);
    beta_ = a_bar_ + chunk_ * row.states;
    x_ = beta_ + chunk_ * row.states;
    state_ = x_ + chunk_ * row.states;
    grad_state_ = state_ + row.states;
    starts_ = grad_state_ + row.states;
  }

  int64_t time(int64_t i) const { return reverse_ ? row_.steps - 1 - i : i; }
  int64_t begin(int64_t chunk) const { return chunk * chunk_; }
  int64_t length(int64_t chunk) const {
    const int64_t rest = row_.steps - begin(chunk);
    return rest < chunk_ ? rest : chunk_;
  }

  template <class Method>
  void run_forward(const E* initial_state, S* y, E* last_state) {
    copy_or_clear(initial_state, state_);
    for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
      compute_coefficients<Method>(chunk);
      sweep_forward<false>(chunk, y);
    }
    if (last_state) copy(state_, last_state);
  }

  template <class Method>
  void run_backward(const ScanRowGradient<S, E>& grad, const E* initial_state,
                    const E* grad_last_state) {
    copy_or_clear(initial_state, state_);
    for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
      copy(state_, starts_ + chunk * row_.states);
      if (chunk + 1 == chunks_) break;  // recomputed below in any case
      compute_coefficients<Method>(chunk);
      sweep_forward<false>(chunk, nullptr);
    }
    copy_or_clear(grad_last_state, grad_state_);
    for (int64_t chunk = chunks_ - 1; chunk >= 0; --chunk) {
      copy(starts_ + chunk * row_.states, state_);
      compute_coefficients<Method>(chunk);
      sweep_forward<true>(chunk, grad.recomputed_y);
      sweep_backward(chunk, grad);
      coefficients_vjp<Method>(chunk, grad);
    }
  }

  template <class Method>
  void compute_coefficients(int64_t chunk) {
    const int64_t first = begin(chunk), n_steps = length(chunk), states = row_.states;
    for (int64_t n = 0; n < states; n += lanes) {
      const V a = load<V>(row_.a + n);
      for (int64_t i = 0; i < n_steps; ++i) {
        const Coefficients<V> c = Method::coefficients(R(row_.dt[time(first + i)]), a);
        store<V>(a_bar_ + i * states + n, c.a_bar);
        store<V>(beta_ + i * states + n, c.beta);
      }
    }
  }

  // x_t = a_bar x_(t-1) + beta B u; adds the weighted outputs to y where there is one.
  template <bool keep_states>
  void sweep_forward(int64_t chunk, S* y) {
    const int64_t first = begin(chunk), n_steps = length(chunk), states = row_.states;
    for_each_vector([&](int64_t n, auto of_given) {
      V x = load<V>(state_ + n);
      for (int64_t i = 0; i < n_steps; ++i) {
        const int64_t t = time(first + i), at = i * states + n;
        // In this order, as the reference has it: where u is infinite, others give NaN with complex numbers.
        const V input =
            R(row_.u[t]) * (load<V>(beta_ + at) * load<V>(row_.B + t * row_.step_B + n));
        x = load<V>(a_bar_ + at) * x + input;
        if (keep_states) store<V>(x_ + at, x);
        const R product = of_given(real(load<V>(row_.C + t * row_.step_C + n) * x));
        reduced_[i] = n == 0 ? product : reduced_[i] + product;
      }
      store<V>(state_ + n, x);
    });
    if (y)
      for (int64_t i = 0; i < n_steps; ++i) y[time(first + i)] += weight_ * sum_lanes(reduced_[i]);
  }

  // Gradients of u, B and C; those of a_bar and beta replace a_bar and beta in scratch.
  void sweep_backward(int64_t chunk, const ScanRowGradient<S, E>& grad) {
    const int64_t first = begin(chunk), n_steps = length(chunk), states = row_.states;
    for_each_vector([&](int64_t n, auto of_given) {
      V grad_x = load<V>(grad_state_ + n);
      for (int64_t i = n_steps - 1; i >= 0; --i) {
        const int64_t t = time(first + i), at = i * states + n;
        const R grad_y = R(weight_ * grad.y[t]), u = R(row_.u[t]);
        const V x = load<V>(x_ + at), beta = load<V>(beta_ + at);
        const V before = i > 0 ? load<V>(x_ + at - states) : load<V>(starts_ + chunk * states + n);
        const V B = load<V>(row_.B + t * row_.step_B + n);
        const V C = load<V>(row_.C + t * row_.step_C + n);

        add(grad.C + t * row_.step_C + n, grad_y * conj(x));
        grad_x = grad_x + grad_y * conj(C);
        add(grad.B + t * row_.step_B + n, u * (grad_x * conj(beta)));
        const R product = of_given(real(grad_x * conj(beta * B)));
        reduced_[i] = n == 0 ? product : reduced_[i] + product;

        const V a_bar = load<V>(a_bar_ + at);
        store<V>(a_bar_ + at, grad_x * conj(before));
        store<V>(beta_ + at, u * (grad_x * conj(B)));
        grad_x = grad_x * conj(a_bar);
      }
      store<V>(grad_state_ + n, grad_x);
    });
    for (int64_t i = 0; i < n_steps; ++i) grad.u[time(first + i)] += sum_lanes(reduced_[i]);
  }

  template <class Method>
  void coefficients_vjp(int64_t chunk, const ScanRowGradient<S, E>& grad) {
    const int64_t first = begin(chunk), n_steps = length(chunk), states = row_.states;
    for_each_vector([&](int64_t n, auto of_given) {
      const V a = load<V>(row_.a + n);
      V grad_a = load<V>(grad.a + n);
      for (int64_t i = 0; i < n_steps; ++i) {
        const R dt = R(row_.dt[time(first + i)]);
        const auto d = Method::derivatives(dt, a, Method::coefficients(dt, a));
        const V grad_z = load<V>(a_bar_ + i * states + n) * conj(d.a_bar_z);
        const V grad_beta = load<V>(beta_ + i * states + n);
        const V by_dt = grad_z * conj(a) + grad_beta * conj(d.beta_dt);
        const V by_a = dt * grad_z + grad_beta * conj(d.beta_a);
        const R product = of_given(real(by_dt));
        reduced_too_[i] = n == 0 ? product : reduced_too_[i] + product;
        grad_a = grad_a + by_a;
      }
      store<V>(grad.a + n, grad_a);
    });
    for (int64_t i = 0; i < n_steps; ++i) grad.dt[time(first + i)] += sum_lanes(reduced_too_[i]);
  }

  // Calls f(n, of_given) for the first of each vector of states. of_given(x) is x, with 0 in the place of states
  // that only fill the lanes: what these make of an infinite input is NaN, which no sum may have.
  template <class F>
  VIM_MM_INLINE void for_each_vector(const F& f) const {
    int64_t n = 0;
    for (; n + lanes <= row_.given; n += lanes) f(n, [](R x) { return x; });
    if (n == row_.states) return;
    const auto given = Layout<V>::first(row_.given - n);
    f(n, [&](R x) { return select(given, x, R(S(0))); });
  }
  static VIM_MM_INLINE void add(E* p, V x) { store<V>(p, load<V>(p) + x); }
  void copy(const E* from, E* to) const {
    for (int64_t n = 0; n < row_.states; ++n) to[n] = from[n];
  }
  void copy_or_clear(const E* from, E* to) const {
    if (from) return copy(from, to);
    for (int64_t n = 0; n < row_.states; ++n) to[n] = E(S(0));
  }

  const ScanRow<S, E>& row_;
  const bool reverse_;
  const S weight_;
  const int64_t chunk_, chunks_;
  R* reduced_;      // [chunk]
  R* reduced_too_;  // [chunk]
  E* a_bar_;        // [chunk, N]
  E* beta_;         // [chunk, N]
  E* x_;            // [chunk, N]
  E* state_;        // [N]
  E* grad_state_;   // [N]
  E* starts_;       // [chunks, N]
};

template <class V>
ScanKernels<ScalarOf<V>, typename Layout<V>::Element> scan_kernels() {
  using Scan = RowScan<V>;
  return {Scan::lanes, Scan::scratch_bytes, Scan::forward, Scan::backward, Scan::discretize};
}

template <class R>
ElementwiseKernels<ScalarOf<R>> elementwise_kernels() {
  using S = ScalarOf<R>;
  return {[](int64_t n, const S* x, S* out) {
            for (int64_t i = 0; i < n; i += Layout<R>::lanes)
              store<R>(out + i, softplus(load<R>(x + i)));
          },
          [](int64_t n, const S* x, S* out) {
            for (int64_t i = 0; i < n; i += Layout<R>::lanes)
              store<R>(out + i, sigmoid(load<R>(x + i)));
          }};
}

}  // namespace VIM_MM_ISA
}  // namespace vim_mm
