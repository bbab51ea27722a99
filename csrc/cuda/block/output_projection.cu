// The gate and out_proj in one pass: what is gated goes through shared memory to the tensor cores and
// nowhere else. A block has all of C for its tokens, so that y and z come into a multiprocessor once;
// the weights come from L2 into every one, and that is what decides how large a tile is best.
//
// SPDX-License-Identifier: Apache-2.0
#include "../common/async_copy.cuh"
#include "../common/launch.cuh"
#include "block.h"
#include "gate.cuh"
#include "tensor_core.cuh"

namespace vim_mm {
inline namespace VIM_MM_ISA {

// Terms of a stage: as many entries of a row of weights as a quarter of a warp reads at once.
constexpr int kPack = 8, kTerms = 4 * kPack, kFragment = 16;
constexpr int kOuterWarps = 6, kTokenWarps = 2, kThreads = kWarp * kOuterWarps * kTokenWarps;
constexpr int kMostFragments = 4;  // of tokens, of one warp
constexpr int kGroups = 2;         // of kFragment entries of C, of one warp
// The weights of a wider model would cost more than is gained: with C = 384 and 8192 tokens they are
// 75 MB from L2, three times what is gated, written and read. Blocks that share C would gate twice.
constexpr int kMostOuter = kOuterWarps * kGroups * kFragment;

// Of so many fragments of tokens to a warp.
template <int Fragments>
struct OutputTile {
  static constexpr int tokens = kTokenWarps * Fragments * kFragment, packs = tokens / kPack;
  static constexpr int pitch = packs + 1;  // odd: the packs of eight rows lie on different banks
  // Stages that are copied ahead: enough bytes in flight to reach the bandwidth, in no more shared
  // memory than a block may have on every GPU.
  static constexpr int ahead = 12 / Fragments;
  static constexpr int entries = kTerms * packs;

  uint4 y[ahead][kMaxDirections][entries], z[ahead][entries];
  uint4 gated[2][kTerms * pitch];
};

// The packs of y and z that a thread copies, gates and hands over, the same in every stage. Nobody
// else reads its copies: only what is gated needs a barrier.
template <class T, int Fragments>
class GatedPacks {
  using Tile = OutputTile<Fragments>;
  static constexpr int count = (Tile::entries + kThreads - 1) / kThreads;

 public:
  __device__ __forceinline__ GatedPacks(const OutputProjection& p, Tile& tile)
      : p_(p), tile_(tile), row_packs_(p.tokens / kPack) {
#pragma unroll
    for (int n = 0; n < count; ++n) {
      const int i = threadIdx.x + n * kThreads, row = i / Tile::packs;
      const int64_t pack = blockIdx.x * int64_t(Tile::packs) + i % Tile::packs;
      rows_left_[n] = pack < row_packs_ ? int(p.channels) - row : 0;
      first_[n] = row * row_packs_ + pack;
    }
  }

  // Of one stage, `ahead` stages before it is gated; of none past the last one, or the block would end
  // before its copies have come. In the place of a direction that there is not come zeros.
  __device__ __forceinline__ void copy(int stage) {
    const int slot = stage % Tile::ahead;
    const uint4* const y = static_cast<const uint4*>(p_.gate.y);
    const uint4* const z = static_cast<const uint4*>(p_.gate.z);
    if (stage * kTerms < p_.channels) {
      for_each(stage, [&](int i, int64_t at, bool inside) {
        const auto copy = [](uint4* to, const uint4* from, bool inside) {
          start_copy<sizeof(uint4)>(to, from, inside ? sizeof(uint4) : 0);
        };
        copy(&tile_.y[slot][0][i], y + at, inside);
        copy(&tile_.y[slot][1][i], y + p_.channels * row_packs_ + at,
             inside && p_.gate.directions > 1);
        copy(&tile_.z[slot][i], z + at, inside);
      });
    }
    end_group_of_copies();
  }

  __device__ __forceinline__ void gate(int stage) {
    wait_for_copies<Tile::ahead - 1>();
    const int slot = stage % Tile::ahead;
    using Entries = Pack<T, kPack>;
    for_each(stage, [&](int i, int64_t at, bool inside) {
      float sum[kPack], other[kPack], z[kPack], out[kPack];
      load_pack(entries_of(tile_.y[slot][0][i]), sum);
      load_pack(entries_of(tile_.y[slot][1][i]), other);
      load_pack(entries_of(tile_.z[slot][i]), z);
#pragma unroll
      for (int j = 0; j < kPack; ++j) sum[j] += other[j];
      gate_pack<T>(sum, z, p_.gate.scale, out);
      const int place = place_of(i / Tile::packs) * Tile::pitch + i % Tile::packs;
      store_pack(entries_of(tile_.gated[stage % 2][place]), out);
      if (p_.gate.sum && inside) store_pack(static_cast<Entries*>(p_.gate.sum)[at].item, sum);
    });
  }

 private:
  static __device__ __forceinline__ T* entries_of(uint4& pack) {
    return reinterpret_cast<T*>(&pack);
  }
  // Calls f(i, at, inside) for each pack i of the thread: its place in [H, T], or it is outside.
  template <class F>
  __device__ __forceinline__ void for_each(int stage, const F& f) {
#pragma unroll
    for (int n = 0; n < count; ++n) {
      const int i = threadIdx.x + n * kThreads, row = stage * kTerms;
      if (Tile::entries % kThreads == 0 || i < Tile::entries)
        f(i, first_[n] + row * row_packs_, row < rows_left_[n]);
    }
  }
  // A lane of the product has eight neighbouring terms of the weights: bits 3 and 4 of a term are its
  // lane, bit 2 the instruction, bit 1 the half of it, bit 0 the entry of a pair. Fragments want rows
  // by instruction, half, lane and entry.
  static __device__ __forceinline__ int place_of(int term) {
    const int lane = term / 8, instruction = term / 4 % 2, half = term / 2 % 2;
    return 16 * instruction + 8 * half + 2 * lane + term % 2;
  }

  const OutputProjection& p_;
  Tile& tile_;
  const int64_t row_packs_;
  int64_t first_[count];  // place of stage 0
  int rows_left_[count];  // from there on; none beside the tokens
};

// Where a lane finds its weights. Which entries of C a fragment has is free too: two of them alternate
// by pairs, so that a lane has four neighbours of every token. What is past an end is read from before
// it: as terms it is multiplied with zeros, as entries of C it is not stored.
class WeightRows {
 public:
  struct Packs {
    uint4 of[kGroups][2];
  };

  __device__ __forceinline__ explicit WeightRows(const OutputProjection& p)
      : weight_(static_cast<const uint4*>(p.weight)), row_packs_(int(p.channels / kPack)) {
    const int row = threadIdx.x % kWarp / 4;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int outer = first_outer(g) + row / 2 * 4 + 2 * j + row % 2;
        first_[g][j] = (outer < p.outer ? outer : int(p.outer) - 1) * row_packs_;
      }
    }
  }
  static __device__ __forceinline__ int first_outer(int group) {
    return (group * kOuterWarps + threadIdx.x / kWarp % kOuterWarps) * kFragment;
  }
  __device__ __forceinline__ void load(Packs& packs, int stage) const {
    const int pack = stage * (kTerms / kPack) + threadIdx.x % 4;
    const int at = pack < row_packs_ ? pack : row_packs_ - 1;
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
      for (int j = 0; j < 2; ++j) packs.of[g][j] = weight_[first_[g][j] + at];
  }

