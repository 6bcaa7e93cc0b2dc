// CPU kernels of norms whose columns are spread over ranks. Each call does a range of the rows, so
// that the caller's thread pool can share them out.
#pragma once

#include <cstdint>

#include "norm/shard_norm.h"

namespace fuselage::cpu {

// p.sums (and p.new_residual) of rows [row_begin, row_end).
void shard_norm_sums(const ShardNorm& p, int64_t row_begin, int64_t row_end);

// p.out, and in the forward p.saved, of rows [row_begin, row_end).
void shard_norm_finish(const ShardNorm& p, int64_t row_begin, int64_t row_end);

}  // namespace fuselage::cpu
