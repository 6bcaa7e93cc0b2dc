// Bindings of the quant family. The formulas are in common/quant.h.
#include "quantised.h"

#include "binding.h"

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

void check_given_scale(const char* op, const char* name, const Tensor& scale, const Tensor& x) {
  check_same_device(op, name, scale, x);
  FUSELAGE_CHECK(op, is_float32(scale), "`", name, "` must be float32, got ",
                 torch::headeronly::toString(scale.scalar_type()));
  FUSELAGE_CHECK(op, scale.numel() == 1, "`", name, "` must have one element, for all rows, got ",
                 shape_of(scale));
}

// Scales of groups, as the rows of x: or a column after the other, each padded to 4 rows, as TMA
// takes them.
Tensor empty_scales(const char* op, const Tensor& x, int64_t groups, bool by_columns) {
  if (!by_columns) return empty_with_columns(x, groups, ScalarType::Float);
  int64_t sizes[kMaxDim], strides[kMaxDim];
  const int64_t last = x.dim() - 1;
  FUSELAGE_CHECK(op, last < kMaxDim, "`x` must have at most 64 dimensions");
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

std::tuple<Tensor, Tensor> quant_fp8(const Tensor& x, const OptionalTensor& scale,
                                     int64_t group_size, bool scales_by_columns, bool scale_ue8m0,
                                     ScalarType dtype) {
  const char* op = "quant_fp8";
  QuantForward p{};
  const DType x_dtype = check_rows(op, x);
  check_columns(op, "x", x);
  const QuantResults results = quant_results(
      op, x, columns_in(x), x_dtype, {scale, group_size, scales_by_columns, scale_ue8m0, dtype}, p);
  if (!is_nothing(x, p.rows, p.dim)) {
    const auto rows = read_rows(p.x, p.x_stride, x);
    launch<cpu::quant_fp8, gpu::quant_fp8>(op, x, p, p.rows, p.dim);
  }
  return {results.q, results.scale};
}

}  // namespace

// Of a result with the rows of `x`, and so many columns: makes what it is quantised to, and fills
// `p` but for the values themselves.
QuantResults quant_results(const char* op, const Tensor& x, int64_t columns, DType x_dtype,
                           const QuantOptions& options, QuantForward& p) {
  p.x_dtype = x_dtype;
  p.format = check_format(op, options.dtype);
  p.limit = quant_limit(p.format);
  p.rows = rows_in(x);
  p.dim = columns;
  FUSELAGE_CHECK(op, options.group_size == -1 || options.group_size == kQuantGroup,
                 "`group_size` must be -1, for a scale a row, or ", kQuantGroup, ", got ",
                 options.group_size);
  p.in_groups = options.group_size != -1;
  p.power_of_two = options.scale_ue8m0;
  const Tensor q = empty_with_columns(x, columns, options.dtype);
  const bool is_empty = is_nothing(x, p.rows, p.dim);
  if (!is_empty) p.q = static_cast<uint8_t*>(q.mutable_data_ptr());
  if (options.scale.has_value()) {
    check_given_scale(op, options.scale_name, *options.scale, x);
    FUSELAGE_CHECK(op, !p.in_groups && !options.scales_by_columns && !options.scale_ue8m0, "`",
                   options.scale_name,
                   "` is one for all rows, and `group_size`, `scale_layout` and "
                   "`scale_ue8m0` are for scales that are made: got both");
    if (!is_empty) p.given_scale = static_cast<const float*>(options.scale->const_data_ptr());
    const int64_t none = 0;
    return {q, empty(&none, 1, ScalarType::Float, x)};
  }
  const int64_t groups = p.in_groups ? quant_groups(p.dim) : 1;
  const Tensor made = empty_scales(op, x, groups, options.scales_by_columns);
  if (p.dim == 0 && !is_meta(x)) torch::stable::fill_(made, 1.0);  // rows of no columns
  if (!is_empty) p.scale = static_cast<float*>(made.mutable_data_ptr());
  p.scale_row_stride = options.scales_by_columns ? 1 : groups;
  p.scale_group_stride = options.scales_by_columns ? (p.rows + 3) / 4 * 4 : 1;
  return {q, made};
}

void register_quant_ops(const Ops& ops) {
  ops.op("quant_fp8(Tensor x, " FUSELAGE_QUANT_OPTIONS
         ", ScalarType dtype) -> (Tensor q, Tensor scale_of_q)",
         TORCH_BOX(&quant_fp8));
}

}  // namespace fuselage::binding
