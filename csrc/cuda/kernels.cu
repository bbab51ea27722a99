// The entry points of the CUDA kernels: the choice of the method, and the small kernels beside the
// scan.
//
// SPDX-License-Identifier: Apache-2.0
#include "errors.h"
#include "methods.h"
#include "shapes.cuh"

namespace vim_mm {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ Sums sums) {
  const Sum& sum = sums.each[blockIdx.y];
  const int64_t* n = sum.sizes;
  const int64_t entries = n[0] * n[1] * n[2] * n[3] * sum.components;
  const int64_t stride = int64_t(gridDim.x) * kThreads;
  for (int64_t index = blockIdx.x * int64_t(kThreads) + threadIdx.x; index < entries;
       index += stride) {
    float total = 0.0f;
#pragma unroll 8
    for (int64_t part = 0; part < sum.count; ++part) total += sum.parts[part * entries + index];
    int64_t rest = index / sum.components;
    const int64_t l = rest % n[3];
    rest /= n[3];
    const int64_t k = rest % n[2];
    rest /= n[2];
    const int64_t j = rest % n[1], i = rest / n[1], component = index % sum.components;
    char* p = sum.to.data + i * sum.to.batch + j * sum.to.group + k * sum.to.row + l * sum.to.last;
    const int item = sum.to.storage == Storage::float64 ? 8 : 4;
    store_real(p + component * item, sum.to.storage, total);
  }
}

template <class Method, class E>
__global__ void __launch_bounds__(kThreads)
    discretize_kernel(int64_t n, const float* dt, const E* a, E* out) {
  const int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  if (i >= n) return;
  const Coefficients<E> c = Method::coefficients(dt[i], a[i]);
  const Derivatives<E> d = Method::derivatives(dt[i], a[i]);
  const E values[6] = {c.a_bar, c.beta, d.a_bar_dt, d.a_bar_a, d.beta_dt, d.beta_a};
  for (int k = 0; k < 6; ++k) out[k * n + i] = values[k];
}

}  // namespace

BlockShape backward_shape(const ScanArguments& scan) {
  return dispatch_element(scan, [&](auto e) {
    return choose_backward<decltype(e)>(scan, [](auto shape, auto) {
      using Block = decltype(shape);
      return BlockShape{Block::threads, Block::channels, Block::padded_states};
    });
  });
}

void scan_forward(const ForwardArguments& p, void* stream) {
  dispatch_method(p.scan.method,
                  [&](auto method) { MethodKernels<decltype(method)>::forward(p, stream); });
}

void scan_backward(const BackwardArguments& p, void* stream) {
  dispatch_method(p.scan.method,
                  [&](auto method) { MethodKernels<decltype(method)>::backward(p, stream); });
}

void sum_in_order(const Sums& sums, void* stream) {
  int64_t most = 0;
  for (int i = 0; i < sums.count; ++i) {
    const Sum& sum = sums.each[i];
    const int64_t* n = sum.sizes;
    const int64_t entries = n[0] * n[1] * n[2] * n[3] * sum.components;
    most = entries > most ? entries : most;
  }
  if (most == 0) return;
  const int64_t wanted = (most + kThreads - 1) / kThreads, limit = 1 << 16;
  const dim3 grid(static_cast<unsigned>(wanted < limit ? wanted : limit), sums.count);
  sum_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(sums);
  check(cudaGetLastError());
}

void discretize(int64_t n, int method, bool is_complex, const float* dt, const void* a, void* out,
                void* stream) {
  if (n == 0) return;
  const auto run = [&](auto e) {
    using E = decltype(e);
    dispatch_method(method, [&](auto m) {
      discretize_kernel<decltype(m), E><<<static_cast<unsigned>((n + kThreads - 1) / kThreads),
                                          kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
          n, dt, static_cast<const E*>(a), static_cast<E*>(out));
    });
  };
  if (is_complex) run(Complex<float>());
  else run(float());
  check(cudaGetLastError());
}

}  // namespace vim_mm
