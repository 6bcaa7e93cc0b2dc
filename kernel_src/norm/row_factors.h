// The factors of a backward of rows (norm/row_backward.h): what grad_out is multiplied with, and
// what else has a value for each column of all rows of a group.
#pragma once

#include "common/gpu_compat.h"

namespace fuselage {
namespace {

// The factors of a thread's columns: in registers, or in shared memory, where the threads of other
// rows with the same columns read them too.
template <typename Op, int kVectors, int N, bool kInShared = (Op::kSharedFactors > 0)>
struct RowFactors {
  float values[kVectors][N];

  __device__ __forceinline__ RowFactors(float4*, bool) {}
  __device__ __forceinline__ void set(int, int j, const float (&factors)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) values[j][k] = factors[k];
  }
  __device__ __forceinline__ void get(int, int j, float (&factors)[N]) const {
#pragma unroll
    for (int k = 0; k < N; ++k) factors[k] = values[j][k];
  }
};

// [kind][vector][quarter][thread of the row]
template <typename Op, int kVectors, int N>
struct RowFactors<Op, kVectors, N, true> {
  float4* quads;
  const bool writes;

  __device__ __forceinline__ RowFactors(float4* memory, bool by_row)
      : quads(memory + threadIdx.x), writes(by_row || threadIdx.y == 0) {}
  __device__ __forceinline__ float4* quad(int kind, int j, int k) const {
    return quads + ((kind * kVectors + j) * N + k) / 4 * static_cast<int>(blockDim.x);
  }
  __device__ __forceinline__ void set(int kind, int j, const float (&factors)[N]) {
    if (!writes) return;
#pragma unroll
    for (int k = 0; k < N; k += 4)
      *quad(kind, j, k) = make_float4(factors[k], factors[k + 1], factors[k + 2], factors[k + 3]);
  }
  __device__ __forceinline__ void get(int kind, int j, float (&factors)[N]) const {
#pragma unroll
    for (int k = 0; k < N; k += 4) {
      const float4 four = *quad(kind, j, k);
      factors[k] = four.x;
      factors[k + 1] = four.y;
      factors[k + 2] = four.z;
      factors[k + 3] = four.w;
    }
  }
};

}  // namespace
}  // namespace fuselage
