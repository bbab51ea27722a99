// The compiled scan as XLA calls it: memory of XLA becomes tensors, and the operators of vim_mm._C compute.
// Built by vim_mm/jax/build.py. Shapes and letters as in csrc/ops.cpp.
//
// Operands and results may have dimensions in front of those, which jax.vmap adds: all have the same number,
// and an operand has 1 where it is the same for all. The operator is called once for each index of them.
//
// SPDX-License-Identifier: Apache-2.0
#include <c10/core/InferenceMode.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <exception>
#include <functional>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using torch::headeronly::DeviceType;
using torch::headeronly::ScalarType;
using torch::stable::Device;
using torch::stable::Tensor;
using torch::stable::detail::from;
using torch::stable::detail::to;

constexpr size_t kGradients =
    9;  // of u, delta, A, B, C, D, z, delta_bias, initial_state; behind them is reset
using Gradients = std::array<Tensor, kGradients>;
using Sizes = std::vector<int64_t>;

struct Options {
  bool delta_softplus;
  int64_t method;
  ffi::Span<const int64_t> reverse;
};

int64_t product(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t(1), std::multiplies<>());
}

ScalarType type_of(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F16: return ScalarType::Half;
    case ffi::DataType::BF16: return ScalarType::BFloat16;
    case ffi::DataType::F32: return ScalarType::Float;
    case ffi::DataType::F64: return ScalarType::Double;
    case ffi::DataType::C64: return ScalarType::ComplexFloat;
    case ffi::DataType::C128: return ScalarType::ComplexDouble;
    case ffi::DataType::PRED: return ScalarType::Bool;
    default: throw std::runtime_error("vim_mm: expected floating point, complex or bool arrays");
  }
}

// An operand or a result: contiguous tensors, one for each index of the leading dimensions.
class Tensors {
 public:
  Tensors(const ffi::AnyBuffer& buffer, size_t leading, Device device)
      : data_(static_cast<char*>(buffer.untyped_data())), type_(type_of(buffer.element_type())),
        item_(int64_t(ffi::ByteWidth(buffer.element_type()))), device_(device) {
    const auto dims = buffer.dimensions();
    if (dims.size() < leading)
      throw std::runtime_error("vim_mm: an operand has too few dimensions");
    leading_.assign(dims.begin(), dims.begin() + leading);
    sizes_.assign(dims.begin() + leading, dims.end());
    strides_.assign(sizes_.size(), 1);
    for (size_t i = sizes_.size(); i-- > 1;)
      strides_[i - 1] = strides_[i] * std::max<int64_t>(sizes_[i], 1);
  }

  const Sizes& leading() const { return leading_; }

  // Counted through the leading dimensions `all`, of which this operand may have 1 each.
  Tensor at(int64_t index, const Sizes& all) const {
    int64_t tensor = 0, stride = 1;
    for (size_t i = all.size(); i-- > 0; index /= all[i]) {
      if (leading_[i] > 1) tensor += stride * (index % all[i]);
      stride *= leading_[i];
    }
    return torch::stable::from_blob(data_ + tensor * product(sizes_) * item_, sizes_, strides_,
                                    device_, type_);
  }

  // A missing operand has one dimension, which none of the others has.
  std::optional<Tensor> if_given_at(int64_t index, const Sizes& all) const {
    return sizes_.size() == 1 ? std::nullopt : std::optional<Tensor>(at(index, all));
  }

 private:
  char* data_;
  ScalarType type_;
  int64_t item_;
  Device device_;
  Sizes leading_, sizes_, strides_;
};

