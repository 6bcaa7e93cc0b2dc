// Allocation of results and of scratch memory.
#pragma once

#include <initializer_list>

#include "checks.h"

namespace fuselage::binding {

constexpr int64_t kMaxDim = 64;  // of a tensor

// A tensor on the device of `like`. One call into Torch, past its dispatcher.
inline Tensor empty_strided(const int64_t* sizes, const int64_t* strides, int64_t dim,
                            ScalarType type, const Tensor& like) {
  int32_t dtype = 0;
  switch (type) {
    case ScalarType::Half: dtype = aoti_torch_dtype_float16(); break;
    case ScalarType::BFloat16: dtype = aoti_torch_dtype_bfloat16(); break;
    case ScalarType::Long: dtype = aoti_torch_dtype_int64(); break;
    case ScalarType::Bool: dtype = aoti_torch_dtype_bool(); break;
    case ScalarType::Float8_e4m3fn: dtype = aoti_torch_dtype_float8_e4m3fn(); break;
    case ScalarType::Float8_e5m2: dtype = aoti_torch_dtype_float8_e5m2(); break;
    case ScalarType::Char: dtype = aoti_torch_dtype_int8(); break;
    default: dtype = aoti_torch_dtype_float32();
  }
  const int32_t device_type = like.is_cpu()    ? aoti_torch_device_type_cpu()
                              : like.is_cuda() ? aoti_torch_device_type_cuda()
                                               : aoti_torch_device_type_meta();
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(dim, sizes, strides, dtype, device_type, like.get_device_index(),
                               &handle) != AOTI_TORCH_SUCCESS)
    fail_to_allocate(sizes, dim, like);
  return Tensor(handle);
}

// Strides of a contiguous tensor.
inline void contiguous_strides(const int64_t* sizes, int64_t dim, int64_t (&strides)[kMaxDim]) {
  if (dim > kMaxDim) throw std::runtime_error("fuselage: tensors have at most 64 dimensions");
  int64_t stride = 1;
  for (int64_t i = dim - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= sizes[i] == 0 ? 1 : sizes[i];
  }
}

// As empty_strided, contiguous.
inline Tensor empty(const int64_t* sizes, int64_t dim, ScalarType type, const Tensor& like) {
  int64_t strides[kMaxDim];
  contiguous_strides(sizes, dim, strides);
  return empty_strided(sizes, strides, dim, type, like);
}

inline Tensor empty_like(const Tensor& like, ScalarType type) {
  const auto sizes = like.sizes();
  return empty(sizes.data(), static_cast<int64_t>(sizes.size()), type, like);
}

// Float32, of these sizes.
inline Tensor empty_floats(std::initializer_list<int64_t> sizes, const Tensor& like) {
  return empty(sizes.begin(), static_cast<int64_t>(sizes.size()), ScalarType::Float, like);
}

// As `like`, but of so many columns and perhaps another type.
inline Tensor empty_with_columns(const Tensor& like, int64_t columns, ScalarType type) {
  int64_t sizes[kMaxDim];
  const int64_t last = like.dim() - 1;
  for (int64_t i = 0; i < last; ++i) sizes[i] = like.size(i);
  sizes[last] = columns;
  return empty(sizes, like.dim(), type, like);
}
inline Tensor empty_with_columns(const Tensor& like, int64_t columns) {
  return empty_with_columns(like, columns, like.scalar_type());
}

// What stands for an output that was not asked for: ops have no optional results.
inline Tensor no_tensor(const Tensor& like) {
  const int64_t size = 0;
  return empty(&size, 1, like.scalar_type(), like);
}

// A gradient, which is computed where it is needed alone.
struct Gradient {
  Tensor tensor;
  bool needed;

  void* data() const { return needed ? tensor.mutable_data_ptr() : nullptr; }
  // The sum over no rows.
  void zero() {
    if (needed) torch::stable::zero_(tensor);
  }
};

inline Gradient gradient_of(const Tensor& tensor, bool needed) {
  return {needed ? empty_like(tensor, tensor.scalar_type()) : no_tensor(tensor), needed};
}

inline Gradient no_gradient(const Tensor& x) { return {no_tensor(x), false}; }

// Of something that `x` may come without.
inline Gradient gradient_of(const OptionalTensor& tensor, bool needed, const Tensor& x) {
  return needed && tensor.has_value() ? gradient_of(*tensor, true) : no_gradient(x);
}

// Float32 values that a kernel leaves for another one, and null where there are none. They live as
// long as `memory`.
inline float* scratch(OptionalTensor& memory, int64_t values, const Tensor& like) {
  if (values == 0) return nullptr;
  memory = empty_floats({values}, like);
  return static_cast<float*>(memory->mutable_data_ptr());
}

// What a forward returns: with kForGradient also what it has `kept` for the backward.
template <bool kForGradient>
auto returned(const Tensor& out, const OptionalTensor& kept) {
  if constexpr (kForGradient)
    return std::tuple(out, *kept);
  else
    return out;
}

template <bool kForGradient>
auto returned(const Tensor& out, const OptionalTensor& new_residual, const OptionalTensor& kept) {
  if constexpr (kForGradient)
    return std::tuple(out, *new_residual, *kept);
  else
    return std::tuple(out, *new_residual);
}

}  // namespace fuselage::binding
