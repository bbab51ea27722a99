// Chooses the CPU kernels for this processor, once.
//
// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace vim_mm {
namespace {

struct Choice {
  const char* name;
  RealKernels kernels;
};

Choice choose() {
  const char* variable = std::getenv("VIM_MM_CPU_CAPABILITY");
  const std::string wanted = variable ? variable : "";
  const bool any = wanted.empty();
  if (!any && wanted != "portable" && wanted != "avx2" && wanted != "avx512")
    throw std::runtime_error("VIM_MM_CPU_CAPABILITY is '" + wanted +
                             "', expected portable, avx2 or avx512");
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512 && (any || wanted == "avx512")) return {"avx512", avx512_kernels()};
  if (avx2 && (any || wanted == "avx2")) return {"avx2", avx2_kernels()};
#endif
  if (any || wanted == "portable") return {"portable", portable_kernels()};
  throw std::runtime_error("VIM_MM_CPU_CAPABILITY is '" + wanted +
                           "', which this processor does not have");
}

const Choice& choice() {
  static const Choice chosen = choose();
  return chosen;
}

const ComplexKernels& complex() {
  static const ComplexKernels kernels = complex_kernels();
  return kernels;
}

}  // namespace

const char* cpu_capability() { return choice().name; }

template <>
const ScanKernels<float, float>& scan_kernels_of() {
  return choice().kernels.scan_float;
}
template <>
const ScanKernels<double, double>& scan_kernels_of() {
  return choice().kernels.scan_double;
}
template <>
const ScanKernels<float, Complex<float>>& scan_kernels_of() {
  return complex().scan_float;
}
template <>
const ScanKernels<double, Complex<double>>& scan_kernels_of() {
  return complex().scan_double;
}
template <>
const ElementwiseKernels<float>& elementwise_kernels_of() {
  return choice().kernels.elementwise_float;
}
template <>
const ElementwiseKernels<double>& elementwise_kernels_of() {
  return choice().kernels.elementwise_double;
}

}  // namespace vim_mm
