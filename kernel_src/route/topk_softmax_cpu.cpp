// topk_softmax on the CPU: formulas in route/topk_softmax.h. Compiled once per instruction set: see
// common/cpu_isa.h.

#include "route/topk_softmax_cpu.h"

#include <cstdint>

#include "common/cpu_isa.h"
#include "common/cpu_vector.h"
#include "common/dtype.h"
#include "common/softmax_cpu.h"
#include "route/topk_softmax_math.h"

namespace fuselage::cpu {
namespace FUSELAGE_ISA {

constexpr int kTopkPiece = 16;  // experts of which the largest is known
constexpr int kTopkPieces = kMaxExperts / kTopkPiece;
static_assert(kMaxExperts % kTopkPiece == 0 && kTopkPiece % kLanes == 0,
              "whole vectors of a row are in whole pieces, and these in its buffer");

FUSELAGE_INLINE int topk_padded(int size, int multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

// ---- scores ----

// A row in float32, and -inf up to whole vectors.
static void topk_load(const ExpertLogits& logits, int64_t row, float* x) {
  visit_dtype(logits.dtype, [&](auto type) {
    const auto* from = static_cast<const decltype(type)*>(logits.data) + row * logits.stride;
    for_each_vector(0, logits.experts,
                    [&](int64_t i, auto lanes) { store(x + i, load(from + i, lanes), lanes); });
  });
  for (int i = logits.experts; i % kLanes != 0; ++i) x[i] = -__builtin_inff();
}

// Of the numbers of a padded row: NaN is left to the sum.
static float topk_max(const float* x, int experts) {
  Floats maxima = broadcast(-__builtin_inff());
  for (int i = 0; i < experts; i += kLanes) {
    const Floats value = load(x + i, AllLanes{});
    maxima = value > maxima ? value : maxima;
  }
  float max = maxima[0];
  for (int lane = 1; lane < kLanes; ++lane) max = maxima[lane] > max ? maxima[lane] : max;
  return max;
}

FUSELAGE_INLINE Floats topk_sigmoid(Floats x) {
  const Floats power = exp_up_to_0(x > Floats{} ? -x : x);
  const Floats of_positive = 1.0f / (1.0f + power);
  return x > Floats{} ? of_positive : power * of_positive;
}

// The scores of a row. Those of softmax are not divided by their sum.
struct TopkScores {
  Score score;
  float max;  // of softmax

  TopkScores(Score score_, const float* x, int experts)
      : score(score_), max(score_ == Score::softmax ? topk_max(x, experts) : 0) {}

  FUSELAGE_INLINE Floats of(Floats x) const {
    return score == Score::softmax ? exp_up_to_0(x - max) : topk_sigmoid(x);
  }
  float sum(const float* x, int experts) const {
    const int padded = topk_padded(experts, kLanes);
    return static_cast<float>(
        sum_vectors(padded, [&](int64_t i, auto) { return of(load(x + i, AllLanes{})); }));
  }
};

// ---- the choice ----

// The keys of a row, and none up to whole pieces. `sum`: what scores are divided by.
static void topk_keys(const TopkForward& p, const float* x, const TopkScores& scores, float sum,
                      int32_t* keys) {
  const int experts = p.logits.experts;
  float choices[kMaxExperts];
  if (p.compares_scores()) {
    for (int i = 0; i < experts; i += kLanes)
      store(choices + i, scores.of(load(x + i, AllLanes{})) / sum, AllLanes{});
    visit_dtype(p.bias_dtype, [&](auto type) {
      const auto* bias = static_cast<const decltype(type)*>(p.bias);
      if (bias == nullptr) return;
      for_each_vector(0, experts, [&](int64_t i, auto lanes) {
        store(choices + i, load(choices + i, lanes) + load(bias + i, lanes), lanes);
      });
    });
    x = choices;
  }
  for (int i = 0; i < experts; ++i) keys[i] = key_of<CpuFloats>(x[i]);
  for (int i = experts; i % kTopkPiece != 0; ++i) keys[i] = kNoKey;
}

// Takes the keys of groups that are not among the best.
static void topk_limit_to_groups(const TopkForward& p, int32_t* keys) {
  const int size = p.group_size;
  int32_t of_groups[kMaxExperts];
  for (int group = 0; group < p.groups; ++group) {
    LargestKeys largest = {kNoKey, kNoKey};
    for (int i = 0; i < size; ++i) add_key(largest, keys[group * size + i]);
    of_groups[group] = group_key<CpuFloats>(largest, p.score);
  }
  for (int group = 0; group < p.groups; ++group) {
    int before = 0;
    for (int other = 0; other < p.groups; ++other) before += comes_before(of_groups, other, group);
    if (before < p.chosen_groups) continue;
    for (int i = 0; i < size; ++i) keys[group * size + i] = kNoKey;
  }
}

FUSELAGE_INLINE int32_t topk_largest(const int32_t* piece) {
  int32_t largest = piece[0];
  for (int i = 1; i < kTopkPiece; ++i) largest = piece[i] > largest ? piece[i] : largest;
  return largest;
}

// Chooses k experts, each of which loses its key.
static void topk_choose(int32_t* keys, int experts, int k, int32_t* chosen) {
  const int pieces = topk_padded(experts, kTopkPiece) / kTopkPiece;
  int32_t largest[kTopkPieces];
  for (int i = 0; i < pieces; ++i) largest[i] = topk_largest(keys + i * kTopkPiece);
  for (int j = 0; j < k; ++j) {
    int piece = 0;
    for (int i = 1; i < pieces; ++i) piece = largest[i] > largest[piece] ? i : piece;
    int expert = piece * kTopkPiece;
    while (keys[expert] != largest[piece]) ++expert;
    chosen[j] = expert;
    keys[expert] = kNoKey;
    largest[piece] = topk_largest(keys + piece * kTopkPiece);
  }
}

// The chosen scores over their sum, or over that of all.
static void topk_weights(const TopkForward& p, int64_t row, const float* x,
                         const TopkScores& scores, float sum, const int32_t* chosen) {
  float found[kMaxChosen];
  for (float& score : found) score = -__builtin_inff();  // past k: not above the maximum
  for (int j = 0; j < p.k; ++j) found[j] = x[chosen[j]];
  for (int j = 0; j < p.k; j += kLanes)
    store(found + j, scores.of(load(found + j, AllLanes{})), AllLanes{});
  if (p.renormalize) {
    double total = 0;
    for (int j = 0; j < p.k; ++j) total += found[j];
    sum = static_cast<float>(total) + divisor_epsilon(p.score);
  }
  for (int j = 0; j < p.k; ++j) {
    p.weights[row * p.k + j] = found[j] / sum;
    p.indices[row * p.k + j] = chosen[j];
  }
}

static void topk_forward_row(const TopkForward& p, int64_t row) {
  const int experts = p.logits.experts;
  float x[kMaxExperts];
  int32_t keys[kMaxExperts], chosen[kMaxChosen];
  topk_load(p.logits, row, x);
  const TopkScores scores(p.score, x, experts);
  const float sum = p.sums_scores() ? scores.sum(x, experts) : 1;
  topk_keys(p, x, scores, sum, keys);
  if (p.has_limited_groups()) topk_limit_to_groups(p, keys);
  topk_choose(keys, experts, p.k, chosen);
  topk_weights(p, row, x, scores, sum, chosen);
}

FUSELAGE_HIDDEN void topk_softmax_forward(const TopkForward& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) topk_forward_row(p, row);
}

// ---- the backward ----

// The gradients of the chosen logits, into their places.
static void topk_chosen_gradients(const TopkBackward& p, int64_t row, const float* x, float mean,
                                  float* grads) {
  const float* weights = p.weights + row * p.k;
  const float* grad_weights = p.grad_weights + row * p.k;
  const int64_t* indices = p.indices + row * p.k;
  float factors[kMaxChosen] = {};
  const auto is_expert = [&](int j) { return indices[j] >= 0 && indices[j] < p.logits.experts; };
  if (p.score == Score::sigmoid) {  // 1 - s
    for (int j = 0; j < p.k; ++j) factors[j] = is_expert(j) ? -x[indices[j]] : 0;
    for (int j = 0; j < p.k; j += kLanes)
      store(factors + j, topk_sigmoid(load(factors + j, AllLanes{})), AllLanes{});
  }
  for (int j = 0; j < p.k; ++j) {
    const float factor = p.score == Score::sigmoid ? factors[j] : 1;
    if (is_expert(j)) grads[indices[j]] = weights[j] * (grad_weights[j] - mean) * factor;
  }
}

static void topk_backward_row(const TopkBackward& p, int64_t row) {
  const int experts = p.logits.experts;
  float x[kMaxExperts], grads[kMaxExperts];
  topk_load(p.logits, row, x);
  double mean = 0;
  if (p.subtracts_mean()) {
    for (int j = 0; j < p.k; ++j)
      mean += static_cast<double>(p.grad_weights[row * p.k + j]) * p.weights[row * p.k + j];
  }
  set_zero(grads, experts);
  if (p.reaches_all()) {
    const TopkScores scores(p.score, x, experts);
    const float factor = -static_cast<float>(mean), sum = scores.sum(x, experts);
    for (int i = 0; i < experts; i += kLanes)
      store(grads + i, factor * (scores.of(load(x + i, AllLanes{})) / sum), AllLanes{});
  }
  topk_chosen_gradients(p, row, x, static_cast<float>(mean), grads);
  visit_dtype(p.logits.dtype, [&](auto type) {
    auto* to = static_cast<decltype(type)*>(p.grad_logits) + row * experts;
    for_each_vector(0, experts,
                    [&](int64_t i, auto lanes) { store(to + i, load(grads + i, lanes), lanes); });
  });
}

FUSELAGE_HIDDEN void topk_softmax_backward(const TopkBackward& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) topk_backward_row(p, row);
}

}  // namespace FUSELAGE_ISA

// The public functions

FUSELAGE_PICK_ISA(topk_softmax_forward, (const TopkForward& p, int64_t begin, int64_t end),
                  (p, begin, end))
FUSELAGE_PICK_ISA(topk_softmax_backward, (const TopkBackward& p, int64_t begin, int64_t end),
                  (p, begin, end))

}  // namespace fuselage::cpu
