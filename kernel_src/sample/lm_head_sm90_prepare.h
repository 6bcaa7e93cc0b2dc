// The small kernels around that of sample/lm_head_sm90.cu: before it, what is cleared and, for
// weights of float8, hidden in tiles; after it, the reduction of the blocks' candidates.
#pragma once

#include "common/ptx.h"
#include "sample/sample_device.h"

namespace fuselage {
namespace gpu {
namespace {

// ---- before ----

// Memory that a launch needs initialised.
struct Cleared {
  uint32_t* values;  // [count]: set to 0
  int count;
  int64_t* offset;  // advanced, or null

  __device__ __forceinline__ void run() const {
    for (int i = threadIdx.x; i < count; i += blockDim.x) values[i] = 0;
    if (offset != nullptr && threadIdx.x == 0) ++*offset;
  }
};

// NOTE: the dependent kernel may start as soon as all that was launched before is done.
__global__ void clear_kernel(const Cleared cleared) {
  grid_dependency_wait();
  launch_dependents();
  cleared.run();
}

struct HiddenTiles {
  const uint16_t* hidden;  // [batch, dim]
  bool is_bfloat16;
  int64_t stride, dim;
  int batch, columns;
  int blocks;     // of 16 elements of the depth, zeros at its end included
  uint4* tiles;   // float16, [blocks / 4, columns, 64], each block in the order of the products
  float* scales;  // [columns]: of the products
  Cleared cleared;
};

constexpr int kTilesThreads = 256;

__device__ __forceinline__ float power_of_2(int exponent) {
  return __int_as_float((exponent + 127) << 23);
}

// The exponent of the power of two by which a row of bfloat16 is scaled, so that its largest finite
// element is near the largest float16. Elements below 2^-32 of it are rounded, by 2^-40 of it at
// most, and the others are exact.
__device__ __forceinline__ int scale_exponent(uint32_t max_magnitude) {
  const int exponent = max(static_cast<int>(max_magnitude >> 7), 1) - 127;
  return min(15 - exponent, 126);
}

// Elements 16 * block to 16 * block + 15 of a column; zeros past the end.
__device__ __forceinline__ void load_block(const HiddenTiles& p, int column, int block,
                                           uint32_t (&pairs)[8]) {
#pragma unroll
  for (uint32_t& pair : pairs) pair = 0;
  if (column >= p.batch) return;
  const int64_t first = int64_t{block} * 16;
  const uint16_t* from = p.hidden + column * p.stride + first;
  if (first + 16 <= p.dim && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint4 four = load_global_16(from + 8 * k);
      pairs[4 * k] = four.x;
      pairs[4 * k + 1] = four.y;
      pairs[4 * k + 2] = four.z;
      pairs[4 * k + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      if (first + k < p.dim) pairs[k / 2] |= uint32_t{from[k]} << (k % 2 * 16);
    }
  }
}

// The largest finite magnitude of a column, as bits, in all threads.
__device__ __forceinline__ uint32_t max_magnitude_of(const HiddenTiles& p, int column,
                                                     uint32_t& shared) {
  if (threadIdx.x == 0) shared = 0;
  __syncthreads();
  uint32_t max_magnitude = 0;
  for (int block = threadIdx.x; block < p.blocks; block += kTilesThreads) {
    uint32_t pairs[8];
    load_block(p, column, block, pairs);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const uint32_t magnitude = pairs[i / 2] >> (i % 2 * 16) & 0x7fffu;
      if (magnitude < 0x7f80u) max_magnitude = max(max_magnitude, magnitude);
    }
  }
  max_magnitude = __reduce_max_sync(0xffffffffu, max_magnitude);
  if (threadIdx.x % 32 == 0) atomicMax(&shared, max_magnitude);
  __syncthreads();
  return shared;
}

// Puts hidden into tiles, a column a block, and clears as clear_kernel, whose note holds here.
__global__ void __launch_bounds__(kTilesThreads) hidden_tiles_kernel(const HiddenTiles p) {
  __shared__ uint32_t max_magnitude;
  grid_dependency_wait();
  launch_dependents();
  if (blockIdx.x == 0) p.cleared.run();
  const int column = blockIdx.x;
  int exponent = 0;
  if (p.is_bfloat16) exponent = scale_exponent(max_magnitude_of(p, column, max_magnitude));
  if (threadIdx.x == 0) p.scales[column] = power_of_2(-exponent);
  for (int block = threadIdx.x; block < p.blocks; block += kTilesThreads) {
    uint32_t pairs[8];
    load_block(p, column, block, pairs);
    if (p.is_bfloat16) {
#pragma unroll
      for (uint32_t& pair : pairs) {
        float values[2];
        WordTraits<bfloat16>::unpack(pair, values);
        for (float& value : values) value *= power_of_2(exponent);
        pair = WordTraits<float16>::pack(values);
      }
    }
    // A consumer's lane has four neighbours, and multiplies the first two as of the lower half, the
    // others as of the upper.
    uint4* to = p.tiles + (int64_t{block / 4} * p.columns + column) * 8 + block % 4 * 2;
    to[0] = make_uint4(pairs[0], pairs[2], pairs[4], pairs[6]);
    to[1] = make_uint4(pairs[1], pairs[3], pairs[5], pairs[7]);
  }
}

// ---- after ----

struct Finish {
  const unsigned long long* candidates;  // [blocks, num_samples, columns]
  int blocks, columns, batch, num_samples, batch_start;
  int64_t vocab_offset;
  int64_t* tokens;
  float* scores;
  int64_t* offsets;  // to be advanced, or null
  bool offset_per_row;
  int64_t offset_stride;
};

constexpr int kHeadFinishThreads = 128;

// A warp for each token.
__global__ void __launch_bounds__(kHeadFinishThreads) head_finish_kernel(Finish p) {
  const int i = blockIdx.x * (kHeadFinishThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  launch_dependents();
  grid_dependency_wait();
  if (i >= p.batch * p.num_samples) return;
  const int b = i / p.num_samples, sample = i % p.num_samples;
  unsigned long long best = 0;
  constexpr int kAtOnce = 5;  // on an H200 all
  for (int first = lane; first < p.blocks; first += 32 * kAtOnce) {
    unsigned long long keys[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int64_t block = first + 32 * k;
      keys[k] =
          block < p.blocks ? p.candidates[(block * p.num_samples + sample) * p.columns + b] : 0;
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) best = keys[k] > best ? keys[k] : best;
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    const unsigned long long other = __shfl_xor_sync(0xffffffffu, best, mask);
    best = other > best ? other : best;
  }
  if (lane == 0) {
    if (p.offsets != nullptr && sample == 0 && (p.offset_per_row || b == 0)) {
      ++p.offsets[(p.batch_start + b) * p.offset_stride];
    }
    const int64_t at = int64_t{p.batch_start + b} * p.num_samples + sample;
    const bool none = best == 0;
    p.tokens[at] = none ? -1 : p.vocab_offset + static_cast<uint32_t>(~best);
    if (p.scores != nullptr) {
      p.scores[at] = none ? -INFINITY : value_of_key<SampleMath>(static_cast<uint32_t>(best >> 32));
    }
  }
}

}  // namespace
}  // namespace gpu
}  // namespace fuselage
