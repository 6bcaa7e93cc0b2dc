// Kernels that show what emulated_gpu does with their threads: tests/test_emulated_gpu.py runs the
// one that is named, and reads what it prints.
#include <hip/hip_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

// The sum of a block's numbers: in warps, then of them.
__global__ void block_sum(const int* numbers, int* sums) {
  __shared__ int of_warps[32];
  const int thread = static_cast<int>(threadIdx.x);
  int sum = numbers[blockIdx.x * blockDim.x + threadIdx.x];
  for (int mask = 1; mask < 32; mask *= 2) sum += __shfl_xor(sum, mask, 32);
  if (thread % 32 == 0) of_warps[thread / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int i = 0; i < static_cast<int>(blockDim.x) / 32; ++i) sum += of_warps[i];
  if (thread == 0) sums[blockIdx.x] = sum;
}

// Each reads what its neighbour writes, without a barrier.
__global__ void race(int* numbers) {
  const int thread = static_cast<int>(threadIdx.x);
  numbers[thread] = thread;
  const int neighbour = numbers[(thread + 1) % static_cast<int>(blockDim.x)];
  numbers[blockDim.x + threadIdx.x] = neighbour;
}

// The same with one.
__global__ void no_race(int* numbers) {
  const int thread = static_cast<int>(threadIdx.x);
  numbers[thread] = thread;
  __syncthreads();
  const int neighbour = numbers[(thread + 1) % static_cast<int>(blockDim.x)];
  numbers[blockDim.x + threadIdx.x] = neighbour;
}

__global__ void half_at_a_barrier(int* numbers) {
  if (threadIdx.x < 16) {
    __syncthreads();
  } else {
    numbers[threadIdx.x] = __shfl_xor(1, 1, 32);
  }
}

__global__ void others_have_ended(int* numbers) {
  if (threadIdx.x >= 8) return;
  __syncthreads();
  numbers[threadIdx.x] = __shfl_xor(7, 8, 16);
  numbers[8 + threadIdx.x] = __shfl(static_cast<int>(threadIdx.x), 3, 4);
  numbers[16 + threadIdx.x] = __shfl_up(static_cast<int>(threadIdx.x), 1, 4);
}

// Votes of half a wavefront, while the other half is at a barrier.
__global__ void votes(int* numbers) {
  if (threadIdx.x < 32) numbers[threadIdx.x] = __any(threadIdx.x == 5);
  __syncthreads();
  if (threadIdx.x >= 32) numbers[threadIdx.x] = __any(threadIdx.x == 5);
}

__global__ void shared_memory_is_not_zero(int* numbers) {
  numbers[threadIdx.x] = static_cast<int*>(emulated_gpu::dynamic_shared())[threadIdx.x];
}

void print(const int* numbers, int count) {
  for (int i = 0; i < count; ++i) std::printf("%d%c", numbers[i], i + 1 < count ? ' ' : '\n');
}

// Kernels of one block, and what is printed of the numbers that they leave.
struct Probe {
  const char* name;
  void (*kernel)(int*);
  unsigned threads;
  int first, count;
};
const Probe probes[] = {
    {"race", race, 8, 8, 8},
    {"no_race", no_race, 8, 8, 8},
    {"half_at_a_barrier", half_at_a_barrier, 32, 0, 0},
    {"others_have_ended", others_have_ended, 16, 0, 24},
    {"votes", votes, 64, 0, 64},
    {"shared_memory_is_not_zero", shared_memory_is_not_zero, 2, 0, 2},
    {"too_many_threads", race, 1025, 0, 0},
};

}  // namespace

int main(int, char** arguments) {
  const std::string name = arguments[1];
  static int numbers[256], sums[4];
  if (name == "block_sum") {
    for (int i = 0; i < 256; ++i) numbers[i] = i;
    emulated_gpu::launch(block_sum, dim3(4), dim3(64), 0, numbers, sums);
    print(sums, 4);
    return EXIT_SUCCESS;
  }
  for (const Probe& probe : probes) {
    if (name != probe.name) continue;
    emulated_gpu::launch(probe.kernel, dim3(1), dim3(probe.threads), 0, numbers);
    print(numbers + probe.first, probe.count);
    return EXIT_SUCCESS;
  }
  return EXIT_FAILURE;
}
