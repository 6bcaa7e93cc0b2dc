// Bindings of layer_norm and the adaptive norms. The schemas are in torch_binding.cpp, the formulas
// in norm/ada_norm.h. `layer`: take the mean away.
#pragma once

#include <tuple>

#include "binding.h"

namespace fuselage::binding {

Tensor layer_norm(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                  double eps);

// As layer_norm, and the statistics [rows, 2] for the backward.
std::tuple<Tensor, Tensor> layer_norm_fwd(const Tensor& x, const OptionalTensor& weight,
                                          const OptionalTensor& bias, double eps);

// (grad_x, grad_weight, grad_bias), each empty where not needed. Of `bias` only the dtype counts.
std::tuple<Tensor, Tensor, Tensor> layer_norm_bwd(const Tensor& grad_out, const Tensor& x,
                                                  const OptionalTensor& weight,
                                                  const OptionalTensor& bias,
                                                  const Tensor& statistics, bool needs_grad_x,
                                                  bool needs_grad_weight, bool needs_grad_bias);

std::tuple<Tensor, Tensor> fused_add_layer_norm(const Tensor& x, const Tensor& residual,
                                                const OptionalTensor& weight,
                                                const OptionalTensor& bias, double eps);

// As fused_add_layer_norm, and the statistics [rows, 2] for gate_residual_ada_norm_bwd.
std::tuple<Tensor, Tensor, Tensor> fused_add_layer_norm_fwd(const Tensor& x, const Tensor& residual,
                                                            const OptionalTensor& weight,
                                                            const OptionalTensor& bias, double eps);

// Writes out over x, and new_residual over residual.
void fused_add_layer_norm_(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps);

Tensor ada_norm(const Tensor& x, const OptionalTensor& scale, const OptionalTensor& shift,
                const OptionalTensor& weight, const OptionalTensor& bias, double eps, bool layer);

// As ada_norm, and the statistics, [rows, 2] or [rows], for the backward.
std::tuple<Tensor, Tensor> ada_norm_fwd(const Tensor& x, const OptionalTensor& scale,
                                        const OptionalTensor& shift, const OptionalTensor& weight,
                                        const OptionalTensor& bias, double eps, bool layer);

// (grad_x, grad_scale, grad_shift, grad_weight, grad_bias), each empty where not needed. Of `shift`
// only shape and dtype count, and of `bias` only the dtype unless grad_scale is needed.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> ada_norm_bwd(
    const Tensor& grad_out, const Tensor& x, const OptionalTensor& scale,
    const OptionalTensor& shift, const OptionalTensor& weight, const OptionalTensor& bias,
    const Tensor& statistics, bool layer, bool needs_grad_x, bool needs_grad_scale,
    bool needs_grad_shift, bool needs_grad_weight, bool needs_grad_bias);

std::tuple<Tensor, Tensor> gate_residual_ada_norm(
    const Tensor& x, const Tensor& residual, const OptionalTensor& gate,
    const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& weight,
    const OptionalTensor& bias, double eps, bool layer);

// As gate_residual_ada_norm, and the statistics for the backward.
std::tuple<Tensor, Tensor, Tensor> gate_residual_ada_norm_fwd(
    const Tensor& x, const Tensor& residual, const OptionalTensor& gate,
    const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& weight,
    const OptionalTensor& bias, double eps, bool layer);

// (grad_x, grad_residual, grad_gate, grad_scale, grad_shift, grad_weight, grad_bias), as
// ada_norm_bwd. `x` may be missing unless grad_gate is needed.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> gate_residual_ada_norm_bwd(
    const Tensor& grad_out, const OptionalTensor& grad_new_residual, const Tensor& new_residual,
    const OptionalTensor& x, const OptionalTensor& gate, const OptionalTensor& scale,
    const OptionalTensor& shift, const OptionalTensor& weight, const OptionalTensor& bias,
    const Tensor& statistics, bool layer, bool needs_grad_x, bool needs_grad_residual,
    bool needs_grad_gate, bool needs_grad_scale, bool needs_grad_shift, bool needs_grad_weight,
    bool needs_grad_bias);

}  // namespace fuselage::binding
