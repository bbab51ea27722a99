// SPDX-License-Identifier: Apache-2.0
#include "../launches.cuh"

template struct vim_mm::ScanOf<vim_mm::Foh>;
