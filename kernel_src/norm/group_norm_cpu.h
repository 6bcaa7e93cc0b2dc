// CPU kernels of group_norm. Each call does a range of the work, so that the caller's thread pool
// can share it out. The work is cut by shape alone.
#pragma once

#include <cstdint>

#include "norm/group_norm.h"

namespace fuselage::cpu {

// Sets p.chunks, and returns how many floats p.partials must have: none where a group is small
// enough to be done at once, by group_norm_whole. Otherwise the three functions below come one
// after the other.
int64_t group_norm_forward_workspace(GroupNormForward& p);

// Groups [begin, end) of all samples. Statistics may be null.
void group_norm_whole(const GroupNormForward& p, int64_t begin, int64_t end);

// How many pieces there are for `group_norm_moments` and `group_norm_apply`.
int64_t group_norm_pieces(const GroupNormForward& p);
void group_norm_moments(const GroupNormForward& p, int64_t begin, int64_t end);
// The statistics of groups [begin, end) of all samples.
void group_norm_combine(const GroupNormForward& p, int64_t begin, int64_t end);
void group_norm_apply(const GroupNormForward& p, int64_t begin, int64_t end);

// The backward: pieces of `partials`, then groups of all samples for `sums` and `means`, then
// pieces of grad_x and channels of the other gradients.
void group_norm_backward_chunks(GroupNormBackward& p);
int64_t group_norm_backward_pieces(const GroupNormBackward& p);
void group_norm_backward_partials(const GroupNormBackward& p, int64_t begin, int64_t end);
void group_norm_backward_sums(const GroupNormBackward& p, int64_t begin, int64_t end);
void group_norm_backward_x(const GroupNormBackward& p, int64_t begin, int64_t end);
void group_norm_backward_channels(const GroupNormBackward& p, int64_t begin, int64_t end);

}  // namespace fuselage::cpu
