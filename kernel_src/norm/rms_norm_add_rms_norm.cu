// rms_norm_add_rms_norm on the GPU (formulas: norm/rms_norm.h): an operator of norm/row_forward.h
// that has two sums over a row, one after the other.
#include <type_traits>

#include "common/dispatch.h"
#include "common/runtime_dtype.h"
#include "common/vector.h"
#include "norm/rms_norm.h"
#include "norm/rms_norm_device.h"
#include "norm/rms_norm_policy.h"
#include "norm/row_forward.h"

namespace fuselage {
namespace {

template <typename T>
struct RmsNormAddRmsNormOp {
  using Params = RmsNormAddRmsNorm;
  using In = T;
  using Out = T;
  using Values = RuntimeValues<T>;
  static constexpr int N = 16 / sizeof(T);
  static constexpr bool kCentres = false, kMostVectors = false;
  static constexpr int kSums = 1, kShared = 1;
  static constexpr bool kWritesSum = true, kNormsInput = true;

  // Launch bounds: 64 registers with two vectors of an aligned row.
  static constexpr int threads(bool, bool) { return kForwardThreads; }
  static constexpr int blocks(int vectors, bool aligned, bool) {
    return aligned && vectors == 2 ? 2 : 1;
  }
  static constexpr int short_blocks(bool aligned) { return aligned ? 5 : 4; }
  static constexpr bool early(int, bool) { return true; }

  static __device__ __forceinline__ bool shares_columns(const Params&) { return true; }
  static __device__ __forceinline__ T* sum_row(const Params& p, int64_t row) {
    return static_cast<T*>(p.new_residual) + row * p.dim;
  }
  static __device__ __forceinline__ T* out_row(const Params& p, int64_t row) {
    return static_cast<T*>(p.out) + row * p.dim;
  }
  static __device__ __forceinline__ void sums_of(const Vector<T, N>& s, float (&sums)[1]) {
    sums[0] = sum_of_squares(s);
  }

  // kPost: of x; otherwise of the sum.
  template <bool kPost>
  struct Rstd {
    float rstd;

    __device__ __forceinline__ explicit Rstd(float rstd_) : rstd(rstd_) {}
    __device__ __forceinline__ Rstd(const Params& p, const float (&sums)[1])
        : rstd(rstd_of(sums[0], p.dim, kPost ? p.eps : p.pre_eps)) {}
    __device__ __forceinline__ void save(const Params& p, int64_t row) const {
      if (p.statistics != nullptr) p.statistics[2 * row + (kPost ? 0 : 1)] = rstd;
    }
    __device__ __forceinline__ Rstd from(int lane, int width) const {
      return Rstd(shuffle_from(rstd, lane, width));
    }
  };
  using InputStats = Rstd<true>;
  using Stats = Rstd<false>;

  // One of the weights: what becomes of normalised values.
  template <bool kAligned>
  struct Weight {
    using Loaded = RuntimeLoading<T, N, kAligned>;
    Values values;
    float offset;
    bool cast_before_weight;

    __device__ __forceinline__ Weight(const Params& p, const void* data, DType dtype)
        : values(data, dtype),
          offset(data == nullptr ? 0.0f : p.weight_offset),
          cast_before_weight(p.cast_before_weight) {}
    __device__ __forceinline__ Loaded load(int column, int dim) const {
      Loaded loaded;
      loaded.start(values, column, dim);
      return loaded;
    }
    __device__ __forceinline__ Vector<T, N> times(const Vector<T, N>& s, float rstd,
                                                  const Loaded& loaded, int column, int dim) const {
      float normalised[N], factors[N];
      s.to_floats(normalised);
      loaded.finish(values, column, dim, 1.0f, factors);
      rms_normalise<T>(normalised, rstd, factors, offset, cast_before_weight);
      return Vector<T, N>::from_floats(normalised);
    }
  };

  // x, and then the rounded sum of the residual and the normalised x.
  template <int kVectors, bool kAligned>
  struct Inputs {
    RowLoading<T, kVectors, kAligned> x, residual;
    typename Weight<kAligned>::Loaded weights[kVectors];

