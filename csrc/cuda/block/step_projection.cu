// The projection of the step sizes. Its inner dimension is a rank of a dozen or a few: what it writes
// decides, many times as much as it reads, and libraries of matrix products are made for others.
// Addresses count in packs of tokens, not in tokens: else nvcc splits a store of a pack that not every
// thread makes into stores of single entries.
//
// SPDX-License-Identifier: Apache-2.0
#include "../common/launch.cuh"
#include "block.h"
#include "tensor_core.cuh"

namespace vim_mm {
namespace {

// By tensor cores: a warp has a square of channels and tokens.
constexpr int kWarps = 4, kPack = 8, kTile = 8 * kPack;
constexpr int kInstruction = 16;  // rows that one takes
constexpr int kMostRank = 64;     // the greatest whose operands fit in registers
// Otherwise: what a thread has.
constexpr int kThreads = 256, kChannels = 8;

// What a lane has of an operand: four rows for each instruction, of eight neighbours that fragments
// of as many instructions have in the same place. Fragments want rows in pairs.
template <int Instructions>
struct Operand {
  uint32_t pair[Instructions][2][kPack];

  // Of so many rows, each of `size` packs, from their pack `first` on; zeros below and beside them.
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
  // Of two neighbours in one row and in the next, those above each other.
  static __device__ __forceinline__ void interleave(uint32_t row, uint32_t next, uint32_t* pairs) {
    pairs[0] = __byte_perm(row, next, 0x5410);
    pairs[1] = __byte_perm(row, next, 0x7632);
  }
};

// Which rows, columns and terms of the sums a fragment has is free, as long as all agree: so lanes
// load and store packs where they lie. Tokens are rows of fragments, because eight lanes share a
// column: they store 128 bytes of a channel at once, and few sectors of memory in part where channels
// are aligned to no more than a pack.
template <class T, int Instructions>
__global__ void __launch_bounds__(kWarp* kWarps)
    tensor_core_kernel(const __grid_constant__ StepProjection p) {
  let_next_begin();
  const int row = threadIdx.x % kWarp / 4, column = threadIdx.x % 4;
  const int64_t set = blockIdx.z, channel_pack = blockIdx.y * int64_t(kPack);
  const int64_t token_packs = p.tokens / kPack, channel_packs = p.channels / kPack;
  const int64_t first_pack = (blockIdx.x * int64_t(kWarps) + threadIdx.x / kWarp) * kPack;
  if (first_pack >= token_packs) return;
  wait_for_previous();
  const uint4* const weights = static_cast<const uint4*>(p.weight) + set * p.rank * channel_packs;
  const Operand<Instructions> weight(weights, p.rank, channel_packs, channel_pack + row);
  const int64_t token_pack = first_pack + row;
  const Operand<Instructions> dt(static_cast<const uint4*>(p.dt) + set * (p.dt_set / kPack), p.rank,
                                 token_packs, token_pack);
  const int64_t channel = (channel_pack + 2 * column) * kPack;
  uint4* delta =
      static_cast<uint4*>(p.delta) + (set * p.channels + channel) * token_packs + token_pack;
#pragma unroll
  for (int c = 0; c < kPack; ++c, delta += token_packs) {
    float sums[kPack / 2][4] = {};  // of two tokens in two packs of channels each
#pragma unroll
    for (int i = 0; i < Instructions; ++i) {
      const auto &w = weight.pair[i], &t = dt.pair[i];
#pragma unroll
      for (int j = 0; j < kPack / 2; ++j)
        multiply_add<T>(sums[j], t[0][2 * j], t[0][2 * j + 1], t[1][2 * j], t[1][2 * j + 1],
                        w[0][c], w[1][c]);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const auto word = [&](int j) { return word_of<T>(sums[j][k], sums[j][2 + k]); };
      if (token_pack < token_packs && channel_pack + 2 * column + k < channel_packs)
        delta[k * kPack * token_packs] = make_uint4(word(0), word(1), word(2), word(3));
    }
  }
}

// Any type, layout and rank, by plain sums: each thread has Width tokens in kChannels channels.
template <class T, int Width>
__global__ void __launch_bounds__(kThreads) plain_kernel(const __grid_constant__ StepProjection p) {
  let_next_begin();
  using Tokens = Pack<T, Width>;
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
    load_pack(dt[r * size].item, x);
#pragma unroll
    for (int c = 0; c < kChannels; c += Width) {
      float pack[Width] = {};
      if (first + c < p.channels) load_pack(weight + r * p.channels + c, pack);
#pragma unroll
      for (int j = 0; j < Width; ++j) w[c + j] = pack[j];
    }
#pragma unroll
    for (int c = 0; c < kChannels; ++c)
#pragma unroll
      for (int j = 0; j < Width; ++j) sums[c][j] += w[c] * x[j];
  }
  Tokens* const delta = static_cast<Tokens*>(p.delta) + (set * p.channels + first) * size + at;
#pragma unroll
  for (int c = 0; c < kChannels; ++c)
    if (first + c < p.channels) store_pack(delta[c * size].item, sums[c]);
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
         Begin::early, stream, p);
}

template <class T, int Width>
void launch_plain(const StepProjection& p, void* stream) {
  launch(plain_kernel<T, Width>, {blocks_of(p, kThreads * Width, kChannels), kThreads},
         Begin::early, stream, p);
}

}  // namespace

void project_steps(const StepProjection& p, void* stream) {
  if (p.tokens == 0 || p.channels == 0) return;
  dispatch_storage(p.storage, [&](auto t) {
    using T = decltype(t);
    if constexpr (sizeof(T) == 2) {
      if (p.rank <= kMostRank && is_aligned(p, kPack)) return launch_tensor_core<T>(p, stream);
    }
    if (is_aligned(p, kQuad)) launch_plain<T, kQuad>(p, stream);
    else launch_plain<T, 1>(p, stream);
  });
}

}  // namespace vim_mm
