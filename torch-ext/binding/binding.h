// What every binding needs: checks with readable errors, the row view of a tensor, allocation, and the
// current stream. Tensors stop here; below are raw pointers.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "common/dtype.h"

#if defined(CUDA_KERNEL) || defined(ROCM_KERNEL)
#define FUSELAGE_GPU 1
// Torch's own declaration is only seen when its CUDA headers are.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                             void** ret_stream);
#endif

// The stable headers of Torch 2.10 to 2.12 have it under another name.
#if !defined(STABLE_TORCH_ERROR_CODE_CHECK)
#define STABLE_TORCH_ERROR_CODE_CHECK TORCH_ERROR_CODE_CHECK
#endif

namespace fuselage::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Text of a part of a message. NOTE: no streams, whose locales crash where a compiler's C++ library is
// newer than the one that Torch has loaded.
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

inline std::string shape_of(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t i = 0; i < tensor.dim(); ++i)
    text += (i == 0 ? "" : ", ") + std::to_string(tensor.size(i));
  return text + "]";
}

// Whether the tensor has no data: fake kernels run the checks of an op on such tensors. Checks of memory do
// not apply to it, and nothing is launched.
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

inline DType check_dtype(const char* op, const char* name, const Tensor& tensor) {
  const std::optional<DType> dtype = dtype_from(tensor.scalar_type());
  FUSELAGE_CHECK(op, dtype.has_value(), "`", name, "` must be float16, bfloat16 or float32, got ",
                 torch::headeronly::toString(tensor.scalar_type()));
  return *dtype;
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

// Kernels count columns in 32 bits, up to a step of at most 2^15 past the end of a row.
constexpr int64_t kMaxColumns = (int64_t{1} << 31) - (1 << 16);

inline void check_columns(const char* op, const char* name, const Tensor& tensor) {
  FUSELAGE_CHECK(op, tensor.size(tensor.dim() - 1) <= kMaxColumns, "the last dimension of `", name,
                 "` must be at most 2^31 - 2^16, got ", shape_of(tensor));
}

// `tensor` is like `x` in device, shape and dtype.
inline void check_like(const char* op, const char* name, const Tensor& tensor, const Tensor& x,
                       const char* x_name = "x") {
  check_same_device(op, name, tensor, x, x_name);
  check_same_shape(op, name, tensor, x, x_name);
  const DType dtype = check_dtype(op, name, tensor);
  const DType wanted = *dtype_from(x.scalar_type());
  FUSELAGE_CHECK(op, dtype == wanted, "`", name, "` must be ", dtype_name(wanted), " as `", x_name,
                 "`, got ", dtype_name(dtype));
}

// `dtype`, that of `name`, is x's or float32.
inline void check_like_or_float32(const char* op, const char* name, DType dtype, DType x_dtype,
                                  const char* x_name = "x") {
  FUSELAGE_CHECK(op, dtype == x_dtype || dtype == DType::float32, "`", name, "` must be ",
                 dtype_name(x_dtype), " as `", x_name, "`, or float32, got ", dtype_name(dtype));
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
  return vector->is_contiguous() ? vector : torch::stable::contiguous(*vector);
}

// As float32, in which kernels take it.
inline void check_eps(const char* op, double eps) {
  FUSELAGE_CHECK(op, eps >= 0 && std::isfinite(static_cast<float>(eps)),
                 "`eps` must be finite and not negative, got ", eps);
}

inline void check_not_nan(const char* op, const char* name, double value) {
  FUSELAGE_CHECK(op, !std::isnan(value), "`", name, "` must be a number, got ", value);
}

// A tensor seen as [rows, dim] with adjacent elements in a row and `stride` elements between rows.
struct Rows {
  Tensor tensor;  // keeps a contiguous copy alive
  int64_t stride;

  const void* data() const { return tensor.const_data_ptr(); }
};

// The stride between rows, or nothing where the tensor cannot be seen that way.
inline std::optional<int64_t> row_stride_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  const int64_t last = tensor.dim() - 1;
  // Whatever its strides are, a tensor without elements has no rows to read.
  const auto none = [&] {
    return tensor.numel() == 0 ? std::optional<int64_t>(sizes[last]) : std::nullopt;
  };
  if (sizes[last] != 1 && strides[last] != 1) return none();
  int64_t row_stride = sizes[last];
  int64_t next = -1;  // the stride that the next dimension out must have
  for (int64_t i = last - 1; i >= 0; --i) {
    if (sizes[i] == 1) continue;
    if (next == -1) {
      row_stride = strides[i];
    } else if (strides[i] != next) {
      return none();
    }
    next = strides[i] * sizes[i];
  }
  return row_stride;
}

// Reads the tensor in place where it has rows, and copies it otherwise.
inline Rows rows_of(const Tensor& tensor) {
  if (const auto stride = row_stride_of(tensor)) return {tensor, *stride};
  return {torch::stable::contiguous(tensor), tensor.size(tensor.dim() - 1)};
}

