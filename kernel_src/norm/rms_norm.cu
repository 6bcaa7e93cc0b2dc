// The forward of rms_norm and fused_add_rms_norm on the GPU (formulas: norm/rms_norm.h). The
// backward is in norm/rms_norm_backward.cu.
//
// Rows of which the output has another type than x go the way of unaligned ones: they are too rare
// for kernels of their own.
#include "norm/rms_norm.h"

#include <type_traits>

#include "common/dispatch.h"
#include "norm/rms_norm_forward.h"
#include "norm/rms_norm_policy.h"

namespace fuselage {
namespace {

template <typename T, typename O, bool kResidual, bool kAligned>
gpuError launch_forward(const RmsNormForward& p, int device, gpuStream stream) {
  const RowPolicy policy = rms_norm_forward_policy(device_info(device), kAligned, p);
  return launch_row_forward<RmsNormOp<T, O, kResidual>, kAligned>(p, policy, stream);
}

}  // namespace

namespace gpu {

const char* rms_norm_forward(const RmsNormForward& p, int device, void* stream) {
  gpuError error = gpuSuccess;
  const bool supported =
      dispatch_activation_output(p.x_dtype, p.out_dtype, [&](auto x_tag, auto out_tag) {
        using T = typename decltype(x_tag)::type;
        using O = typename decltype(out_tag)::type;
        error = with_bool(p.residual != nullptr, [&](auto residual) {
          return with_bool(has_aligned_kernel(p), [&](auto aligned) {
            constexpr bool kAligned = aligned && std::is_same_v<T, O>;
            return launch_forward<T, O, residual, kAligned>(p, device,
                                                            static_cast<gpuStream>(stream));
          });
        });
      });
  return supported ? message_of(error) : "unsupported element types";
}

}  // namespace gpu
}  // namespace fuselage
