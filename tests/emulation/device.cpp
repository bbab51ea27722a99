// The fibers behind device.h, and what the host code asks of a GPU and of torch's streams.
//
// SPDX-License-Identifier: Apache-2.0
#include "device.h"

#include <setjmp.h>
#include <stdlib.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/ops.h>
#include <ucontext.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

// Shared memory, by the name that the kernels declare it with.
namespace vim_mm {
inline namespace cuda {
constexpr size_t kSharedBytes = 99 << 10;  // as much as a block has on every GPU of 8.0 and later
constexpr size_t kGuardBytes = 256;
float4 memory[(kSharedBytes + kGuardBytes) / sizeof(float4)];
}  // namespace cuda
}  // namespace vim_mm

namespace emulation {

uint3 thread, block;
dim3 grid, block_size;

namespace {

constexpr size_t kStackBytes = 256 << 10;

struct Barrier {
  int expected = 0;
  std::vector<int> waiting;
  uint64_t way = 0;  // by which they came
};

// What the 64 bits of a barrier in shared memory hold: how many arrive in each turn, how many of
// this one have, and its number.
struct SharedBarrier {
  uint16_t arrivals, arrived;
  uint32_t turn;
};
SharedBarrier& as_barrier(uint64_t* barrier) { return *reinterpret_cast<SharedBarrier*>(barrier); }

struct Copy {
  void* to;
  const void* from;
  int bytes, inside;  // zeros in the place of those that are not
};

struct Fiber {
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  ucontext_t begin;
  jmp_buf state;
  bool began = false;
  unsigned exchanges;
  std::vector<Copy> copies;  // that have not come yet
};

std::vector<Fiber> fibers;
// Threads that can go on: those of one warp, which is late, and all others.
std::vector<int> ready, ready_but_late;
int running, late_warp;
Barrier block_barrier, warp_barriers[32];
std::vector<std::pair<uint64_t*, int>> waiting_in_shared;  // with their threads
// In turns, or a lane that is ahead would overwrite what others have still to read.
Words passed[2][32][32];
const std::function<void()>* kernel_of_launch;
jmp_buf host;
const char* failure;  // why the host goes on
std::minstd_rand random_order;
bool waited;  // a thread of the launch for the launch before

int warp() { return thread.x / 32; }

void can_go_on(int of_block) {
  (of_block / 32 == late_warp ? ready_but_late : ready).push_back(of_block);
}

// Goes on with the host.
[[noreturn]] void fail(const char* why) {
  failure = why;
  longjmp(host, 1);
}

// Goes on with any thread that can: kernels must not depend on an order. A late one has to wait
// till there is no other, or nobody would ever be far enough ahead to overwrite what it reads.
[[noreturn]] void resume_any() {
  std::vector<int>& those = ready.empty() ? ready_but_late : ready;
  if (those.empty()) fail(running ? "some threads wait for others that never come" : nullptr);
  std::swap(those[random_order() % those.size()], those.back());
  thread.x = those.back();
  those.pop_back();
  Fiber& fiber = fibers[thread.x];
  if (fiber.began) longjmp(fiber.state, 1);
  fiber.began = true;
  setcontext(&fiber.begin);
  abort();  // it has not returned but failed
}

void release_if_complete(Barrier& barrier) {
  if (int(barrier.waiting.size()) < barrier.expected) return;
  std::for_each(barrier.waiting.begin(), barrier.waiting.end(), can_go_on);
  barrier.waiting.clear();
}

// Of the calls that lead here, from the kernel on: functions keep their frame pointers, and a fiber's are on its stack.
uint64_t way_here() {
  const char* const stack = fibers[thread.x].stack.get();
  uint64_t way = 0;
  for (auto* frame = static_cast<void**>(__builtin_frame_address(0));;) {
    const char* const at = reinterpret_cast<const char*>(frame);
    if (at < stack || at >= stack + kStackBytes - 2 * sizeof *frame) return way;
    way = way * 31 + reinterpret_cast<uint64_t>(frame[1]);
    frame = static_cast<void**>(frame[0]);
  }
}

void wait_at(Barrier& barrier) {
  barrier.waiting.push_back(thread.x);
  release_if_complete(barrier);
  if (setjmp(fibers[thread.x].state) == 0) resume_any();
}

// One thread of a block after the other: to begin a fiber costs system calls.
void fiber_main() {
  for (;;) {
    (*kernel_of_launch)();
    --running;
    for (Barrier* const barrier : {&block_barrier, &warp_barriers[warp()]}) {
      --barrier->expected;
      release_if_complete(*barrier);
    }
    if (setjmp(fibers[thread.x].state) == 0) resume_any();
  }
}

void run_block(int threads) {
  ready.clear(), ready_but_late.clear(), waiting_in_shared.clear();
  late_warp = random_order() % (threads / 32);
  running = threads;
  block_barrier = {threads, {}, 0};
  std::fill(std::begin(warp_barriers), std::end(warp_barriers), Barrier{32, {}, 0});
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.exchanges = 0;
    fiber.copies.clear();
    if (!fiber.began) {
      getcontext(&fiber.begin);
      fiber.begin.uc_stack.ss_sp = fiber.stack.get();
      fiber.begin.uc_stack.ss_size = kStackBytes;
      makecontext(&fiber.begin, fiber_main, 0);
    }
    can_go_on(i);
  }
  if (setjmp(host) == 0) resume_any();
  if (failure) {
    fibers.clear();  // they are amid their kernel
    throw std::logic_error(failure);
  }
  for (int i = 0; i < threads; ++i)
    if (!fibers[i].copies.empty()) throw std::logic_error("nobody waited for a copy");
}

}  // namespace

