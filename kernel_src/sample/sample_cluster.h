// The form of gumbel_sample for GPUs with thread block clusters, a cluster for a row.
#pragma once

#include "common/gpu_compat.h"
#include "sample/sample_policy.h"

namespace fuselage {
namespace gpu {

// For policies with blocks. One kernel, and the step of an offset that rows share, unless it is
// advanced before.
gpuError cluster_sample(const GumbelSample& p, const ClusterPolicy& policy, gpuStream stream);

}  // namespace gpu
}  // namespace fuselage
