// The selective scan on CPU tensors: forward, backward, and the elementwise discretization.
// Shapes and letters as in ops.cpp.
//
// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../arguments.h"
#include "kernels.h"
#include "rows.h"
#include "state_matrices.h"

namespace vim_mm {
namespace {

using torch::stable::new_empty;

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Where the sequences of each batch entry begin, and the end of the last: without `reset` there is one.
class Sequences {
 public:
  Sequences(const std::optional<Tensor>& reset, const Sizes& sizes)
      : drops_first_(sizes.batch, false), edges_(sizes.batch) {
    const char* const flags = reset ? static_cast<const char*>(reset->const_data_ptr()) : nullptr;
    for (int64_t b = 0; b < sizes.batch; ++b) {
      const auto is_reset = [&](int64_t t) {
        return flags && flags[b * reset->stride(0) + t * reset->stride(1)] != 0;
      };
      edges_[b].push_back(0);
      for (int64_t t = 1; flags && t < sizes.steps; ++t)
        if (is_reset(t)) edges_[b].push_back(t);
      edges_[b].push_back(sizes.steps);
      drops_first_[b] = sizes.steps > 0 && is_reset(0);
    }
  }

  const std::vector<int64_t>& edges(int64_t b) const { return edges_[b]; }
  // Whether the first step begins a sequence itself: what a scan from left to right brings is dropped.
  bool drops_first(int64_t b) const { return drops_first_[b]; }

 private:
  std::vector<bool> drops_first_;
  std::vector<std::vector<int64_t>> edges_;
};

// The operands of all rows, converted; a thread's RowWork points into them.
template <class S, class E>
struct Problem {
  const Inputs& in;
  const Sizes sizes;
  const ScanKernels<S, E>& kernels = scan_kernels_of<S, E>();
  const ElementwiseKernels<S>& elementwise = elementwise_kernels_of<S>();
  const int64_t padded = round_up(sizes.states, kernels.lanes);
  const int64_t padded_steps = round_up(sizes.steps, kRowPadding);
  const Buffer<E> A = read_A<E>(in.A, padded);
  const StateMatrix<E> B{in.B, sizes, padded};
  const StateMatrix<E> C{in.C, sizes, padded};
  const Buffer<S> D = read_channels(in.D);
  const Buffer<S> delta_bias = read_channels(in.delta_bias);
  const RowView u{in.u}, delta{in.delta}, z{in.z ? *in.z : in.u};
  const Buffer<E> initial_state = read_initial_state();
  const Sequences sequences{in.reset, sizes};

  Problem(const Inputs& inputs) : in(inputs), sizes(inputs) {}

 private:
  Buffer<S> read_channels(const std::optional<Tensor>& t) const {
    Buffer<S> values(sizes.groups * sizes.channels);
    values.zero();
    if (t) {
      const RowView view(*t);
      for (int64_t g = 0; g < view.rows(); ++g) view.read(g, values.data() + g * view.length());
    }
    return values;
  }

  // [rows, padded N], of none nothing.
  Buffer<E> read_initial_state() const {
    Buffer<E> states(in.initial_state ? sizes.rows() * padded : 0);
    states.zero();
    if (in.initial_state) {
      const RowView view(*in.initial_state);
      for (int64_t row = 0; row < sizes.rows(); ++row) view.read(row, states.data() + row * padded);
    }
    return states;
  }
};

// One row at a time, with the scratch of one thread.
template <class S, class E>
class RowWork {
 public:
  explicit RowWork(const Problem<S, E>& problem)
      : p_(problem), arrays_(10 * problem.padded_steps),
        scratch_(problem.kernels.scratch_bytes(problem.sizes.steps, problem.padded)) {
    // The elementwise kernels run over the padding too: it must hold numbers.
    arrays_.zero();
    S* next = arrays_.data();
    for (S** array :
         {&u, &raw_delta, &dt, &z, &gate_sigmoid, &y, &grad_gated, &grad_y, &grad_u, &grad_dt}) {
      *array = next;
      next += problem.padded_steps;
    }
  }

  // Reads the inputs of a row (row = (b * G + g) * H + h).
  ScanRow<S, E> load(int64_t row) {
    const Sizes& sizes = p_.sizes;
    const int64_t bg = row / sizes.channels, g = bg % sizes.groups;
    gh = g * sizes.channels + row % sizes.channels;
    p_.u.read(row, u);
    p_.delta.read(row, raw_delta);
    for (int64_t t = 0; t < sizes.steps; ++t) raw_delta[t] += p_.delta_bias.data()[gh];
    if (p_.in.delta_softplus) p_.elementwise.softplus(p_.padded_steps, raw_delta, dt);
    else std::copy(raw_delta, raw_delta + sizes.steps, dt);
    if (p_.in.z) {
      p_.z.read(row, z);
      p_.elementwise.sigmoid(p_.padded_steps, z, gate_sigmoid);
    }
    return {sizes.steps,
            sizes.states,
            p_.padded,
            static_cast<int>(p_.in.method),
            p_.in.reverse[g] != 0,
            dt,
            u,
            p_.A.data() + gh * p_.padded,
            p_.B.at(bg, gh),
            p_.C.at(bg, gh),
            p_.B.step(),
            p_.C.step(),
            p_.in.initial_state ? p_.initial_state.data() + row * p_.padded : nullptr};
  }