void wait_for_block() {
  const uint64_t way = way_here();
  if (block_barrier.waiting.empty()) block_barrier.way = way;
  else if (block_barrier.way != way) fail("threads of a block wait for it at different places");
  wait_at(block_barrier);
}
void wait_for_warp() { wait_at(warp_barriers[warp()]); }
bool any_of_block(bool says) {
  static bool any;
  wait_for_block();  // all have read the last answer
  any = false;
  wait_for_block();
  any |= says;
  wait_for_block();
  return any;
}
void wait_for_previous() { waited = true; }
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
  for (auto w = left; w != waiting_in_shared.end(); ++w) can_go_on(w->second);
  waiting_in_shared.erase(left, waiting_in_shared.end());
}
void barrier_wait(uint64_t* barrier, int odd) {
  // Open means that the turn of that parity is over: the one at hand has the other.
  while (int(as_barrier(barrier).turn % 2) == odd) {
    waiting_in_shared.emplace_back(barrier, thread.x);
    if (setjmp(fibers[thread.x].state) == 0) resume_any();
  }
}

void start_copy(void* to, const void* from, int bytes, int inside) {
  for (const void* p : {const_cast<const void*>(to), from})
    if (reinterpret_cast<uintptr_t>(p) % bytes) throw std::logic_error("a copy is not aligned");
  if (inside < 0 || inside > bytes) throw std::logic_error("a copy of more than its bytes");
  memset(to, 0xff, bytes);  // what was there is gone, and what comes is not there yet
  fibers[thread.x].copies.push_back({to, from, bytes, inside});
}
void wait_for_all_copies() {
  for (const Copy& copy : fibers[thread.x].copies) {
    memset(copy.to, 0, copy.bytes);
    if (copy.inside) memcpy(copy.to, copy.from, copy.inside);
  }
  fibers[thread.x].copies.clear();
}

const Words* exchange(const Words& words) {
  Words(&all)[32] = passed[fibers[thread.x].exchanges++ % 2][warp()];
  all[lane()] = words;
  wait_for_warp();
  return all;
}

int launches[1025];  // so far, by the threads of a block
std::set<const void*> launched;

cudaError_t run(dim3 blocks, int threads, size_t bytes, bool early,
                const std::function<void()>& kernel) {
  if (threads % 32 != 0 || threads > 1024 || bytes > vim_mm::kSharedBytes)
    return cudaErrorInvalidConfiguration;
  ++launches[threads];
  kernel_of_launch = &kernel;
  grid = blocks, block_size = dim3(threads);
  fibers.resize(std::max(fibers.size(), size_t(threads)));
  char* const shared = reinterpret_cast<char*>(vim_mm::memory);
  std::vector<unsigned> order(size_t(grid.x) * grid.y * grid.z);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), random_order);
  waited = false;
  for (const unsigned i : order) {
    block = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
    // NaN: nobody may read what nobody wrote.
    memset(shared, 0xff, bytes + vim_mm::kGuardBytes);
    run_block(threads);
    for (size_t k = bytes; k < bytes + vim_mm::kGuardBytes; ++k)
      if (shared[k] != char(0xff)) throw std::logic_error("written behind shared memory");
  }
  if (early && !waited) throw std::logic_error("nobody waited for the launch before");
  return cudaSuccess;
}

}  // namespace emulation

