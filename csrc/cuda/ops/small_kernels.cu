// The small kernels beside the scan.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "../common/launch.cuh"
#include "../common/tile.cuh"

namespace vim_mm {
namespace {

constexpr int kThreads = 256, kParts = 8, kMostSharing = 64, kWide = 4;

__host__ __device__ int64_t floats_of(const Sum& sum) {
  return sum.sizes[0] * sum.sizes[1] * sum.sizes[2] * sum.components;
}
// How many threads share the parts of one entry, a power of two: so many that each has few, which it
// reads all at once, if there are not too many.
__host__ __device__ int threads_per_entry(const Sum& sum) {
  int threads = 1;
  while (threads < kMostSharing && threads * kParts < sum.counts[0] * sum.counts[1]) threads *= 2;
  return threads;
}
// How many neighbouring floats a thread adds up at once: to find an entry is more work than that.
__host__ __device__ int floats_per_thread(const Sum& sum) {
  return sum.components == 1 && sum.sizes[2] % kWide == 0 ? kWide : 1;
}

}  // namespace
inline namespace VIM_MM_ISA {

// Neighbouring threads have neighbouring entries. `Index` holds every number of floats.
template <int Width, class Index>
__device__ void sum_parts(const Sum& sum) {
  struct alignas(4 * Width) Floats {
    float v[Width];
  };
  extern __shared__ float4 memory[];
  Floats* const totals = reinterpret_cast<Floats*>(memory);  // kThreads of them
  const int sharing = threads_per_entry(sum), lines = kThreads / sharing;
  const int line = threadIdx.x % lines, first_part = threadIdx.x / lines;
  const int parts = sum.counts[0] * sum.counts[1], inner_parts = sum.counts[1];
  const Index floats = floats_of(sum), components = sum.components;
  const Index rows = sum.sizes[1], entries = sum.sizes[2];
  const int64_t inner = sum.sizes[2] * sum.components, outer = floats_of(sum) * inner_parts;
  const Index per_block = lines * Width;
  for (Index first = blockIdx.x * per_block; first < floats; first += gridDim.x * per_block) {
    const Index index = first + line * Width;
    const Index at = Width == 1 ? index / components : index;
    const Index component = Width == 1 ? index - at * components : 0;
    const Index row = at / entries, entry = at - row * entries, group = row / rows;
    const float* const p =
        sum.parts + int64_t(row) * inner_parts * inner + entry * sum.components + component;
    Floats total{};
    const auto add = [&](Floats part) {
#pragma unroll
      for (int k = 0; k < Width; ++k) total.v[k] += part.v[k];
    };
    if (index < floats) {
      int i = first_part / inner_parts, j = first_part % inner_parts;
      wait_for_previous();
#pragma unroll 1
      for (int part = first_part; part < parts; part += kParts * sharing) {
        Floats some[kParts];
#pragma unroll
        for (int k = 0; k < kParts; ++k) {
          some[k] = part + k * sharing < parts
                        ? *reinterpret_cast<const Floats*>(p + i * outer + j * inner)
                        : Floats();
          i += sharing / inner_parts, j += sharing % inner_parts;
          if (j >= inner_parts) j -= inner_parts, ++i;
        }
#pragma unroll
        for (int k = 0; k < kParts; ++k) add(some[k]);
      }
    }
    for (int half = sharing / 2; half > 0; half /= 2) {
      __syncthreads();  // what was there has been read
      totals[threadIdx.x] = total;
      __syncthreads();
      if (first_part < half) add(totals[threadIdx.x + half * lines]);
    }
    if (index >= floats || first_part > 0) continue;
    const int64_t item = sum.to.storage == Storage::float64 ? 8 : 4;
    char* const p_to = sum.to.data + group * sum.to.group + (row - group * rows) * sum.to.row +
                       entry * sum.to.last + component * item;
#pragma unroll
    for (int k = 0; k < Width; ++k) store_real(p_to + k * sum.to.last, sum.to.storage, total.v[k]);
  }
}

template <class Index>
__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ Sums sums) {
  let_next_begin();
  const Sum& sum = sums.each[blockIdx.y];
  if (floats_per_thread(sum) == kWide) sum_parts<kWide, Index>(sum);
  else sum_parts<1, Index>(sum);
}

}  // namespace VIM_MM_ISA
namespace {

template <class Method, class E>
__global__ void __launch_bounds__(kThreads)
    discretize_kernel(int64_t n, const float* dt, const E* a, E* out) {
  const int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  if (i >= n) return;
  const Coefficients<E> c = Method::coefficients(dt[i], a[i]);
  const auto d = Method::derivatives(dt[i], a[i], c);
  const E values[6] = {c.a_bar,
                       c.beta,
                       a[i] * d.a_bar_z,
                       dt[i] * d.a_bar_z,
                       value_of<E>(d.beta_dt),
                       value_of<E>(d.beta_a)};
  for (int k = 0; k < 6; ++k) out[k * n + i] = values[k];
}

// A thread has eight steps, a byte of their word, so that few rows fill more than a block or two.
constexpr int kSteps = 8, kBytes = kChunk / kSteps;

__global__ void __launch_bounds__(kThreads)
    cuts_kernel(View reset, int64_t batch, int64_t steps, uint8_t* cuts) {
  const int64_t words = (steps + kChunk - 1) / kChunk + 1;
  const int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x, word = i / kBytes;
  if (word >= batch * 2 * words) return;
  const int64_t first = word % words * kChunk + i % kBytes * kSteps, b = word / words / 2;
  const bool reverse = word / words % 2;
  uint8_t byte = 0;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    // In reverse a sequence begins with the step before in scan order, and nothing before the first one.
    const int64_t step = first + k, t = reverse ? steps - step : step;
    if (step < steps && t < steps && reset.data[b * reset.batch + t * reset.last]) byte |= 1 << k;
  }
  cuts[i] = byte;
}

}  // namespace