  // A row of several sequences is so many scans: calls f(scan, first, is_last) for each of them, which begins at
  // step `first`. The states before and after the row belong to the first and the last in scan order.
  template <class F>
  void for_each_sequence(const ScanRow<S, E>& row, int64_t b, const F& f) const {
    const std::vector<int64_t>& edges = p_.sequences.edges(b);
    const size_t count = edges.size() - 1;
    for (size_t i = 0; i < count; ++i) {
      const bool leftmost = i == 0, rightmost = i + 1 == count;
      ScanRow<S, E> scan = row;
      scan.steps = edges[i + 1] - edges[i];
      scan.dt += edges[i], scan.u += edges[i];
      scan.B += edges[i] * row.step_B, scan.C += edges[i] * row.step_C;
      if (row.reverse ? !rightmost : !leftmost || p_.sequences.drops_first(b))
        scan.initial_state = nullptr;
      f(scan, edges[i], row.reverse ? leftmost : rightmost);
    }
  }

  void forward(int64_t row, const RowView& out, const RowView& last_state) {
    const ScanRow<S, E> scan = load(row);
    Buffer<E> last(p_.padded);
    for_each_sequence(
        scan, batch_of(row), [&](const ScanRow<S, E>& part, int64_t first, bool is_last) {
          p_.kernels.forward(part, {y + first, is_last ? last.data() : nullptr}, scratch_.data());
        });
    add_skipped(y, u);
    if (p_.in.z)
      for (int64_t t = 0; t < p_.sizes.steps; ++t) y[t] *= z[t] * gate_sigmoid[t];
    out.write(row, y);
    last_state.write(row, last.data());
  }

  struct Outputs {
    const RowView *u, *delta, *z;
    E *A, *B, *C, *last_state, *initial_state;
    S *D, *delta_bias;
  };

  void backward(int64_t row, const RowView* grad_out, const Outputs& out) {
    const ScanRow<S, E> scan = load(row);
    const int64_t steps = p_.sizes.steps;
    const bool gated = p_.in.z.has_value();
    if (grad_out) grad_out->read(row, grad_gated);
    else std::fill(grad_gated, grad_gated + steps, S(0));
    for (int64_t t = 0; t < steps; ++t)
      grad_y[t] = gated ? grad_gated[t] * (z[t] * gate_sigmoid[t]) : grad_gated[t];
    std::fill(grad_u, grad_u + steps, S(0));
    std::fill(grad_dt, grad_dt + steps, S(0));

    for_each_sequence(
        scan, batch_of(row), [&](const ScanRow<S, E>& part, int64_t first, bool is_last) {
          p_.kernels.backward(
              part,
              {grad_y + first, is_last ? out.last_state : nullptr, gated ? y + first : nullptr,
               grad_dt + first, grad_u + first, out.A, out.B + first * part.step_B,
               out.C + first * part.step_C, part.initial_state ? out.initial_state : nullptr},
              scratch_.data());
        });

    S grad_D = 0, grad_bias = 0;
    for (int64_t t = 0; t < steps; ++t) grad_D += grad_y[t] * u[t];
    if (gated) {
      add_skipped(y, u);
      for (int64_t t = 0; t < steps; ++t) {
        const S s = gate_sigmoid[t];
        y[t] = grad_gated[t] * y[t] * (s * (S(1) + z[t] * (S(1) - s)));
      }
    }
    add_skipped(grad_u, grad_y);
    if (p_.in.delta_softplus) {
      p_.elementwise.sigmoid(p_.padded_steps, raw_delta, dt);
      for (int64_t t = 0; t < steps; ++t) grad_dt[t] *= dt[t];
    }
    for (int64_t t = 0; t < steps; ++t) grad_bias += grad_dt[t];
    out.u->write(row, grad_u);
    out.delta->write(row, grad_dt);
    if (gated) out.z->write(row, y);
    *out.D = grad_D;
    *out.delta_bias = grad_bias;
  }

 private:
  int64_t batch_of(int64_t row) const { return row / (p_.sizes.groups * p_.sizes.channels); }

