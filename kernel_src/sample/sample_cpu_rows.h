// Reading the rows of the sampling family on the CPU: options, logits.
//
// Part of sample/sample_cpu.cpp, which says how it is compiled.
#pragma once

#include <cstdint>

#include "common/cpu_isa.h"
#include "common/cpu_vector.h"
#include "common/dtype.h"
#include "common/softmax_cpu.h"
#include "sample/gumbel.h"
#include "sample/sample_cpu.h"

namespace fuselage::cpu {
namespace FUSELAGE_ISA {

using SampleIntegers = Integers;
using SampleVectors = CpuVectors;
using SampleNumbers = CpuFloats;

FUSELAGE_INLINE float sample_minus_infinity() { return -__builtin_inff(); }

// ---- rows ----

constexpr uint32_t kSampleNoBound = kKeyOfMinusInfinity + 1;  // all logits but -inf

FUSELAGE_INLINE float sample_option(const RowFloats& option, int64_t row) {
  return option.values == nullptr ? option.value : option.values[row * option.stride];
}

struct SampleTemperature {
  bool greedy;
  float inv_temperature;
  float scale, unit;  // of scores
};

FUSELAGE_INLINE SampleTemperature sample_temperature(const Draws& draws, int64_t row) {
  const float temperature = sample_option(draws.temperature, row);
  if (!(temperature >= 0x1p-126f)) return {true, 1.0f, 1.0f, 0.0f};
  const float inverse = 1.0f / temperature, unit = score_unit<SampleNumbers>(inverse);
  return {false, inverse, inverse * unit, unit};
}

FUSELAGE_INLINE NoiseKey sample_key(const Draws& draws, int64_t row) {
  const uint64_t seed = static_cast<uint64_t>(draws.seeds[row * draws.seed_stride]);
  const uint64_t offset = draws.offsets == nullptr
                              ? 0
                              : static_cast<uint64_t>(draws.offsets[row * draws.offset_stride]);
  return {{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)},
          {static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32)},
          draws.seed_per_row ? 0u : static_cast<uint32_t>(row) * 256u};
}

template <class T>
static void sample_load_as(const T* from, float* to, int64_t size) {
  for_each_vector(0, size,
                  [&](int64_t i, auto lanes) { store(to + i, load(from + i, lanes), lanes); });
}

template <class T>
static void sample_add_as(const T* from, float* to, int64_t size) {
  for_each_vector(0, size, [&](int64_t i, auto lanes) {
    store(to + i, load(to + i, lanes) + load(from + i, lanes), lanes);
  });
}

// visit(pointer of the type).
template <class Visit>
FUSELAGE_INLINE void sample_visit(const void* data, DType dtype, Visit visit) {
  visit_dtype(dtype, [&](auto type) { visit(static_cast<const decltype(type)*>(data)); });
}

// Logits [begin, begin + size) of a row; -inf stands for NaN and what may not be drawn.
static void sample_load(const GumbelSample& p, int64_t row, int64_t begin, int64_t size,
                        float* logits) {
  sample_visit(p.logits, p.dtype, [&](const auto* data) {
    sample_load_as(data + row * p.stride + begin, logits, size);
  });
  if (p.bias != nullptr) {
    sample_visit(p.bias, p.bias_dtype, [&](const auto* data) {
      sample_add_as(data + row * p.bias_stride + begin, logits, size);
    });
  }
  if (p.bitmask != nullptr) {
    const int32_t* mask = p.bitmask + row * p.bitmask_stride;
    for (int64_t i = 0; i < size; ++i) {
      const bool allowed = static_cast<uint32_t>(mask[(begin + i) / 32]) >> (begin + i) % 32 & 1;
      if (!allowed) logits[i] = sample_minus_infinity();
    }
  }
  for (int64_t i = 0; i < size; ++i)
    logits[i] = logits[i] == logits[i] ? logits[i] : sample_minus_infinity();
}

// The maximum of logits [begin, end), -inf where there are none.
FUSELAGE_INLINE float sample_max(const float* logits, int64_t begin, int64_t end) {
  Floats maxima = broadcast(sample_minus_infinity());
  for_each_vector(begin, end, [&](int64_t i, auto lanes) {
    Floats logit = maxima;
    __builtin_memcpy(&logit, logits + i, count_of(lanes) * sizeof(float));
    maxima = logit > maxima ? logit : maxima;
  });
  typedef float Quad __attribute__((vector_size(16)));
  Quad quad[kLanes / 4];
  __builtin_memcpy(quad, &maxima, sizeof(quad));
  Quad four = quad[0];
  for (int k = 1; k < kLanes / 4; ++k) four = quad[k] > four ? quad[k] : four;
  const float even = four[0] > four[2] ? four[0] : four[2];
  const float odd = four[1] > four[3] ? four[1] : four[3];
  return even > odd ? even : odd;
}

}  // namespace FUSELAGE_ISA
}  // namespace fuselage::cpu
