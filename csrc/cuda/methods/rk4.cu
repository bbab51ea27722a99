// SPDX-License-Identifier: Apache-2.0
#include "../dispatch/method.cuh"

template struct vim_mm::ScanOf<vim_mm::Rk4>;