 private:
  const uint4* const weight_;
  const int row_packs_;
  int first_[kGroups][2];
};

template <class T, int Fragments>
__global__ void __launch_bounds__(kThreads)
    output_projection_kernel(const __grid_constant__ OutputProjection p) {
  using Tile = OutputTile<Fragments>;
  let_next_begin();
  extern __shared__ float4 memory[];
  Tile& tile = *reinterpret_cast<Tile*>(memory);
  const int row = threadIdx.x % kWarp / 4, column = threadIdx.x % 4;
  const int first_fragment = threadIdx.x / kWarp / kOuterWarps * Fragments;
  const int stages = int((p.channels + kTerms - 1) / kTerms);

  GatedPacks<T, Fragments> gating(p, tile);
  const WeightRows weights(p);
  WeightRows::Packs even, odd;  // of every other stage, asked for as soon as there is room
  wait_for_previous();
  gating.copy(0);
  weights.load(even, 0), weights.load(odd, 1);
  __syncthreads();  // or the compiler asks for weights only when the first copies have come
  for (int s = 1; s < Tile::ahead; ++s) gating.copy(s);

  float sums[Fragments][kGroups][2][4];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int outer = WeightRows::first_outer(g) + 4 * column;
    float bias[4] = {};
    if (p.bias && outer < p.outer) load_pack(static_cast<const T*>(p.bias) + outer, bias);
#pragma unroll
    for (int r = 0; r < Fragments; ++r)
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[r][g][i / 4][i % 4] = bias[i / 4 * 2 + i % 2];
  }

  const auto multiply = [&](int stage, WeightRows::Packs& packs) {
    __syncthreads();  // this stage is gated, and nobody reads the one before
    gating.copy(stage + Tile::ahead);
    const uint4* const gated = tile.gated[stage % 2] + first_fragment * (kFragment / kPack);
#pragma unroll
    for (int k = 0; k < kTerms / kFragment; ++k) {
#pragma unroll
      for (int r = 0; r < Fragments; ++r) {
        uint32_t a[4];
        load_columns(a, gated + k * kFragment * Tile::pitch + 2 * r, Tile::pitch);
#pragma unroll
        for (int g = 0; g < kGroups; ++g)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const uint4 b = packs.of[g][j];
            multiply_add<T>(sums[r][g][j], a[0], a[1], a[2], a[3], k ? b.z : b.x, k ? b.w : b.y);
          }
      }
    }
    weights.load(packs, stage + 2);
    if (stage + 1 < stages) gating.gate(stage + 1);
  };
  gating.gate(0);
  for (int stage = 0; stage < stages; stage += 2) {
    multiply(stage, even);
    if (stage + 1 < stages) multiply(stage + 1, odd);
  }

  const int64_t first = blockIdx.x * int64_t(Tile::tokens) + first_fragment * kFragment + row;
