// Products of rows and weights in float8_e4m3fn, of few rows:
//
//   y[i, o] = (sum over k of q[i, k] * weight[o, k]) * q_scale[i] * weight_scale[o] + bias[o]
//
// with one scale for each row of either, or, in groups, one for 128 columns of q and one for
// 128 x 128 of the weight, which then apply to the sums of 128 columns. Sums are float32, and y is
// rounded once. A row of y does not depend on other rows.
#pragma once

#include <cstdint>

#include "common/quant.h"

namespace fuselage {

constexpr int64_t kFp8ProductRows = 16;  // at most
constexpr int kFp8ProductMultiple = 16;  // of dim and out

struct Fp8Product {
  const uint8_t* q;  // [rows, dim], contiguous
  const float* q_scale;
  int64_t q_scale_row_stride, q_scale_group_stride;
  const uint8_t* weight;      // [out, dim], contiguous
  const float* weight_scale;  // [out], or [out / 128, dim / 128] rounded up
  bool in_groups;
  const void* bias;  // [out], or null
  DType bias_dtype;
  void* y;  // [rows, out], contiguous
  DType y_dtype;
  int64_t rows, dim, out;
};

namespace gpu {

// Whether the GPU has such a kernel.
bool has_fp8_product(int device);

// Launches on `stream` of `device`, which must be current. Returns null, or why it could not.
const char* fp8_product(const Fp8Product& p, int device, void* stream);

}  // namespace gpu
}  // namespace fuselage
