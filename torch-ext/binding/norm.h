// Bindings of the norm family. The schemas are in torch_binding.cpp, the formulas in
// norm/rms_norm.h.
#pragma once

#include <tuple>

#include "binding.h"

namespace fuselage::binding {

Tensor rms_norm(const Tensor& x, const OptionalTensor& weight, double eps, double weight_offset,
                bool cast_before_weight, std::optional<ScalarType> out_dtype);

// As rms_norm, and rstd [rows] for the backward.
std::tuple<Tensor, Tensor> rms_norm_fwd(const Tensor& x, const OptionalTensor& weight, double eps,
                                        double weight_offset, bool cast_before_weight,
                                        std::optional<ScalarType> out_dtype);

// The gradient of both forwards: (grad_x, grad_weight), either of them empty where not needed.
std::tuple<Tensor, Tensor> rms_norm_bwd(const Tensor& grad_out,
                                        const OptionalTensor& grad_new_residual, const Tensor& x,
                                        const OptionalTensor& weight, const Tensor& rstd,
                                        double weight_offset, bool needs_grad_x,
                                        bool needs_grad_weight);

std::tuple<Tensor, Tensor> fused_add_rms_norm(const Tensor& x, const Tensor& residual,
                                              const OptionalTensor& weight, double eps,
                                              double weight_offset, bool cast_before_weight,
                                              std::optional<ScalarType> out_dtype);

// As fused_add_rms_norm, and rstd [rows] for the backward.
std::tuple<Tensor, Tensor, Tensor> fused_add_rms_norm_fwd(const Tensor& x, const Tensor& residual,
                                                          const OptionalTensor& weight, double eps,
                                                          double weight_offset,
                                                          bool cast_before_weight,
                                                          std::optional<ScalarType> out_dtype);

// out goes to x, new_residual to residual.
void fused_add_rms_norm_(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                         double eps, double weight_offset, bool cast_before_weight);

}  // namespace fuselage::binding
