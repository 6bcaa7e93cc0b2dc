// The kernel of rows that are quantised as they are read, or computed element by element. A struct,
// Source, says which:
//
//   T, kTyped                  as in common/quant_device.h
//   Params                     what the kernel is given; Source::quant(p) is the QuantForward in it
//   Inputs<kVectors>           start() issues the loads of a row; finish(p, j) gives vector j of T
//   store(p, row, column, vector)   where the result goes unquantised, too
//
// Rows, warps and vectors. A vector is 16 bytes of x; a thread has kVectors of them, a warp apart,
// in registers (common/row_vectors.h): x is read once.
//
//   short rows                     one row a block             a row over several blocks,
//   .------------------------.     .---------------------.     which have no scale in common
//   | lanes 0-15:  row 0     |     | warp 0 | warp 1 | ..|     .---------. .---------.
//   | lanes 16-31: row 1     |     '---------------------'     | slice 0 | | slice 1 |
//   '------------------------'     maxima meet in shared       '---------' '---------'
//                                  memory: one barrier
//
// A group of 128 columns is a vector of each of 16 lanes (float32: of 32).
#pragma once

#include "common/quant_device.h"
#include "common/quant_policy.h"

namespace fuselage {

// Registers of a thread. With more, which the compiler takes where it can, fewer blocks are on a
// multiprocessor to load while others compute: gelu_tanh_quant of (16384, 4096) bfloat16 takes 84
// us on an H100 so, and 94 with 64 registers.
constexpr int quant_registers(int vectors) { return vectors == 1 ? 32 : 48; }

template <typename Source, int kVectors>
__global__ void FUSELAGE_MAX_REGISTERS(kVectors == 1 ? kQuantShortThreads : kQuantThreads,
                                       quant_registers(kVectors))
    quant_kernel(const typename Source::Params params, const int slices) {
  using T = typename Source::T;
  constexpr int N = 16 / sizeof(T);
  constexpr int kStep = kWarpSize * N;  // columns between a thread's vectors
  const QuantForward& p = Source::quant(params);
  const int dim = static_cast<int>(p.dim);
  const int row_block = static_cast<int>(blockIdx.x) / slices;
  const int slice = static_cast<int>(blockIdx.x) - row_block * slices;
  const int64_t row = int64_t{row_block} * blockDim.y + threadIdx.y;
  const int warp = static_cast<int>(threadIdx.x / kWarpSize);
  const int first_column = slice * static_cast<int>(blockDim.x) * kVectors * N +
                           warp * kVectors * kStep + static_cast<int>(threadIdx.x % kWarpSize) * N;
  const int left = row < p.rows ? dim - first_column : -N;

  typename Source::template Inputs<kVectors> inputs;
  inputs.start(params, row, first_column, left);
  Vector<T, N> vectors[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    vectors[j] = inputs.finish(params, j);
    if (left > j * kStep) Source::store(params, row, first_column + j * kStep, vectors[j]);
  }
  quantise_row<Source::kTyped, T, kVectors>(p, vectors, row, first_column, left);
}

template <typename Source>
gpuError launch_quant(const typename Source::Params& params, const QuantPolicy& policy,
                      gpuStream stream) {
  const int64_t rows = Source::quant(params).rows;
  const dim3 grid(static_cast<unsigned>(ceil_div(rows, policy.rows_per_block) * policy.slices));
  const dim3 block(policy.threads_per_row, policy.rows_per_block);
  const auto kernel =
      policy.vectors == 1 ? &quant_kernel<Source, 1> : &quant_kernel<Source, kQuantVectors>;
  return gpu_launch(kernel, grid, block, 0, 1, stream, params, static_cast<int>(policy.slices));
}

}  // namespace fuselage
