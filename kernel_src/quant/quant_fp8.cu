// quant_fp8 on the GPU (formulas: common/quant.h).
//
// Aligned rows of float8_e4m3fn, which products take, have the kernel of common/quant_kernel.h. All
// others share one with fewer loads in flight, rows that no block holds as well.
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
  static constexpr bool kTyped = false;
  static constexpr int N = 16 / sizeof(T);

  static __host__ __device__ const QuantForward& quant(const QuantForward& p) { return p; }

  template <int kVectors>
  struct Inputs {
    RowLoading<T, kVectors, true> x;

    __device__ __forceinline__ void start(const QuantForward& p, int64_t row, int column,
                                          int left) {
      x.start(static_cast<const T*>(p.x) + row * p.x_stride + column, left);
    }
    __device__ __forceinline__ Vector<T, N> finish(const QuantForward&, int j) const {
      return x.finish(j);
    }
  };
  static __device__ __forceinline__ void store(const QuantForward&, int64_t, int,
                                               const Vector<T, N>&) {}
};

// Rows of any alignment, format and length, a vector a thread. A row with one scale belongs to one
// block, and where it is longer than that it is read twice, the second time mostly from L2.
template <typename T>
__global__ void __launch_bounds__(kQuantThreads)
    quant_any_kernel(const QuantForward p, const int slices) {
  constexpr int N = 16 / sizeof(T);
  __shared__ uint32_t warps[kWarpSize];
  const int dim = static_cast<int>(p.dim);
  const int row_block = static_cast<int>(blockIdx.x) / slices;
  const int slice = static_cast<int>(blockIdx.x) - row_block * slices;
  const int64_t row = int64_t{row_block} * blockDim.y + threadIdx.y;
  const int step = static_cast<int>(blockDim.x) * N;
  const bool makes_row_scale = p.given_scale == nullptr && !p.in_groups;
  const int begin = slice * step, end = makes_row_scale ? dim : min(dim, begin + step);
  const bool is_held = end - begin <= step;

  RowLoading<T, 1, false> loading;
  const auto left_of = [&](int column) { return row < p.rows ? max(dim - column, -N) : -N; };
  // f(column, columns left, vector) of all vectors of this thread.
  const auto for_each_vector = [&](bool load, auto&& f) {
#pragma unroll 1
    for (int start = begin; start < end; start += step) {
      const int column = start + static_cast<int>(threadIdx.x) * N, left = left_of(column);
      if (load) loading.start(static_cast<const T*>(p.x) + row * p.x_stride + column, left);
      f(column, left, loading.finish(0));
    }
  };
  float scale = 1.0f;
  if (p.given_scale != nullptr) {
    scale = *p.given_scale;
  } else if (makes_row_scale) {
    uint32_t keys = 0;
    for_each_vector(
        true, [&](int, int, const Vector<T, N>& vector) { keys = larger_keys(keys, vector); });
    scale = scale_of<false, T>(p, largest_of_row(key_of<T>(keys), warps));
    if (threadIdx.x == 0 && row < p.rows) p.scale[row * p.scale_row_stride] = scale;
  }
  ScaleDivisor divisor(p, scale);
  for_each_vector(
      !makes_row_scale || !is_held, [&](int column, int left, const Vector<T, N>& vector) {
        if (p.in_groups)
          divisor = ScaleDivisor(p, scale_of_group<false, 1>(p, vector, row, column, left > 0));
        quantise<false, false>(p, vector, divisor, p.q + row * p.dim + column, left);
      });
}

template <typename T>
gpuError launch(const QuantForward& p, const QuantPolicy& policy, gpuStream stream) {
  if (policy.for_many) return launch_quant<PlainRows<T>>(p, policy, stream);
  const int64_t blocks = ceil_div(p.rows, policy.rows_per_block) * policy.slices;
  return gpu_launch(&quant_any_kernel<T>, dim3(static_cast<unsigned>(blocks)),
                    dim3(policy.threads_per_row, policy.rows_per_block), 0, 1, stream, p,
                    static_cast<int>(policy.slices));
}

}  // namespace

namespace gpu {

const char* quant_fp8(const QuantForward& p, int, void* stream) {
  const int size = dtype_size(p.x_dtype);
  const bool aligned = aligned_rows(p.x, p.rows == 1 ? 0 : p.x_stride, p.dim, size) &&
                       aligned_rows(p.q, p.dim, p.dim, 1, 16 / size);
  const bool for_many = aligned && p.format == QuantFormat::e4m3;
  const QuantPolicy policy = quant_policy(p.dim, size, makes_row_scales(p), for_many);
  if (ceil_div(p.rows, policy.rows_per_block) * policy.slices > kMaxQuantBlocks)
    return "`x` has too many rows for one launch";
  return message_of(dispatch_size(p.x_dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch<T>(p, policy, static_cast<gpuStream>(stream));
  }));
}

}  // namespace gpu
}  // namespace fuselage
