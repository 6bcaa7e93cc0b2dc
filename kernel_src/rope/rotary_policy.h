// How the rope kernels are laid out on a GPU: pure functions of the device and the shape.
#pragma once

#include <algorithm>

#include "common/launch_policy.h"
#include "rope/rotary.h"

namespace fuselage {

// Elements of a vector of apply_rotary, of any type. More of a half type would be fewer instructions, but the cos
// and sin of a pair of vectors are four times as many floats: registers are what limits the bytes under way.
constexpr int kRotaryVector = 4;

// Of qk_norm_rotary, where there are more instructions: 16 bytes.
inline int qk_norm_vector(const RotaryShape& shape) {
  return static_cast<int>(16 / dtype_size(shape.dtype));
}

// A head of rotary_dim + rest columns is cut into items of two vectors each. The vectors of an item are
// `half` columns apart: those of a pair in the half-split form, and otherwise so that neighbouring items have
// neighbouring vectors. Items [0, rotated_items) are rotated, those behind them are passed through.
struct HeadLayout {
  int rotated_half, rest_half;    // columns from the first vector of an item to its second
  int rotated_items, rest_items;  // of a head; some may be behind its end
  int width;  // neighbouring items that exchange the ends of unaligned vectors: a power of two
};

inline HeadLayout head_layout(const RotaryShape& shape, int64_t vector, bool with_rest,
                              bool padded) {
  const int64_t rest = with_rest ? shape.dim - shape.rotary_dim : 0;
  const auto half_of = [&](int64_t columns) {
    return std::min(columns, ceil_div(ceil_div(columns, vector), 2) * vector);
  };
  const int64_t rotated_half = shape.interleaved ? half_of(shape.rotary_dim) : shape.rotary_dim / 2;
  const int64_t rest_half = half_of(rest);
  int64_t rotated = ceil_div(rotated_half, vector), other = ceil_div(rest_half, vector);
  int width = 1;
  if (padded) {
    width = std::min(next_power_of_two(std::max(rotated, other)), kWarpSize);
    rotated = ceil_div(rotated, width) * width;
    other = ceil_div(other, width) * width;
  }
  return {static_cast<int>(rotated_half), static_cast<int>(rest_half), static_cast<int>(rotated),
          static_cast<int>(other), width};
}

constexpr int kRotaryThreads = 256;
constexpr int64_t kMostBlocksOfToken = 65535;  // of a grid's second dimension

struct RotaryPolicy {
  HeadLayout layout;
  int heads_per_thread;  // 1, 2 or 4 heads of a token share the cos and sin that a thread holds
  int groups;            // of that many heads, in a token
  int threads_per_token, tokens_per_block;
  int blocks_per_token;
};

inline RotaryPolicy rotary_policy(const DeviceInfo& device, const RotaryShape& shape, int64_t heads,
                                  int vector, bool with_rest, bool aligned) {
  RotaryPolicy policy{};
  policy.layout = head_layout(shape, vector, with_rest, !aligned);
  const int64_t items = policy.layout.rotated_items + policy.layout.rest_items;
  const int64_t tokens = shape.batch * shape.tokens;
  // Two vectors of each head, all in flight together. Where all threads are on the GPU at once, time is
  // latency: fewer heads a thread.
  policy.heads_per_thread = !aligned || heads == 2 ? 2 : heads == 1 ? 1 : 4;
  while (aligned && policy.heads_per_thread > 1 &&
         tokens * items * ceil_div(heads, policy.heads_per_thread) <
             int64_t{device.multiprocessors} * 2 * kRotaryThreads) {
    policy.heads_per_thread /= 2;
  }
  policy.groups = static_cast<int>(ceil_div(heads, policy.heads_per_thread));
  const int64_t slots = items * policy.groups;
  if (slots >= kRotaryThreads) {
    policy.threads_per_token = kRotaryThreads;
    policy.tokens_per_block = 1;
    policy.blocks_per_token = static_cast<int>(ceil_div(slots, kRotaryThreads));
    return policy;
  }
  // As many tokens as fit, and full warps where that costs at most half of them.
  policy.threads_per_token = static_cast<int>(slots);
  policy.blocks_per_token = 1;
  const int most = static_cast<int>(kRotaryThreads / slots);
  policy.tokens_per_block = most;
  for (int count = most; count > most / 2; --count) {
    if (count * slots % kWarpSize == 0) {
      policy.tokens_per_block = count;
      break;
    }
  }
  // Lanes of unaligned rows exchange values, so warps must be whole.
  if (!aligned && policy.tokens_per_block * slots % kWarpSize != 0) {
    policy.threads_per_token = static_cast<int>(ceil_div(slots, kWarpSize) * kWarpSize);
    policy.tokens_per_block = kRotaryThreads / policy.threads_per_token;
  }
  return policy;
}

// qk_norm_rotary: the threads of a row hold one item each, of up to four heads in the forward and of one in the
// backward, which keeps more in registers.
constexpr int kQkNormThreads = 256;  // as the kernels' launch bounds

// Two vectors of float32 a thread, less what whole warps of either part may waste. Half types stop there too: no
// model has longer heads.
inline int64_t qk_norm_max_dim(const RotaryShape& shape) {
  return shape.dtype == DType::float32 && shape.rotary_dim < shape.dim ? 1536 : 2048;
}

struct QkNormPolicy {
  HeadLayout layout;
  int threads_per_row, rows_per_block;
};

// The layout is padded whether or not rows are aligned, so that the order of a sum does not depend on it.
inline QkNormPolicy qk_norm_policy(const RotaryShape& shape) {
  QkNormPolicy policy{};
  policy.layout = head_layout(shape, qk_norm_vector(shape), true, true);
  policy.threads_per_row = threads_for(policy.layout.rotated_items + policy.layout.rest_items, 1);
  policy.rows_per_block = std::max(1, kQkNormThreads / policy.threads_per_row);
  return policy;
}

// Heads of a row in the aligned forward: four, or one where there are fewer or all are on the GPU at once.
inline int qk_norm_heads(const DeviceInfo& device, const RotaryShape& shape, int64_t q_heads,
                         int64_t k_heads) {
  const int64_t rows = shape.batch * shape.tokens * (q_heads + k_heads);
  const int64_t resident = int64_t{device.multiprocessors} * 2 * kQkNormThreads;
  return q_heads >= 4 && rows * qk_norm_policy(shape).threads_per_row > resident ? 4 : 1;
}

// Persistent blocks of the backward, as many as registers let run at once. Each leaves one row of partials.
inline int qk_norm_backward_blocks(const DeviceInfo& device, const RotaryShape& shape,
                                   int64_t q_heads, int64_t k_heads) {
  const int64_t rows = shape.batch * shape.tokens * std::max(q_heads, k_heads);
  const int64_t blocks = ceil_div(rows, qk_norm_policy(shape).rows_per_block);
  return static_cast<int>(std::clamp<int64_t>(blocks, 1, 2 * device.multiprocessors));
}

}  // namespace fuselage