#pragma unroll
  for (int i = 0; i < 2 * Fragments; ++i) {
    const int64_t token = first + i * kPack;
    if (token >= p.tokens) break;
    uint2* const out = static_cast<uint2*>(p.out) + token * (p.outer / 4);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int outer = WeightRows::first_outer(g) + 4 * column;
      const auto word = [&](int j) {
        const float* const pair = sums[i / 2][g][j] + i % 2 * 2;
        return word_of<T>(pair[0], pair[1]);
      };
      if (outer < p.outer) out[outer / 4] = make_uint2(word(0), word(1));
    }
  }
}

}  // namespace VIM_MM_ISA

namespace {

int64_t tiles_of(const OutputProjection& p, int fragments) {
  const int64_t tokens = OutputTile<1>::tokens * fragments;
  return (p.tokens + tokens - 1) / tokens;
}

// The size whose blocks are done first, if each takes a multiprocessor as long as it reads.
int best_fragments(const OutputProjection& p) {
  const int64_t multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  int best = 1;
  int64_t least = INT64_MAX;
  for (int fragments = 1; fragments <= kMostFragments; ++fragments) {
    const int64_t rounds = (tiles_of(p, fragments) + multiprocessors - 1) / multiprocessors;
    const int64_t reads = (p.gate.directions + 1) * OutputTile<1>::tokens * fragments + p.outer;
    if (rounds * reads < least) least = rounds * reads, best = fragments;
  }
  return best;
}

template <class T, int Fragments = 1>
void launch_tiles(const OutputProjection& p, int fragments, void* stream) {
  if constexpr (Fragments < kMostFragments)
    if (fragments > Fragments) return launch_tiles<T, Fragments + 1>(p, fragments, stream);
  launch(output_projection_kernel<T, Fragments>,
         {grid_of(tiles_of(p, Fragments)), kThreads, sizeof(OutputTile<Fragments>)}, Begin::early,
         stream, p);
}

}  // namespace

bool can_project_output(const OutputProjection& p) {
  const Storage storage = p.gate.storage;
  return item_of(storage) == 2 && p.channels > 0 && p.outer > 0 && p.outer <= kMostOuter &&
         fits(p.gate.y, storage, kPack, p.tokens) && fits(p.gate.z, storage, kPack, p.tokens) &&
         fits(p.gate.sum, storage, kPack, p.tokens) && fits(p.weight, storage, kPack, p.channels) &&
         fits(p.bias, storage, kQuad, 0) && fits(p.out, storage, kQuad, p.outer);
}

void project_output(const OutputProjection& p, void* stream) {
  const int fragments = best_fragments(p);
  if (p.gate.storage == Storage::float16) launch_tiles<__half>(p, fragments, stream);
  else launch_tiles<__nv_bfloat16>(p, fragments, stream);
}

}  // namespace vim_mm
