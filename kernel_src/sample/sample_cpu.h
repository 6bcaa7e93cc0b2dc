// CPU kernels of the sampling family. Each call does a range of the work, so that the caller's
// thread pool can share it out. The work is cut by shape alone.
#pragma once

#include <cstdint>

#include "sample/sample.h"

namespace fuselage::cpu {

// The best of some of a row's logits.
struct SampleCandidate {
  float score, logit;
  int64_t index;  // over all shards, or -1
};

// What filters and log-probabilities need of a row.
struct SampleRow {
  float max_logit;
  uint32_t bound;             // lowest key of a logit that may be drawn
  uint64_t weights, allowed;  // with filters: sums over all logits, and over those
  uint64_t strip_weights;     // the sum over all, as log-probabilities have it
};

constexpr int64_t kSamplePiece = 4096;  // logits of a row
inline int64_t sample_pieces(int64_t vocab) { return (vocab + kSamplePiece - 1) / kSamplePiece; }

// Rows [begin, end).
void sample_rows(const GumbelSample& p, SampleRow* rows, int64_t begin, int64_t end);

// Pieces [begin, end) of batch * sample_pieces(vocab). `rows` may be null.
void sample_draw(const GumbelSample& p, const SampleRow* rows,
                 SampleCandidate* candidates,  // [batch, pieces, num_samples]
                 int64_t begin, int64_t end);

// Of all pieces. Advances the offsets.
void sample_finish(const Draws& draws, const DrawResults& results, const SampleRow* rows,
                   const SampleCandidate* candidates, int64_t pieces);

// The head. Rows of hidden, as contiguous float32.
void lm_head_hidden(const LmHead& p, float* hidden, int64_t begin, int64_t end);

constexpr int64_t kLmHeadPiece = 256;  // rows of weight
inline int64_t lm_head_pieces(int64_t vocab) { return (vocab + kLmHeadPiece - 1) / kLmHeadPiece; }
// Floats of scratch for a call.
int64_t lm_head_logits_scratch(const LmHead& p);
int64_t lm_head_draw_scratch(const LmHead& p);

// Pieces [begin, end) of lm_head_pieces(vocab).
void lm_head_logits(const LmHead& p, const float* hidden, float* scratch,
                    float* logits,  // [batch, vocab]
                    int64_t stride, int64_t begin, int64_t end);
void lm_head_draw(const LmHead& p, const Draws& draws, const float* hidden, float* scratch,
                  SampleCandidate* candidates,  // [batch, pieces, num_samples]
                  int64_t begin, int64_t end);

}  // namespace fuselage::cpu
