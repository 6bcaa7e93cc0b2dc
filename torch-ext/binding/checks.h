// Checks of arguments, and their messages. Tensors stop in the bindings; below are raw pointers.
#pragma once

#include <cmath>
#include <cstdio>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "common/dtype.h"
#include "torch_stable.h"

#if defined(CUDA_KERNEL) || defined(ROCM_KERNEL)
#define FUSELAGE_GPU 1
namespace fuselage::gpu {
const char* pending_error();  // of common/device_info.h, which a build for the CPU does not have
}
#endif

namespace fuselage::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Text of a part of a message. NOTE: no streams, whose locales crash where a compiler's C++ library
// is newer than the one that Torch has loaded.
template <typename Part>
std::string text_of(const Part& part) {
  if constexpr (std::is_floating_point_v<Part>) {
    char text[32];
    std::snprintf(text, sizeof(text), "%g", part);
    return text;
  } else if constexpr (std::is_arithmetic_v<Part>) {
    return std::to_string(part);
  } else {
    return part;
  }
}

// Raises RuntimeError("fuselage::<op>: <message>").
template <typename... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::string message = std::string("fuselage::") + op + ": ";
  ((message += text_of(parts)), ...);
  throw std::runtime_error(message);
}

// The message is built only when the condition is false.
#define FUSELAGE_CHECK(op, condition, ...) \
  if (!(condition)) ::fuselage::binding::fail(op, __VA_ARGS__)

inline std::string shape_of(const int64_t* sizes, int64_t dim) {
  std::string text = "[";
  for (int64_t i = 0; i < dim; ++i) text += (i == 0 ? "" : ", ") + std::to_string(sizes[i]);
  return text + "]";
}

inline std::string shape_of(const Tensor& tensor) {
  return shape_of(tensor.sizes().data(), tensor.dim());
}

// Raises what keeps Torch from making a tensor of these sizes on the device of `like`. Python makes
// torch.OutOfMemoryError of it. NOTE: Torch's own message is lost, up to 2.12.
[[noreturn]] inline void fail_to_allocate(const int64_t* sizes, int64_t dim, const Tensor& like) {
#if defined(FUSELAGE_GPU)
  const char* error = like.is_cuda() ? gpu::pending_error() : nullptr;
  if (error != nullptr) throw std::runtime_error(std::string("fuselage: ") + error);
#endif
#if defined(ROCM_KERNEL)
  const char* gpu = "HIP";
#else
  const char* gpu = "CUDA";
#endif
  throw std::runtime_error(std::string(like.is_cuda() ? gpu : "CPU") +
                           " out of memory. fuselage tried to allocate a tensor of " +
                           shape_of(sizes, dim));
}

inline Tensor contiguous_copy(const Tensor& tensor) {
  try {
    return torch::stable::contiguous(tensor);
  } catch (const std::exception&) {
    fail_to_allocate(tensor.sizes().data(), tensor.dim(), tensor);
  }
}

// Whether the tensor has no data: fake kernels run the checks of an op on such tensors. Checks of
// memory do not apply to it, and nothing is launched.
inline bool is_meta(const Tensor& tensor) { return !tensor.is_cpu() && !tensor.is_cuda(); }

inline std::string device_of(const Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  if (is_meta(tensor)) return "meta";
  return "cuda:" + std::to_string(tensor.get_device_index());
}

inline std::optional<DType> dtype_from(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return DType::float32;
    case ScalarType::Half: return DType::float16;
    case ScalarType::BFloat16: return DType::bfloat16;
    default: return std::nullopt;
  }
}

inline ScalarType scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::float16: return ScalarType::Half;
    case DType::bfloat16: return ScalarType::BFloat16;
    default: return ScalarType::Float;
  }
}

inline bool is_float32(const Tensor& tensor) { return tensor.scalar_type() == ScalarType::Float; }

inline DType check_dtype(const char* op, const char* name, const Tensor& tensor) {
  const std::optional<DType> dtype = dtype_from(tensor.scalar_type());
  FUSELAGE_CHECK(op, dtype.has_value(), "`", name, "` must be float16, bfloat16 or float32, got ",
                 torch::headeronly::toString(tensor.scalar_type()));
  return *dtype;
}

// `x`, whose last dimension is that of columns.
inline DType check_rows(const char* op, const Tensor& x, const char* name = "x") {
  FUSELAGE_CHECK(op, x.dim() >= 1, "`", name, "` must have at least one dimension, got a scalar");
  return check_dtype(op, name, x);
}

// `x_name`: what the op calls the tensor that others are compared with.
inline void check_same_device(const char* op, const char* name, const Tensor& tensor,
                              const Tensor& x, const char* x_name = "x") {
  const bool same =
      tensor.is_cpu() == x.is_cpu() && tensor.get_device_index() == x.get_device_index();
  FUSELAGE_CHECK(op, same, "`", name, "` must be on the device of `", x_name, "` (", device_of(x),
                 "), got ", device_of(tensor));
}

