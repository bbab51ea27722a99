// What the operators around the scan of a block (block.cpp) hand to their kernels. Letters as in
// ops.cpp; all tensors are contiguous unless a stride is given, counted in entries.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels.h"

namespace vim_mm {

constexpr int kMaxDirections = 2, kMaxTaps = 8;

// A tensor of any floating point type.
struct Parameter {
  const void* data = nullptr;  // null: there is none
  Storage storage = Storage::float32;
};
struct Output {
  void* data = nullptr;
  Storage storage = Storage::float32;
};

// normed = (residual + update) / rms * weight, row by row.
struct AddRmsNorm {
  int64_t rows, channels;
  double eps;
  Parameter residual, update, weight;  // there may be no update
  Output normed, sum;                  // sum where there is an update, stored as residual is
  float* rstd;                         // [rows], 1 / rms
};
struct AddRmsNormBackward {
  int64_t rows, channels;
  Parameter grad_normed, grad_sum, sum, weight;  // there may be no grad_sum
  const float* rstd;
  Output grad_residual, grad_update;  // the same values; there may be no grad_update
  float* grad_weight;                 // [blocks, channels], to be summed over blocks
  int blocks;
};

// u[k, h, b, l] = silu(bias + sum over w of weight[w] x[h, b, l - (W - 1) + w]), or with l mirrored
// where `reverse`.
struct Convolution {
  Storage storage;  // of x, u and their gradients
  int64_t channels, batch, steps;
  int directions, taps;
  Parameter weight[kMaxDirections], bias[kMaxDirections];
  bool reverse[kMaxDirections];
  const void* x;
  int64_t x_row;  // from one channel to the next
  void* u;
};
struct ConvolutionBackward {
  Convolution forward;
  const void* grad_u;
  void* grad_x;
  int64_t grad_x_row;
  float *grad_weight, *grad_bias;  // [directions, channels, taps] and [directions, channels]
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

// to = from, or -exp(from), in the type of each.
struct Conversion {
  Parameter from;
  Output to;
  int64_t count;
  bool negative_exp;
};
constexpr int kMaxConversions = 2 + 5 * kMaxDirections;
struct Conversions {
  Conversion each[kMaxConversions];
  int count = 0;
};

// These enqueue work on the stream and throw std::runtime_error where CUDA reports an error.
void add_rms_norm(const AddRmsNorm&, void* stream);
void add_rms_norm_backward(const AddRmsNormBackward&, void* stream);
void convolve(const Convolution&, void* stream);
void convolve_backward(const ConvolutionBackward&, void* stream);
void gate(const Gate&, void* stream);
void gate_backward(const GateBackward&, void* stream);
void convert(const Conversions&, void* stream);

}  // namespace vim_mm