extern "C" {
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDevice(int*) { return cudaSuccess; }
// A few multiprocessors, so that small scans have more blocks than that, unless a test wants more.
static int multiprocessors = 4;
void set_multiprocessors(int count) { multiprocessors = count; }
int count_launches(int threads) { return emulation::launches[threads]; }
// Of a kernel, by its distance to this function, which the library's symbols tell.
bool was_launched(int64_t distance) {
  const auto here = reinterpret_cast<intptr_t>(&was_launched);
  return emulation::launched.count(reinterpret_cast<const void*>(here + distance)) > 0;
}
void forget_launches() { emulation::launched.clear(); }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr of, int) {
  if (of == cudaDevAttrMultiProcessorCount) *value = multiprocessors;
  else if (of == cudaDevAttrMaxSharedMemoryPerMultiprocessor)
    *value = 2 * int(vim_mm::kSharedBytes);
  else if (of == cudaDevAttrMaxSharedMemoryPerBlockOptin) *value = int(vim_mm::kSharedBytes);
  // No thread too many fits: so no launch asks for more shared memory than it needs, and what it writes behind that
  // is seen.
  else if (of == cudaDevAttrMaxThreadsPerMultiProcessor) *value = 0;
  else return cudaErrorInvalidValue;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp*, int) { return cudaErrorNoDevice; }
const char* cudaGetErrorString(cudaError_t) { return "a launch that no GPU takes"; }

// On the CPU, by the dispatcher: so deterministic mode fills what nobody has written.
AOTITorchError aoti_torch_empty_strided(int64_t dims, const int64_t* sizes, const int64_t*,
                                        int32_t type, int32_t, int32_t, AtenTensorHandle* handle) {
  using torch::stable::detail::from;
  const torch::stable::Tensor tensor = torch::stable::empty(
      {sizes, size_t(dims)}, torch::stable::detail::to<torch::headeronly::ScalarType>(from(type)));
  return aoti_torch_new_tensor_handle(tensor.get(), handle);
}
// The device of these tensors is a GPU to whoever asks.
int32_t aoti_torch_device_type_cuda() { return aoti_torch_device_type_cpu(); }

// Matrix products, by the CPU's operators.
AOTITorchError aoti_torch_cuda_mm_out(AtenTensorHandle out, AtenTensorHandle a,
                                      AtenTensorHandle b) {
  return aoti_torch_cpu_mm_out(out, a, b);
}
AOTITorchError aoti_torch_cuda_bmm_out(AtenTensorHandle out, AtenTensorHandle a,
                                       AtenTensorHandle b) {
  return aoti_torch_cpu_bmm_out(out, a, b);
}
AOTITorchError aoti_torch_cuda_addmm_out(AtenTensorHandle out, AtenTensorHandle added,
                                         AtenTensorHandle a, AtenTensorHandle b, double beta,
                                         double alpha) {
  return aoti_torch_cpu_addmm_out(out, added, a, b, beta, alpha);
}
AOTITorchError aoti_torch_cuda_baddbmm_out(AtenTensorHandle out, AtenTensorHandle added,
                                           AtenTensorHandle a, AtenTensorHandle b, double beta,
                                           double alpha) {
  return aoti_torch_cpu_baddbmm_out(out, added, a, b, beta, alpha);
}

// The CPU has no products whose result has another dtype than what is multiplied.
AOTITorchError torch_call_dispatcher(const char* name, const char* overload, StableIValue* stack,
                                     uint64_t) {
  if (strcmp(overload, "dtype_out") != 0) return aoti_torch_call_dispatcher(name, overload, stack);
  using torch::stable::Tensor, torch::stable::detail::to;
  const auto widened = [](const Tensor& t, const Tensor& like) {
    Tensor wide = torch::stable::new_empty(like, t.sizes());
    return torch::stable::copy_(wide, t);
  };
  const Tensor a = to<Tensor>(stack[0]), b = to<Tensor>(stack[1]), out = to<Tensor>(stack[3]);
  const auto product = a.dim() == 3 ? aoti_torch_cpu_bmm_out : aoti_torch_cpu_mm_out;
  const auto error = product(out.get(), widened(a, out).get(), widened(b, out).get());
  stack[0] = torch::stable::detail::from(out);
  return error;
}

AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**) { return 0; }
AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle*) { return 0; }
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) { return 0; }
}
