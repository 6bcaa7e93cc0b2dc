// The form of gumbel_sample with filters for logits of which the greatest of each strip is known.
#pragma once

#include "common/gpu_compat.h"
#include "sample/sample.h"

namespace fuselage {
namespace gpu {

// Draws the rows whose filters leave few logits, and sets done[row] to 1; and to 0 for the others. p.strips is there.
gpuError strips_sample(const GumbelSample& p, uint32_t* done, gpuStream stream);

}  // namespace gpu
}  // namespace fuselage
