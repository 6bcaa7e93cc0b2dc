// fp8_product on the GPU (formulas: quant/fp8_product.h), for the few rows of a decoding step: as
// fast as the weight is read.
//
// The outputs are the M of the tensor cores' product, and the rows of q are its N. A block has 16
// outputs; its warps share the columns out among them, 128 at a time, and add their sums up in the
// end, in shared memory.
//
//              columns 0-127   128-255        of 8 warps
//             .-------------.-------------.
//   16 rows   | warp 0      | warp 1      | ..   a lane loads 16 bytes of row lane / 4, and of row
//   of weight '-------------'-------------'      lane / 4 + 8, from column 16 * (lane % 4) on
//   8 rows    .-------------.-------------.
//   of q      |             |             | ..   and of its row lane / 4 of q
//             '-------------'-------------'
//
// It does not matter to a sum which column is which, as long as both operands agree. So the 16
// bytes of a lane, which lie together in memory, are its columns of four instructions of the tensor
// cores, four of each, and nothing goes through shared memory on the way there. Codes become
// float16, which holds each of them.
//
// Tried on an H100, and slower (8 rows and 4096 x 4096 take 7.8 us): a bulk prefetch of the block's
// weights into L2 (9.1); 32 outputs a block, which read q half as often (9.6). 32 rows would take
// 31.5 us for 14336 x 4096, where 16 take 25.8.
#include "quant/fp8_product.h"

#include "common/dispatch.h"
#include "common/float8.h"
#include "common/launch_policy.h"
#include "common/runtime_dtype.h"

namespace fuselage {
namespace {

constexpr int kFp8ProductWarps = 8;
constexpr int kFp8ProductThreads = kFp8ProductWarps * kWarpSize;
constexpr int kFp8ProductOutputs = 16;  // of a block: the M of the tensor cores' instruction
constexpr int kHalves = 2;  // of a group of columns, as 4 lanes load 64 bytes of a row at once

// What a lane holds of half a group.
template <int kRowTiles>
struct Codes {
  uint4 weight[2];  // rows lane / 4 and lane / 4 + 8
  uint4 q[kRowTiles];
};

__device__ __forceinline__ uint32_t word_of(const uint4& four, int i) {
  return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

template <int kRowTiles>
__device__ __forceinline__ void multiply(const Codes<kRowTiles>& codes,
                                         float (&sums)[kRowTiles][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t a[4];
    e4m3x4_to_float16(word_of(codes.weight[0], i), a[0], a[2]);
    e4m3x4_to_float16(word_of(codes.weight[1], i), a[1], a[3]);
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      uint32_t b[2];
      e4m3x4_to_float16(word_of(codes.q[n], i), b[0], b[1]);
      mma_m16n8k16<true>(sums[n], a, b[0], b[1]);
    }
  }
}

template <int kRowTiles, bool kInGroups>
__global__ void __launch_bounds__(kFp8ProductThreads,
                                  bounded_blocks(kFp8ProductThreads,
                                                 kInGroups&& kRowTiles == 2 ? 2 : 3))
    fp8_product_kernel(const Fp8Product p) {
  if constexpr (!kCompilesMma) return;
  constexpr int kOutputs = kFp8ProductOutputs, kRows = 8 * kRowTiles;
  constexpr int kStride = kOutputs + 4;  // without bank conflicts between the lanes of a fragment
  __shared__ float partial[kFp8ProductWarps][kRows * kStride];
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int dim = static_cast<int>(p.dim), rows = static_cast<int>(p.rows);
  const int64_t first = int64_t{blockIdx.x} * kOutputs;
  const uint8_t* weight = p.weight + first * dim;
  const int own_row = lane / 4, own_column = lane % 4 * 16;
  const int groups = (dim + kQuantGroup - 1) / kQuantGroup;
  grid_dependency_wait();

  Codes<kRowTiles> codes[kHalves];
  // Zeros past the end, of columns and of rows.
  const auto load = [&](int group, int half) {
    const int column = group * kQuantGroup + half * 64 + own_column;
    const auto load_row = [&](const uint8_t* matrix, int row, bool exists, auto&& load_16) {
      return column < dim && exists ? load_16(matrix + int64_t{row} * dim + column)
                                    : make_uint4(0, 0, 0, 0);
    };
#pragma unroll
    for (int i = 0; i < 2; ++i)
      codes[half].weight[i] = load_row(weight, own_row + i * 8, true, ld_global_nc_no_allocate);
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      const int row = own_row + n * 8;
      codes[half].q[n] = load_row(p.q, row, row < rows, load_global_16);
    }
  };
  // Half a group is on its way while the other is multiplied.
  const auto multiply_group = [&](int group, auto& to) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      multiply(codes[half], to);
      load(group + kFp8ProductWarps, half);
    }
  };
  float sums[kRowTiles][4] = {};
#pragma unroll
  for (int half = 0; half < kHalves; ++half) load(warp, half);
#pragma unroll 1
  for (int group = warp; group < groups; group += kFp8ProductWarps) {
    if constexpr (!kInGroups) {
      multiply_group(group, sums);
    } else {
      float of_group[kRowTiles][4] = {};
      const float weight_scale = p.weight_scale[first / kQuantGroup * groups + group];
      const float* q_scale = p.q_scale + group * p.q_scale_group_stride;
      multiply_group(group, of_group);
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = n * 8 + lane % 4 * 2 + i % 2;
          const float scale = row < rows ? q_scale[row * p.q_scale_row_stride] : 0.0f;
          sums[n][i] = fmaf(of_group[n][i], scale * weight_scale, sums[n][i]);
        }
      }
    }
  }

#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int output = i / 2 * 8 + own_row, row = n * 8 + lane % 4 * 2 + i % 2;
      partial[warp][row * kStride + output] = sums[n][i];
    }
  }
  __syncthreads();
  const int output = static_cast<int>(threadIdx.x) % kOutputs;
  const int row = static_cast<int>(threadIdx.x) / kOutputs;
  static_assert(kOutputs * kRows <= kFp8ProductThreads, "a thread has one output at most");
  if (row >= rows) return;
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kFp8ProductWarps; ++w) sum += partial[w][row * kStride + output];
  if (!kInGroups)
    sum = sum * p.q_scale[row * p.q_scale_row_stride] * p.weight_scale[first + output];
  if (p.bias != nullptr) sum += load_value(p.bias, p.bias_dtype, first + output);
  store_value(p.y, p.y_dtype, row * p.out + first + output, sum);
}

}  // namespace

namespace gpu {

bool has_fp8_product(int device) { return device_info(device).tensor_cores != TensorCores::none; }

const char* fp8_product(const Fp8Product& p, int, void* stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(p.out, kFp8ProductOutputs)));
  const auto run = [&](auto kernel) {
    return gpu_launch_after(kernel, grid, dim3(kFp8ProductThreads), static_cast<gpuStream>(stream),
                            p);
  };
  return message_of(with_bool(p.in_groups, [&](auto in_groups) {
    return p.rows <= 8 ? run(&fp8_product_kernel<1, in_groups>)
                       : run(&fp8_product_kernel<2, in_groups>);
  }));
}

}  // namespace gpu
}  // namespace fuselage
