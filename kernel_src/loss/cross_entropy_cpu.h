// CPU kernels of the loss family: rows [begin, end) of the work. Targets are in the vocabulary, or
// ignore_index.
#pragma once

#include <cstdint>

#include "loss/cross_entropy.h"

namespace fuselage::cpu {

// The losses and statistics alone.
void cross_entropy_forward(const CrossEntropyForward& p, int64_t begin, int64_t end);
// Their sum or mean.
void cross_entropy_finish(const CrossEntropyForward& p);

// What log_probs needs of a row.
struct LogProbsRow {
  float max, target;  // of x
  uint64_t weights;   // 0: there is NaN, an infinity, or no finite logit
  double products;    // the sum of weight * distance
};

void log_probs_forward(const LogProbsForward& p, LogProbsRow* rows, int64_t begin, int64_t end);
void log_probs_finish(const LogProbsForward& p, const LogProbsRow* rows);

void loss_backward(const LossBackward& p, int64_t begin, int64_t end);

// Elements [begin, end).
void multiply(const Multiply& p, int64_t begin, int64_t end);

}  // namespace fuselage::cpu
