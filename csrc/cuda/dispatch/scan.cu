// Hands a scan to its method.
//
// SPDX-License-Identifier: Apache-2.0
#include "../common/tile.cuh"
#include "scan_of_method.cuh"

namespace vim_mm {

ForwardScratch count_scratch(const ForwardArguments& p) {
  ForwardScratch count{};
  dispatch_method(p.scan.method, [&](auto m) { count = ScanOf<decltype(m)>::count_scratch(p); });
  return count;
}
void scan_forward(const ForwardArguments& p, void* stream) {
  dispatch_method(p.scan.method, [&](auto m) { ScanOf<decltype(m)>::scan_forward(p, stream); });
}
void plan_backward(BackwardArguments& p) {
  dispatch_method(p.scan.method, [&](auto m) { ScanOf<decltype(m)>::plan_backward(p); });
}
void scan_backward(const BackwardArguments& p, void* stream) {
  dispatch_method(p.scan.method, [&](auto m) { ScanOf<decltype(m)>::scan_backward(p, stream); });
}

std::string describe(const ScanArguments& scan, bool bounded) {
  std::string text;
  dispatch_method(scan.method,
                  [&](auto m) { text = ScanOf<decltype(m)>::describe(scan, bounded); });
  return text;
}

}  // namespace vim_mm
