// All of a method's scan, for the files in methods/.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backward.cuh"
#include "forward.cuh"

namespace vim_mm {

// A line for each kernel that a row of the table chooses: the row of the table, and what was measured for it.
template <class Method>
std::string ScanOf<Method>::describe(const ScanArguments& scan, bool bounded) {
  std::string text;
  const auto add = [&](const char* pass, int64_t blocks, int threads, const Row& row) {
    text += std::string(pass) + ": " + row.when + "; " + std::to_string(blocks) + " blocks of " +
            std::to_string(threads) + " threads; measured: " + row.measured + "\n";
  };
  if (const char* const reason = reason_for_general_path<Method>(scan, bounded, {}))
    text += std::string("the general path, because ") + reason + "\n";
  // Gradients are laid out as what they are of.
  BackwardArguments p{};
  p.scan = scan, p.grad_out = p.grad_u = scan.u, p.grad_delta = scan.delta, p.grad_z = scan.z;
  p.grad_B = scan.B, p.grad_C = scan.C;
  if (bounded) p.bounds.initial_state = scan.u;  // any will do
  ScanOf<Method>::plan_backward(p);
  dispatch_layout(scan, layout_of<Method>(scan, bounded, {}), [&](auto, auto layout) {
    const auto of_rows = [&](const char* pass) {
      return [&, pass](auto shape, auto, const Row& row) {
        using Block = decltype(shape);
        if constexpr (Block::sequential) add(pass, blocks_of<Block>(scan), Block::all_threads, row);
        else add(pass, blocks_of<Block>(scan), Block::threads, row);
      };
    };
    choose_forward<Method, layout()>(scan, bounded, of_rows("forward"));
    choose_edges<Method, layout()>(scan, bounded, of_rows("backward, what enters chunks"));
    for (const bool is_tail : {false, true}) {
      const ChunkShare& share = is_tail ? p.tail : p.body;
      if (share.chunks == 0) continue;
      choose_backward<Method, layout()>(
          scan, bounded, is_tail, [&](auto shape, auto, auto, const Row& row) {
            const int64_t blocks = scan.batch * scan.groups * share.chunks * share.slabs;
            const std::string pass = "backward, chunks shared by " + std::to_string(share.slabs);
            add(pass.c_str(), blocks, decltype(shape)::threads, row);
          });
    }
  });
  return text;
}

}  // namespace vim_mm
