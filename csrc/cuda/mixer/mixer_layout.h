// The sizes of a mixer's call, its parameters, and the buffers of its passes. Letters as in ops.cpp;
// T = B L tokens. Nothing here needs a GPU.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "../block/block.h"
#include "../ops/workspace_layout.h"

namespace vim_mm {

using Integers = std::vector<int64_t>;

// Parameters, in the order in which operators take them: the first four once, the following for each
// set, A_log for each direction.
enum Kind {
  kInProj,
  kInBias,
  kOutProj,
  kOutBias,
  kConv,
  kConvBias,
  kXProj,
  kDtProj,
  kDtBias,
  kD,
  kALog,
  kKinds
};
constexpr int kSingle = kConv, kEach = kALog - kConv;
constexpr int kMaxParameters = kSingle + kMaxDirections * (kEach + 1);
static_assert(kMaxParameters == kMaxConversions, "one launch converts all of them");

struct ParameterKind {
  const char* name;
  int count;  // how many there are
  int dims;
  std::array<int64_t, 3> sizes;  // of each
  bool optional = false;

  int64_t numel() const {
    int64_t numel = 1;
    for (int i = 0; i < dims; ++i) numel *= sizes[i];
    return numel;
  }
};

// The sizes that parameters alone tell: H, N, R and W.
struct InnerSizes {
  int64_t channels, states, rank, taps;
};

struct Mixer {
  int64_t batch, steps, outer, channels, states, rank, taps;
  int sets, directions, method;
  bool normed;      // with the RMSNorm before it
  ScalarType type;  // of activations
  std::array<ParameterKind, kKinds> kinds;

  // For x [B, L, C] and so many parameters.
  Mixer(std::array<int64_t, 3> x, int64_t parameters, const InnerSizes& inner, ScalarType type,
        bool normed, int64_t method, int64_t directions);

  int64_t tokens() const { return batch * steps; }
  int64_t rows() const { return rank + 2 * states; }  // of dt, B and C
  bool shares() const { return sets < directions; }   // whether directions share parameters
  int parameters() const { return index(kALog, directions); }
  // Where the k-th parameter of a kind comes.
  int index(Kind kind, int k = 0) const {
    if (kind < kSingle) return kind;
    return kind == kALog ? kSingle + sets * kEach + k : kSingle + k * kEach + kind - kSingle;
  }
  // Calls f(kind, k, index) for each parameter, in their order.
  template <class F>
  void for_each_parameter(const F& f) const {
    for (int kind = 0; kind < kSingle; ++kind) f(Kind(kind), 0, kind);
    for (int k = 0; k < sets; ++k)
      for (int kind = kSingle; kind < kALog; ++kind) f(Kind(kind), k, index(Kind(kind), k));
    for (int k = 0; k < directions; ++k) f(kALog, k, index(kALog, k));
  }
};

// What forward saves for backward: [P, ..] of all sets, [K, ..] of all directions.
struct SavedBuffers {
  WorkspaceLayout layout;
  // Parameters as products (in the dtype of activations) and kernels (float32) take them: dt_proj
  // transposed to [P, R, H], and A = -exp(A_log).
  std::array<Buffer, kKinds> parameters;
  Buffer normed;  // [T, C], and
  Buffer rstd;    // [T], 1 / rms: both only with the norm
  Buffer xz;      // [2, H, T]
  Buffer dt_B_C;  // [P, R + 2 N, T]
  Buffer edges;   // the states that enter the chunks of the scan
  Buffer sum;     // [H, T], of the scan's output over directions: only for backward

  SavedBuffers(const Mixer&, bool for_backward);
};

// What forward needs besides.
struct ForwardBuffers {
  WorkspaceLayout layout;
  Buffer u, delta;    // [P, H, T]
  Buffer y;           // [K, H, T]
  Buffer last_state;  // [B, K, H, N]
  Buffer gated;       // [H, T], in the memory of u

  explicit ForwardBuffers(const Mixer&);
};

struct BackwardBuffers {
  WorkspaceLayout layout;
  Buffer grad_and_gated;                // [2, H, T]: gradient of the gated sum, and the gated sum
  Buffer grad_y;                        // [H, T]
  Buffer grad_xz;                       // [2, H, T]
  Buffer u, delta;                      // [P, H, T], computed once more
  Buffer grad_u, grad_delta;            // [K, H, T]
  Buffer grad_dt_B_C;                   // [K, R + 2 N, T]
  std::array<Buffer, kSingle> singles;  // gradients of parameters that are not float32 themselves
  // Sums over tokens, in float32.
  Buffer conv, conv_bias;  // [P, H, W], [P, H]
  // One product for all sets, of which the blocks on the diagonal count.
  Buffer x_proj, dt_proj;  // [P (R + 2 N), P H], [P H, P (R + 2 N)]
  Buffer D, dt_bias, A;    // [K, H], and [K, H, N]
  // Gradients of sets: sums over directions where they share parameters, else those above.
  struct {
    Buffer grad_u, grad_delta, grad_dt_B_C, D, dt_bias;
  } set;
  Buffer grad_normed, norm_parts;  // [T, C], and of the weight's gradient: only with the norm

  // `types`: of each parameter its dtype as a number of Storage, -1 for none.
  BackwardBuffers(const Mixer&, const Integers& types);
};

}  // namespace vim_mm
