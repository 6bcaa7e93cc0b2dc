// The library: the ops of all families, on the CPU and in a GPU variant on the GPU.
#include "binding/ops.h"

#include "binding/launch.h"
#include "registration.h"

static void register_ops(const fuselage::binding::Ops& ops) {
  using namespace fuselage::binding;
  register_norm_ops(ops);
  register_gated_rms_norm_ops(ops);
  register_group_norm_ops(ops);
  register_poly_norm_ops(ops);
  register_ada_norm_ops(ops);
  register_shard_norm_ops(ops);
  register_gate_ops(ops);
  register_loss_ops(ops);
  register_quant_ops(ops);
  register_fp8_linear_ops(ops);
  register_rope_ops(ops);
  register_route_ops(ops);
  register_sample_ops(ops);
  register_tuning_ops(ops);
}

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, library) {
  register_ops(fuselage::binding::Ops::definitions(library));
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, library) {
  register_ops(fuselage::binding::Ops::kernels(library));
}

#if defined(FUSELAGE_GPU)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, library) {
  register_ops(fuselage::binding::Ops::kernels(library));
}
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