  // Adds D x where there is a D: 0 times what is infinite would be NaN.
  void add_skipped(S* to, const S* x) const {
    if (!p_.in.D) return;
    const S D = p_.D.data()[gh];
    for (int64_t t = 0; t < p_.sizes.steps; ++t) to[t] += D * x[t];
  }

  const Problem<S, E>& p_;
  Buffer<S> arrays_;
  Buffer<char> scratch_;
  int64_t gh = 0;
  S *u, *raw_delta, *dt, *z, *gate_sigmoid, *y;  // [padded L]
  S *grad_gated, *grad_y, *grad_u, *grad_dt;     // of out, and of y before D and the gate
};

template <class S, class E>
std::tuple<Tensor, Tensor> forward_rows(const Inputs& in) {
  const Problem<S, E> problem(in);
  const Sizes& sizes = problem.sizes;
  Tensor out = empty_like(in.u);
  Tensor last_state =
      new_empty(in.u, {sizes.batch, sizes.groups, sizes.channels, sizes.states}, state_type(in));
  const RowView out_view(out), last_view(last_state);
  parallel_for(0, sizes.rows(), 1, [&](int64_t begin, int64_t end) {
    RowWork<S, E> work(problem);
    for (int64_t row = begin; row < end; ++row) work.forward(row, out_view, last_view);
  });
  return {out, last_state};
}

// How many slabs the channels of a group are cut into: enough work for many cores, but the slabs'
// gradients of B and C together no larger than u. The number of threads has no say, and so none
// in the results.
int64_t count_slabs(const Sizes& sizes, int64_t padded) {
  const int64_t wanted = 64 / std::max<int64_t>(1, sizes.batch * sizes.groups);
  return std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, sizes.channels / (2 * padded)));
}

template <class S, class E>
Gradients backward_rows(const std::optional<Tensor>& grad_out,
                        const std::optional<Tensor>& grad_last_state, const Inputs& in) {
  const Problem<S, E> problem(in);
  const Sizes& sizes = problem.sizes;
  expect_gradients(in, sizes, grad_out, grad_last_state);
  const int64_t padded = problem.padded, slabs = count_slabs(sizes, padded);
  const int64_t slab_channels = (sizes.channels + slabs - 1) / slabs;

  const Tensor none = new_empty(in.u, {0});
  const Tensor grad_u = empty_like(in.u), grad_delta = empty_like(in.delta);
  const Tensor grad_z = in.z ? empty_like(*in.z) : none;
  const RowView u_view(grad_u), delta_view(grad_delta), z_view(grad_z);
  const std::optional<RowView> out_view =
      grad_out ? std::optional<RowView>(*grad_out) : std::nullopt;
  StateMatrixGradient<E> grad_B(in.B, sizes, padded, slabs), grad_C(in.C, sizes, padded, slabs);
  Buffer<E> grad_A(sizes.rows() * padded), last(sizes.rows() * padded);
  Buffer<E> first(in.initial_state ? sizes.rows() * padded : 0);
  Buffer<S> grad_D(sizes.rows()), grad_bias(sizes.rows());
  grad_A.zero();
  last.zero();
  first.zero();  // where a reset drops the initial state, it has no gradient
  if (grad_last_state) {
    const RowView view(*grad_last_state);
    for (int64_t row = 0; row < sizes.rows(); ++row) view.read(row, last.data() + row * padded);
  }

  parallel_for(0, sizes.batch * sizes.groups * slabs, 1, [&](int64_t begin, int64_t end) {
    RowWork<S, E> work(problem);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t bg = task / slabs, slab = task % slabs;
      const int64_t stop = std::min(sizes.channels, (slab + 1) * slab_channels);
      for (int64_t h = slab * slab_channels; h < stop; ++h) {
        const int64_t row = bg * sizes.channels + h;
        work.backward(
            row, out_view ? &*out_view : nullptr,
            {&u_view, &delta_view, &z_view, grad_A.data() + row * padded, grad_B.at(bg, slab, row),
             grad_C.at(bg, slab, row), grad_last_state ? last.data() + row * padded : nullptr,
             in.initial_state ? first.data() + row * padded : nullptr, grad_D.data() + row,
             grad_bias.data() + row});
      }
    }
  });

  const Tensor grad_initial = in.initial_state ? empty_like(*in.initial_state) : none;
  if (in.initial_state) {
    const RowView view(grad_initial);
    for (int64_t row = 0; row < sizes.rows(); ++row) view.write(row, first.data() + row * padded);
  }
  // D and delta_bias are [G, H] in one row each: their last dimension is H.
  const auto reduce_channels = [&](const std::optional<Tensor>& like, const Buffer<S>& values) {
    return like ? reduce_parameter(*like, values, sizes.batch, sizes.channels) : none;
  };
  return {grad_u,
          grad_delta,
          reduce_parameter(in.A, grad_A, sizes.batch, padded),
          grad_B.reduce(),
          grad_C.reduce(),
          reduce_channels(in.D, grad_D),
          grad_z,
          reduce_channels(in.delta_bias, grad_bias),
          grad_initial};
}

