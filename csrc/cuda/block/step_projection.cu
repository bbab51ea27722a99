// dt_proj: the product that expands the low-rank dt to the step sizes of all channels. The inner dimension
// is small (12, say), so that the bytes written bound the kernel; cuBLAS is made for other shapes.
// Addresses count vectors of tokens, not tokens: else nvcc splits a predicated store of a vector into
// stores of single entries.
//
// SPDX-License-Identifier: Apache-2.0
#include "../common/launch.cuh"
#include "block.h"
#include "tensor_core.cuh"

namespace vim_mm {
namespace {

// Tensor cores: a warp computes a square of channels and tokens.
constexpr int kWarps = 4, kWidth = 8, kTile = 8 * kWidth;
constexpr int kInstruction = 16;  // inner dimension of one mma
constexpr int kMostRank = 64;     // the largest rank whose operands fit in registers
// Plain sums: a block's threads, and a thread's channels.
constexpr int kThreads = 256, kChannels = 8;

// A lane's part of an operand: for each mma four rows of eight neighbours, interleaved in pairs of rows as
// fragments want them.
template <int Instructions>
struct Operand {
  uint32_t pair[Instructions][2][kWidth];

  // From `count` rows of `size` vectors each, beginning at vector `first`; zeros outside.
  __device__ __forceinline__ Operand(const uint4* rows, int count, int64_t size, int64_t first) {
    const int lane_row = threadIdx.x % 4 * 4;
    const bool inside = first < size;
    const uint4* next = rows + lane_row * size + first;
#pragma unroll
    for (int i = 0; i < Instructions; ++i, next += (kInstruction - 4) * size) {
      uint4 row[4];
#pragma unroll
      for (int r = 0; r < 4; ++r, next += size) {
        row[r] = make_uint4(0, 0, 0, 0);
        if (inside && i * kInstruction + lane_row + r < count) row[r] = *next;
      }
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        interleave(row[2 * p].x, row[2 * p + 1].x, pair[i][p]);
        interleave(row[2 * p].y, row[2 * p + 1].y, pair[i][p] + 2);
        interleave(row[2 * p].z, row[2 * p + 1].z, pair[i][p] + 4);
        interleave(row[2 * p].w, row[2 * p + 1].w, pair[i][p] + 6);
      }
    }
  }

