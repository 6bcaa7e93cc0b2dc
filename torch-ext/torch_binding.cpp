// Schemas and registration. `*_fwd` ops return what their backward needs as well; the plain ones
// return the results alone. Where a backward needs the inputs alone, both are one function, and
// `*_fwd` is what torch.compile sees: a registered autograd would cost every call of the plain op.
#include <torch/csrc/stable/library.h>

#include "binding/ada_norm.h"
#include "binding/gate.h"
#include "binding/norm.h"
#include "binding/poly_norm.h"
#include "binding/rope.h"
#include "binding/sample.h"
#include "registration.h"

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def(
      "rms_norm(Tensor x, Tensor? weight, float eps, float weight_offset, bool cast_before_weight, "
      "ScalarType? out_dtype) -> Tensor");
  ops.def(
      "rms_norm_fwd(Tensor x, Tensor? weight, float eps, float weight_offset, bool "
      "cast_before_weight, ScalarType? out_dtype) -> (Tensor out, Tensor rstd)");
  ops.def(
      "rms_norm_bwd(Tensor grad_out, Tensor? grad_new_residual, Tensor x, Tensor? weight, Tensor "
      "rstd, float weight_offset, bool needs_grad_x, bool needs_grad_weight) -> (Tensor grad_x, "
      "Tensor grad_weight)");
  ops.def(
      "fused_add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float "
      "weight_offset, bool cast_before_weight, ScalarType? out_dtype) -> (Tensor out, Tensor "
      "new_residual)");
  ops.def(
      "fused_add_rms_norm_fwd(Tensor x, Tensor residual, Tensor? weight, float eps, float "
      "weight_offset, bool cast_before_weight, ScalarType? out_dtype) -> (Tensor out, Tensor "
      "new_residual, Tensor rstd)");
  ops.def(
      "fused_add_rms_norm_(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, float eps, float "
      "weight_offset, bool cast_before_weight) -> ()");
  ops.def("poly_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor");
  ops.def(
      "poly_norm_fwd(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor out, Tensor "
      "rstd)");
  ops.def(
      "fused_mul_poly_norm(Tensor x, Tensor? mul, Tensor weight, Tensor bias, float eps, bool "
      "mul_first) -> Tensor");
  ops.def(
      "fused_mul_poly_norm_fwd(Tensor x, Tensor? mul, Tensor weight, Tensor bias, float eps, "
      "bool mul_first) -> (Tensor out, Tensor rstd)");
  ops.def(
      "grouped_poly_norm(Tensor x, Tensor? mul, Tensor weight, Tensor bias, Tensor offs, float "
      "eps, bool mul_first, float? hidden_clamp) -> Tensor");
  ops.def(
      "grouped_poly_norm_fwd(Tensor x, Tensor? mul, Tensor weight, Tensor bias, Tensor offs, float "
      "eps, bool mul_first, float? hidden_clamp) -> (Tensor out, Tensor rstd)");
  ops.def(
      "grouped_poly_norm_bwd(Tensor grad_out, Tensor x, Tensor? mul, bool mul_first, Tensor "
      "weight, Tensor bias, Tensor offs, Tensor rstd, float? hidden_clamp, bool needs_grad_x, bool "
      "needs_grad_mul, bool needs_grad_weight, bool needs_grad_bias) -> (Tensor grad_x, Tensor "
      "grad_mul, Tensor grad_weight, Tensor grad_bias)");
  ops.def(
      "poly_norm_bwd(Tensor grad_out, Tensor x, Tensor? mul, bool packed, bool mul_first, Tensor "
      "weight, Tensor bias, Tensor rstd, bool needs_grad_x, bool needs_grad_mul, bool "
      "needs_grad_weight, bool needs_grad_bias) -> (Tensor grad_x, Tensor grad_mul, Tensor "
      "grad_weight, Tensor grad_bias)");

  ops.def("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor");
  ops.def(
      "layer_norm_fwd(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor out, Tensor "
      "statistics)");
  ops.def(
      "layer_norm_bwd(Tensor grad_out, Tensor x, Tensor? weight, Tensor? bias, Tensor statistics, "
      "bool needs_grad_x, bool needs_grad_weight, bool needs_grad_bias) "
      "-> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)");
  ops.def(
      "fused_add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> "
      "(Tensor out, Tensor new_residual)");
  ops.def(
      "fused_add_layer_norm_fwd(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float "
      "eps) -> (Tensor out, Tensor new_residual, Tensor statistics)");
  ops.def(
      "fused_add_layer_norm_(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, Tensor? bias, "
      "float eps) -> ()");
  ops.def(
      "ada_norm(Tensor x, Tensor? scale, Tensor? shift, Tensor? weight, Tensor? bias, float eps, "
      "bool layer) -> Tensor");
  ops.def(
      "ada_norm_fwd(Tensor x, Tensor? scale, Tensor? shift, Tensor? weight, Tensor? bias, float "
      "eps, bool layer) -> (Tensor out, Tensor statistics)");
  ops.def(
      "ada_norm_bwd(Tensor grad_out, Tensor x, Tensor? scale, Tensor? shift, Tensor? weight, "
      "Tensor? bias, Tensor statistics, bool layer, bool needs_grad_x, bool needs_grad_scale, bool "
      "needs_grad_shift, bool needs_grad_weight, bool needs_grad_bias) -> (Tensor grad_x, Tensor "
      "grad_scale, Tensor grad_shift, Tensor grad_weight, Tensor grad_bias)");
  ops.def(
      "gate_residual_ada_norm(Tensor x, Tensor residual, Tensor? gate, Tensor? scale, Tensor? "
      "shift, Tensor? weight, Tensor? bias, float eps, bool layer) -> (Tensor out, Tensor "
      "new_residual)");
  ops.def(
      "gate_residual_ada_norm_fwd(Tensor x, Tensor residual, Tensor? gate, Tensor? scale, Tensor? "
      "shift, Tensor? weight, Tensor? bias, float eps, bool layer) -> (Tensor out, Tensor "
      "new_residual, Tensor statistics)");
  ops.def(
      "gate_residual_ada_norm_bwd(Tensor grad_out, Tensor? grad_new_residual, Tensor new_residual, "
      "Tensor? x, Tensor? gate, Tensor? scale, Tensor? shift, Tensor? weight, Tensor? bias, Tensor "
      "statistics, bool layer, bool needs_grad_x, bool needs_grad_residual, bool needs_grad_gate, "
      "bool needs_grad_scale, bool needs_grad_shift, bool needs_grad_weight, bool needs_grad_bias) "
      "-> (Tensor grad_x, Tensor grad_residual, Tensor grad_gate, Tensor grad_scale, Tensor "
      "grad_shift, Tensor grad_weight, Tensor grad_bias)");

  ops.def("activation(Tensor x, int activation) -> Tensor");
  ops.def("activation_fwd(Tensor x, int activation) -> Tensor");
  ops.def("activation_bwd(Tensor grad_out, Tensor x, int activation) -> Tensor");
  ops.def("act_and_mul(Tensor x, int activation, bool gate_first) -> Tensor");
  ops.def("act_and_mul_fwd(Tensor x, int activation, bool gate_first) -> Tensor");
  ops.def("act_and_mul_bwd(Tensor grad_out, Tensor x, int activation, bool gate_first) -> Tensor");
  ops.def("swiglu_clamped(Tensor x, float alpha, float limit, bool interleaved) -> Tensor");
  ops.def("swiglu_clamped_fwd(Tensor x, float alpha, float limit, bool interleaved) -> Tensor");
  ops.def(
      "swiglu_clamped_bwd(Tensor grad_out, Tensor x, float alpha, float limit, bool interleaved) "
      "-> Tensor");
  ops.def("glu(Tensor gate, Tensor up, int activation) -> Tensor");
  ops.def("glu_fwd(Tensor gate, Tensor up, int activation) -> Tensor");
  ops.def(
      "glu_bwd(Tensor grad_out, Tensor gate, Tensor up, int activation, bool needs_grad_gate, "
      "bool needs_grad_up) -> (Tensor grad_gate, Tensor grad_up)");
  ops.def("bias_act(Tensor x, Tensor? bias, int activation) -> Tensor");
  ops.def("bias_act_fwd(Tensor x, Tensor? bias, int activation) -> Tensor");
  ops.def("bias_act_(Tensor(a!) x, Tensor? bias, int activation) -> ()");
  ops.def("add_mul_act(Tensor x, Tensor? bias, Tensor y, float alpha, int activation) -> Tensor");
  ops.def(
      "add_mul_act_fwd(Tensor x, Tensor? bias, Tensor y, float alpha, int activation) -> Tensor");
  ops.def("add_mul_act_(Tensor(a!) x, Tensor? bias, Tensor y, float alpha, int activation) -> ()");
  ops.def(
      "add_mul_act_bwd(Tensor grad_out, Tensor? x, Tensor? bias, Tensor? y, float alpha, int "
      "activation, bool needs_grad_x, bool needs_grad_bias, bool needs_grad_y) -> (Tensor grad_x, "
      "Tensor grad_bias, Tensor grad_y)");

  ops.def(
      "apply_rotary(Tensor q, Tensor? k, Tensor cos, Tensor sin, Tensor? position_ids, Tensor? "
      "offsets, int? offset, bool interleaved, int heads_dim, int? rotary_dim) -> (Tensor q_out, "
      "Tensor k_out)");
  ops.def(
      "apply_rotary_fwd(Tensor q, Tensor? k, Tensor cos, Tensor sin, Tensor? position_ids, Tensor? "
      "offsets, int? offset, bool interleaved, int heads_dim, int? rotary_dim) -> (Tensor q_out, "
      "Tensor k_out)");
  ops.def(
      "apply_rotary_bwd(Tensor grad_q, Tensor? grad_k, Tensor cos, Tensor sin, Tensor? "
      "position_ids, Tensor? offsets, int? offset, bool interleaved, int heads_dim, int? "
      "rotary_dim) -> (Tensor grad_q_in, Tensor grad_k_in)");
  ops.def(
      "apply_rotary_(Tensor(a!) q, Tensor(b!)? k, Tensor cos, Tensor sin, Tensor? position_ids, "
      "Tensor? offsets, int? offset, bool interleaved, int heads_dim, int? rotary_dim) -> ()");
  ops.def(
      "qk_norm_rotary(Tensor q, Tensor? k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor "
      "sin, Tensor? position_ids, Tensor? offsets, int? offset, float eps, float weight_offset, "
      "bool cast_before_weight, bool interleaved, int heads_dim, int? rotary_dim) -> (Tensor "
      "q_out, Tensor k_out)");
  ops.def(
      "qk_norm_rotary_fwd(Tensor q, Tensor? k, Tensor? q_weight, Tensor? k_weight, Tensor cos, "
      "Tensor sin, Tensor? position_ids, Tensor? offsets, int? offset, float eps, float "
      "weight_offset, bool cast_before_weight, bool interleaved, int heads_dim, int? rotary_dim) "
      "-> (Tensor q_out, Tensor k_out)");
  ops.def(
      "qk_norm_rotary_bwd(Tensor grad_q_out, Tensor? grad_k_out, Tensor q, Tensor? k, Tensor? "
      "q_weight, Tensor? k_weight, Tensor cos, Tensor sin, Tensor? position_ids, Tensor? offsets, "
      "int? offset, float eps, float weight_offset, bool interleaved, int heads_dim, int? "
      "rotary_dim, bool needs_grad_q, bool needs_grad_k, bool needs_grad_q_weight, bool "
      "needs_grad_k_weight) -> (Tensor grad_q, Tensor grad_k, Tensor grad_q_weight, Tensor "
      "grad_k_weight)");

  ops.def(
      "gumbel_sample(Tensor logits, Tensor? bias, Tensor? bitmask, Tensor seed, Tensor(a!)? "
      "offset, Tensor? temperature, float temperature_value, Tensor? top_k, int? top_k_value, "
      "Tensor? top_p, float? top_p_value, Tensor? min_p, float? min_p_value, int num_samples, int "
      "vocab_offset, bool return_logprobs) -> (Tensor tokens, Tensor logprobs, Tensor "
      "filtered_logprobs)");
  ops.def(
      "lm_head_sample(Tensor hidden, Tensor weight, Tensor? weight_scale, Tensor? bias, float? "
      "logit_softcap, Tensor seed, Tensor(a!)? offset, Tensor? temperature, float "
      "temperature_value, Tensor? top_k, int? top_k_value, Tensor? top_p, float? top_p_value, "
      "Tensor? min_p, float? min_p_value, int num_samples, int vocab_offset, bool return_logprobs) "
      "-> (Tensor tokens, Tensor logprobs, Tensor filtered_logprobs)");
  ops.def(
      "lm_head_sample_shard(Tensor hidden, Tensor weight, Tensor? weight_scale, Tensor? bias, "
      "float? logit_softcap, Tensor seed, Tensor(a!)? offset, Tensor? temperature, float "
      "temperature_value, int num_samples, int vocab_offset, bool return_log_sum_exp) -> (Tensor "
      "scores, Tensor tokens, Tensor logits, Tensor log_sum_exp)");
}

