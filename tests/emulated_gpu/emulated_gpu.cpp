// The threads of emulated_gpu: fibers, on one thread of the CPU. See hip/hip_runtime.h.
#include <hip/hip_runtime.h>

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>

#if !defined(__x86_64__)
#error "the fibers of emulated_gpu are written for x86-64"
#endif

namespace emulated_gpu {

Index thread_index, block_index;
dim3 block_size, grid_size;

namespace {

enum class Wait { nothing, barrier, shuffle, vote };

constexpr size_t kStack = 256 << 10;  // bytes of a thread's
constexpr int kMostThreads = 1024, kMostGrid = 65535, kMostShared = 64 << 10;

// ---- switching stacks ----

// Saves the registers that a call keeps, and the stack in *from; goes on where `to` was saved.
extern "C" void emulated_gpu_switch(void** from, void* to);
asm(R"(
.text
.local emulated_gpu_switch
.type emulated_gpu_switch, @function
emulated_gpu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulated_gpu_switch, . - emulated_gpu_switch
)");

struct Thread {
  void* stack = nullptr;  // of kStack bytes
  void* saved = nullptr;
  bool ended = false;
  Wait wait = Wait::nothing;
  int width = 0;      // of its shuffle
  bool vote = false;  // then the result
  Index index{};
};

struct Options {
  int warp = 64, multiprocessors = 4;
  bool backwards = false;
};

Options read_options() {
  Options options;
  if (const char* text = std::getenv("EMULATED_GPU_WARP")) options.warp = std::atoi(text);
  if (const char* text = std::getenv("EMULATED_GPU_BACKWARDS")) options.backwards = *text == '1';
  return options;
}
const Options options = read_options();

std::mutex one_launch;
Thread threads[kMostThreads];
Left left[kMostThreads], seen[kMostThreads];  // by threads that wait, and by those that go on
int count = 0, current = 0;
void* scheduler = nullptr;  // its stack, while a thread runs
void (*body)(void*) = nullptr;
void* body_data = nullptr;
alignas(128) char shared_memory[kMostShared];

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "emulated GPU: %s, block (%u, %u, %u) of %u threads\n", what, block_index.x,
               block_index.y, block_index.z, static_cast<unsigned>(count));
  for (int i = 0; i < count; ++i) {
    const char* const names[] = {"runs", "at a barrier", "at a shuffle", "at a vote"};
    const char* state = threads[i].ended ? "ended" : names[static_cast<int>(threads[i].wait)];
    if (i < 4 || i + 1 == count || threads[i].wait != threads[i - 1].wait ||
        threads[i].ended != threads[i - 1].ended)
      std::fprintf(stderr, "  thread %d: %s (width %d)\n", i, state, threads[i].width);
  }
  std::abort();
}

// The first function of every thread's stack.
void start() {
  body(body_data);
  threads[current].ended = true;
  emulated_gpu_switch(&threads[current].saved, scheduler);  // never to come back
  std::abort();
}

void prepare(Thread& thread) {
  if (thread.stack == nullptr) {
    thread.stack =
        mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (thread.stack == MAP_FAILED) fail("no memory for stacks");
  }
  // A `ret` to start(), at which the stack is as after a call: 8 bytes off a multiple of 16.
  void** top = reinterpret_cast<void**>(static_cast<char*>(thread.stack) + kStack);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&start);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  thread.saved = top;
  thread.ended = false;
  thread.wait = Wait::nothing;
}

void resume(int i) {
  current = i;
  thread_index = threads[i].index;
  emulated_gpu_switch(&scheduler, threads[i].saved);
}

// Other threads run until those that it waits for have come.
void wait_for(Wait wait) {
  threads[current].wait = wait;
  emulated_gpu_switch(&threads[current].saved, scheduler);
}

// Lets `width` threads go on if all of them wait for `wait`, but for those that ended.
bool meet(Wait wait, int first, int width) {
  const int last = std::min(first + width, count);
  int waiting = 0;
  for (int i = first; i < last; ++i) {
    if (threads[i].ended) continue;
    if (threads[i].wait != wait || (wait == Wait::shuffle && threads[i].width != width))
      return false;
    ++waiting;
  }
  for (int i = first; i < last; ++i) {
    seen[i] = left[i];
    if (threads[i].ended) std::memset(&seen[i], 0xff, sizeof(Left));
    threads[i].wait = Wait::nothing;
  }
  return waiting > 0;
}

