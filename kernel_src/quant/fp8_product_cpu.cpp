// fp8_product on the CPU: formulas in quant/fp8_product.h. A group of a row of the weight is
// decoded into the cache, and multiplied with that of every row of q. Compiled once per instruction
// set: see common/cpu_isa.h.

#include "quant/fp8_product_cpu.h"

#include <cstdint>

#include "common/cpu_float8.h"
#include "common/cpu_isa.h"
#include "common/cpu_vector.h"
#include "common/dtype.h"

namespace fuselage::cpu {
namespace FUSELAGE_ISA {

FUSELAGE_HIDDEN void fp8_decode(const uint8_t* codes, float* values, int64_t begin, int64_t end) {
  decode_e4m3(codes + begin, values + begin, end - begin);
}

// Sums of one output for all rows, scaled.
static void fp8_sums(const Fp8Product& p, const float* q, int64_t output,
                     float (&totals)[kFp8ProductRows]) {
  const uint8_t* codes = p.weight + output * p.dim;
  const int64_t groups = (p.dim + kQuantGroup - 1) / kQuantGroup;
  Floats sums[kFp8ProductRows] = {};
  float weight[kQuantGroup];
  for (int64_t row = 0; row < p.rows; ++row) totals[row] = 0;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t first = group * kQuantGroup;
    const int64_t count = p.dim - first < kQuantGroup ? p.dim - first : kQuantGroup;
    decode_e4m3(codes + first, weight, count);
    for (int64_t row = 0; row < p.rows; ++row) {
      Floats sum = p.in_groups ? Floats{} : sums[row];
      const float* x = q + row * p.dim + first;
      for_each_vector(0, count, [&](int64_t i, auto lanes) {
        sum += load(weight + i, lanes) * load(x + i, lanes);
      });
      sums[row] = sum;
      if (p.in_groups) {
        const float scale = p.q_scale[row * p.q_scale_row_stride + group * p.q_scale_group_stride];
        totals[row] +=
            sum_lanes(sum) * (scale * p.weight_scale[output / kQuantGroup * groups + group]);
      }
    }
  }
  if (p.in_groups) return;
  for (int64_t row = 0; row < p.rows; ++row)
    totals[row] =
        sum_lanes(sums[row]) * p.q_scale[row * p.q_scale_row_stride] * p.weight_scale[output];
}

FUSELAGE_HIDDEN void fp8_product(const Fp8Product& p, const float* q, int64_t begin, int64_t end) {
  for (int64_t output = begin; output < end; ++output) {
    float totals[kFp8ProductRows];
    fp8_sums(p, q, output, totals);
    const FirstLanes one{1};
    float bias = 0;
    if (p.bias != nullptr) {
      visit_dtype(p.bias_dtype, [&](auto type) {
        bias = load(static_cast<const decltype(type)*>(p.bias) + output, one)[0];
      });
    }
    visit_dtype(p.y_dtype, [&](auto type) {
      auto* y = static_cast<decltype(type)*>(p.y) + output;
      for (int64_t row = 0; row < p.rows; ++row)
        store(y + row * p.out, broadcast(totals[row] + bias), one);
    });
  }
}

}  // namespace FUSELAGE_ISA

// The public functions

FUSELAGE_PICK_ISA(fp8_decode, (const uint8_t* codes, float* values, int64_t begin, int64_t end),
                  (codes, values, begin, end))
FUSELAGE_PICK_ISA(fp8_product, (const Fp8Product& p, const float* q, int64_t begin, int64_t end),
                  (p, q, begin, end))

}  // namespace fuselage::cpu
