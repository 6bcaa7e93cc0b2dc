// The choice of experts for each token, as routers of mixture-of-experts models make it.
//
//   s_i = e^x_i / sum of e^x              score: softmax, over all experts
//   s_i = 1 / (1 + e^-x_i)                score: sigmoid
//   c_i = s_i + bias_i                    what experts are compared by
//
// The k experts with the largest c are chosen, the largest first. Of equal ones the first comes
// first, and NaN is larger than any number. With groups, which are neighbouring experts, only those
// of the best groups can be chosen: a group counts for its largest c (softmax, as in DeepSeek-V2),
// or for the sum of its two largest (sigmoid, as in DeepSeek-V3).
//
//   weight_j = s_j                                       of the chosen experts, without the bias
//   weight_j = s_j / (sum of the chosen s + epsilon)     renormalised; epsilon: 0, sigmoid 1e-20
//
// Without a bias c has the order of x, and x is compared, but with groups of sigmoid: scores that
// are rounded to one number are told apart, and most of them are not computed.
//
// The backward, of gradients g of the weights, with mean = sum of g_j weight_j:
//
//   softmax, renormalised    x_j: weight_j (g_j - mean)           others: 0
//   softmax                  x_j: weight_j (g_j - mean)           others: -s_i mean
//   sigmoid, renormalised    x_j: weight_j (g_j - mean) (1 - s_j) others: 0
//   sigmoid                  x_j: weight_j g_j (1 - s_j)          others: 0
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace fuselage {

// Of members that kernels call. NOTE: always inlined, so that no copy of one instruction set serves
// the others (common/cpu_isa.h).
#if defined(__CUDACC__) || defined(__HIPCC__)
#define FUSELAGE_MEMBER __host__ __device__ __forceinline__
#else
#define FUSELAGE_MEMBER __attribute__((always_inline))
#endif

constexpr int kMaxExperts = 1024;  // a warp has a row in registers
constexpr int kMaxChosen = 64;

enum class Score { softmax, sigmoid };

struct ExpertLogits {
  const void* data;  // [rows, experts]
  DType dtype;
  int64_t rows, stride;
  int experts;
};

struct TopkForward {
  ExpertLogits logits;
  Score score;
  const void* bias;  // [experts], or null
  DType bias_dtype;
  int k;
  int groups, group_size;
  int chosen_groups;  // all of them where there is no limit
  bool renormalize;
  float* weights;    // [rows, k]
  int64_t* indices;  // [rows, k]

  FUSELAGE_MEMBER bool has_limited_groups() const { return chosen_groups < groups; }
  // Whether experts are compared by scores, and not by logits.
  FUSELAGE_MEMBER bool compares_scores() const {
    return bias != nullptr || (score == Score::sigmoid && has_limited_groups());
  }
  // Whether the sum over all experts is needed.
  FUSELAGE_MEMBER bool sums_scores() const {
    return score == Score::softmax && (bias != nullptr || !renormalize);
  }
};

struct TopkBackward {
  ExpertLogits logits;
  Score score;
  int k;
  bool renormalize;
  const float* grad_weights;  // [rows, k]
  const float* weights;       // [rows, k]
  const int64_t* indices;     // [rows, k]
  void* grad_logits;          // [rows, experts], of the logits' dtype

  // Whether a weight depends on other logits than its own.
  FUSELAGE_MEMBER bool subtracts_mean() const { return score == Score::softmax || renormalize; }
  // And on those that were not chosen.
  FUSELAGE_MEMBER bool reaches_all() const { return score == Score::softmax && !renormalize; }
};

namespace gpu {

const char* topk_softmax_forward(const TopkForward& p, int device, void* stream);
const char* topk_softmax_backward(const TopkBackward& p, int device, void* stream);

}  // namespace gpu
}  // namespace fuselage