// Calls an operator of vim_mm by torch's dispatcher; the first `results` of what it returns.
template <size_t results, class... Arguments>
std::array<Tensor, results> call(const char* name, Arguments... arguments) {
  std::array<StableIValue, std::max(sizeof...(Arguments), results)> stack{from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
  std::array<Tensor, results> tensors;
  for (size_t i = 0; i < results; ++i) tensors[i] = to<Tensor>(stack[i]);
  return tensors;
}

// All that one index of the leading dimensions has.
struct Operands {
  Tensor u, delta, A, B, C;
  std::optional<Tensor> D, z, delta_bias, initial_state, reset;
  bool delta_softplus;
  int64_t method;
  Sizes reverse;

  Operands(const Tensors* of, int64_t i, const Sizes& all, const Options& options)
      : u(of[0].at(i, all)), delta(of[1].at(i, all)), A(of[2].at(i, all)), B(of[3].at(i, all)),
        C(of[4].at(i, all)), D(of[5].if_given_at(i, all)), z(of[6].if_given_at(i, all)),
        delta_bias(of[7].if_given_at(i, all)), initial_state(of[8].if_given_at(i, all)),
        reset(of[9].if_given_at(i, all)), delta_softplus(options.delta_softplus),
        method(options.method), reverse(options.reverse.begin(), options.reverse.end()) {}

  // out, last_state and what backward takes of the states.
  std::array<Tensor, 3> forward() const {
    return call<3>("vim_mm::selective_scan_fwd", u, delta, A, B, C, D, z, delta_bias, initial_state,
                   reset, delta_softplus, method, reverse);
  }

  Gradients backward(const Tensor& grad_out, const Tensor& grad_last_state) const {
    // The CPU's backward takes nothing of forward, so that its `edges` are empty. CUDA's takes states at
    // the edges of chunks: XLA does not keep them, a forward pass computes them anew.
    const Tensor edges =
        u.device().type() == DeviceType::CPU ? torch::stable::new_empty(u, {0}) : forward()[2];
    return call<kGradients>("vim_mm::selective_scan_bwd", std::optional(grad_out),
                            std::optional(grad_last_state), edges, u, delta, A, B, C, D, z,
                            delta_bias, initial_state, reset, delta_softplus, method, reverse);
  }
};

// Forward: the ten tensors -> out, last_state. Backward: the gradients of these two and the ten tensors
// -> gradients of all but reset, empty where there is none.
void compute(bool backward, Device device, ffi::RemainingArgs args, ffi::RemainingRets rets,
             const Options& options) {
  // Without the keys of autograd, whose kernels are Python's: XLA calls from threads of its own.
  const c10::InferenceMode no_autograd;
  const size_t leading = args.get<ffi::AnyBuffer>(0)->dimensions().size() - 4;
  std::vector<Tensors> operands, results;
  for (size_t i = 0; i < args.size(); ++i)
    operands.emplace_back(*args.get<ffi::AnyBuffer>(i), leading, device);
  for (size_t i = 0; i < rets.size(); ++i)
    results.emplace_back(**rets.get<ffi::AnyBuffer>(i), leading, device);
  const auto copy_to_results = [&](const auto& tensors, int64_t i, const Sizes& all) {
    for (size_t k = 0; k < results.size(); ++k) {
      Tensor result = results[k].at(i, all);
      torch::stable::copy_(result, tensors[k]);
    }
  };
  const Sizes& all = results[0].leading();
  for (int64_t i = 0; i < product(all); ++i) {
    if (backward) {
      const Operands of(operands.data() + 2, i, all, options);
      copy_to_results(of.backward(operands[0].at(i, all), operands[1].at(i, all)), i, all);
    } else {
      copy_to_results(Operands(operands.data(), i, all, options).forward(), i, all);
    }
  }
}

template <bool backward>
ffi::Error on_cpu(ffi::RemainingArgs args, ffi::RemainingRets rets, bool delta_softplus,
                  int64_t method, ffi::Span<const int64_t> reverse) try {
  compute(backward, Device(DeviceType::CPU), args, rets, {delta_softplus, method, reverse});
  return ffi::Error::Success();
} catch (const std::exception& error) {
  return ffi::Error::Internal(error.what());
}

#if defined(USE_CUDA)
// What torch does, on the stream that XLA works on.
class StreamGuard {
 public:
  StreamGuard(void* stream, int32_t device) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_create_cuda_stream_guard(stream, device, &handle_));
  }
  ~StreamGuard() { aoti_torch_delete_cuda_stream_guard(handle_); }
  StreamGuard(const StreamGuard&) = delete;

 private:
  CUDAStreamGuardHandle handle_ = nullptr;
};

template <bool backward>
ffi::Error on_cuda(void* stream, int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   bool delta_softplus, int64_t method, ffi::Span<const int64_t> reverse) try {
  // Else the operator refuses them, and PyTorch's C interface does not hand on why.
  for (size_t i = 0; i < args.size(); ++i)
    if (const auto type = args.get<ffi::AnyBuffer>(i)->element_type();
        type == ffi::F64 || type == ffi::C128)
      return ffi::Error::InvalidArgument("vim_mm: the CUDA scan has no float64");
  const StreamGuard guard(stream, device);
  compute(backward, Device(DeviceType::CUDA, device), args, rets,
          {delta_softplus, method, reverse});
  return ffi::Error::Success();
} catch (const std::exception& error) {
  return ffi::Error::Internal(error.what());
}
#endif

template <class Binding>
auto with_operands(Binding binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<bool>("delta_softplus")
      .template Attr<int64_t>("method")
      .template Attr<ffi::Span<const int64_t>>("reverse");
}
auto cpu() { return with_operands(ffi::Ffi::Bind()); }

#if defined(USE_CUDA)
auto cuda() {
  return with_operands(
      ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().Ctx<ffi::DeviceOrdinal>());
}
#endif

}  // namespace

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(vim_mm_scan_forward_cpu, on_cpu<false>, cpu());
XLA_FFI_DEFINE_HANDLER_SYMBOL(vim_mm_scan_backward_cpu, on_cpu<true>, cpu());
#if defined(USE_CUDA)
XLA_FFI_DEFINE_HANDLER_SYMBOL(vim_mm_scan_forward_cuda, on_cuda<false>, cuda());
XLA_FFI_DEFINE_HANDLER_SYMBOL(vim_mm_scan_backward_cuda, on_cuda<true>, cuda());
#endif
#pragma GCC visibility pop
