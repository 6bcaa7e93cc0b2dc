// Bindings of norms whose columns are spread over ranks, for the rules of DTensors
// (fuselage/_shard_norm.py). The formulas are in norm/shard_norm.h. `kind`: 0 rms, 1 layer, 2 poly;
// `dim`: columns of all ranks.
#include "binding.h"

#include "norm/shard_norm.h"
#include "norm/shard_norm_cpu.h"

namespace fuselage::binding {
namespace {

// What an op is given, as it was called.
struct Arguments {
  const char* op;
  const Tensor& x;
  int64_t kind;
  const OptionalTensor& weight;
  const OptionalTensor& bias;
  double weight_offset;
};

const OptionalTensor kNone = std::nullopt;

// The same, checked, and what keeps contiguous copies alive.
struct Checked {
  ShardNorm p;
  OptionalTensor weight, bias;
};

OptionalTensor check_factors(const Arguments& a, const char* name, const OptionalTensor& factors,
                             int64_t width) {
  FUSELAGE_CHECK(a.op, factors.has_value(), "`", name, "` must be given for kind 2");
  check_same_device(a.op, name, *factors, a.x);
  FUSELAGE_CHECK(a.op, factors->dim() == 1 && factors->size(0) == width, "`", name,
                 "` must have shape [", width, "], got ", shape_of(*factors));
  check_like_or_float32(a.op, name, check_dtype(a.op, name, *factors),
                        *dtype_from(a.x.scalar_type()));
  return with_adjacent_elements(*factors);
}

Checked check(const Arguments& a, bool has_factors) {
  Checked c{};
  ShardNorm& p = c.p;
  p.dtype = p.out_dtype = check_rows(a.op, a.x);
  check_columns(a.op, "x", a.x);
  FUSELAGE_CHECK(a.op, 0 <= a.kind && a.kind <= 2, "`kind` must be 0, 1 or 2, got ", a.kind);
  p.kind = static_cast<ShardNormKind>(a.kind);
  const bool poly = p.kind == ShardNormKind::poly;
  if (has_factors && poly) {
    c.weight = check_factors(a, "weight", a.weight, 3);
    c.bias = check_factors(a, "bias", a.bias, 1);
  } else if (has_factors) {
    c.weight = check_vector(a.op, "weight", a.weight, a.x);
    c.bias = check_vector(a.op, "bias", a.bias, a.x);
  }
  check_not_nan(a.op, "weight_offset", a.weight_offset);
  read_vector(p.weight, p.weight_dtype, c.weight, p.dtype);
  read_vector(p.bias, p.bias_dtype, c.bias, p.dtype);
  p.rows = rows_in(a.x);
  p.dim = columns_in(a.x);
  p.weight_offset = static_cast<float>(a.weight_offset);
  return c;
}

// The sums that all ranks gave: [ranks, rows, floats].
void check_gathered(const Arguments& a, ShardNorm& p, const Tensor& gathered, int64_t dim) {
  const int64_t floats = shard_sum_count(p.kind, p.backward);
  check_same_device(a.op, "gathered", gathered, a.x);
  FUSELAGE_CHECK(a.op,
                 is_float32(gathered) && gathered.dim() == 3 && gathered.size(1) == p.rows &&
                     gathered.size(2) == floats && gathered.is_contiguous() && gathered.size(0) > 0,
                 "`gathered` must be contiguous float32 [ranks, ", p.rows, ", ", floats, "], got ",
                 torch::headeronly::toString(gathered.scalar_type()), " ", shape_of(gathered));
  FUSELAGE_CHECK(a.op, p.dim <= dim && dim <= kMaxColumns, "`dim` must be at least that of `x` ",
                 shape_of(a.x), " and at most 2^31 - 2^16, got ", dim);
  p.ranks = gathered.size(0);
  p.total_dim = dim;
  p.rank_dim = (dim + p.ranks - 1) / p.ranks;
}

void check_saved_statistics(const Arguments& a, const ShardNorm& p, const Tensor& statistics) {
  const int64_t values = p.rows * shard_statistic_count(p.kind);
  check_saved(a.op, "statistics", statistics, values, a.x, "x", values, " float32 values");
}

void check_gradient(const Arguments& a, ShardNorm& p, const Tensor& grad_out) {
  check_same_device(a.op, "grad_out", grad_out, a.x);
  check_same_shape(a.op, "grad_out", grad_out, a.x);
  p.out_dtype = check_dtype(a.op, "grad_out", grad_out);
  check_like_or_float32(a.op, "grad_out", p.out_dtype, p.dtype);
  p.backward = true;
}

void check_mul(const Arguments& a, const ShardNorm& p, const OptionalTensor& mul) {
  FUSELAGE_CHECK(a.op, !mul.has_value() || p.kind == ShardNormKind::poly,
                 "`mul` must be None but for kind 2");
  check_like(a.op, "mul", mul, a.x);
}

float* floats_of(const Tensor& tensor) { return static_cast<float*>(tensor.mutable_data_ptr()); }
const float* read_floats(const Tensor& tensor) {
  return static_cast<const float*>(tensor.const_data_ptr());
}

void run_sums(const Arguments& a, const ShardNorm& p) {
  launch<cpu::shard_norm_sums, gpu::shard_norm_sums>(a.op, a.x, p, p.rows, p.dim);
}
void run_finish(const Arguments& a, const ShardNorm& p) {
  launch<cpu::shard_norm_finish, gpu::shard_norm_finish>(a.op, a.x, p, p.rows, p.dim);
}

// A rank's own sums of each row, of x or of the sum with the residual: (sums, new_residual).
std::tuple<Tensor, Tensor> shard_norm_sums(const Tensor& x, const OptionalTensor& residual,
                                           int64_t kind) {
  const Arguments a{"shard_norm_sums", x, kind, kNone, kNone, 0};
  Checked c = check(a, false);
  ShardNorm& p = c.p;
  check_like(a.op, "residual", residual, x);
  Tensor sums = empty_floats({p.rows, shard_sum_count(p.kind, false)}, x);
  const Gradient new_residual = gradient_of(residual, true, x);
  if (p.dim == 0) torch::stable::zero_(sums);
  if (is_nothing(x, p.rows, p.dim)) return {sums, new_residual.tensor};
  const auto x_rows = read_rows(p.x, p.x_stride, x);
  const auto residual_rows = read_rows(p.residual, p.residual_stride, residual);
  p.sums = floats_of(sums);
  p.new_residual = new_residual.data();
  run_sums(a, p);
  return {sums, new_residual.tensor};
}

// The result of the columns of a rank, and the statistics of each row: (out, statistics).
std::tuple<Tensor, Tensor> shard_norm(const Tensor& x, const OptionalTensor& mul,
                                      const Tensor& gathered, const OptionalTensor& weight,
                                      const OptionalTensor& bias, int64_t dim, double eps,
                                      double weight_offset, bool cast_before_weight,
                                      std::optional<ScalarType> out_dtype, int64_t kind) {
  const Arguments a{"shard_norm", x, kind, weight, bias, weight_offset};
  Checked c = check(a, true);
  ShardNorm& p = c.p;
  check_mul(a, p, mul);
  check_eps(a.op, eps);
  check_gathered(a, p, gathered, dim);
  p.out_dtype = check_out_dtype(a.op, out_dtype, p.dtype);
  FUSELAGE_CHECK(
      a.op,
      p.out_dtype == p.dtype || (p.kind == ShardNormKind::rms && p.out_dtype == DType::float32),
      "`out_dtype` must be None, or float32 for kind 0");
  Tensor out = empty_like(x, scalar_type_of(p.out_dtype));
  const int64_t values = shard_statistic_count(p.kind);
  Tensor statistics = values == 1 ? empty_floats({p.rows}, x) : empty_floats({p.rows, values}, x);
  if (p.dim == 0) torch::stable::zero_(statistics);
  if (is_nothing(x, p.rows, p.dim)) return {out, statistics};
  const auto x_rows = read_rows(p.x, p.x_stride, x);
  const auto mul_rows = read_rows(p.mul, p.mul_stride, mul);
  p.gathered = read_floats(gathered);
  p.saved = floats_of(statistics);
  p.out = out.mutable_data_ptr();
  p.eps = static_cast<float>(eps);
  p.cast_before_weight = cast_before_weight;
  run_finish(a, p);
  return {out, statistics};
}

// A rank's own sums of each row that the gradient of x needs of all ranks.
Tensor shard_norm_bwd_sums(const Tensor& grad_out, const Tensor& x, const OptionalTensor& mul,
                           const OptionalTensor& weight, const OptionalTensor& bias,
                           const Tensor& statistics, double weight_offset, int64_t kind) {
  const Arguments a{"shard_norm_bwd_sums", x, kind, weight, bias, weight_offset};
  Checked c = check(a, true);
  ShardNorm& p = c.p;
  check_gradient(a, p, grad_out);
  check_mul(a, p, mul);
  check_saved_statistics(a, p, statistics);
  Tensor sums = empty_floats({p.rows, shard_sum_count(p.kind, true)}, x);
  if (p.dim == 0) torch::stable::zero_(sums);
  if (is_nothing(x, p.rows, p.dim)) return sums;
  const auto grad_out_rows = read_rows(p.grad_out, p.grad_out_stride, grad_out);
  const auto x_rows = read_rows(p.x, p.x_stride, x);
  const auto mul_rows = read_rows(p.mul, p.mul_stride, mul);
  p.statistics = read_floats(statistics);
  p.sums = floats_of(sums);
  run_sums(a, p);
  return sums;
}

// The gradient of x.
Tensor shard_norm_bwd(const Tensor& grad_out, const OptionalTensor& grad_new_residual,
                      const Tensor& x, const OptionalTensor& mul, const Tensor& gathered,
                      const OptionalTensor& weight, const OptionalTensor& bias,
                      const Tensor& statistics, int64_t dim, double weight_offset, int64_t kind) {
  const Arguments a{"shard_norm_bwd", x, kind, weight, bias, weight_offset};
  Checked c = check(a, true);
  ShardNorm& p = c.p;
  check_gradient(a, p, grad_out);
  check_mul(a, p, mul);
  check_like(a.op, "grad_new_residual", grad_new_residual, x);
  FUSELAGE_CHECK(a.op, !grad_new_residual.has_value() || p.kind != ShardNormKind::poly,
                 "`grad_new_residual` must be None for kind 2");
  check_saved_statistics(a, p, statistics);
  check_gathered(a, p, gathered, dim);
  Tensor grad_x = empty_like(x, x.scalar_type());
  if (is_nothing(x, p.rows, p.dim)) return grad_x;
  const auto grad_out_rows = read_rows(p.grad_out, p.grad_out_stride, grad_out);
  const auto other_rows =
      read_rows(p.grad_new_residual, p.grad_new_residual_stride, grad_new_residual);
  const auto x_rows = read_rows(p.x, p.x_stride, x);
  const auto mul_rows = read_rows(p.mul, p.mul_stride, mul);
  p.statistics = read_floats(statistics);
  p.gathered = read_floats(gathered);
  p.out = grad_x.mutable_data_ptr();
  run_finish(a, p);
  return grad_x;
}

}  // namespace

void register_shard_norm_ops(const Ops& ops) {
  ops.op(
      "shard_norm_sums(Tensor x, Tensor? residual, int kind) -> (Tensor sums, Tensor new_residual)",
      TORCH_BOX(&shard_norm_sums));
  ops.op(
      "shard_norm(Tensor x, Tensor? mul, Tensor gathered, Tensor? weight, Tensor? bias, int dim, "
      "float eps, float weight_offset, bool cast_before_weight, ScalarType? out_dtype, int kind) "
      "-> (Tensor out, Tensor statistics)",
      TORCH_BOX(&shard_norm));
  ops.op(
      "shard_norm_bwd_sums(Tensor grad_out, Tensor x, Tensor? mul, Tensor? weight, Tensor? bias, "
      "Tensor statistics, float weight_offset, int kind) -> Tensor sums",
      TORCH_BOX(&shard_norm_bwd_sums));
  ops.op(
      "shard_norm_bwd(Tensor grad_out, Tensor? grad_new_residual, Tensor x, Tensor? mul, Tensor "
      "gathered, Tensor? weight, Tensor? bias, Tensor statistics, int dim, float weight_offset, "
      "int kind) -> Tensor grad_x",
      TORCH_BOX(&shard_norm_bwd));
}

}  // namespace fuselage::binding
