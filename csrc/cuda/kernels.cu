// The small kernels beside the scan.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "errors.h"
#include "tile.cuh"

namespace vim_mm {
namespace {

constexpr int kThreads = 256, kWarp = 32;

// How many lanes share the parts of one entry, where there are many.
__host__ __device__ int lanes_of(const Sum& sum) {
  return sum.counts[0] * sum.counts[1] >= 64 ? 16 : 1;
}
__host__ __device__ int64_t floats_of(const Sum& sum) {
  return sum.sizes[0] * sum.sizes[1] * sum.sizes[2] * sum.sizes[3] * sum.components;
}

// `Index` holds every number of floats: division is the most of the work here.
template <class Index>
__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ Sums sums) {
  const Sum& sum = sums.each[blockIdx.y];
  const int lanes = lanes_of(sum), per_warp = kWarp / lanes;
  const int lane = threadIdx.x % kWarp, first_part = lane / per_warp;
  const Index warp = (blockIdx.x * Index(kThreads) + threadIdx.x) / kWarp;
  const Index stride = gridDim.x * Index(kThreads / kWarp) * per_warp;
  const Index floats = floats_of(sum), components = sum.components;
  for (Index first = warp * per_warp; first < floats; first += stride) {
    const Index index = first + lane % per_warp, component = index % components;
    Index rest = index / components;
    int64_t from = 0, to = 0;
    const int64_t to_strides[4] = {sum.to.batch, sum.to.group, sum.to.row, sum.to.last};
#pragma unroll
    for (int d = 3; d >= 0; --d) {
      const Index size = sum.sizes[d], i = d == 0 ? rest : rest % size;
      from += i * sum.strides[d];
      to += i * to_strides[d];
      if (d > 0) rest /= size;
    }
    const float* const p = sum.parts + from * sum.components + component;
    const int64_t outer = sum.part_strides[0] * sum.components;
    const int64_t inner = sum.part_strides[1] * sum.components;
    float total = 0.0f;
    int i = first_part / sum.counts[1], j = first_part % sum.counts[1];
    if (index >= floats) i = sum.counts[0];
#pragma unroll 4
    while (i < sum.counts[0]) {
      total += p[i * outer + j * inner];
      j += lanes;
      while (j >= sum.counts[1]) j -= sum.counts[1], ++i;
    }
    for (int by = per_warp; by < kWarp; by *= 2) total += __shfl_xor_sync(0xffffffffu, total, by);
    const int item = sum.to.storage == Storage::float64 ? 8 : 4;
    if (index < floats && first_part == 0)
      store_real(sum.to.data + to + component * item, sum.to.storage, total);
  }
}

template <class Method, class E>
__global__ void __launch_bounds__(kThreads)
    discretize_kernel(int64_t n, const float* dt, const E* a, E* out) {
  const int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  if (i >= n) return;
  const Coefficients<E> c = Method::coefficients(dt[i], a[i]);
  const Derivatives<E> d = Method::derivatives(dt[i], a[i], c);
  const E values[6] = {c.a_bar, c.beta, a[i] * d.a_bar_z, dt[i] * d.a_bar_z, d.beta_dt, d.beta_a};
  for (int k = 0; k < 6; ++k) out[k * n + i] = values[k];
}

}  // namespace

void sum_in_order(const Sums& sums, void* stream) {
  int64_t most = 0;
  for (int i = 0; i < sums.count; ++i)
    most = std::max(most, floats_of(sums.each[i]) * lanes_of(sums.each[i]));
  if (most == 0) return;
  const int64_t blocks = std::min<int64_t>((most + kThreads - 1) / kThreads, 1 << 16);
  const dim3 grid(static_cast<unsigned>(blocks), sums.count);
  const auto kernel = most < int64_t(1) << 31 ? sum_kernel<uint32_t> : sum_kernel<uint64_t>;
  kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(sums);
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
