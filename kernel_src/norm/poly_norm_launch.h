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

// Whether rows are streamed: where they are short, those that are not aligned, too.
inline bool is_streamed(const RowPolicy& policy, bool aligned) {
  const bool is_short = policy.vectors < kPolyNormVectors || policy.threads_per_row < kWarpSize;
  return policy.streamed || (!aligned && is_short);
}

// launch(vectors, rows, long, aligned) with the template arguments of a kernel for this policy. Of
// rows that are not aligned, one kernel has those of a block and those of a cluster.
template <Form kForm, typename F>
gpuError with_row_kernel(const RowPolicy& policy, bool is_long, bool aligned, F&& launch) {
  using std::integral_constant;
  const integral_constant<int, kPolyNormVectors> most{};
  const integral_constant<int, 1> one{};
  if (!aligned) return launch(most, one, std::true_type{}, std::false_type{});
  if constexpr (kForm != Form::grouped) {
    const integral_constant<int, 2> two{};
    const std::false_type is_short{};
    if (policy.vectors == 1)
      return launch(one, integral_constant<int, 4>{}, is_short, std::true_type{});
    if (policy.vectors == 2) return launch(two, two, is_short, std::true_type{});
  }
  return with_bool(is_long, [&](auto tag) { return launch(most, one, tag, std::true_type{}); });
}

}  // namespace
}  // namespace fuselage
