// Arguments of the kernels around the scan of a block. Letters as in ops.cpp. Tensors are contiguous
// unless there is a stride, which counts entries.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include "../common/scan_arguments.h"

namespace vim_mm {

constexpr int kMaxDirections = 2, kMaxTaps = 8;

// normed = sum / rms(sum) * weight, row by row, sum = residual + update.
struct AddRmsNorm {
  Storage residual_storage, storage, weight_storage;  // each float32, or as `storage` is
  int64_t rows, channels;
  float eps;
  const void *residual, *update, *weight;  // there may be no update, and then no sum
  void *normed, *sum;                      // sum stored as residual is
  float* rstd;                             // [rows], 1 / rms
};
struct AddRmsNormBackward {
  Storage residual_storage, storage, weight_storage;
  int64_t rows, channels;
  const void *grad_normed, *grad_sum, *sum, *weight;  // there may be no grad_sum
  const float* rstd;
  void *grad_residual, *grad_update;  // the same values; there may be no grad_update
  float* grad_weight;                 // [blocks, channels], to be summed over blocks
  int blocks;                         // rms_norm_backward_blocks(rows)
};
// Two for each multiprocessor, if so many have 16 rows each.
inline int64_t rms_norm_backward_blocks(int64_t rows) {
  return std::clamp<int64_t>((rows + 15) / 16, 1, 2 * kMultiprocessors);
}

// u[k, h, b, l] = silu(bias + sum over w of weight[w] x[h, b, l - (W - 1) + w]), or with l mirrored
// where `reverse`. With `reset` no tap reaches over a step at which it is true.
struct Convolution {
  Storage storage;  // of x, u and their gradients
  int64_t channels, batch, steps;
  int directions, taps;
  bool reverse[kMaxDirections];
  const float *weight, *bias;  // [directions, channels, taps] and [directions, channels]
  const void* x;
  int64_t x_row;  // from one channel to the next
  void* u;
  const bool* reset;  // [batch, steps], or null
};
struct ConvolutionBackward {
  Convolution forward;
  const void* grad_u;
  void* grad_x;
  int64_t grad_x_row;
  float *grad_weight, *grad_bias;
};

// delta[k, h, t] = sum over r of weight[k, r, h] dt[k, r, t]; t counts tokens.
struct StepProjection {
  Storage storage;
  int sets, rank;
  int64_t channels, tokens;
  const void *weight, *dt;
  int64_t dt_set;  // from one set to the next
  void* delta;
};

// out = silu(z) * sum, sum = scale times the sum of y over directions, rounded to its type.
struct Gate {
  Storage storage;
  int64_t count;  // entries of z
  int directions;
  float scale;
  const void *y, *z;
  void *out, *sum;  // sum may be null
};
struct GateBackward {
  Storage storage;
  int64_t count;
  float scale;
  const void *grad_out, *sum, *z;
  void *grad_y, *grad_z, *out;
};

// Copies a matrix to another dtype and applies `function` to its entries. Without a source: zeros.
struct Conversion {
  enum Function : int { copy, negative_exp, product };

  const void* from = nullptr;
  void* to = nullptr;
  Storage from_storage = Storage::float32, to_storage = Storage::float32;
  int rows = 1, columns = 0;          // of `to`, which is contiguous
  int from_row = 0, from_column = 1;  // from one to the next
  Function function = copy;
  const float* factor = nullptr;  // of product, shaped like `to`
};
constexpr int kMaxConversions = 4 + 7 * kMaxDirections;  // all parameters of a mixer
struct Conversions {
  Conversion each[kMaxConversions];
  int count = 0;
};

// These enqueue work on the stream and throw std::runtime_error if CUDA reports an error.
// One launch for the norm and for conversions that do not depend on it.
void add_rms_norm(const AddRmsNorm&, const Conversions& beside, void* stream);
void add_rms_norm_backward(const AddRmsNormBackward&, void* stream);
void convolve(const Convolution&, void* stream);
void convolve_backward(const ConvolutionBackward&, void* stream);
void project_steps(const StepProjection&, void* stream);
void gate(const Gate&, void* stream);
void gate_backward(const GateBackward&, void* stream);
void convert(const Conversions&, void* stream);

}  // namespace vim_mm
