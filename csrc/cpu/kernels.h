// The CPU kernels of every instruction set, and the choice among them at run time.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../methods/elementary.h"
#include "scan_params.h"

namespace vim_mm {

struct RealKernels {
  ScanKernels<float, float> scan_float;
  ScanKernels<double, double> scan_double;
  ElementwiseKernels<float> elementwise_float;
  ElementwiseKernels<double> elementwise_double;
};
struct ComplexKernels {
  ScanKernels<float, Complex<float>> scan_float;
  ScanKernels<double, Complex<double>> scan_double;
};

RealKernels portable_kernels();
RealKernels avx2_kernels();
RealKernels avx512_kernels();
ComplexKernels complex_kernels();

// The widest set that this processor runs. The environment variable VIM_MM_CPU_CAPABILITY
// (portable, avx2, avx512) lowers it; asking for more than the processor has throws.
const char* cpu_capability();

template <class S, class E>
const ScanKernels<S, E>& scan_kernels_of();
template <class S>
const ElementwiseKernels<S>& elementwise_kernels_of();

}  // namespace vim_mm
