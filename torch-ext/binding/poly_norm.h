// Bindings of poly_norm, fused_mul_poly_norm and grouped_poly_norm. The schemas are in
// torch_binding.cpp, the formulas in norm/poly_norm.h.
#pragma once

#include <tuple>

#include "binding.h"

namespace fuselage::binding {

Tensor poly_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps);

// As poly_norm, and rstd [rows, 3] for the backward.
std::tuple<Tensor, Tensor> poly_norm_fwd(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                         double eps);

// Without mul, x is packed: [..., 2 * dim], x in the first half and mul in the second, or the other
// way round with mul_first.
Tensor fused_mul_poly_norm(const Tensor& x, const OptionalTensor& mul, const Tensor& weight,
                           const Tensor& bias, double eps, bool mul_first);

std::tuple<Tensor, Tensor> fused_mul_poly_norm_fwd(const Tensor& x, const OptionalTensor& mul,
                                                   const Tensor& weight, const Tensor& bias,
                                                   double eps, bool mul_first);

// The gradient of both: (grad_x, grad_mul, grad_weight, grad_bias), each empty where not needed.
// That of a packed x is packed.
std::tuple<Tensor, Tensor, Tensor, Tensor> poly_norm_bwd(
    const Tensor& grad_out, const Tensor& x, const OptionalTensor& mul, bool packed, bool mul_first,
    const Tensor& weight, const Tensor& bias, const Tensor& rstd, bool needs_grad_x,
    bool needs_grad_mul, bool needs_grad_weight, bool needs_grad_bias);

// As fused_mul_poly_norm, with the weight and the bias of each row's expert.
Tensor grouped_poly_norm(const Tensor& x, const OptionalTensor& mul, const Tensor& weight,
                         const Tensor& bias, const Tensor& offs, double eps, bool mul_first,
                         std::optional<double> hidden_clamp);

std::tuple<Tensor, Tensor> grouped_poly_norm_fwd(const Tensor& x, const OptionalTensor& mul,
                                                 const Tensor& weight, const Tensor& bias,
                                                 const Tensor& offs, double eps, bool mul_first,
                                                 std::optional<double> hidden_clamp);

std::tuple<Tensor, Tensor, Tensor, Tensor> grouped_poly_norm_bwd(
    const Tensor& grad_out, const Tensor& x, const OptionalTensor& mul, bool mul_first,
    const Tensor& weight, const Tensor& bias, const Tensor& offs, const Tensor& rstd,
    std::optional<double> hidden_clamp, bool needs_grad_x, bool needs_grad_mul,
    bool needs_grad_weight, bool needs_grad_bias);

}  // namespace fuselage::binding