inline void check_same_shape(const char* op, const char* name, const Tensor& tensor,
                             const Tensor& x, const char* x_name = "x") {
  bool same = tensor.dim() == x.dim();
  for (int64_t i = 0; same && i < x.dim(); ++i) same = tensor.size(i) == x.size(i);
  FUSELAGE_CHECK(op, same, "`", name, "` must have the shape of `", x_name, "` ", shape_of(x),
                 ", got ", shape_of(tensor));
}

// Whether the tensors have the same dimensions, but for that of columns.
inline bool same_rows(const Tensor& a, const Tensor& b) {
  bool same = a.dim() == b.dim();
  for (int64_t i = 0; same && i + 1 < b.dim(); ++i) same = a.size(i) == b.size(i);
  return same;
}

// Kernels count columns in 32 bits, up to a step of at most 2^15 past the end of a row.
constexpr int64_t kMaxColumns = (int64_t{1} << 31) - (1 << 16);

inline void check_columns(const char* op, const char* name, const Tensor& tensor) {
  FUSELAGE_CHECK(op, tensor.size(tensor.dim() - 1) <= kMaxColumns, "the last dimension of `", name,
                 "` must be at most 2^31 - 2^16, got ", shape_of(tensor));
}

inline void check_same_dtype(const char* op, const char* name, const Tensor& tensor,
                             const Tensor& x, const char* x_name = "x") {
  const DType dtype = check_dtype(op, name, tensor);
  const DType wanted = *dtype_from(x.scalar_type());
  FUSELAGE_CHECK(op, dtype == wanted, "`", name, "` must be ", dtype_name(wanted), " as `", x_name,
                 "`, got ", dtype_name(dtype));
}

// `tensor` is like `x` in device, shape and dtype.
inline void check_like(const char* op, const char* name, const Tensor& tensor, const Tensor& x,
                       const char* x_name = "x") {
  check_same_device(op, name, tensor, x, x_name);
  check_same_shape(op, name, tensor, x, x_name);
  check_same_dtype(op, name, tensor, x, x_name);
}

inline void check_like(const char* op, const char* name, const OptionalTensor& tensor,
                       const Tensor& x, const char* x_name = "x") {
  if (tensor.has_value()) check_like(op, name, *tensor, x, x_name);
}

// `dtype`, that of `name`, is x's or float32.
inline void check_like_or_float32(const char* op, const char* name, DType dtype, DType x_dtype,
                                  const char* x_name = "x") {
  FUSELAGE_CHECK(op, dtype == x_dtype || dtype == DType::float32, "`", name, "` must be ",
                 dtype_name(x_dtype), " as `", x_name, "`, or float32, got ", dtype_name(dtype));
}

// The dtype of a result that is x's, float32, or anything for float32 x.
inline DType check_out_dtype(const char* op, std::optional<ScalarType> out_dtype, DType x_dtype) {
  if (!out_dtype.has_value()) return x_dtype;
  const std::optional<DType> dtype = dtype_from(*out_dtype);
  FUSELAGE_CHECK(op,
                 dtype.has_value() &&
                     (*dtype == x_dtype || *dtype == DType::float32 || x_dtype == DType::float32),
                 "`out_dtype` must be ", dtype_name(x_dtype), " as `x`, or float32",
                 x_dtype == DType::float32 ? ", float16 or bfloat16" : "", ", got ",
                 torch::headeronly::toString(*out_dtype));
  return *dtype;
}

// `saved` are the float32 values that the forward returned: so many of them, or in words
// `expected`.
template <typename... Parts>
void check_saved(const char* op, const char* name, const Tensor& saved, int64_t values,
                 const Tensor& x, const char* x_name, const Parts&... expected) {
  check_same_device(op, name, saved, x, x_name);
  FUSELAGE_CHECK(op, saved.numel() == values && saved.is_contiguous() && is_float32(saved), "`",
                 name, "` must be the ", expected..., " that the forward returned, got ",
                 shape_of(saved));
}

inline Tensor with_adjacent_elements(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : contiguous_copy(tensor);
}

// `vector` [dim] in x's type or float32, as adjacent elements.
inline OptionalTensor check_vector(const char* op, const char* name, const OptionalTensor& vector,
                                   const Tensor& x, const char* x_name = "x") {
  if (!vector.has_value()) return std::nullopt;
  check_same_device(op, name, *vector, x, x_name);
  const int64_t dim = x.size(x.dim() - 1);
  FUSELAGE_CHECK(op, vector->dim() == 1 && vector->size(0) == dim, "`", name, "` must have shape [",
                 dim, "], the last dimension of `", x_name, "` ", shape_of(x), ", got ",
                 shape_of(*vector));
  check_like_or_float32(op, name, check_dtype(op, name, *vector), *dtype_from(x.scalar_type()),
                        x_name);
  return with_adjacent_elements(*vector);
}

// As float32, in which kernels take it.
inline void check_eps(const char* op, double eps, const char* name = "eps") {
  FUSELAGE_CHECK(op, eps >= 0 && std::isfinite(static_cast<float>(eps)), "`", name,
                 "` must be finite and not negative, got ", eps);
}

inline void check_not_nan(const char* op, const char* name, double value) {
  FUSELAGE_CHECK(op, !std::isnan(value), "`", name, "` must be a number, got ", value);
}

}  // namespace fuselage::binding
