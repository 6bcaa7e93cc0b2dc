// From run-time element types to compile-time ones.
#pragma once

#include "common/dtype.h"
#include "common/vector.h"

namespace fuselage {

template <typename T>
struct TypeTag {
  using type = T;
};

// Calls f(TypeTag<activation>, TypeTag<output>) for the pairs that operators support: equal types, and
// float32 with either half type. False for any other pair.
template <typename F>
inline bool dispatch_activation_output(DType activation, DType output, F&& f) {
  const auto with_activation = [&](auto tag, DType own) {
    if (output == own) {
      f(tag, tag);
      return true;
    }
    if (output == DType::float32) {
      f(tag, TypeTag<float>{});
      return true;
    }
    return false;
  };
  switch (activation) {
    case DType::float16: return with_activation(TypeTag<float16>{}, DType::float16);
    case DType::bfloat16: return with_activation(TypeTag<bfloat16>{}, DType::bfloat16);
    case DType::float32:
      switch (output) {
        case DType::float32: f(TypeTag<float>{}, TypeTag<float>{}); return true;
        case DType::float16: f(TypeTag<float>{}, TypeTag<float16>{}); return true;
        case DType::bfloat16: f(TypeTag<float>{}, TypeTag<bfloat16>{}); return true;
      }
  }
  return false;
}

// Whether rows of this type start on boundaries of so many bytes. Null does.
inline bool aligned_rows(const void* pointer, int64_t stride, DType dtype, int64_t bytes = 16) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0 &&
         stride * dtype_size(dtype) % bytes == 0;
}

// f(true_type) or f(false_type).
template <typename F>
gpuError with_bool(bool value, F&& f) {
  return value ? f(std::true_type{}) : f(std::false_type{});
}

}  // namespace fuselage
