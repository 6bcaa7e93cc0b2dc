// quant_fp8 on the GPU (formulas: common/quant.h).
//
// Aligned rows of float8_e4m3fn, which products take, have the kernel of common/quant_kernel.h. All
// others share one, rows that no block holds as well.
#include "quant/quant_fp8.h"

#include "common/alignment.h"
#include "common/quant_kernel.h"

namespace fuselage {
namespace {

// x as it is.
template <typename T_>
struct PlainRows {
  using T = T_;
  using Params = QuantForward;
  static constexpr bool kTyped = false, kUnaligned = false;
  static constexpr int kRegisters = 48;

  static __host__ __device__ const QuantForward& quant(const QuantForward& p) { return p; }
  static __device__ __forceinline__ T* out_row(const QuantForward&, int64_t) { return nullptr; }

  template <int kVectors, bool kAligned>
  struct Inputs {
    RowLoading<T, kVectors, kAligned> x;

    __device__ __forceinline__ void start(const QuantForward& p, int64_t row, int column,
                                          int left) {
      x.start(static_cast<const T*>(p.x) + row * p.x_stride + column, left);
    }
    __device__ __forceinline__ void join() { x.join(); }
    __device__ __forceinline__ Vector<T, 16 / sizeof(T)> finish(int j) const { return x.joined(j); }
  };
};

// Rows of any alignment, format and length. A row with one scale belongs to one block. Where it is
// longer than the block's registers it is read twice, from its start for the scale and then back,
// so that the second time its end is there already, and the rest mostly in L2.
template <typename T, int kVectors>
__global__ void __launch_bounds__(kQuantThreads)
    quant_any_kernel(const QuantForward p, const int slices) {
  constexpr int N = 16 / sizeof(T);
  constexpr int kStep = kWarpSize * N;  // columns between a thread's vectors
  __shared__ uint32_t warps[kWarpSize];
  const int dim = static_cast<int>(p.dim);
  const int row_block = static_cast<int>(blockIdx.x) / slices;
  const int slice = static_cast<int>(blockIdx.x) - row_block * slices;
  const int64_t row = int64_t{row_block} * blockDim.y + threadIdx.y;
  const int step = static_cast<int>(blockDim.x) * kVectors * N;
  const int thread_column = static_cast<int>(threadIdx.x / kWarpSize) * kVectors * kStep +
                            static_cast<int>(threadIdx.x % kWarpSize) * N;
  const bool makes_row_scale = p.given_scale == nullptr && !p.in_groups;
  const int begin = slice * step, end = makes_row_scale ? dim : min(dim, begin + step);

  Vector<T, N> vectors[kVectors];
  const auto left_of = [&](int start) {
    return row < p.rows ? max(dim - start - thread_column, -N) : -N;
  };
  const auto load = [&](int start) {
    RowLoading<T, kVectors, false> loading;
    loading.start(static_cast<const T*>(p.x) + row * p.x_stride + start + thread_column,
                  left_of(start));
    loading.join();
#pragma unroll
    for (int j = 0; j < kVectors; ++j) vectors[j] = loading.joined(j);
  };
  float scale = 1.0f;
  int start = begin;
  load(start);
  if (p.given_scale != nullptr) {
    scale = *p.given_scale;
  } else if (makes_row_scale) {
    uint32_t keys = 0;
#pragma unroll 1
    while (true) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) keys = larger_keys(keys, vectors[j]);
      if (end - start <= step) break;
      start += step;
      load(start);
    }
    scale = scale_of<false, T>(p, largest_of_row(key_of<T>(keys), warps));
    if (threadIdx.x == 0 && row < p.rows) p.scale[row * p.scale_row_stride] = scale;
  }
#pragma unroll 1
  while (true) {
    quantise_vectors<false, false, false>(p, vectors, scale, row, start + thread_column,
                                          left_of(start));
    if (start == begin) break;
    start -= step;
    load(start);
  }
}

template <typename T>
gpuError launch(const QuantForward& p, const QuantPolicy& policy, gpuStream stream) {
  if (policy.for_many) return launch_quant<PlainRows<T>>(p, policy, true, stream);
  const int64_t blocks = ceil_div(p.rows, policy.rows_per_block) * policy.slices;
  const auto kernel =
      policy.vectors == 1 ? &quant_any_kernel<T, 1> : &quant_any_kernel<T, kQuantVectors>;
  return gpu_launch(kernel, dim3(static_cast<unsigned>(blocks)),
                    dim3(policy.threads_per_row, policy.rows_per_block), 0, 1, stream, p,
                    static_cast<int>(policy.slices));
}

}  // namespace

namespace gpu {

const char* quant_fp8(const QuantForward& p, int device, void* stream) {
  const int size = dtype_size(p.x_dtype);
  const bool aligned = aligned_rows(p.x, p.rows == 1 ? 0 : p.x_stride, p.dim, size) &&
                       aligned_rows(p.q, p.dim, p.dim, 1, 16 / size);
  const bool for_many = aligned && p.format == QuantFormat::e4m3;
  const QuantPolicy policy = quant_policy(
      device_info(device), {p.rows, p.dim, size, makes_row_scales(p), aligned, for_many});
  if (ceil_div(p.rows, policy.rows_per_block) * policy.slices > kMaxQuantBlocks)
    return "`x` has too many rows for one launch";
  return message_of(dispatch_size(p.x_dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch<T>(p, policy, static_cast<gpuStream>(stream));
  }));
}

}  // namespace gpu
}  // namespace fuselage
