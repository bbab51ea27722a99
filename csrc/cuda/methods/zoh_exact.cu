// SPDX-License-Identifier: Apache-2.0
#include "../dispatch/backward.cuh"
#include "../dispatch/forward.cuh"

template struct vim_mm::ScanOf<vim_mm::ZohExact>;
