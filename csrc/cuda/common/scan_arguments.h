// What the CUDA operators (which know tensors) hand to the kernels (which do not).
// Letters as in ops.cpp; H counts the channels of a group.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdint.h>

namespace vim_mm {

// Storage types. Complex tensors carry the type of their parts.
enum class Storage : int { float32, float16, bfloat16, float64 };

// A tensor by its strides in bytes, so that the kernels need no template per dtype.
// [B, G, H, L], [B, G, N, L], or with a stride of 0 for the batch [G, H, N] and [G, H].
struct View {
  char* data = nullptr;  // null: there is no such tensor
  Storage storage = Storage::float32;
  int64_t batch = 0, group = 0, row = 0, last = 0;
};

constexpr int kChunk = 64;        // steps between the edges whose states forward keeps for backward
constexpr int kMaxGroups = 4096;  // whose directions differ
// Of the GPUs that the sizes of launches were measured on, H100 and H200. The number stays this on others, so that
// every GPU adds up in the same order.
constexpr int64_t kMultiprocessors = 132;

struct Directions {
  uint32_t bits[kMaxGroups / 32];  // set: that group is scanned from the last step to the first
};

struct ScanArguments {
  View u, delta, z, A, B, C, D, delta_bias;  // z is u where there is no gate
  bool gated, delta_softplus, constant_B, constant_C, is_complex;
  int64_t batch, groups, channels, steps, states;
  int method;
  bool same_direction;  // then all groups have that of group 0
  bool aligned;         // four neighbours in time, of every tensor, can be moved at once
  Directions directions;
};

inline int64_t rows_of(const ScanArguments& scan) {
  return scan.batch * scan.groups * scan.channels;
}
inline int64_t chunks_of(const ScanArguments& scan) { return (scan.steps + kChunk - 1) / kChunk; }

// What a scan may have besides: a state that stands before its first step in scan order, and places in time where no
// state passes. The latter in scan order, forwards and then in reverse: bit i of a word is set where none passes from the
// step before to step i of that chunk. Kernels are compiled for scans that have either (`Bounded`), and for all others.
struct Bounds {
  View initial_state;              // [B, G, H, N]
  const uint64_t* cuts = nullptr;  // contiguous [B, 2, chunks + 1], of which the last word is 0

  bool any() const { return initial_state.data || cuts; }
};

// How many parts a scan's time is cut into, and chunks of each; the last one may have fewer.
struct Splits {
  int64_t count, chunks;
};

// States at the edges of chunks are contiguous [B, G, H, chunks, N], float or complex of float:
// those that enter each chunk. Methods that are not causal have them for both directions: those of
// the other one, which enter a chunk at its last step, behind the first ones.
struct ForwardArguments {
  ScanArguments scan;
  View out;
  void* last_state;  // contiguous [B, G, H, N]
  void *edges, *other_edges;
  int64_t chunks;
  // Of a scan that goes over time twice, what the way back leaves (forward/averaged.cuh): count_scratch of both.
  float *first_sums, *across;
  Bounds bounds;
  // Of a scan that is split in time (forward/splits.cuh), contiguous [B, G, H, splits, N] and [B, G, H, splits].
  float *ends, *step_sums;
  Splits splits;
};

// So many chunks of each group, and how many blocks share the channels of one: its slabs.
struct ChunkShare {
  int64_t chunks, slabs;
};

// The blocks that share the channels of a chunk leave their gradients of B and C in memory, where there is room for
// so many `parts` of each chunk, and the one that comes last adds them up. Every pointer is to contiguous memory of
// float, or complex of float for A, B, C and states.
struct BackwardArguments {
  ScanArguments scan;
  View grad_out, grad_last_state;                   // incoming; either may be missing
  View grad_u, grad_delta, grad_z, grad_B, grad_C;  // outgoing; B's and C's where not constant
  const void* edges;                                // of forward
  void* grad_edges;  // their adjoint; in the end parts of A's gradient [B, G, H, chunks, N]
  // [B, G, chunks, parts, N, kChunk], or where constant in time [B, G, H, chunks, N].
  void *B_parts, *C_parts;
  float *grad_D, *grad_bias;  // [B, G, chunks, H]
  uint32_t* counts;  // [B, G, chunks] of blocks whose part is there, where a chunk is shared
  // plan_backward knows; `tail` is a last chunk of few steps, whose blocks have another shape.
  int64_t chunks, parts;
  ChunkShare body, tail;
  // The launch knows. From a block's channels to its next ones, bytes, of edges entries.
  ChunkShare share;
  struct {
    int64_t u, delta, z, A, grad_out, grad_u, grad_delta, grad_z, edges;
  } next;
  Bounds bounds;
  void* grad_initial_state;  // contiguous [B, G, H, N]; null: nobody asks
  // Of a sweep that is split in time, contiguous [B, G, H, splits, N]; plan_backward knows the number, or 0.
  float* ends;
  Splits splits;
};

// One gradient that several blocks hold parts of, which are contiguous:
// to [i, j, k] = sum over p, q of parts[p, i, j, q, k].
struct Sum {
  const float* parts;
  int components;  // floats of an entry: 2 for complex
  int counts[2];
  int64_t sizes[3];
  View to;  // by group, row and last
};
constexpr int kMaxSums = 5;
struct Sums {
  Sum each[kMaxSums];
  int count = 0;
};

// The floats that scan_forward has to be given room for, where it goes over time twice or is split in time.
struct ForwardScratch {
  int64_t first_sums, across, ends, step_sums;

  bool any() const { return first_sums > 0 || ends > 0; }
};
ForwardScratch count_scratch(const ForwardArguments&);
// Shares the work out: what scan_backward has to be given room for.
void plan_backward(BackwardArguments&);

// These enqueue work on the stream and throw std::runtime_error where CUDA reports an error.
void scan_forward(const ForwardArguments&, void* stream);
void scan_backward(const BackwardArguments&, void* stream);
void sum_in_order(const Sums&, void* stream);
// Fills the cuts of Bounds: where `reset`, bools [B, L] by batch and last, is true, no state passes to that step from the
// one before it in time, in either direction.
void find_cuts(const View& reset, int64_t batch, int64_t steps, uint64_t* cuts, void* stream);
void discretize(int64_t n, int method, bool is_complex, const float* dt, const void* a, void* out,
                void* stream);

}  // namespace vim_mm
