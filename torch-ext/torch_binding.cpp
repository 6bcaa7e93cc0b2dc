// Schemas and registration. `*_fwd` ops return what their backward needs as well; the plain ones return the
// results alone.
#include <torch/csrc/stable/library.h>

#include "binding/norm.h"
#include "binding/poly_norm.h"
#include "registration.h"

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def(
      "rms_norm(Tensor x, Tensor? weight, float eps, float weight_offset, bool cast_before_weight, "
      "ScalarType? out_dtype) -> Tensor");
  ops.def(
      "rms_norm_fwd(Tensor x, Tensor? weight, float eps, float weight_offset, bool cast_before_weight, "
      "ScalarType? out_dtype) -> (Tensor out, Tensor rstd)");
  ops.def(
      "rms_norm_bwd(Tensor grad_out, Tensor? grad_new_residual, Tensor x, Tensor? weight, Tensor rstd, "
      "float weight_offset, bool needs_grad_x, bool needs_grad_weight) -> (Tensor grad_x, Tensor grad_weight)");
  ops.def(
      "fused_add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset, "
      "bool cast_before_weight, ScalarType? out_dtype) -> (Tensor out, Tensor new_residual)");
  ops.def(
      "fused_add_rms_norm_fwd(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset, "
      "bool cast_before_weight, ScalarType? out_dtype) -> (Tensor out, Tensor new_residual, Tensor rstd)");
  ops.def(
      "fused_add_rms_norm_(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, float eps, float weight_offset, "
      "bool cast_before_weight) -> ()");
  ops.def("poly_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor");
  ops.def(
      "poly_norm_fwd(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor out, Tensor rstd)");
  ops.def(
      "fused_mul_poly_norm(Tensor x, Tensor? mul, Tensor weight, Tensor bias, float eps, bool mul_first) "
      "-> Tensor");
  ops.def(
      "fused_mul_poly_norm_fwd(Tensor x, Tensor? mul, Tensor weight, Tensor bias, float eps, "
      "bool mul_first) -> (Tensor out, Tensor rstd)");
  ops.def(
      "grouped_poly_norm(Tensor x, Tensor? mul, Tensor weight, Tensor bias, Tensor offs, float eps, "
      "bool mul_first, float? hidden_clamp) -> Tensor");
  ops.def(
      "grouped_poly_norm_fwd(Tensor x, Tensor? mul, Tensor weight, Tensor bias, Tensor offs, float eps, "
      "bool mul_first, float? hidden_clamp) -> (Tensor out, Tensor rstd)");
  ops.def(
      "grouped_poly_norm_bwd(Tensor grad_out, Tensor x, Tensor? mul, bool mul_first, Tensor weight, "
      "Tensor bias, Tensor offs, Tensor rstd, float? hidden_clamp, bool needs_grad_x, bool needs_grad_mul, "
      "bool needs_grad_weight, bool needs_grad_bias) "
      "-> (Tensor grad_x, Tensor grad_mul, Tensor grad_weight, Tensor grad_bias)");
  ops.def(
      "poly_norm_bwd(Tensor grad_out, Tensor x, Tensor? mul, bool packed, bool mul_first, Tensor weight, "
      "Tensor bias, Tensor rstd, bool needs_grad_x, bool needs_grad_mul, bool needs_grad_weight, "
      "bool needs_grad_bias) "
      "-> (Tensor grad_x, Tensor grad_mul, Tensor grad_weight, Tensor grad_bias)");
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
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) { implement(ops); }

#if defined(FUSELAGE_GPU)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) { implement(ops); }
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
