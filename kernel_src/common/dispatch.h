// From run-time element types to compile-time ones.
#pragma once

#include "common/dtype.h"
#include "common/vector.h"

namespace fuselage {

template <typename T>
struct TypeTag {
  using type = T;
};

// What f(TypeTag<T>) returns for the type; an error for what is none.
template <typename F>
inline gpuError dispatch_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::float32: return f(TypeTag<float>{});
    case DType::float16: return f(TypeTag<float16>{});
    case DType::bfloat16: return f(TypeTag<bfloat16>{});
  }
  return gpuErrorInvalidValue;
}

// Likewise, of a type of half precision.
template <typename F>
inline gpuError dispatch_half(DType dtype, F&& f) {
  switch (dtype) {
    case DType::float16: return f(TypeTag<float16>{});
    case DType::bfloat16: return f(TypeTag<bfloat16>{});
    default: return gpuErrorInvalidValue;
  }
}

// Calls f(TypeTag<activation>, TypeTag<output>) for the pairs that operators support: equal types,
// and float32 with either half-precision dtype. False for any other pair.
template <typename F>
[[nodiscard]] inline bool dispatch_activation_output(DType activation, DType output, F&& f) {
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

// f(true_type) or f(false_type).
template <typename F>
gpuError with_bool(bool value, F&& f) {
  return value ? f(std::true_type{}) : f(std::false_type{});
}

}  // namespace fuselage
