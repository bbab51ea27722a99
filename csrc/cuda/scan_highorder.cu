// SPDX-License-Identifier: Apache-2.0
#include "launch.cuh"

template struct vim_mm::MethodKernels<vim_mm::HighOrder>;
