// The methods as CUDA kernels compile them, in a namespace of their own: the include of csrc/methods stands here,
// behind its name.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#define VIM_MM_ISA cuda

#include "../../methods/discretization.h"
