// Bindings of the quant family. The formulas are in quant/quant_fp8.h.
#include "binding.h"

#include "quant/quant_fp8.h"
#include "quant/quant_fp8_cpu.h"

namespace fuselage::binding {
namespace {

QuantFormat check_format(const char* op, ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float8_e4m3fn: return QuantFormat::e4m3;
    case ScalarType::Float8_e5m2: return QuantFormat::e5m2;
    case ScalarType::Char: return QuantFormat::int8;
    default:
      fail(op, "`dtype` must be float8_e4m3fn, float8_e5m2 or int8, got ",
           torch::headeronly::toString(dtype));
  }
}

void check_given_scale(const char* op, const Tensor& scale, const Tensor& x) {
  check_same_device(op, "scale", scale, x);
  FUSELAGE_CHECK(op, is_float32(scale), "`scale` must be float32, got ",
                 torch::headeronly::toString(scale.scalar_type()));
  FUSELAGE_CHECK(op, scale.numel() == 1, "`scale` must have one element, for all of `x`, got ",
                 shape_of(scale));
}

// Scales of groups, as the rows of x: or a column after the other, each padded to 4 rows, as TMA
// takes them.
Tensor empty_scales(const Tensor& x, int64_t groups, bool by_columns) {
  if (!by_columns) return empty_with_columns(x, groups, ScalarType::Float);
  int64_t sizes[kMaxDim], strides[kMaxDim];
  const int64_t last = x.dim() - 1;
  FUSELAGE_CHECK("quant_fp8", last < kMaxDim, "`x` must have at most 64 dimensions");
  int64_t stride = 1;
  for (int64_t i = last - 1; i >= 0; --i) {
    sizes[i] = x.size(i);
    strides[i] = stride;
    stride *= sizes[i] == 0 ? 1 : sizes[i];
  }
  sizes[last] = groups;
  strides[last] = (stride + 3) / 4 * 4;
  return empty_strided(sizes, strides, x.dim(), ScalarType::Float, x);
}

// (q, scale). `scale` has no elements where one is given: ops return no arguments of theirs.
std::tuple<Tensor, Tensor> quant_fp8(const Tensor& x, const OptionalTensor& scale,
                                     int64_t group_size, bool scales_by_columns, bool scale_ue8m0,
                                     ScalarType dtype) {
  const char* op = "quant_fp8";
  QuantForward p{};
  p.x_dtype = check_rows(op, x);
  check_columns(op, "x", x);
  p.format = check_format(op, dtype);
  p.limit = quant_limit(p.format);
  p.rows = rows_in(x);
  p.dim = columns_in(x);
  FUSELAGE_CHECK(op, group_size == -1 || group_size == kQuantGroup,
                 "`group_size` must be -1, for a scale a row, or ", kQuantGroup, ", got ",
                 group_size);
  p.in_groups = group_size != -1;
  p.power_of_two = scale_ue8m0;
  const int64_t groups = p.in_groups ? (p.dim + kQuantGroup - 1) / kQuantGroup : 1;
  const Tensor q = empty_like(x, dtype);
  if (scale.has_value()) {
    check_given_scale(op, *scale, x);
    FUSELAGE_CHECK(op, !p.in_groups && !scales_by_columns && !scale_ue8m0,
                   "`scale` is one for all of `x`, and `group_size`, `scale_layout` and "
                   "`scale_ue8m0` are for scales that are made: got both");
    const int64_t none = 0;
    const Tensor no_scale = empty(&none, 1, ScalarType::Float, x);
    if (is_nothing(x, p.rows, p.dim)) return {q, no_scale};
    p.given_scale = static_cast<const float*>(scale->const_data_ptr());
    const auto rows = read_rows(p.x, p.x_stride, x);
    p.q = static_cast<uint8_t*>(q.mutable_data_ptr());
    launch<cpu::quant_fp8, gpu::quant_fp8>(op, x, p, p.rows, p.dim);
    return {q, no_scale};
  }
  const Tensor made = empty_scales(x, groups, scales_by_columns);
  if (p.dim == 0 && !is_meta(x)) torch::stable::fill_(made, 1.0);  // rows of no columns
  if (is_nothing(x, p.rows, p.dim)) return {q, made};
  const auto rows = read_rows(p.x, p.x_stride, x);
  p.q = static_cast<uint8_t*>(q.mutable_data_ptr());
  p.scale = static_cast<float*>(made.mutable_data_ptr());
  p.scale_row_stride = scales_by_columns ? 1 : groups;
  p.scale_group_stride = scales_by_columns ? (p.rows + 3) / 4 * 4 : 1;
  launch<cpu::quant_fp8, gpu::quant_fp8>(op, x, p, p.rows, p.dim);
  return {q, made};
}

}  // namespace

void register_quant_ops(const Ops& ops) {
  ops.op(
      "quant_fp8(Tensor x, Tensor? scale, int group_size, bool scales_by_columns, "
      "bool scale_ue8m0, ScalarType dtype) -> (Tensor q, Tensor scale_of_q)",
      TORCH_BOX(&quant_fp8));
}

}  // namespace fuselage::binding