void find_cuts(const View& reset, int64_t batch, int64_t steps, uint64_t* cuts, void* stream) {
  const int64_t words = batch * 2 * ((steps + kChunk - 1) / kChunk + 1);
  if (words == 0) return;
  enqueue(cuts_kernel, grid_of((words * kBytes + kThreads - 1) / kThreads), kThreads, 0, stream,
          reset, batch, steps, reinterpret_cast<uint8_t*>(cuts));
}

void sum_in_order(const Sums& sums, void* stream) {
  int64_t most = 0, threads = 0;
  for (int i = 0; i < sums.count; ++i) {
    const Sum& sum = sums.each[i];
    most = std::max(most, floats_of(sum));
    threads = std::max(threads, floats_of(sum) * threads_per_entry(sum) / floats_per_thread(sum));
  }
  if (most == 0) return;
  const int64_t blocks = std::min<int64_t>((threads + kThreads - 1) / kThreads, 1 << 16);
  const dim3 grid(static_cast<unsigned>(blocks), sums.count);
  const auto kernel = most < int64_t(1) << 30 ? sum_kernel<uint32_t> : sum_kernel<uint64_t>;
  launch(kernel, {grid, kThreads, kThreads * kWide * sizeof(float)}, stream, sums);
}

void discretize(int64_t n, int method, bool is_complex, const float* dt, const void* a, void* out,
                void* stream) {
  if (n == 0) return;
  const auto run = [&](auto e) {
    using E = decltype(e);
    dispatch_method(method, [&](auto m) {
      enqueue(discretize_kernel<decltype(m), E>,
              static_cast<unsigned>((n + kThreads - 1) / kThreads), kThreads, 0, stream, n, dt,
              static_cast<const E*>(a), static_cast<E*>(out));
    });
  };
  if (is_complex) run(Complex<float>());
  else run(float());
}

}  // namespace vim_mm
