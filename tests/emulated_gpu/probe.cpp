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

}  // namespace

int main(int, char** arguments) {
  const std::string name = arguments[1];
  static int numbers[256], sums[4];
  if (name == "block_sum") {
    for (int i = 0; i < 256; ++i) numbers[i] = i;
    emulated_gpu::launch(block_sum, dim3(4), dim3(64), 0, numbers, sums);
    print(sums, 4);
  } else if (name == "race") {
    emulated_gpu::launch(race, dim3(1), dim3(8), 0, numbers);
    print(numbers + 8, 8);
  } else if (name == "no_race") {
    emulated_gpu::launch(no_race, dim3(1), dim3(8), 0, numbers);
    print(numbers + 8, 8);
  } else if (name == "half_at_a_barrier") {
    emulated_gpu::launch(half_at_a_barrier, dim3(1), dim3(32), 0, numbers);
  } else if (name == "others_have_ended") {
    emulated_gpu::launch(others_have_ended, dim3(1), dim3(16), 0, numbers);
    print(numbers, 24);
  } else if (name == "votes") {
    emulated_gpu::launch(votes, dim3(1), dim3(64), 0, numbers);
    print(numbers, 64);
  } else if (name == "shared_memory_is_not_zero") {
    emulated_gpu::launch(shared_memory_is_not_zero, dim3(1), dim3(2), 8, numbers);
    print(numbers, 2);
  } else if (name == "too_many_threads") {
    emulated_gpu::launch(race, dim3(1), dim3(1025), 0, numbers);
  } else {
    return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}
