// Element types of activations and weights, shared by the GPU and CPU kernels and the bindings.
#pragma once

namespace fuselage {

enum class DType { float32, float16, bfloat16 };

inline const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::float32: return "float32";
    case DType::float16: return "float16";
    case DType::bfloat16: return "bfloat16";
  }
  return "unknown";
}

inline int dtype_size(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

}  // namespace fuselage
