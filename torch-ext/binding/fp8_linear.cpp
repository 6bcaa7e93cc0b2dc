// Bindings of float8 products, which modules.Fp8Linear calls. Formulas: quant/fp8_product.h.
#include <algorithm>
#include <vector>

#include "binding.h"
#include "quant/fp8_product.h"
#include "quant/fp8_product_cpu.h"
#include "quantised.h"

namespace fuselage::binding {
namespace {

// A linear layer as ops are given it. `in_groups`: its scales are those of blocks of 128 x 128.
struct Linear {
  const Tensor &weight, &weight_scale;
  const OptionalTensor& bias;
  int64_t dim, out;
  bool in_groups;
};

void check_scale(const char* op, const char* name, const Tensor& scale, const Tensor& q,
                 int64_t rows, int64_t groups) {
  check_same_device(op, name, scale, q, "q");
  FUSELAGE_CHECK(op, is_float32(scale) && scale.numel() == rows * groups, "`", name,
                 "` must be float32 with ", rows, " x ", groups, " elements, got ",
                 torch::headeronly::toString(scale.scalar_type()), " ", shape_of(scale));
}

void check_codes(const char* op, const char* name, const Tensor& codes) {
  FUSELAGE_CHECK(op, codes.scalar_type() == ScalarType::Float8_e4m3fn && codes.is_contiguous(), "`",
                 name, "` must be float8_e4m3fn and contiguous, got ",
                 torch::headeronly::toString(codes.scalar_type()), " ", shape_of(codes));
}

// `x`: [..., dim] on the device of it all.
Linear check_linear(const char* op, const Tensor& x, const char* x_name, const Tensor& weight,
                    const Tensor& weight_scale, const OptionalTensor& bias) {
  check_same_device(op, "weight", weight, x, x_name);
  check_codes(op, "weight", weight);
  FUSELAGE_CHECK(op, weight.dim() == 2, "`weight` must be [out, dim], got ", shape_of(weight));
  const int64_t out = weight.size(0), dim = weight.size(1);
  FUSELAGE_CHECK(op, out % kFp8ProductMultiple == 0 && dim % kFp8ProductMultiple == 0,
                 "both sizes of `weight` must be multiples of ", kFp8ProductMultiple, ", got ",
                 shape_of(weight));
  FUSELAGE_CHECK(op, x.dim() >= 1 && columns_in(x) == dim, "`", x_name, "` must have ", dim,
                 " columns, as `weight`, got ", shape_of(x));
  check_columns(op, "weight", weight);
  const bool in_rows = weight_scale.dim() == 2 && weight_scale.size(0) == out;
  check_scale(op, "weight_scale", weight_scale, x, in_rows ? out : quant_groups(out),
              in_rows ? 1 : quant_groups(dim));
  FUSELAGE_CHECK(op, weight_scale.is_contiguous(), "`weight_scale` must be contiguous");
  if (bias.has_value()) {
    check_same_device(op, "bias", *bias, x, x_name);
    check_dtype(op, "bias", *bias);
    FUSELAGE_CHECK(op, bias->dim() == 1 && bias->size(0) == out && bias->is_contiguous(),
                   "`bias` must be contiguous, of shape [", out, "], got ", shape_of(*bias));
  }
  return {weight, weight_scale, bias, dim, out, !in_rows};
}

DType check_result(const char* op, ScalarType dtype) {
  const std::optional<DType> found = dtype_from(dtype);
  FUSELAGE_CHECK(op, found.has_value(), "`dtype` must be float16, bfloat16 or float32, got ",
                 torch::headeronly::toString(dtype));
  return *found;
}

// Codes as GPUs read them, 16 bytes at a time: a copy, where they do not begin on a boundary.
Tensor aligned(const Tensor& codes) {
  const auto address = reinterpret_cast<uintptr_t>(codes.const_data_ptr());
  return codes.is_cpu() || address % 16 == 0 ? codes : torch::stable::clone(codes);
}

// Of q, and of the scale of row i and group j at i * scale_row_stride + j * scale_group_stride.
Tensor product_of_few(const char* op, const Tensor& q, const Tensor& scale,
                      int64_t scale_row_stride, int64_t scale_group_stride, const Linear& linear,
                      DType y_dtype) {
  const Tensor y = empty_with_columns(q, linear.out, scalar_type_of(y_dtype));
  Fp8Product p{};
  p.rows = rows_in(q);
  p.dim = linear.dim;
  p.out = linear.out;
  if (p.rows == 0 || p.out == 0 || is_meta(q)) return y;
  const Tensor codes = aligned(q), weight = aligned(linear.weight);
  p.q = static_cast<const uint8_t*>(codes.const_data_ptr());
  p.q_scale = static_cast<const float*>(scale.const_data_ptr());
  p.q_scale_row_stride = scale_row_stride;
  p.q_scale_group_stride = scale_group_stride;
  p.weight = static_cast<const uint8_t*>(weight.const_data_ptr());
  p.weight_scale = static_cast<const float*>(linear.weight_scale.const_data_ptr());
  p.in_groups = linear.in_groups;
  read_vector(p.bias, p.bias_dtype, linear.bias, y_dtype);
  p.y = y.mutable_data_ptr();
  p.y_dtype = y_dtype;
  const auto on_cpu = [&] {
    std::vector<float> rows(p.rows * p.dim);
    cpu::fp8_decode(p.q, rows.data(), 0, p.rows * p.dim);
    torch::stable::parallel_for(
        0, p.out, tasks_of(p.dim * p.rows),
        [&](int64_t begin, int64_t end) { cpu::fp8_product(p, rows.data(), begin, end); });
  };
  launch(op, q, on_cpu, [&](int32_t device, void* stream) -> const char* {
#if defined(FUSELAGE_EMULATED_GPU)  // of tests/emulated_gpu, which has no tensor cores
    on_cpu();
    return nullptr;
#elif defined(CUDA_KERNEL)
    if (gpu::has_fp8_product(device)) return gpu::fp8_product(p, device, stream);
#endif
    static_cast<void>(device), static_cast<void>(stream);
    return "this GPU has no such product";
  });
  return y;
}

// Whether the elements of a column are adjacent, as in one layout of quant_fp8's scales.
bool has_columns(const Tensor& scale) {
  int64_t stride = 1;
  for (int64_t i = scale.dim() - 2; i >= 0; --i) {
    if (scale.size(i) != 1 && scale.stride(i) != stride) return false;
    stride *= scale.size(i);
  }
  return true;
}

Tensor fp8_product(const Tensor& q, const Tensor& scale, const Tensor& weight,
                   const Tensor& weight_scale, const OptionalTensor& bias, ScalarType dtype) {
  const char* op = "fp8_product";
  check_codes(op, "q", q);
  const Linear linear = check_linear(op, q, "q", weight, weight_scale, bias);
  const DType y_dtype = check_result(op, dtype);
  const int64_t rows = rows_in(q), groups = linear.in_groups ? quant_groups(linear.dim) : 1;
  FUSELAGE_CHECK(op, rows <= kFp8ProductRows, "`q` must have at most ", kFp8ProductRows,
                 " rows, got ", shape_of(q));
  check_scale(op, "scale", scale, q, rows, groups);
  const int64_t last = scale.dim() - 1;
  const bool by_columns = groups > 1 && has_columns(scale);
  const Tensor read = by_columns ? scale : with_adjacent_elements(scale);
  return product_of_few(op, q, read, by_columns ? 1 : groups, by_columns ? scale.stride(last) : 1,
                        linear, y_dtype);
}

// The elements of a tensor with these sizes and strides. One call into Torch, past its dispatcher:
// a view by the latter takes the host about a microsecond.
Tensor seen_as(const Tensor& tensor, const int64_t* sizes, const int64_t* strides, int64_t dim) {
  int64_t offset = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(tensor.get(), &offset));
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(tensor.get(), dim, sizes, strides, offset, &handle));
  return Tensor(handle);
}

