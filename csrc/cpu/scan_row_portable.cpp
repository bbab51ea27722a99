// The row scan for any processor (16-byte vectors), and the complex one.
//
// SPDX-License-Identifier: Apache-2.0
#define VIM_MM_VECTOR_BYTES 16

#include "kernels.h"
#include "scan_row.h"

namespace vim_mm {

RealKernels portable_kernels() {
  return {scan_kernels<Lanes<float, 4>>(), scan_kernels<Lanes<double, 2>>(),
          elementwise_kernels<Lanes<float, 4>>(), elementwise_kernels<Lanes<double, 2>>()};
}

ComplexKernels complex_kernels() {
  return {scan_kernels<Complex<float>>(), scan_kernels<Complex<double>>()};
}

}  // namespace vim_mm