 private:
  // Two rows of two neighbours as two columns.
  static __device__ __forceinline__ void interleave(uint32_t row, uint32_t next, uint32_t* pairs) {
    pairs[0] = __byte_perm(row, next, 0x5410);
    pairs[1] = __byte_perm(row, next, 0x7632);
  }
};

// Rows, columns and terms may be permuted as long as both operands agree, so that lanes load and store
// whole vectors. Tokens are the rows of fragments, because eight lanes share a column: together they store
// 128 bytes of a channel, and write few sectors of memory in part.
template <class T, int Instructions>
__global__ void __launch_bounds__(kWarp* kWarps)
    tensor_core_kernel(const __grid_constant__ StepProjection p) {
  let_next_begin();
  const int row = threadIdx.x % kWarp / 4, column = threadIdx.x % 4;
  const int64_t set = blockIdx.z, channel_vector = blockIdx.y * int64_t(kWidth);
  const int64_t token_vectors = p.tokens / kWidth, channel_vectors = p.channels / kWidth;
  const int64_t first_vector = (blockIdx.x * int64_t(kWarps) + threadIdx.x / kWarp) * kWidth;
  if (first_vector >= token_vectors) return;
  wait_for_previous();
  const uint4* const weights = static_cast<const uint4*>(p.weight) + set * p.rank * channel_vectors;
  const Operand<Instructions> weight(weights, p.rank, channel_vectors, channel_vector + row);
  const int64_t token_vector = first_vector + row;
  const Operand<Instructions> dt(static_cast<const uint4*>(p.dt) + set * (p.dt_set / kWidth),
                                 p.rank, token_vectors, token_vector);
  const int64_t channel = (channel_vector + 2 * column) * kWidth;
  uint4* delta =
      static_cast<uint4*>(p.delta) + (set * p.channels + channel) * token_vectors + token_vector;
#pragma unroll
  for (int c = 0; c < kWidth; ++c, delta += token_vectors) {
    float sums[kWidth / 2][4] = {};  // of two tokens in two vectors of channels each
#pragma unroll
    for (int i = 0; i < Instructions; ++i) {
      const auto &w = weight.pair[i], &t = dt.pair[i];
#pragma unroll
      for (int j = 0; j < kWidth / 2; ++j)
        multiply_add<T>(sums[j], t[0][2 * j], t[0][2 * j + 1], t[1][2 * j], t[1][2 * j + 1],
                        w[0][c], w[1][c]);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const auto word = [&](int j) { return word_of<T>(sums[j][k], sums[j][2 + k]); };
      if (token_vector < token_vectors && channel_vector + 2 * column + k < channel_vectors)
        delta[k * kWidth * token_vectors] = make_uint4(word(0), word(1), word(2), word(3));
    }
  }
}

// Any type, layout and rank, by plain sums: a thread computes Width tokens of kChannels channels.
template <class T, int Width>
__global__ void __launch_bounds__(kThreads) plain_kernel(const __grid_constant__ StepProjection p) {
  let_next_begin();
  using Tokens = Vector<T, Width>;
  const int64_t set = blockIdx.z, first = blockIdx.y * int64_t(kChannels);
  const int64_t size = p.tokens / Width, at = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  if (at >= size) return;
  wait_for_previous();
  const T* const weight = static_cast<const T*>(p.weight) + set * p.rank * p.channels + first;
  const Tokens* const dt = static_cast<const Tokens*>(p.dt) + set * (p.dt_set / Width) + at;
  float sums[kChannels][Width] = {};
#pragma unroll 4
  for (int64_t r = 0; r < p.rank; ++r) {
    float x[Width], w[kChannels] = {};
    load_vector(dt[r * size].item, x);
#pragma unroll
    for (int c = 0; c < kChannels; c += Width) {
      float vector[Width] = {};
      if (first + c < p.channels) load_vector(weight + r * p.channels + c, vector);
#pragma unroll
      for (int j = 0; j < Width; ++j) w[c + j] = vector[j];
    }
#pragma unroll
    for (int c = 0; c < kChannels; ++c)
#pragma unroll
      for (int j = 0; j < Width; ++j) sums[c][j] += w[c] * x[j];
  }
  Tokens* const delta = static_cast<Tokens*>(p.delta) + (set * p.channels + first) * size + at;
#pragma unroll
  for (int c = 0; c < kChannels; ++c)
    if (first + c < p.channels) store_vector(delta[c * size].item, sums[c]);
}

bool is_aligned(const StepProjection& p, int width) {
  return fits(p.weight, p.storage, width, p.channels) && fits(p.dt, p.storage, width, p.dt_set) &&
         fits(p.delta, p.storage, width, p.tokens);
}

// Blocks of so many tokens and channels.
dim3 blocks_of(const StepProjection& p, int64_t tokens, int64_t channels) {
  const int64_t columns = (p.tokens + tokens - 1) / tokens;
  const int64_t rows = (p.channels + channels - 1) / channels;
  if (columns > INT32_MAX || rows > UINT16_MAX)
    throw std::runtime_error("vim_mm: too many tokens or channels for one launch");
  return dim3(static_cast<unsigned>(columns), static_cast<unsigned>(rows), p.sets);
}

template <class T, int Instructions = 1>
void launch_tensor_core(const StepProjection& p, void* stream) {
  if constexpr (Instructions * kInstruction < kMostRank)
    if (p.rank > Instructions * kInstruction)
      return launch_tensor_core<T, Instructions + 1>(p, stream);
  launch(tensor_core_kernel<T, Instructions>, {blocks_of(p, kWarps * kTile, kTile), kWarp * kWarps},
         stream, p);
}

template <class T, int Width>
void launch_plain(const StepProjection& p, void* stream) {
  launch(plain_kernel<T, Width>, {blocks_of(p, kThreads * Width, kChannels), kThreads}, stream, p);
}

}  // namespace

void project_steps(const StepProjection& p, void* stream) {
  if (p.tokens == 0 || p.channels == 0) return;
  dispatch_storage(p.storage, [&](auto t) {
    using T = decltype(t);
    if constexpr (sizeof(T) == 2) {
      if (p.rank <= kMostRank && is_aligned(p, kWidth)) return launch_tensor_core<T>(p, stream);
    }
    if (is_aligned(p, kQuad)) launch_plain<T, kQuad>(p, stream);
    else launch_plain<T, 1>(p, stream);
  });
}

}  // namespace vim_mm