// A contiguous tensor as a matrix, or as its transpose.
Tensor matrix_of(const Tensor& tensor, int64_t rows, int64_t columns) {
  if (tensor.dim() == 2) return tensor;
  const int64_t sizes[] = {rows, columns}, strides[] = {columns, 1};
  return seen_as(tensor, sizes, strides, 2);
}
Tensor transpose_of(const Tensor& tensor, int64_t rows, int64_t columns) {
  const int64_t sizes[] = {columns, rows}, strides[] = {1, columns};
  return seen_as(tensor, sizes, strides, 2);
}

// PyTorch's product, of any number of rows with a scale each.
Tensor scaled_mm(const Tensor& q, const Tensor& scale, const Linear& linear, bool fast_accum) {
  if (is_meta(q)) return empty_with_columns(q, linear.out, ScalarType::BFloat16);
  const int64_t rows = rows_in(q);
  using torch::stable::detail::from;
  StableIValue stack[] = {
      from(matrix_of(q, rows, linear.dim)),
      from(transpose_of(linear.weight, linear.out, linear.dim)),
      from(matrix_of(scale, rows, 1)),
      from(transpose_of(linear.weight_scale, linear.out, 1)),
      from(linear.bias),
      from(std::nullopt),
      from(std::optional<ScalarType>(ScalarType::BFloat16)),
      from(fast_accum),
  };
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::_scaled_mm", "", stack, TORCH_ABI_VERSION));
  const Tensor y = torch::stable::detail::to<Tensor>(stack[0]);
  if (q.dim() == 2) return y;
  int64_t sizes[kMaxDim], strides[kMaxDim];
  std::copy(q.sizes().begin(), q.sizes().end(), sizes);
  sizes[q.dim() - 1] = linear.out;
  contiguous_strides(sizes, q.dim(), strides);
  return seen_as(y, sizes, strides, q.dim());
}

