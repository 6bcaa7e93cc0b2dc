// The language-model head on the CPU.
//
// Part of sample/sample_cpu.cpp, which says how it is compiled.
#pragma once

#include "common/cpu_float8.h"
#include "common/float8.h"
#include "sample/sample_cpu_draw.h"

namespace fuselage::cpu {
namespace FUSELAGE_ISA {

FUSELAGE_HIDDEN void lm_head_hidden(const LmHead& p, float* hidden, int64_t begin, int64_t end) {
  sample_visit(p.hidden, p.dtype, [&](const auto* data) {
    for (int64_t row = begin; row < end; ++row)
      sample_load_as(data + row * p.hidden_stride, hidden + row * p.dim, p.dim);
  });
}

constexpr int kLmHeadRows = 4;  // of weight, together

// w * x + sum: rounded once where there is an instruction for it, and always twice elsewhere.
FUSELAGE_INLINE Floats lm_head_add(Floats w, Floats x, Floats sum) {
#if FUSELAGE_VECTOR_BYTES > 16 || defined(__aarch64__)
  return fused_multiply_add(w, x, sum);
#else
  return w * x + sum;
#endif
}

// Dot products of kLmHeadRows rows of weight with kBatch rows of hidden. Each has one accumulator,
// a vector whose lanes are added up in the end, so that its bits do not depend on the others.
template <int kBatch, class W>
static void lm_head_dots(const W* const (&weights)[kLmHeadRows], const float* hidden, int64_t dim,
                         float (&dots)[kLmHeadRows][kBatch]) {
  Floats sums[kLmHeadRows][kBatch] = {};
  for_each_vector(0, dim, [&](int64_t i, auto lanes) {
    Floats x[kBatch];
    for (int b = 0; b < kBatch; ++b) x[b] = load(hidden + b * dim + i, lanes);
    for (int r = 0; r < kLmHeadRows; ++r) {
      const Floats w = load(weights[r] + i, lanes);
      for (int b = 0; b < kBatch; ++b) sums[r][b] = lm_head_add(w, x[b], sums[r][b]);
    }
  });
  for (int r = 0; r < kLmHeadRows; ++r) {
    for (int b = 0; b < kBatch; ++b) dots[r][b] = sum_lanes(sums[r][b]);
  }
}

// Logits of the weight's rows [begin, end), at most kLmHeadPiece, for all of the batch.
template <class W>
static void lm_head_piece(const LmHead& p, const W* weight, const float* hidden, float* scratch,
                          int64_t begin, int64_t end, float* logits, int64_t stride) {
  for (int64_t row = begin; row < end; row += kLmHeadRows) {
    const int64_t count = end - row < kLmHeadRows ? end - row : kLmHeadRows;
    const auto dots_with = [&](const auto* const(&rows)[kLmHeadRows]) {
      const auto keep = [&](int64_t b, const auto& dots) {
        for (int64_t r = 0; r < count; ++r) {
          for (int k = 0; k < int(sizeof(dots[0]) / sizeof(float)); ++k) {
            float logit = dots[r][k];
            if (p.weight_scale != nullptr) logit *= p.weight_scale[p.scale_per_row ? row + r : 0];
            if (p.bias != nullptr) {
              float bias = 0;
              sample_visit(p.bias, p.bias_dtype,
                           [&](const auto* data) { sample_load_as(data + row + r, &bias, 1); });
              // A float64 sum, so that nothing is an fma.
              logit = static_cast<float>(static_cast<double>(logit) + bias);
            }
            if (p.softcap != 0) logit = soft_capped<SampleNumbers>(logit, p.softcap);
            logits[(b + k) * stride + row - begin + r] = logit;
          }
        }
      };
      int64_t b = 0;
      for (; b + 4 <= p.batch; b += 4) {
        float dots[kLmHeadRows][4];
        lm_head_dots(rows, hidden + b * p.dim, p.dim, dots);
        keep(b, dots);
      }
      for (; b < p.batch; ++b) {
        float dots[kLmHeadRows][1];
        lm_head_dots(rows, hidden + b * p.dim, p.dim, dots);
        keep(b, dots);
      }
    };
    if constexpr (sizeof(W) == 1) {
      const float* rows[kLmHeadRows];
      for (int64_t r = 0; r < kLmHeadRows; ++r) {
        rows[r] = scratch + r * p.dim;
        if (r < count) {
          decode_e4m3(&weight[(row + r) * p.weight_stride].bits, scratch + r * p.dim, p.dim);
        } else {
          rows[r] = rows[0];
        }
      }
      dots_with(rows);
    } else {
      const W* rows[kLmHeadRows];
      for (int64_t r = 0; r < kLmHeadRows; ++r)
        rows[r] = weight + (row + (r < count ? r : 0)) * p.weight_stride;
      dots_with(rows);
    }
  }
}

static void lm_head_piece_of(const LmHead& p, const float* hidden, float* scratch, int64_t begin,
                             int64_t end, float* logits, int64_t stride) {
  if (p.weight_type == WeightType::float8_e4m3) {
    return lm_head_piece(p, static_cast<const Float8*>(p.weight), hidden, scratch, begin, end,
                         logits, stride);
  }
  sample_visit(p.weight, p.dtype, [&](const auto* weight) {
    lm_head_piece(p, weight, hidden, scratch, begin, end, logits, stride);
  });
}

FUSELAGE_HIDDEN void lm_head_logits(const LmHead& p, const float* hidden, float* scratch,
                                    float* logits, int64_t stride, int64_t begin, int64_t end) {
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t row = piece * kLmHeadPiece;
    const int64_t row_end = p.vocab - row < kLmHeadPiece ? p.vocab : row + kLmHeadPiece;
    lm_head_piece_of(p, hidden, scratch, row, row_end, logits + row, stride);
  }
}

FUSELAGE_HIDDEN void lm_head_draw(const LmHead& p, const Draws& draws, const float* hidden,
                                  float* scratch, SampleCandidate* candidates, int64_t begin,
                                  int64_t end) {
  const int64_t pieces = lm_head_pieces(p.vocab);
  float* logits = scratch + kLmHeadRows * p.dim;
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t row = piece * kLmHeadPiece;
    const int64_t row_end = p.vocab - row < kLmHeadPiece ? p.vocab : row + kLmHeadPiece;
    lm_head_piece_of(p, hidden, scratch, row, row_end, logits, kLmHeadPiece);
    for (int64_t b = 0; b < p.batch; ++b) {
      float* own = logits + b * kLmHeadPiece;
      for (int64_t i = 0; i < row_end - row; ++i)
        own[i] = own[i] == own[i] ? own[i] : sample_minus_infinity();
      SampleDraw draw = {own, row_end - row, draws.vocab_offset + row, sample_temperature(draws, b),
                         sample_key(draws, b)};
      for (draw.sample = 0; draw.sample < draws.num_samples; ++draw.sample) {
        SampleCandidate* best = candidates + (b * pieces + piece) * draws.num_samples + draw.sample;
        *best = sample_best(draw, piece > begin ? best[-draws.num_samples] : sample_nothing());
      }
    }
  }
}

}  // namespace FUSELAGE_ISA
}  // namespace fuselage::cpu
