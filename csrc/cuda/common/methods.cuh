// The methods as CUDA kernels compile them, in a namespace of their own: all includes of csrc/methods stand here,
// behind its name.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#define VIM_MM_ISA cuda

#include "../../methods/discretization.h"
#include "../../methods/steps.h"
