// What a scan runs, in words.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "scan_arguments.h"

namespace vim_mm {

// Which kernels forward and backward of such a scan take, a line each. `bounded`: it has Bounds.
std::string describe(const ScanArguments&, bool bounded);

}  // namespace vim_mm
