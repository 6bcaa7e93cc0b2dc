// From a poly_norm policy to the kernel that follows it.
#pragma once

#include <type_traits>

#include "common/dispatch.h"
#include "norm/poly_norm_device.h"
#include "norm/poly_norm_policy.h"

namespace fuselage {
namespace {

template <Form kForm>
using FormTag = std::integral_constant<Form, kForm>;

// f(type of the elements, form) for what is in the params.
template <typename Params, typename F>
gpuError dispatch(const Params& p, F&& f) {
  return dispatch_dtype(p.dtype, [&](auto tag) {
    if (p.mul == nullptr) return f(tag, FormTag<Form::plain>{});
    if (p.offs == nullptr) return f(tag, FormTag<Form::mul>{});
    return f(tag, FormTag<Form::grouped>{});
  });
}

// Columns of a row that a block of a streamed kernel has.
int streamed_slice(const RowPolicy& policy, int64_t dim, DType dtype) {
  if (policy.streamed) return static_cast<int>(dim);
  return policy.threads_per_row * policy.vectors * (16 / dtype_size(dtype));
}

// launch(vectors, rows, long) with the template arguments of a kernel for this policy.
template <Form kForm, typename F>
gpuError with_row_kernel(const RowPolicy& policy, bool is_long, F&& launch) {
  const auto with_long = [&](auto vectors, auto rows) {
    if constexpr (vectors == kPolyNormVectors) {
      if (is_long) return launch(vectors, rows, std::true_type{});
    }
    return launch(vectors, rows, std::false_type{});
  };
  using std::integral_constant;
  if constexpr (kForm != Form::grouped) {
    switch (policy.vectors) {
      case 1: return with_long(integral_constant<int, 1>{}, integral_constant<int, 4>{});
      case 2: return with_long(integral_constant<int, 2>{}, integral_constant<int, 2>{});
    }
  }
  return with_long(integral_constant<int, kPolyNormVectors>{}, integral_constant<int, 1>{});
}

}  // namespace
}  // namespace fuselage
