// The fibers behind device.h, and what the host code asks of a GPU and of torch's streams.
//
// SPDX-License-Identifier: Apache-2.0
#include "device.h"

#include <setjmp.h>
#include <stdlib.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <ucontext.h>

#include <algorithm>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

// Shared memory, by the name that the kernels declare it with.
namespace vim_mm {
inline namespace cuda {
constexpr size_t kSharedBytes = 227 << 10, kGuardBytes = 256;
float4 memory[(kSharedBytes + kGuardBytes) / sizeof(float4)];
}  // namespace cuda
}  // namespace vim_mm

namespace emulation {

uint3 thread, block;
dim3 grid;

namespace {

constexpr size_t kStackBytes = 256 << 10;

struct Barrier {
  int expected = 0;
  std::vector<int> waiting;
};

// What the 64 bits of a barrier in shared memory hold: how many arrive in each turn, how many of
// this one have, and its number.
struct SharedBarrier {
  uint16_t arrivals, arrived;
  uint32_t turn;
};
SharedBarrier& as_barrier(uint64_t* barrier) { return *reinterpret_cast<SharedBarrier*>(barrier); }

struct Fiber {
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  ucontext_t begin;
  jmp_buf state;
  bool began;
  unsigned exchanges;
};

std::vector<Fiber> fibers;
std::vector<int> ready;
int running;
Barrier block_barrier, warp_barriers[32];
std::vector<std::pair<uint64_t*, int>> waiting_in_shared;  // with their threads
// In turns, or a lane that is ahead would overwrite what others have still to read.
float passed[2][32][32];
const std::function<void()>* kernel_of_launch;
jmp_buf host;
std::minstd_rand random_order;

int warp() { return thread.x / 32; }

// Goes on with any thread that can: kernels must not depend on an order.
[[noreturn]] void resume_any() {
  if (ready.empty()) longjmp(host, 1);
  std::swap(ready[random_order() % ready.size()], ready.back());
  thread.x = ready.back();
  ready.pop_back();
  Fiber& fiber = fibers[thread.x];
  if (fiber.began) longjmp(fiber.state, 1);
  fiber.began = true;
  setcontext(&fiber.begin);
  abort();  // it has not returned but failed
}

void release_if_complete(Barrier& barrier) {
  if (int(barrier.waiting.size()) < barrier.expected) return;
  ready.insert(ready.end(), barrier.waiting.begin(), barrier.waiting.end());
  barrier.waiting.clear();
}

void wait_at(Barrier& barrier) {
  barrier.waiting.push_back(thread.x);
  release_if_complete(barrier);
  if (setjmp(fibers[thread.x].state) == 0) resume_any();
}

void fiber_main() {
  (*kernel_of_launch)();
  --running;
  for (Barrier* const barrier : {&block_barrier, &warp_barriers[warp()]}) {
    --barrier->expected;
    release_if_complete(*barrier);
  }
  resume_any();
}

void run_block(int threads) {
  ready.clear(), waiting_in_shared.clear();
  running = threads;
  block_barrier = {threads, {}};
  std::fill(std::begin(warp_barriers), std::end(warp_barriers), Barrier{32, {}});
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.began = false;
    fiber.exchanges = 0;
    getcontext(&fiber.begin);
    fiber.begin.uc_stack.ss_sp = fiber.stack.get();
    fiber.begin.uc_stack.ss_size = kStackBytes;
    makecontext(&fiber.begin, fiber_main, 0);
    ready.push_back(i);
  }
  if (setjmp(host) == 0) resume_any();
  if (running) throw std::logic_error("some threads wait for others that never come");
}

}  // namespace

void wait_for_block() { wait_at(block_barrier); }
void wait_for_warp() { wait_at(warp_barriers[warp()]); }
void barrier_begin(uint64_t* barrier, int arrivals) {
  as_barrier(barrier) = {uint16_t(arrivals), 0, 0};
}
void barrier_arrive(uint64_t* barrier) {
  SharedBarrier& at = as_barrier(barrier);
  if (++at.arrived < at.arrivals) return;
  at.arrived = 0;
  ++at.turn;
  const auto left = std::partition(waiting_in_shared.begin(), waiting_in_shared.end(),
                                   [&](const auto& waits) { return waits.first != barrier; });
  for (auto w = left; w != waiting_in_shared.end(); ++w) ready.push_back(w->second);
  waiting_in_shared.erase(left, waiting_in_shared.end());
}
void barrier_wait(uint64_t* barrier, int odd) {
  // Open means that the turn of that parity is over: the one at hand has the other.
  while (int(as_barrier(barrier).turn % 2) == odd) {
    waiting_in_shared.emplace_back(barrier, thread.x);
    if (setjmp(fibers[thread.x].state) == 0) resume_any();
  }
}

float exchange(float value, int lane) {
  float (&values)[32] = passed[fibers[thread.x].exchanges++ % 2][warp()];
  values[emulation::lane()] = value;
  wait_for_warp();
  return values[lane];
}

cudaError_t run(dim3 blocks, int threads, size_t bytes, const std::function<void()>& kernel) {
  if (threads % 32 != 0 || threads > 1024 || bytes > vim_mm::kSharedBytes)
    return cudaErrorInvalidConfiguration;
  kernel_of_launch = &kernel;
  grid = blocks;
  fibers.resize(std::max(fibers.size(), size_t(threads)));
  char* const shared = reinterpret_cast<char*>(vim_mm::memory);
  for (block.y = 0; block.y < grid.y; ++block.y) {
    for (block.x = 0; block.x < grid.x; ++block.x) {
      memset(shared, 0xff, bytes + vim_mm::kGuardBytes);  // NaN: nobody may read what nobody wrote
      run_block(threads);
      for (size_t i = bytes; i < bytes + vim_mm::kGuardBytes; ++i)
        if (shared[i] != char(0xff)) throw std::logic_error("written behind shared memory");
    }
  }
  return cudaSuccess;
}

}  // namespace emulation

extern "C" {
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDevice(int*) { return cudaErrorNoDevice; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp*, int) { return cudaErrorNoDevice; }
const char* cudaGetErrorString(cudaError_t) { return "a launch that no GPU takes"; }

AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**) { return 0; }
AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle*) { return 0; }
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) { return 0; }
}
