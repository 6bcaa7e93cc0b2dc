// How the rows of topk_softmax are laid out on a GPU: pure functions of the shape. The order of a
// float sum is that of the layout, so they do not ask for the rows.
#pragma once

#include "common/launch_policy.h"
#include "route/topk_softmax.h"

namespace fuselage {

constexpr int kTopkThreads = 128;  // of a block
constexpr int64_t kMaxTopkBlocks = (int64_t{1} << 31) - 1;

// Keys of a lane. A choice takes a step for each, and a few for each halving of the lanes: with
// more keys a lane, more rows share a warp.
constexpr int kFewKeys = 16;
constexpr int kManyKeys = 32;
static_assert(kManyKeys * kWarpSize == kMaxExperts, "a warp has all experts");

// A row belongs to `lanes` neighbouring lanes of a warp, a power of two.
struct TopkPolicy {
  int keys;
  int lanes;
  int rows_per_block;
  bool has_shared_keys;  // keys go through shared memory
  int shared_words;      // of a row
};

// `in_vectors`: a lane may make its keys of whole vectors of logits.
inline TopkPolicy topk_policy(int experts, int k, int groups, bool in_vectors) {
  TopkPolicy policy{};
  policy.keys = experts <= kFewKeys * kWarpSize ? kFewKeys : kManyKeys;
  policy.lanes = next_power_of_two(ceil_div(experts, policy.keys));
  policy.rows_per_block = kTopkThreads / policy.lanes;
  policy.has_shared_keys = !in_vectors || policy.keys == kManyKeys;
  policy.shared_words = 2 * k;  // the chosen, and their scores
  if (policy.has_shared_keys) policy.shared_words += experts + groups;
  return policy;
}

// The backward goes through a row by the element. Lanes of a row write neighbouring ones.
inline TopkPolicy topk_gradient_policy(int experts, bool needs_logits) {
  constexpr int kLogits = 4;  // of a lane, where a warp has as many lanes
  TopkPolicy policy{};
  policy.lanes = std::min(next_power_of_two(ceil_div(experts, kLogits)), kWarpSize);
  policy.rows_per_block = kTopkThreads / policy.lanes;
  policy.shared_words = needs_logits ? experts : 0;
  return policy;
}

}  // namespace fuselage
