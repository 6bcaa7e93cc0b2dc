// rms_norm and fused_add_rms_norm whose results are quantised, on the GPU (norm/row_quant.h).
#include "common/dispatch.h"
#include "norm/rms_norm_forward.h"
#include "norm/rms_norm_policy.h"
#include "norm/row_quant.h"

namespace fuselage::gpu {

bool rms_norm_quantises(const Quantised<RmsNormForward>& p) { return is_one_kernel(p); }

const char* rms_norm_quant(const Quantised<RmsNormForward>& p, int device, void* stream) {
  return message_of(dispatch_half(p.x_dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return with_bool(p.residual != nullptr, [&](auto residual) {
      return launch_row_quant<RmsNormOp<T, T, residual>>(static_cast<const RmsNormForward&>(p),
                                                         p.quant, is_aligned(p), device,
                                                         static_cast<gpuStream>(stream));
    });
  }));
}

}  // namespace fuselage::gpu