namespace {

void implement(torch::stable::detail::StableLibrary& ops) {
  using namespace fuselage::binding;
  ops.impl("rms_norm", TORCH_BOX(&rms_norm));
  ops.impl("rms_norm_fwd", TORCH_BOX(&rms_norm_fwd));
  ops.impl("rms_norm_bwd", TORCH_BOX(&rms_norm_bwd));
  ops.impl("fused_add_rms_norm", TORCH_BOX(&fused_add_rms_norm));
  ops.impl("fused_add_rms_norm_fwd", TORCH_BOX(&fused_add_rms_norm_fwd));
  ops.impl("fused_add_rms_norm_", TORCH_BOX(&fused_add_rms_norm_));
  ops.impl("poly_norm", TORCH_BOX(&poly_norm));
  ops.impl("poly_norm_fwd", TORCH_BOX(&poly_norm_fwd));
  ops.impl("fused_mul_poly_norm", TORCH_BOX(&fused_mul_poly_norm));
  ops.impl("fused_mul_poly_norm_fwd", TORCH_BOX(&fused_mul_poly_norm_fwd));
  ops.impl("poly_norm_bwd", TORCH_BOX(&poly_norm_bwd));
  ops.impl("grouped_poly_norm", TORCH_BOX(&grouped_poly_norm));
  ops.impl("grouped_poly_norm_fwd", TORCH_BOX(&grouped_poly_norm_fwd));
  ops.impl("grouped_poly_norm_bwd", TORCH_BOX(&grouped_poly_norm_bwd));
  ops.impl("layer_norm", TORCH_BOX(&layer_norm));
  ops.impl("layer_norm_fwd", TORCH_BOX(&layer_norm_fwd));
  ops.impl("layer_norm_bwd", TORCH_BOX(&layer_norm_bwd));
  ops.impl("fused_add_layer_norm", TORCH_BOX(&fused_add_layer_norm));
  ops.impl("fused_add_layer_norm_fwd", TORCH_BOX(&fused_add_layer_norm_fwd));
  ops.impl("fused_add_layer_norm_", TORCH_BOX(&fused_add_layer_norm_));
  ops.impl("ada_norm", TORCH_BOX(&ada_norm));
  ops.impl("ada_norm_fwd", TORCH_BOX(&ada_norm_fwd));
  ops.impl("ada_norm_bwd", TORCH_BOX(&ada_norm_bwd));
  ops.impl("gate_residual_ada_norm", TORCH_BOX(&gate_residual_ada_norm));
  ops.impl("gate_residual_ada_norm_fwd", TORCH_BOX(&gate_residual_ada_norm_fwd));
  ops.impl("gate_residual_ada_norm_bwd", TORCH_BOX(&gate_residual_ada_norm_bwd));
  ops.impl("activation", TORCH_BOX(&activation));
  ops.impl("activation_fwd", TORCH_BOX(&activation));
  ops.impl("activation_bwd", TORCH_BOX(&activation_bwd));
  ops.impl("act_and_mul", TORCH_BOX(&act_and_mul));
  ops.impl("act_and_mul_fwd", TORCH_BOX(&act_and_mul));
  ops.impl("act_and_mul_bwd", TORCH_BOX(&act_and_mul_bwd));
  ops.impl("swiglu_clamped", TORCH_BOX(&swiglu_clamped));
  ops.impl("swiglu_clamped_fwd", TORCH_BOX(&swiglu_clamped));
  ops.impl("swiglu_clamped_bwd", TORCH_BOX(&swiglu_clamped_bwd));
  ops.impl("glu", TORCH_BOX(&glu));
  ops.impl("glu_fwd", TORCH_BOX(&glu));
  ops.impl("glu_bwd", TORCH_BOX(&glu_bwd));
  ops.impl("bias_act", TORCH_BOX(&bias_act));
  ops.impl("bias_act_fwd", TORCH_BOX(&bias_act));
  ops.impl("bias_act_", TORCH_BOX(&bias_act_));
  ops.impl("add_mul_act", TORCH_BOX(&add_mul_act));
  ops.impl("add_mul_act_fwd", TORCH_BOX(&add_mul_act));
  ops.impl("add_mul_act_", TORCH_BOX(&add_mul_act_));
  ops.impl("add_mul_act_bwd", TORCH_BOX(&add_mul_act_bwd));
  ops.impl("apply_rotary", TORCH_BOX(&apply_rotary));
  ops.impl("apply_rotary_fwd", TORCH_BOX(&apply_rotary));
  ops.impl("apply_rotary_bwd", TORCH_BOX(&apply_rotary_bwd));
  ops.impl("apply_rotary_", TORCH_BOX(&apply_rotary_));
  ops.impl("qk_norm_rotary", TORCH_BOX(&qk_norm_rotary));
  ops.impl("qk_norm_rotary_fwd", TORCH_BOX(&qk_norm_rotary));
  ops.impl("qk_norm_rotary_bwd", TORCH_BOX(&qk_norm_rotary_bwd));
  ops.impl("gumbel_sample", TORCH_BOX(&gumbel_sample));
  ops.impl("lm_head_sample", TORCH_BOX(&lm_head_sample));
  ops.impl("lm_head_sample_shard", TORCH_BOX(&lm_head_sample_shard));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) { implement(ops); }

#if defined(FUSELAGE_GPU)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) { implement(ops); }
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