    static __device__ __forceinline__ Weight<kAligned> weight(const Params& p) {
      return Weight<kAligned>(p, p.post_weight, p.post_weight_dtype);
    }
    __device__ __forceinline__ void start(const Params& p, int64_t row, int column, int left) {
      x.start(static_cast<const T*>(p.x) + row * p.x_stride + column, left);
      residual.start(static_cast<const T*>(p.residual) + row * p.residual_stride + column, left);
#pragma unroll
      for (int j = 0; j < kVectors; ++j)
        weights[j] = weight(p).load(column + j * kWarpSize * N, static_cast<int>(p.dim));
    }
    __device__ __forceinline__ void join(const Params&) {
      x.join();
      residual.join();
    }
    __device__ __forceinline__ Vector<T, N> finish(const Params&, int64_t, int, int j) const {
      return x.joined(j);
    }
    __device__ __forceinline__ Vector<T, N> add(const Params& p, int column, int j,
                                                const Vector<T, N>& s,
                                                const InputStats& stats) const {
      float a[N], b[N];
      weight(p).times(s, stats.rstd, weights[j], column, static_cast<int>(p.dim)).to_floats(a);
      residual.joined(j).to_floats(b);
#pragma unroll
      for (int k = 0; k < N; ++k) a[k] += b[k];
      return Vector<T, N>::from_floats(a);
    }
  };

  template <bool kAligned>
  struct PackedColumns {
    struct Loaded {
      typename Weight<kAligned>::Loaded weights;
      int column;
    };
    static constexpr int kAhead = 0;
    static constexpr bool kRare = false, kTogether = false, kLoadsAnyway = false, kFirst = false;
    Weight<kAligned> weight;
    int dim;

    static __device__ __forceinline__ bool fits(const Params&) { return true; }
    __device__ __forceinline__ PackedColumns(const Params& p, int64_t)
        : weight(p, p.pre_weight, p.pre_weight_dtype), dim(static_cast<int>(p.dim)) {}
    __device__ __forceinline__ Loaded load(int column, int dim) const {
      return {weight.load(column, dim), column};
    }
    __device__ __forceinline__ Vector<T, N> map(const Vector<T, N>& s, const Stats& stats,
                                                const Loaded& loaded) const {
      return weight.times(s, stats.rstd, loaded.weights, loaded.column, dim);
    }
  };

  template <bool kAligned, typename F>
  static __device__ __forceinline__ void with_columns(const Params&, F&& f) {
    f(ColumnsTag<PackedColumns<kAligned>>{});
  }
};

bool is_aligned(const RmsNormAddRmsNorm& p) {
  return aligned_rows(p.x, p.x_stride, p.dim, p.x_dtype) &&
         aligned_rows(p.residual, p.residual_stride, p.dim, p.x_dtype) &&
         aligned_rows(p.new_residual, p.dim, p.dim, p.x_dtype) &&
         aligned_rows(p.out, p.dim, p.dim, p.x_dtype) &&
         aligned_rows(p.post_weight, 0, p.dim, p.post_weight_dtype) &&
         aligned_rows(p.pre_weight, 0, p.dim, p.pre_weight_dtype);
}

}  // namespace

namespace gpu {

const char* rms_norm_add_rms_norm(const RmsNormAddRmsNorm& p, int device, void* stream) {
  return message_of(dispatch_dtype(p.x_dtype, [&](auto tag) {
    using Op = RmsNormAddRmsNormOp<typename decltype(tag)::type>;
    return with_bool(is_aligned(p), [&](auto aligned) {
      const RowPolicy policy =
          rms_norm_add_rms_norm_policy(device_info(device), aligned, p.rows, p.dim, p.x_dtype);
      return launch_row_forward<Op, aligned>(p, policy, static_cast<gpuStream>(stream));
    });
  }));
}

}  // namespace gpu
}  // namespace fuselage
