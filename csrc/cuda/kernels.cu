// The small kernels beside the scan.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "errors.h"
#include "tile.cuh"

namespace vim_mm {
namespace {

constexpr int kThreads = 256, kManyParts = 16, kLoads = 8;

// How many threads share the parts of one entry, where there are many.
__host__ __device__ int threads_per_entry(const Sum& sum) {
  return sum.counts[0] * sum.counts[1] >= kManyParts ? kManyParts : 1;
}
__host__ __device__ int64_t floats_of(const Sum& sum) {
  return sum.sizes[0] * sum.sizes[1] * sum.sizes[2] * sum.sizes[3] * sum.components;
}

// Neighbouring threads have neighbouring entries. `Index` holds every number of floats: division is the
// most of the work here.
template <class Index>
__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ Sums sums) {
  __shared__ float totals[kThreads];
  const Sum& sum = sums.each[blockIdx.y];
  const int sharing = threads_per_entry(sum), entries = kThreads / sharing;
  const int entry = threadIdx.x % entries, first_part = threadIdx.x / entries;
  const int parts = sum.counts[0] * sum.counts[1], inner_parts = sum.counts[1];
  const int64_t outer = sum.part_strides[0] * sum.components;
  const int64_t inner = sum.part_strides[1] * sum.components;
  const int64_t to_strides[4] = {sum.to.batch, sum.to.group, sum.to.row, sum.to.last};
  const Index floats = floats_of(sum), components = sum.components;
  for (Index first = blockIdx.x * Index(entries); first < floats;
       first += gridDim.x * Index(entries)) {
    const Index index = first + entry, component = index % components;
    Index rest = index / components;
    int64_t from = 0, to = 0;
#pragma unroll
    for (int d = 3; d >= 0; --d) {
      const Index size = sum.sizes[d], i = d == 0 ? rest : rest % size;
      from += i * sum.strides[d];
      to += i * to_strides[d];
      if (d > 0) rest /= size;
    }
    const float* const p = sum.parts + from * sum.components + component;
    int i = first_part / inner_parts, j = first_part % inner_parts;
    float total = 0.0f;
    for (int part = first_part; index < floats && part < parts;) {
      float values[kLoads];
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        values[k] = part < parts ? p[i * outer + j * inner] : 0.0f;
        part += sharing;
        i += sharing / inner_parts, j += sharing % inner_parts;
        if (j >= inner_parts) j -= inner_parts, ++i;
      }
#pragma unroll
      for (int k = 0; k < kLoads; ++k) total += values[k];
    }
    if (sharing > 1) {
      __syncthreads();  // what was there has been read
      totals[threadIdx.x] = total;
      __syncthreads();
      for (int k = 1; first_part == 0 && k < sharing; ++k) total += totals[k * entries + entry];
    }
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
  int64_t most = 0;  // threads
  for (int i = 0; i < sums.count; ++i)
    most = std::max(most, floats_of(sums.each[i]) * threads_per_entry(sums.each[i]));
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
