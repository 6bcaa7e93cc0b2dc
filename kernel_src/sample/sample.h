// Draws from the distribution of a row of logits, by the Gumbel-max method, and from that of the
// logits of a language-model head without their ever being in memory.
//
//   logit = softcap(hidden @ weight.T * weight_scale + bias)       softcap(v) = cap * tanh(v / cap)
//   score = fma(logit, 1 / temperature, g)     token = index of the maximum, of equals the lowest
//
// Below a temperature of 1 scores are in units of a power of two, so that they do not overflow
// (sample/gumbel.h).
//
// The noise g of a logit is -log(e), of an exponential e of its own or of its group. It depends on
// nothing but the row's seed, offset and stream, the number of the sample, and the index of the
// logit counted over all shards:
//   group = index / 16          Philox(group)[0] is the word w of the group's smallest exponential,
//                               Philox(group)[1] >> 28 its position, index % 16
//   e     = -log(u(w)) / 16     of the logit at that position
//   e     = -log(u(w)) / 16 - log(u(Philox'(index / 4)[index % 4]))   of the others
// with u(w) = (w + 1/2) / 2^32. These e are as independent exponentials are: see sample/gumbel.h.
// Philox has
//   key     = low and high word of the seed
//   counter = (its argument, 256 * stream + sample, low and high word of the offset)
// and Philox' the other highest bit of the offset. `stream` is the number of the row where all rows
// share a seed, and 0 where each has its own. Rows with a temperature of 0 have no noise, and score
// = logit.
//
// Logits of -inf and NaN are never drawn. A row without any other gives -1.
//
// Filters remove logits below a bound of the row, and never one of two equal ones:
//   top_k    the top_k largest
//   top_p    of what is left, the fewest largest whose probabilities sum up to top_p of it
//   min_p    of what is left, those as probable as min_p times the most probable
// Probabilities are those at the row's temperature. They are added up as integers
// (sample/gumbel.h), so that the bound is the same in whatever order that is done.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/strip.h"

namespace fuselage {

constexpr int kMaxSamples = 256;
constexpr int64_t kMaxVocab = int64_t{1} << 26;  // of a call; sums of weights count with no more

// A number for each row, `stride` apart, or `value` for all where `values` is null.
struct RowFloats {
  const float* values;
  int64_t stride;
  float value;
};

struct RowInts {
  const int64_t* values;
  int64_t stride;
  int64_t value;
};

struct Draws {
  int64_t batch, vocab;
  int64_t vocab_offset;  // index of the first logit
  int num_samples;
  const int64_t* seeds;  // [batch], or [1]
  int64_t* offsets;      // [batch], or [1]: read, and then advanced by one; or null, which is 0
  bool is_advanced;      // whether the head has already advanced the one offset of several rows
  bool seed_per_row, offset_per_row;
  int64_t seed_stride, offset_stride;  // 0 where it is not per row
  RowFloats temperature;
};

struct Filters {
  bool has_top_k, has_top_p, has_min_p;
  RowInts top_k;
  RowFloats top_p, min_p;

  bool any() const { return has_top_k || has_top_p || has_min_p; }
};

// What a draw writes. Null: not wanted.
struct DrawResults {
  int64_t* tokens;           // [batch, num_samples]
  float* logprobs;           // [batch, num_samples]: at the row's temperature
  float* filtered_logprobs;  // [batch, num_samples]: of what the filters leave
  // For the combination of shards: the score and the logit over temperature of each token, and the
  // log of the sum of e to all logits over temperature of the row, -inf where that is 0.
  float* scores;       // [batch, num_samples]
  float* logits;       // [batch, num_samples], of finite ones finite
  float* log_sum_exp;  // [batch]

  bool needs_sums() const { return logprobs != nullptr || log_sum_exp != nullptr; }
};

// The maxima of strips, and the rows that need all of their logits. Strips whose maximum is below
// the row's threshold are not in memory: the filters remove all of their logits.
struct Strips {
  // [batch, ceil(vocab / kStrip)], -inf where all are NaN, rows in multiples of 16 bytes; or null.
  float* maxima;
  int64_t stride;
  // [2 + batch]: the number of rows that clusters have to draw, the number that they have started,
  // and the rows.
  uint32_t* fallback;
  // [2 * batch], after `fallback`: a key for each row, or 0; the head counts in the other half. Or
  // null.
  uint32_t* thresholds;

