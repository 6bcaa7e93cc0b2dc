// The kernel of rows that are quantised as they are read, or computed element by element. A struct,
// Source, says which:
//
//   T, kTyped                  as in common/quant_device.h
//   Params                     what the kernel is given; Source::quant(p) is the QuantForward in it
//   Inputs<kVectors, kAligned>   start() issues the loads of a row, join() puts their vectors
//                              together, finish(j) gives vector j of T
//   out_row(p, row)            where the result goes unquantised, too, or null
//   kUnaligned                 whether rows may start anywhere
//   kRegisters                 of a thread with kQuantVectors of aligned rows
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

// Registers of a thread. With more, fewer blocks are on a multiprocessor to load while others
// compute; with fewer, the compiler loads later.
template <typename Source>
constexpr int quant_registers(int vectors, bool aligned) {
  return vectors == 1 ? 32 : aligned ? Source::kRegisters : 64;
}

template <typename Source, int kVectors, bool kAligned>
__global__ void FUSELAGE_MAX_REGISTERS(kQuantThreads, quant_registers<Source>(kVectors, kAligned))
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

  typename Source::template Inputs<kVectors, kAligned> inputs;
  inputs.start(params, row, first_column, left);
  inputs.join();
  Vector<T, N> vectors[kVectors];
  T* const out = Source::out_row(params, row);
  RowStoring<T, N, kVectors, kAligned> storing(out + first_column, left);
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    vectors[j] = Vector<T, N>::zero();
    if (!is_past_end<kAligned, N>(left, j)) vectors[j] = inputs.finish(j);
    if (!kAligned || out != nullptr) storing.put(j, vectors[j]);
  }
  if (out != nullptr) storing.end();
  quantise_row<Source::kTyped, kAligned>(p, vectors, row, first_column, left);
}

template <typename Source>
gpuError launch_quant(const typename Source::Params& params, const QuantPolicy& policy,
                      bool aligned, gpuStream stream) {
  const int64_t rows = Source::quant(params).rows;
  const dim3 grid(static_cast<unsigned>(ceil_div(rows, policy.rows_per_block) * policy.slices));
  const dim3 block(policy.threads_per_row, policy.rows_per_block);
  auto kernel = policy.vectors == 1 ? &quant_kernel<Source, 1, true>
                                    : &quant_kernel<Source, kQuantVectors, true>;
  if constexpr (Source::kUnaligned) {
    if (!aligned) kernel = &quant_kernel<Source, kQuantVectors, false>;
  }
  return gpu_launch(kernel, grid, block, 0, 1, stream, params, static_cast<int>(policy.slices));
}

}  // namespace fuselage
