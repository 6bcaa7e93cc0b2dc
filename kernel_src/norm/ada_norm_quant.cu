// layer_norm and ada_layer_norm whose results are quantised, on the GPU (norm/row_quant.h).
#include "common/dispatch.h"
#include "norm/ada_norm_forward.h"
#include "norm/ada_norm_policy.h"
#include "norm/row_quant.h"

namespace fuselage::gpu {

bool ada_norm_quantises(const Quantised<AdaNormForward>& p) { return is_one_kernel(p); }

const char* ada_norm_quant(const Quantised<AdaNormForward>& p, int device, void* stream) {
  return message_of(dispatch_half(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return launch_row_quant<AdaNormOp<T, false>>(ada_norm_params(p), p.quant, is_aligned(p), device,
                                                 static_cast<gpuStream>(stream));
  }));
}

}  // namespace fuselage::gpu