  // Words of both, which the head sets to 0, whether there are thresholds or not.
  static int64_t words(int64_t batch) { return 2 + 3 * batch; }
};

// The rows of a batch from which on there are thresholds: fewer write little.
constexpr int64_t kThresholdsFrom = 17;

struct GumbelSample {
  Draws draws;
  Filters filters;
  const void* logits;  // [batch, vocab]
  DType dtype;
  int64_t stride;
  const void* bias;  // [batch or 1, vocab], added to the logits; or null
  DType bias_dtype;
  int64_t bias_stride;
  // [batch or 1, ceil(vocab / 32)], bit i % 32 of word i / 32: whether i may be drawn; or null
  const int32_t* bitmask;
  int64_t bitmask_stride;
  Strips strips;  // only of float32 logits without bias and bitmask
  DrawResults results;
  void* workspace;
};

enum class WeightType { as_hidden, float8_e4m3 };

struct LmHead {
  int64_t batch, vocab, dim;
  const void* hidden;  // [batch, dim]
  DType dtype;         // of hidden
  int64_t hidden_stride;
  const void* weight;  // [vocab, dim]
  WeightType weight_type;
  int64_t weight_stride;
  const float* weight_scale;  // [vocab], [1], or null
  bool scale_per_row;
  const void* bias;  // [vocab], or null
  DType bias_dtype;
  float softcap;  // 0: none
};

// What a head leaves of each strip of a row (common/strip_device.h), for log-probabilities.
struct StripSums {
  StripSum* sums;  // [batch, stride], rows in multiples of 16 bytes; or null
  int64_t stride;
};

struct LmHeadSample {
  LmHead head;
  Draws draws;
  DrawResults results;  // without logits, tokens and scores alone
  void* workspace;
  // Where gpu::draws_before_sums, or null: [batch, logits_stride], of which the logits of what is
  // drawn are written; and the sums of strips, of all.
  float* logits;
  int64_t logits_stride;
  StripSums strips;
};

namespace gpu {

// Advances the offset of a batch without rows.
const char* advance_offset(int64_t* offset, void* stream);

// Bytes of workspace, which need not be initialised.
int64_t gumbel_sample_workspace(const GumbelSample& p, int device);
const char* gumbel_sample(const GumbelSample& p, int device, void* stream);

// The logits themselves, for gumbel_sample.
struct HeadLogits {
  float* logits;  // [batch, vocab], rows in whole strips, which may be filled up
  int64_t stride;
  Strips strips;          // to be written, unless null
  Filters filters;        // for the thresholds, where those are not null
  RowFloats temperature;  // as well
  int64_t* offset;        // to be advanced, for Draws::is_advanced; or null
};

// Whether gumbel_sample would use strips and lm_head_logits can write them.
bool takes_strips(const LmHead& head, const GumbelSample& p, int device);
// Whether the head is to advance the offset then.
bool advances_offset(const Draws& draws);
// Most need no workspace: 0 bytes.
int64_t lm_head_logits_workspace(const LmHead& p, int device);
const char* lm_head_logits(const LmHead& p, const HeadLogits& out, void* workspace, int device,
                           void* stream);

// The sums of strips, and the logits of a token of each row, for log_probs.
struct HeadSums {
  StripSums strips;
  float inv_temperature;
  const void* targets;  // [batch], int64 or int32; those that the vocabulary has not are none
  bool int32_targets;
  float* target_logits;  // [batch]
};

// Whether the head makes sums of strips.
bool makes_strip_sums(const LmHead& p, int device);
// With the workspace of lm_head_logits.
const char* lm_head_sums(const LmHead& p, const HeadSums& out, void* workspace, int device,
                         void* stream);

// Whether lm_head_sample can make what needs sums, without logits in memory.
bool draws_before_sums(const LmHeadSample& p, const Filters& filters, int device);
int64_t lm_head_sample_workspace(const LmHeadSample& p, int device);
const char* lm_head_sample(const LmHeadSample& p, int device, void* stream);

}  // namespace gpu

}  // namespace fuselage
