// The sampling family on the CPU: formulas in sample/sample.h, noise and weights in
// sample/gumbel.h. Compiled once per instruction set: see common/cpu_isa.h.

#include "sample/sample_cpu.h"

#include <cstdint>

#include "common/cpu_isa.h"
#include "sample/lm_head_cpu.h"
#include "sample/sample_cpu_draw.h"
#include "sample/sample_cpu_filter.h"

namespace fuselage::cpu {

// The public functions

FUSELAGE_PICK_ISA(sample_rows, (const GumbelSample& p, SampleRow* rows, int64_t begin, int64_t end),
                  (p, rows, begin, end))
FUSELAGE_PICK_ISA(sample_draw,
                  (const GumbelSample& p, const SampleRow* rows, SampleCandidate* candidates,
                   int64_t begin, int64_t end),
                  (p, rows, candidates, begin, end))
FUSELAGE_PICK_ISA(lm_head_hidden, (const LmHead& p, float* hidden, int64_t begin, int64_t end),
                  (p, hidden, begin, end))
FUSELAGE_PICK_ISA(lm_head_logits,
                  (const LmHead& p, const float* hidden, float* scratch, float* logits,
                   int64_t stride, int64_t begin, int64_t end),
                  (p, hidden, scratch, logits, stride, begin, end))
FUSELAGE_PICK_ISA(lm_head_draw,
                  (const LmHead& p, const Draws& draws, const float* hidden, float* scratch,
                   SampleCandidate* candidates, int64_t begin, int64_t end),
                  (p, draws, hidden, scratch, candidates, begin, end))

#if FUSELAGE_ISA_IS_BASELINE

int64_t lm_head_logits_scratch(const LmHead& p) { return baseline::kLmHeadRows * p.dim; }

int64_t lm_head_draw_scratch(const LmHead& p) {
  return lm_head_logits_scratch(p) + p.batch * kLmHeadPiece;
}

void sample_finish(const Draws& draws, const DrawResults& results, const SampleRow* rows,
                   const SampleCandidate* candidates, int64_t pieces) {
  using baseline::SampleNumbers;
  const int samples = draws.num_samples;
  for (int64_t row = 0; row < draws.batch; ++row) {
    const baseline::SampleTemperature temperature = baseline::sample_temperature(draws, row);
    const float none = baseline::sample_minus_infinity();
    // Logs of the sums of weights, the largest of which is 1.
    float log_all = 0, log_allowed = 0;
    if (rows != nullptr && !temperature.greedy && rows[row].strip_weights != 0) {
      const int shift = baseline::weight_shift(draws.vocab);
      log_all = log_allowed =
          baseline::log_of_weights<SampleNumbers>(rows[row].strip_weights, shift);
      // NOTE: a sum of other roundings, which may be larger.
      if (rows[row].bound != baseline::kSampleNoBound) {
        const float log_sum = baseline::log_of_weights<SampleNumbers>(rows[row].allowed, shift);
        log_allowed = log_sum < log_all ? log_sum : log_all;
      }
    }
    if (results.log_sum_exp != nullptr) {
      results.log_sum_exp[row] =
          temperature.greedy ? none
                             : baseline::tempered<SampleNumbers>(
                                   rows[row].max_logit, temperature.inv_temperature, log_all);
    }
    for (int s = 0; s < samples; ++s) {
      SampleCandidate best = {none, none, -1};
      for (int64_t piece = 0; piece < pieces; ++piece)
        baseline::sample_keep_better(best, candidates[(row * pieces + piece) * samples + s]);
      const int64_t i = row * samples + s;
      results.tokens[i] = best.index;
      if (results.scores != nullptr) results.scores[i] = best.score;
      if (results.logits != nullptr) {
        results.logits[i] =
            baseline::tempered<SampleNumbers>(best.logit, temperature.inv_temperature, 0.0f);
      }
      if (results.logprobs == nullptr) continue;
      float distance = none;
      if (best.index >= 0)
        distance = temperature.greedy ? 0.0f
                                      : baseline::distance_of(best.logit, rows[row].max_logit,
                                                              temperature.inv_temperature);
      results.logprobs[i] = distance - log_all;
      results.filtered_logprobs[i] = distance - log_allowed;
    }
  }
  if (draws.offsets == nullptr) return;
  for (int64_t i = 0; i < (draws.offset_per_row ? draws.batch : 1); ++i)
    ++draws.offsets[i * draws.offset_stride];
}

#endif

}  // namespace fuselage::cpu
