// SPDX-License-Identifier: Apache-2.0
#include "../launch_backward.cuh"
#include "../launch_forward.cuh"

template struct vim_mm::ScanOf<vim_mm::ZohExact>;
