// The scan of one method. Each method has a file of its own in methods/, or all their kernels, which take minutes
// to compile, would have to wait for one another.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../common/describe.h"
#include "../common/scan_arguments.h"

namespace vim_mm {

// The functions of common/scan_arguments.h that have these names.
template <class Method>
struct ScanOf {
  static ForwardScratch count_scratch(const ForwardArguments&);
  static void scan_forward(const ForwardArguments&, void* stream);
  static void plan_backward(BackwardArguments&);
  static void scan_backward(const BackwardArguments&, void* stream);
  static std::string describe(const ScanArguments&, bool bounded);
};

}  // namespace vim_mm
