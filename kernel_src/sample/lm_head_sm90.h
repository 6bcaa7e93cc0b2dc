// The draw from a language-model head on Hopper GPUs: what sample/lm_head_sm90.cu is given, and
// whether it serves.
#pragma once

#include "sample/sample.h"

namespace fuselage {
namespace gpu {

// Whether the head and the draws are what the kernels for Hopper are made for, on a GPU that has
// them.
bool lm_head_sm90_serves(const LmHeadSample& p, int device);
bool lm_head_sm90_serves(const LmHead& p, int device);

// As lm_head_sample and lm_head_logits, for what is served.
int64_t lm_head_sample_sm90_workspace(const LmHeadSample& p, int device);
const char* lm_head_sample_sm90(const LmHeadSample& p, int device, void* stream);
// What needs sums, of tokens and sums of strips that are there.
const char* lm_head_draw_sums_sm90(const LmHeadSample& p, int device, void* stream);
// As lm_head_sums, with the workspace of logits.
const char* lm_head_sums_sm90(const LmHead& p, const HeadSums& out, void* workspace, int device,
                              void* stream);
int64_t lm_head_logits_sm90_workspace(const LmHead& p);
const char* lm_head_logits_sm90(const LmHead& p, const HeadLogits& out, void* workspace, int device,
                                void* stream);

}  // namespace gpu
}  // namespace fuselage