// A vote of lanes that run together. A wavefront of 64 runs one branch after the other, so that
// those of a branch vote alone; a warp of 32 must come as a whole.
bool count_votes(int first) {
  const int last = std::min(first + options.warp, count);
  bool any = false, all_there = true;
  for (int i = first; i < last; ++i) {
    if (threads[i].ended) continue;
    if (threads[i].wait == Wait::vote) {
      any |= threads[i].vote;
    } else {
      all_there = false;
    }
  }
  if (options.warp <= 32 && !all_there) return false;
  bool released = false;
  for (int i = first; i < last; ++i) {
    if (threads[i].ended || threads[i].wait != Wait::vote) continue;
    threads[i].vote = any;
    threads[i].wait = Wait::nothing;
    released = true;
  }
  return released;
}

// Lets threads go on, now that none can by itself.
bool release() {
  bool any = false;
  for (int i = 0; i < count; ++i) {
    const Thread& its = threads[i];
    if (its.ended) continue;
    if (its.wait == Wait::shuffle) any |= meet(Wait::shuffle, i / its.width * its.width, its.width);
    if (its.wait == Wait::vote) any |= count_votes(i / options.warp * options.warp);
  }
  return any || meet(Wait::barrier, 0, count);
}

void run_block() {
  std::memset(shared_memory, 0xff, sizeof(shared_memory));
  for (int i = 0; i < count; ++i) prepare(threads[i]);
  for (bool running = true; running;) {
    running = false;
    for (int i = 0; i < count; ++i) {
      const int t = options.backwards ? count - 1 - i : i;
      if (!threads[t].ended && threads[t].wait == Wait::nothing) resume(t);
      running |= !threads[t].ended;
    }
    if (running && !release()) fail("threads wait for others that never come");
  }
}

}  // namespace

const Left* exchange(const void* value, size_t bytes, int width) {
  const int i = current;
  if (width < 1 || width > options.warp || (width & (width - 1)) != 0)
    fail("a shuffle's width is wrong");
  std::memcpy(left[i].bytes, value, bytes);
  threads[i].width = width;
  wait_for(Wait::shuffle);
  return seen + i / options.warp * options.warp;
}

bool vote(bool value) {
  threads[current].vote = value;
  wait_for(Wait::vote);
  return threads[current].vote;
}

void barrier() { wait_for(Wait::barrier); }

int lane() { return current % warp_size(); }
int warp_size() { return options.warp; }
void* dynamic_shared() { return shared_memory; }

void run(dim3 grid, dim3 block, size_t shared_bytes, void (*of_thread)(void*), void* data) {
  const std::lock_guard<std::mutex> lock(one_launch);
  const uint64_t wanted = uint64_t{block.x} * block.y * block.z;
  const bool fits = wanted <= kMostThreads && grid.y <= kMostGrid && grid.z <= kMostGrid;
  count = 0;
  if (wanted < 1 || !fits || shared_bytes > kMostShared) fail("a launch that no GPU takes");
  count = static_cast<int>(wanted);
  block_size = block, grid_size = grid, body = of_thread, body_data = data;
  for (int i = 0; i < count; ++i) {
    const unsigned n = static_cast<unsigned>(i);
    threads[i].index = {n % block.x, n / block.x % block.y, n / (block.x * block.y)};
  }
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  for (uint64_t i = 0; i < blocks; ++i) {
    const uint64_t b = options.backwards ? blocks - 1 - i : i;
    block_index = {static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x % grid.y),
                   static_cast<unsigned>(b / grid.x / grid.y)};
    run_block();
  }
}

}  // namespace emulated_gpu

// ---- the runtime ----

hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int) {
  switch (attribute) {
    case hipDeviceAttributeMultiprocessorCount:
      *value = emulated_gpu::options.multiprocessors;
      break;
    case hipDeviceAttributeMaxSharedMemoryPerBlock: *value = emulated_gpu::kMostShared; break;
    case hipDeviceAttributeWarpSize: *value = emulated_gpu::options.warp; break;
  }
  return hipSuccess;
}
hipError_t hipGetDevice(int* device) {
  *device = 0;
  return hipSuccess;
}
hipError_t hipGetDeviceProperties(hipDeviceProp_t* properties, int) {
  std::strcpy(properties->name, "emulated GPU");
  return hipSuccess;
}
hipError_t hipFuncGetAttributes(hipFuncAttributes* attributes, const void*) {
  attributes->sharedSizeBytes = 0;
  return hipSuccess;
}
hipError_t hipFuncSetAttribute(const void*, hipFuncAttribute, int) { return hipSuccess; }
hipError_t hipGetLastError() { return hipSuccess; }
const char* hipGetErrorString(hipError_t error) {
  return error == hipSuccess ? "no error" : "an error of the emulated GPU";
}
hipError_t hipMemsetAsync(void* memory, int value, size_t bytes, hipStream_t) {
  std::memset(memory, value, bytes);
  return hipSuccess;
}
