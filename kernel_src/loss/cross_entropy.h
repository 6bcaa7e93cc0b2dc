// Cross-entropy and log-probabilities of given logits.
//
//   x = logits                                    or softcap * tanh(logits / softcap)
//   z = x * inv_temperature                       temperature 1 in cross_entropy
//   lse = log(sum of e^z)                         log_prob_i = z_i - lse
//
//   loss = (1 - smoothing) * (lse - z_target) + smoothing * (lse - mean of z)
//          + square_scale * lse^2                 times the weight of the token
//   entropy = -sum of e^log_prob_i * log_prob_i
//
// A token whose target is ignore_index has zeros for all of that, and for its gradient; its logits
// are not read. A row with NaN or infinity, or without any finite logit, is NaN, as are rows of
// targets that the vocabulary does not have: the CPU's binding refuses those.
//
// The backward has p_i = e^log_prob_i of what the forward leaves for each row: the maximum of x,
// and the log of the sum of e^((x - maximum) * inv_temperature). The gradient of x_i is
//
//   inv_temperature * (a p_i + b p_i log_prob_i - c [i is the target] - u)
//   cross_entropy, with g that of the token:
//     a = g (1 + 2 square_scale lse)    c = g (1 - smoothing)    u = g smoothing / vocab
//   log_probs, with gradients g_p, g_h of the entropy, and g_s of lse:
//     a = g_s - g_p - g_h entropy       c = -g_p                 b = -g_h
//
// log_probs adds up weights as integers, strip by strip, as a draw does (common/softmax_math.h):
// its bits are those that gumbel_sample reports. cross_entropy adds up floats, in an order that
// depends on the vocabulary alone, in a third of the instructions.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/strip.h"

namespace fuselage {

constexpr int64_t kMaxLossVocab = int64_t{1} << 26;  // sums of weights count with no more

struct LossRows {
  const void* logits;  // [rows, vocab]
  DType dtype;
  int64_t rows, vocab, stride;
  const void* targets;  // [rows], int64 or int32
  bool int32_targets;
  int64_t ignore_index;
  float softcap;  // 0: none
};

// What the forward leaves of a row for the backward.
struct RowStatistics {
  float max, log_sum;
};

enum class Reduction { none, sum, mean };

struct CrossEntropyForward {
  LossRows in;
  const float* token_weights;  // [rows], or null
  float smoothing, square_scale;
  Reduction reduction;
  float* losses;              // [rows]: the result, or what the reduction adds up
  float* loss;                // [1]: the result of a reduction
  float* count;               // [1]: of the targets that count; or null
  RowStatistics* statistics;  // [rows], or null
};

struct LogProbsForward {
  LossRows in;
  // On a GPU, instead of logits: what a head has left of each strip, [rows, stride], and the x of
  // targets, [rows]. Without entropy.
  const StripSum* strips;
  const float* target_logits;
  float inv_temperature;
  float* log_probs;           // [rows]
  float* entropy;             // [rows], or null
  float* log_sum_exp;         // [rows]
  bool* is_greatest;          // [rows]: whether no logit is larger than the target's
  RowStatistics* statistics;  // [rows], or null
};

struct LossBackward {
  LossRows in;
  float inv_temperature;
  const RowStatistics* statistics;  // [rows]
  // Of cross_entropy, or null. One for all rows where the loss is a sum or a mean.
  const float* grad_loss;  // [rows] or [1]
  bool grad_per_row;
  const float* token_weights;  // [rows], or null
  const float* count;          // [1], of a mean; or null
  float smoothing, square_scale;
  // Of log_probs, each [rows] or null.
  const float* grad_log_probs;
  const float* grad_entropy;
  const float* grad_log_sum_exp;
  const float* entropy;  // where there is grad_entropy
  void* grad_logits;     // [rows, vocab], which may be `logits`
  DType grad_dtype;      // that of the logits, or any of float32 ones
  int64_t grad_stride;
  // The columns given are those from `first_column` on, of `full_vocab`.
  int64_t first_column, full_vocab;
};

// x *= factor, in float32. Where that is one, as it mostly is, nothing is written.
struct Multiply {
  void* x;  // [count]
  DType dtype;
  int64_t count;
  const float* factor;  // [1]
};

namespace gpu {

const char* multiply(const Multiply& p, int device, void* stream);
const char* cross_entropy_forward(const CrossEntropyForward& p, int device, void* stream);
// The forward, without a reduction, and then the backward: in one kernel where that is possible.
const char* cross_entropy_with_gradient(const CrossEntropyForward& forward,
                                        const LossBackward& backward, int device, void* stream);
const char* log_probs_forward(const LogProbsForward& p, int device, void* stream);
const char* loss_backward(const LossBackward& p, int device, void* stream);

}  // namespace gpu
}  // namespace fuselage
