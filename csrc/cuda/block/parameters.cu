// The conversion of parameters and of their gradients as a launch of its own.
//
// SPDX-License-Identifier: Apache-2.0
#include "../common/errors.h"
#include "parameters.cuh"

namespace vim_mm {
namespace {

__global__ void __launch_bounds__(kConversionThreads)
    convert_kernel(const __grid_constant__ ConversionBlocks blocks) {
  convert_block(blocks, blockIdx.x);
}

}  // namespace

void convert(const Conversions& conversions, void* stream) {
  const ConversionBlocks blocks = conversion_blocks(conversions);
  if (blocks.count > 0)
    enqueue(convert_kernel, blocks.count, kConversionThreads, 0, stream, blocks);
}

}  // namespace vim_mm
