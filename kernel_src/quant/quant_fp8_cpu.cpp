// quant_fp8 on the CPU: formulas in quant/quant_fp8.h. Compiled once per instruction set: see
// common/cpu_isa.h.

#include "quant/quant_fp8_cpu.h"

#include <cstdint>

#include "common/cpu_isa.h"
#include "common/cpu_vector.h"
#include "common/dtype.h"
#include "common/float8.h"
#include "common/quant_math.h"

namespace fuselage::cpu {
namespace FUSELAGE_ISA {

typedef int32_t QuantIntegers __attribute__((vector_size(FUSELAGE_VECTOR_BYTES)));

// The largest |x| of [begin, end), by its bits: they have the order of numbers, and NaN is above
// infinity.
template <class T>
static float quant_amax(const T* x, int64_t begin, int64_t end) {
  QuantIntegers largest[4] = {};
  const auto take = [&](QuantIntegers& most, int64_t i, auto lanes) {
    const QuantIntegers bits = (QuantIntegers)((Words)load(x + i, lanes) & 0x7fffffffu);
    most = bits > most ? bits : most;
  };
  int64_t i = begin;
  for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
    for (int k = 0; k < 4; ++k) take(largest[k], i + k * kLanes, AllLanes{});
  }
  for_each_vector(i, end, [&](int64_t j, auto lanes) { take(largest[0], j, lanes); });
  int32_t most = 0;
  for (int k = 0; k < 4; ++k) {
    for (int lane = 0; lane < kLanes; ++lane)
      most = largest[k][lane] > most ? largest[k][lane] : most;
  }
  return float8_cast<float>(most);
}

template <QuantFormat kFormat>
FUSELAGE_INLINE Words quant_encode(Floats value) {
  if constexpr (kFormat == QuantFormat::int8) {
    // Adding 1.5 * 2^23 rounds to an integer, in the low bits. NaN becomes zero.
    Floats kept = minimum(broadcast(127.0f), maximum(broadcast(-127.0f), value));
    kept = value == value ? kept : Floats{};
    return (Words)(kept + 0x1.8p23f);
  } else {
    return encode_float8 < kFormat == QuantFormat::e4m3 ? 3 : 2, Words > (value);
  }
}

template <QuantFormat kFormat, class T>
static void quant_columns(const T* x, uint8_t* q, float scale, int64_t begin, int64_t end) {
  for_each_vector(begin, end, [&](int64_t i, auto lanes) {
    const Words codes = quant_encode<kFormat>(load(x + i, lanes) / scale);
    const Bytes bytes = low_bytes(codes);
    __builtin_memcpy(q + i, &bytes, count_of(lanes));
  });
}

template <QuantFormat kFormat, class T>
static void quant_row(const QuantForward& p, int64_t row) {
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  uint8_t* q = p.q + row * p.dim;
  if (p.given_scale != nullptr) {
    quant_columns<kFormat>(x, q, *p.given_scale, 0, p.dim);
    return;
  }
  const int64_t size = p.in_groups ? kQuantGroup : p.dim;
  float* to = p.scale + row * p.scale_row_stride;
  for (int64_t begin = 0; begin < p.dim; begin += size, to += p.scale_group_stride) {
    const int64_t end = p.dim - begin < size ? p.dim : begin + size;
    *to = quant_scale_of(quant_amax(x, begin, end), p.limit, p.power_of_two);
    quant_columns<kFormat>(x, q, *to, begin, end);
  }
}

template <QuantFormat kFormat>
static void quant_rows(const QuantForward& p, int64_t begin, int64_t end) {
  visit_dtype(p.x_dtype, [&](auto type) {
    for (int64_t row = begin; row < end; ++row) quant_row<kFormat, decltype(type)>(p, row);
  });
}

FUSELAGE_HIDDEN void quant_fp8(const QuantForward& p, int64_t begin, int64_t end) {
  switch (p.format) {
    case QuantFormat::e4m3: return quant_rows<QuantFormat::e4m3>(p, begin, end);
    case QuantFormat::e5m2: return quant_rows<QuantFormat::e5m2>(p, begin, end);
    case QuantFormat::int8: return quant_rows<QuantFormat::int8>(p, begin, end);
  }
}

}  // namespace FUSELAGE_ISA

// The public function

FUSELAGE_PICK_ISA(quant_fp8, (const QuantForward& p, int64_t begin, int64_t end), (p, begin, end))

}  // namespace fuselage::cpu