inline int64_t rows_in(const Tensor& x) {
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) rows *= x.size(i);
  return rows;
}

// Whether some element belongs to both [rows, dim] tensors of one type.
inline bool overlap(const Tensor& a, int64_t a_stride, const Tensor& b, int64_t b_stride,
                    int64_t rows, int64_t dim) {
  if (rows == 0 || dim == 0 || is_meta(a)) return false;
  const int64_t size = dtype_size(*dtype_from(a.scalar_type()));
  const int64_t distance = (static_cast<const char*>(b.const_data_ptr()) -
                            static_cast<const char*>(a.const_data_ptr())) /
                           size;
  const int64_t a_end = (rows - 1) * a_stride + dim, b_end = (rows - 1) * b_stride + dim;
  if (distance >= a_end || -distance >= b_end) return false;
  // The rows of one may lie between the rows of the other.
  if (rows == 1 || a_stride != b_stride) return true;
  const int64_t offset = (distance % a_stride + a_stride) % a_stride;
  return offset < dim || offset > a_stride - dim;
}

// Elements from the first of a tensor to the end of its last, without its first `outer` dimensions.
inline int64_t span_of(const Tensor& tensor, int64_t outer = 0) {
  int64_t span = 1;
  for (int64_t i = outer; i < tensor.dim(); ++i) span += (tensor.size(i) - 1) * tensor.stride(i);
  return span;
}

// Whether the memory from the first element of either to the end of its last meets that of the other.
inline bool spans_meet(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0 || is_meta(a)) return false;
  const auto begin_of = [](const Tensor& t) {
    return static_cast<const char*>(t.const_data_ptr());
  };
  const auto end_of = [&](const Tensor& t) {
    const ScalarType type = t.scalar_type();
    const auto dtype = dtype_from(type);
    const int64_t size = dtype.has_value() ? dtype_size(*dtype) : type == ScalarType::Int ? 4 : 8;
    return begin_of(t) + span_of(t) * size;
  };
  return begin_of(a) < end_of(b) && begin_of(b) < end_of(a);
}

// `name`, which is read, has no memory within that of `written_name`, which is written in place.
inline void check_apart(const char* op, const char* written_name, const Tensor& written,
                        const char* name, const Tensor& tensor) {
  FUSELAGE_CHECK(op, !spans_meet(written, tensor), "`", written_name,
                 "` is written in place and must not share memory with `", name, "`; pass a copy");
}

constexpr int64_t kMaxDim = 64;  // of a tensor

// A tensor on the device of `like`. One call into Torch, past its dispatcher.
inline Tensor empty_strided(const int64_t* sizes, const int64_t* strides, int64_t dim,
                            ScalarType type, const Tensor& like) {
  int32_t dtype = 0;
  switch (type) {
    case ScalarType::Half: dtype = aoti_torch_dtype_float16(); break;
    case ScalarType::BFloat16: dtype = aoti_torch_dtype_bfloat16(); break;
    case ScalarType::Long: dtype = aoti_torch_dtype_int64(); break;
    default: dtype = aoti_torch_dtype_float32();
  }
  const int32_t device_type = like.is_cpu()    ? aoti_torch_device_type_cpu()
                              : like.is_cuda() ? aoti_torch_device_type_cuda()
                                               : aoti_torch_device_type_meta();
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dim, sizes, strides, dtype, device_type,
                                                         like.get_device_index(), &handle));
  return Tensor(handle);
}

// Likewise, contiguous.
inline Tensor empty(const int64_t* sizes, int64_t dim, ScalarType type, const Tensor& like) {
  int64_t strides[kMaxDim];
  if (dim > kMaxDim) throw std::runtime_error("fuselage: tensors have at most 64 dimensions");
  int64_t stride = 1;
  for (int64_t i = dim - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= sizes[i] == 0 ? 1 : sizes[i];
  }
  return empty_strided(sizes, strides, dim, type, like);
}

inline Tensor empty_like(const Tensor& like, ScalarType type) {
  const auto sizes = like.sizes();
  return empty(sizes.data(), static_cast<int64_t>(sizes.size()), type, like);
}

// What stands for an output that was not asked for: ops have no optional results.
inline Tensor no_tensor(const Tensor& like) {
  const int64_t size = 0;
  return empty(&size, 1, like.scalar_type(), like);
}

constexpr int64_t kElementsPerTask = 32768;  // work for which a CPU thread is worth waking

// Pieces of work of that many elements for one task.
inline int64_t tasks_of(int64_t elements_each) {
  return std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, elements_each));
}

#if defined(FUSELAGE_GPU)
// Makes a device current while it lives, and knows the stream to launch on.
class OnDevice {
 public:
  explicit OnDevice(int32_t device) : device_(device) {
    // A guard costs an allocation; mostly the device is current already.
    if (torch::stable::accelerator::getCurrentDeviceIndex() != device) guard_.emplace(device);
  }
  void* stream() const {
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream));
    return stream;
  }

 private:
  int32_t device_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};
#endif

}  // namespace fuselage::binding
