// The form of gumbel_sample with filters for logits whose strips have known maxima.
#pragma once

#include "common/gpu_compat.h"
#include "sample/sample_policy.h"

namespace fuselage {
namespace gpu {

// For p.strips, and policies with blocks: rows whose filters leave too much are drawn by a cluster.
gpuError strips_sample(const GumbelSample& p, const ClusterPolicy& policy, gpuStream stream);

}  // namespace gpu
}  // namespace fuselage