// Calls f with (real scalar, state element) for the precision of u and the kind of A.
template <class F>
auto dispatch_compute_type(const Tensor& u, const Tensor& A, const F& f) {
  const bool wide = u.scalar_type() == ScalarType::Double;
  if (is_complex(A)) return wide ? f(double(), Complex<double>()) : f(float(), Complex<float>());
  return wide ? f(double(), double()) : f(float(), float());
}

std::tuple<Tensor, Tensor, Tensor> selective_scan_fwd_cpu(
    const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B, const Tensor& C,
    const std::optional<Tensor>& D, const std::optional<Tensor>& z,
    const std::optional<Tensor>& delta_bias, const std::optional<Tensor>& initial_state,
    const std::optional<Tensor>& reset, bool delta_softplus, int64_t method,
    const std::vector<int64_t>& reverse) {
  const Inputs in{u,     delta,          A,      B,      C, D, z, delta_bias, initial_state,
                  reset, delta_softplus, method, reverse};
  const auto [out, last_state] = dispatch_compute_type(
      u, A, [&](auto s, auto e) { return forward_rows<decltype(s), decltype(e)>(in); });
  return {out, last_state, new_empty(last_state, {0})};  // backward keeps its own states
}

Gradients selective_scan_bwd_cpu(const std::optional<Tensor>& grad_out,
                                 const std::optional<Tensor>& grad_last_state,
                                 const Tensor& /*edges*/, const Tensor& u, const Tensor& delta,
                                 const Tensor& A, const Tensor& B, const Tensor& C,
                                 const std::optional<Tensor>& D, const std::optional<Tensor>& z,
                                 const std::optional<Tensor>& delta_bias,
                                 const std::optional<Tensor>& initial_state,
                                 const std::optional<Tensor>& reset, bool delta_softplus,
                                 int64_t method, const std::vector<int64_t>& reverse) {
  const Inputs in{u,     delta,          A,      B,      C, D, z, delta_bias, initial_state,
                  reset, delta_softplus, method, reverse};
  return dispatch_compute_type(u, A, [&](auto s, auto e) {
    return backward_rows<decltype(s), decltype(e)>(grad_out, grad_last_state, in);
  });
}

Tensor discretize_cpu(const Tensor& delta, const Tensor& A, int64_t method) {
  expect_discretizable(delta, A, method);
  std::vector<int64_t> sizes{6};
  for (const int64_t size : A.sizes()) sizes.push_back(size);
  const Tensor result = new_empty(A, {sizes.data(), sizes.size()});
  if (A.numel() == 0) return result;  // which may have no memory to copy from
  dispatch_compute_type(delta, A, [&](auto s, auto e) {
    using S = decltype(s);
    using E = decltype(e);
    const ScanKernels<S, E>& kernels = scan_kernels_of<S, E>();
    const int64_t n = A.numel(), padded = round_up(n, kernels.lanes);
    Buffer<S> dt(padded);
    Buffer<E> a(padded), values(6 * padded);
    dt.zero();
    a.zero();
    std::memcpy(dt.data(), delta.const_data_ptr(), n * sizeof(S));
    std::memcpy(static_cast<void*>(a.data()), A.const_data_ptr(), n * sizeof(E));
    E* out[6];
    for (int k = 0; k < 6; ++k) out[k] = values.data() + k * padded;
    kernels.discretize(padded, static_cast<int>(method), dt.data(), a.data(), out);
    for (int k = 0; k < 6; ++k)
      std::memcpy(static_cast<E*>(result.mutable_data_ptr()) + k * n, out[k], n * sizeof(E));
    return 0;
  });
  return result;
}

std::string cpu_capability_name() { return cpu_capability(); }

}  // namespace
}  // namespace vim_mm

STABLE_TORCH_LIBRARY_IMPL(vim_mm, CPU, m) {
  m.impl("selective_scan_fwd", TORCH_BOX(&vim_mm::selective_scan_fwd_cpu));
  m.impl("selective_scan_bwd", TORCH_BOX(&vim_mm::selective_scan_bwd_cpu));
  m.impl("discretize", TORCH_BOX(&vim_mm::discretize_cpu));
}

STABLE_TORCH_LIBRARY_IMPL(vim_mm, CompositeExplicitAutograd, m) {
  m.impl("cpu_capability", TORCH_BOX(&vim_mm::cpu_capability_name));
}
