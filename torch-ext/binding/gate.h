// Bindings of the gate family. The schemas are in torch_binding.cpp, the formulas in
// gate/activation.h. Activations are numbers of the enum there.
#pragma once

#include <tuple>

#include "binding.h"

namespace fuselage::binding {

Tensor activation(const Tensor& x, int64_t activation);
Tensor activation_bwd(const Tensor& grad_out, const Tensor& x, int64_t activation);

// act(gate) * value of the halves of x [..., 2 * dim], the gate first or last.
Tensor act_and_mul(const Tensor& x, int64_t activation, bool gate_first);
Tensor act_and_mul_bwd(const Tensor& grad_out, const Tensor& x, int64_t activation,
                       bool gate_first);

// The clamped gate of x [..., 2 * dim]: halves, the gate first, or gate and value in turn.
Tensor swiglu_clamped(const Tensor& x, double alpha, double limit, bool interleaved);
Tensor swiglu_clamped_bwd(const Tensor& grad_out, const Tensor& x, double alpha, double limit,
                          bool interleaved);

Tensor glu(const Tensor& gate, const Tensor& up, int64_t activation);
// (grad_gate, grad_up), either of them empty where not needed.
std::tuple<Tensor, Tensor> glu_bwd(const Tensor& grad_out, const Tensor& gate, const Tensor& up,
                                   int64_t activation, bool needs_grad_gate, bool needs_grad_up);

Tensor bias_act(const Tensor& x, const OptionalTensor& bias, int64_t activation);
void bias_act_(const Tensor& x, const OptionalTensor& bias, int64_t activation);
Tensor add_mul_act(const Tensor& x, const OptionalTensor& bias, const Tensor& y, double alpha,
                   int64_t activation);
void add_mul_act_(const Tensor& x, const OptionalTensor& bias, const Tensor& y, double alpha,
                  int64_t activation);
// The gradient of both: (grad_x, grad_bias, grad_y), any of them empty where not needed. Without an
// activation x and y are not read and may be left out.
std::tuple<Tensor, Tensor, Tensor> add_mul_act_bwd(const Tensor& grad_out, const OptionalTensor& x,
                                                   const OptionalTensor& bias,
                                                   const OptionalTensor& y, double alpha,
                                                   int64_t activation, bool needs_grad_x,
                                                   bool needs_grad_bias, bool needs_grad_y);

}  // namespace fuselage::binding