// Quantises x and multiplies. More rows than kFp8ProductRows: of scales of rows and bfloat16 alone.
std::tuple<Tensor, Tensor, Tensor> fp8_linear(const Tensor& x, const Tensor& weight,
                                              const Tensor& weight_scale,
                                              const OptionalTensor& bias, bool fast_accum,
                                              ScalarType dtype) {
  const char* op = "fp8_linear";
  const DType x_dtype = check_rows(op, x);
  const Linear linear = check_linear(op, x, "x", weight, weight_scale, bias);
  const DType y_dtype = check_result(op, dtype);
  const int64_t rows = rows_in(x);
  const bool has_few = rows <= kFp8ProductRows;
  FUSELAGE_CHECK(op,
                 has_few || (!linear.in_groups && y_dtype == DType::bfloat16 &&
                             (!bias.has_value() || bias->scalar_type() == ScalarType::BFloat16)),
                 "more than ", kFp8ProductRows,
                 " rows need scales of rows, and a bfloat16 `dtype` and `bias`");
  QuantForward quant{};
  const QuantResults results = quant_results(op, x, linear.dim, x_dtype,
                                             {std::nullopt, linear.in_groups ? kQuantGroup : -1,
                                              linear.in_groups, false, ScalarType::Float8_e4m3fn},
                                             quant);
  if (!is_nothing(x, quant.rows, quant.dim)) {
    const auto kept = read_rows(quant.x, quant.x_stride, x);
    launch<cpu::quant_fp8, gpu::quant_fp8>(op, x, quant, quant.rows, quant.dim);
  }
  const Tensor y = has_few ? product_of_few(op, results.q, results.scale, quant.scale_row_stride,
                                            quant.scale_group_stride, linear, y_dtype)
                           : scaled_mm(results.q, results.scale, linear, fast_accum);
  return {y, results.q, results.scale};
}

}  // namespace

void register_fp8_linear_ops(const Ops& ops) {
  const std::string linear = "Tensor weight, Tensor weight_scale, Tensor? bias, ";
  ops.op("fp8_product(Tensor q, Tensor scale, " + linear + "ScalarType dtype) -> Tensor",
         TORCH_BOX(&fp8_product));
  ops.op("fp8_linear(Tensor x, " + linear +
             "bool fast_accum, ScalarType dtype) -> (Tensor y, Tensor q, Tensor scale_of_q)",
         TORCH_BOX(&fp8_linear));
}

}  // namespace fuselage::binding
