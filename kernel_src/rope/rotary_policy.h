// How the rope kernels are laid out on a GPU: pure functions of the device and the shape.
#pragma once

#include <algorithm>
#include <utility>

#include "common/alignment.h"
#include "common/launch_policy.h"
#include "rope/rotary.h"

namespace fuselage {

// Where heads, their halves, and what is read with them start and end: on boundaries of vectors, of
// words of four bytes, as halves of 50 columns do, or of elements.
enum class Starts { vectors, words, anywhere };

// Whether every head, and every half of one, starts and ends on the boundary of a vector of so many
// elements.
inline bool aligned_shape(const RotaryShape& shape, int vector) {
  return shape.dim % vector == 0 &&
         (shape.interleaved ? shape.rotary_dim : shape.rotary_dim / 2) % vector == 0;
}

inline bool aligned_heads(const Heads& heads, const RotaryShape& shape, int vector) {
  const int64_t bytes = vector * dtype_size(shape.dtype);
  for (const int64_t stride : {heads.batch_stride, heads.token_stride, heads.head_stride}) {
    if (!aligned_rows(heads.data, stride, shape.dim, shape.dtype, bytes)) return false;
  }
  return true;
}

// Tables are read in vectors of so many elements, whatever those of the heads are. Their rows end
// where the rotated part of a head does.
inline bool aligned_table(const RotaryTable& table, int vector) {
  const int64_t bytes = vector * dtype_size(table.dtype);
  return aligned_rows(table.cos, table.cos_stride, 0, table.dtype, bytes) &&
         aligned_rows(table.cos, table.cos_batch_stride, 0, table.dtype, bytes) &&
         aligned_rows(table.sin, table.sin_stride, 0, table.dtype, bytes) &&
         aligned_rows(table.sin, table.sin_batch_stride, 0, table.dtype, bytes);
}

inline bool is_aligned(const Rotary& p, int vector, int table_vector) {
  const auto side = [&](const RotarySide& s) {
    return s.heads == 0 ||
           (aligned_heads(s.x, p.shape, vector) && aligned_heads(s.out, p.shape, vector));
  };
  return aligned_shape(p.shape, vector) && aligned_table(p.table, table_vector) && side(p.q) &&
         side(p.k);
}

// Elements of a word.
inline int word_elements(DType dtype) { return 4 / dtype_size(dtype); }

// With vectors of so many elements, of the heads and of the tables.
template <typename P>
Starts starts_of(const P& p, int vector, int table_vector) {
  if (is_aligned(p, vector, table_vector)) return Starts::vectors;
  // Neighbours that share a column of a table are two in a word of it.
  const bool shared = p.shape.interleaved && p.table.half_width;
  const bool in_words = is_aligned(p, word_elements(p.shape.dtype), word_elements(p.table.dtype)) &&
                        (!shared || p.shape.rotary_dim / 2 % word_elements(p.table.dtype) == 0);
  return in_words ? Starts::words : Starts::anywhere;
}

// The order of tokens. Where a row of the tables is long beside the heads that it rotates, as of
// heads that are not split yet, and all sequences share it, the tokens of a position follow each
// other: sequences and tokens change places, and the row is read from memory once.
template <typename P>
bool has_long_shared_rows(const P& p) {
  const RotaryTable& table = p.table;
  const bool shared = table.positions == nullptr && table.step == 1 &&
                      table.cos_batch_stride == 0 && table.sin_batch_stride == 0;
  const int64_t columns = table.half_width ? p.shape.rotary_dim / 2 : p.shape.rotary_dim;
  const int64_t heads = (p.q.heads + p.k.heads) * p.shape.dim * dtype_size(p.shape.dtype);
  return shared && p.shape.batch > 1 && 2 * columns * dtype_size(table.dtype) * 4 >= heads;
}

template <typename P, typename... Each>
P by_position(P p, Each... heads_of_side) {
  if (!has_long_shared_rows(p)) return p;
  const auto exchange = [](Heads& heads) { std::swap(heads.batch_stride, heads.token_stride); };
  (exchange(p.q.*heads_of_side), ...);
  (exchange(p.k.*heads_of_side), ...);
  std::swap(p.shape.batch, p.shape.tokens);
  p.table.cos_batch_stride = p.table.cos_stride;
  p.table.sin_batch_stride = p.table.sin_stride;
  p.table.step = 0;
  return p;
}

// Elements of a vector of apply_rotary, of any type. More in half precision would be fewer
// instructions, but the cos and sin of a pair of vectors are four times as many floats: registers
// are what limits the bytes under way.
constexpr int kRotaryVector = 4;

// A head of rotary_dim + rest columns is cut into items of two vectors each. The vectors of an item
// are `half` columns apart: those of a pair in the half-split form, and otherwise so that
// neighbouring items have neighbouring vectors. Items [0, rotated_items) are rotated, those after
// them are passed through.
struct HeadLayout {
  int rotated_half, rest_half;    // columns from the first vector of an item to its second
  int rotated_items, rest_items;  // of a head; some may be past its end
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

constexpr int kRotaryThreads = 256;  // of a block, at most

struct RotaryPolicy {
  HeadLayout layout;
  int heads_per_thread;  // 1, 2 or 4 heads of a token share the cos and sin that a thread holds
  int groups;            // of that many heads, in a token
  int threads_per_token, tokens_per_block;
  int blocks_per_token;
};

inline RotaryPolicy rotary_policy(const DeviceInfo& device, const RotaryShape& shape, int64_t heads,
                                  bool with_rest, bool aligned) {
  RotaryPolicy policy{};
  policy.layout = head_layout(shape, kRotaryVector, with_rest, !aligned);
  const int64_t items = policy.layout.rotated_items + policy.layout.rest_items;
  const int64_t tokens = shape.batch * shape.tokens;
  // Two vectors of each head, all in flight together. Where all threads are on the GPU at once,
  // time is latency: fewer heads a thread.
  policy.heads_per_thread = !aligned || heads == 2 ? 2 : heads == 1 ? 1 : 4;
  while (aligned && policy.heads_per_thread > 1 &&
         tokens * items * ceil_div(heads, policy.heads_per_thread) <
             int64_t{device.multiprocessors} * device.tuning.rotary_resident_threads) {
    policy.heads_per_thread /= 2;
  }
  policy.groups = static_cast<int>(ceil_div(heads, policy.heads_per_thread));
  const int64_t slots = items * policy.groups;
  // NOTE: never more blocks than a grid has, where the most threads have few enough.
  const int tuned_threads = device.tuning.rotary_threads;
  const int block_threads =
      slots <= kMostBlocksAlongY * tuned_threads ? tuned_threads : kRotaryThreads;
  if (slots >= block_threads) {
    // Blocks of one size: of 72 heads of 128 two have 160 threads, and not 256 and 32.
    policy.tokens_per_block = 1;
    policy.blocks_per_token = static_cast<int>(ceil_div(slots, block_threads));
    policy.threads_per_token = threads_for(slots, policy.blocks_per_token);
    return policy;
  }
  // As many tokens as fit, and full warps where that costs at most half of them.
  policy.threads_per_token = static_cast<int>(slots);
  policy.blocks_per_token = 1;
  const int most = static_cast<int>(block_threads / slots);
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
    policy.tokens_per_block = block_threads / policy.threads_per_token;
  }
  return policy;
}

// Of heads in words, those of the weight are read.
template <typename Side>
bool aligned_weight(const Side& side, const RotaryShape& shape, int vector) {
  return aligned_rows(side.weight, 0, 0, side.weight_dtype,
                      vector * dtype_size(shape.dtype) > 4 ? 16 : 4);
}

inline bool is_aligned(const QkNormRotary& p, int vector, int table_vector) {
  const auto side = [&](const QkNormRotarySide& s) {
    return s.heads == 0 ||
           (aligned_heads(s.x, p.shape, vector) && aligned_heads(s.out, p.shape, vector) &&
            aligned_weight(s, p.shape, vector));
  };
  return aligned_shape(p.shape, vector) && aligned_table(p.table, table_vector) && side(p.q) &&
         side(p.k);
}

inline bool is_aligned(const QkNormRotaryBackward& p, int vector, int table_vector) {
  const auto side = [&](const QkNormRotaryBackwardSide& s) {
    return s.heads == 0 ||
           (aligned_heads(s.x, p.shape, vector) && aligned_heads(s.grad_out, p.shape, vector) &&
            aligned_heads(s.grad_x, p.shape, vector) && aligned_weight(s, p.shape, vector));
  };
  return aligned_shape(p.shape, vector) && aligned_table(p.table, table_vector) && side(p.q) &&
         side(p.k);
}

// qk_norm_rotary: the threads of a row hold one item each, of several heads of a token at once or
// of one.
constexpr int kQkNormThreads = 256;  // as the kernels' launch bounds
constexpr int kQkNormHeads = 4;      // in the forward
// In the backward: as many as registers hold.
constexpr int qk_norm_backward_heads(int64_t element_size) {
  return static_cast<int>(8 / element_size);
}

// Two vectors of float32 a thread, less what whole warps of either part may waste. Half precision
// stops there too: no model has longer heads.
inline int64_t qk_norm_max_dim(const RotaryShape& shape) {
  return shape.dtype == DType::float32 && shape.rotary_dim < shape.dim ? 1536 : 2048;
}

struct QkNormPolicy {
  HeadLayout layout;
  int vector;  // elements of a vector: four where a row fits a warp, and 16 bytes beyond
  int threads_per_row, rows_per_block;
};

// NOTE: the order of a head's sums follows from this. It depends on nothing but the shape of a
// head: not on how many there are, and not on whether they are aligned (so the layout is padded
// either way).
inline QkNormPolicy qk_norm_policy(const RotaryShape& shape) {
  const auto in_vectors_of = [&](int64_t elements) {
    QkNormPolicy policy{};
    policy.vector = static_cast<int>(elements);
    policy.layout = head_layout(shape, elements, true, true);
    policy.threads_per_row = threads_for(policy.layout.rotated_items + policy.layout.rest_items, 1);
    policy.rows_per_block = std::max(1, kQkNormThreads / policy.threads_per_row);
    return policy;
  };
  const QkNormPolicy few = in_vectors_of(kRotaryVector);
  return few.threads_per_row <= kWarpSize ? few : in_vectors_of(16 / dtype_size(shape.dtype));
}

// Whether rows hold several heads at once: their sums stay in a warp, and there are enough for
// `threads` threads.
inline bool has_several_heads(const QkNormPolicy& policy, int several, int64_t tokens,
                              int64_t q_heads, int64_t k_heads, int64_t threads) {
  return policy.vector == kRotaryVector && policy.threads_per_row >= several &&
         policy.threads_per_row <= kWarpSize && std::max(q_heads, k_heads) >= several &&
         tokens * (q_heads + k_heads) * policy.threads_per_row > threads;
}

// Blocks of several heads a row on a multiprocessor: what registers let run at once.
constexpr int kQkNormBlocks = 3;
constexpr int kQkNormBackwardBlocks = 2;

struct QkNormForwardPolicy {
  QkNormPolicy row;
  int heads_per_turn;  // of a row, at once
  int unit;            // heads of a token that a row takes
};

inline QkNormForwardPolicy qk_norm_forward_policy(const DeviceInfo& device,
                                                  const RotaryShape& shape, int64_t q_heads,
                                                  int64_t k_heads) {
  const int64_t tokens = shape.batch * shape.tokens;
  const int64_t threads = int64_t{device.multiprocessors} * kQkNormBlocks * kQkNormThreads;
  QkNormForwardPolicy policy{qk_norm_policy(shape), 1, 1};
  if (!has_several_heads(policy.row, kQkNormHeads, tokens, q_heads, k_heads, threads))
    return policy;
  policy.heads_per_turn = kQkNormHeads;
  // A unit costs about half a turn for cos, sin, weight and addresses; turns without heads, of q or
  // k, are lost.
  int64_t least = 0;
  for (int unit = kQkNormHeads; unit <= device.tuning.qk_norm_turns * kQkNormHeads;
       unit += kQkNormHeads) {
    const int64_t units = ceil_div(q_heads, unit) + ceil_div(k_heads, unit);
    const int64_t cost = units * (2 * unit / kQkNormHeads + 1);
    if (least != 0 && (cost >= least || tokens * units * policy.row.threads_per_row < 2 * threads))
      continue;
    policy.unit = unit;
    least = cost;
  }
  return policy;
}

struct QkNormBackwardPolicy {
  QkNormPolicy row;
  int heads_per_turn;  // of a row, at once
  int q_unit, k_unit;  // heads of a token that a row takes
  int blocks;          // persistent; each leaves one row of partials
  int weight_bytes;    // shared memory of the weight gradients of a block's rows
};

inline QkNormBackwardPolicy qk_norm_backward_policy(const DeviceInfo& device,
                                                    const RotaryShape& shape, int64_t q_heads,
                                                    int64_t k_heads) {
  const int64_t tokens = shape.batch * shape.tokens;
  const int64_t most_blocks = int64_t{device.multiprocessors} * kQkNormBackwardBlocks;
  const int several = qk_norm_backward_heads(dtype_size(shape.dtype));
  QkNormBackwardPolicy policy{};
  policy.row = qk_norm_policy(shape);
  const bool has_several = has_several_heads(policy.row, several, tokens, q_heads, k_heads,
                                             most_blocks * kQkNormThreads);
  policy.heads_per_turn = has_several ? several : 1;
  // As in the forward; and units that do not divide evenly over the rows of all blocks leave rows
  // idle in the end.
  const int64_t rows = most_blocks * policy.row.rows_per_block;
  const auto unit_of = [&](int64_t side_heads) {
    const int64_t turns = ceil_div(side_heads, policy.heads_per_turn);
    int64_t best = 1, least = 0;
    for (int64_t unit = 1; unit <= turns && (least == 0 || 2 * unit + 1 < least); ++unit) {
      const int64_t cost = ceil_div(tokens * ceil_div(turns, unit), rows) * (2 * unit + 1);
      if (least == 0 || cost < least) {
        best = unit;
        least = cost;
      }
    }
    return static_cast<int>(best * policy.heads_per_turn);
  };
  policy.q_unit = unit_of(q_heads);
  policy.k_unit = unit_of(k_heads);
  const int64_t units =
      std::max(ceil_div(q_heads, policy.q_unit), ceil_div(k_heads, policy.k_unit));
  policy.blocks = static_cast<int>(
      std::clamp<int64_t>(ceil_div(tokens * units, policy.row.rows_per_block), 1, most_blocks));
  policy.weight_bytes =
      policy.row.rows_per_block * static_cast<int>(shape.dim) * static_cast<int>(sizeof(float));
  return policy;
}

}  // namespace fuselage
