// What all ranks' sums of a row come to: norm/shard_norm.h.
#pragma once

#include <cstdint>

#include "common/shared.h"

namespace FUSELAGE_SHARED_NAMESPACE {

// The sums over the ranks, in their order, of kCount values so many floats apart.
template <int kCount>
FUSELAGE_SHARED void shard_totals(const float* gathered, int64_t rank_stride, int64_t ranks,
                                  float (&totals)[kCount]) {
  for (int k = 0; k < kCount; ++k) totals[k] = 0.0f;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    for (int k = 0; k < kCount; ++k) totals[k] += gathered[rank * rank_stride + k];
  }
}

// Columns of a rank, where `each` has so many until none are left.
FUSELAGE_SHARED float shard_columns(int64_t total, int64_t each, int64_t rank) {
  const int64_t left = total - rank * each;
  return static_cast<float>(left <= 0 ? 0 : left < each ? left : each);
}

// Of a whole row: the mean is `mean + rest`.
struct ShardMoments {
  float mean, rest, variance;
};

// Merges (mean, rest, squares) of each rank about the mean of the first, which always has columns.
// What a rank without columns gives is zero, and not looked at.
FUSELAGE_SHARED ShardMoments merge_shard_moments(const float* gathered, int64_t rank_stride,
                                                 int64_t ranks, int64_t total, int64_t each) {
  const float first = gathered[0], first_rest = gathered[1];
  const auto distance = [&](const float* of_rank) {
    return (of_rank[0] - first) + (of_rank[1] - first_rest);
  };
  float sum = 0.0f;
  for (int64_t rank = 0; rank < ranks && rank * each < total; ++rank)
    sum += shard_columns(total, each, rank) * distance(gathered + rank * rank_stride);
  const float middle = sum / static_cast<float>(total);  // of all columns, from `first` on
  float squares = 0.0f;
  for (int64_t rank = 0; rank < ranks && rank * each < total; ++rank) {
    const float* of_rank = gathered + rank * rank_stride;
    const float off = distance(of_rank) - middle;
    squares += of_rank[2] + shard_columns(total, each, rank) * off * off;
  }
  return {first, first_rest + middle, squares / static_cast<float>(total)};
}

}  // namespace FUSELAGE_SHARED_NAMESPACE
