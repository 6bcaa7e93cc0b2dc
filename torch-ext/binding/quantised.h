// What ops that quantise share: their options, q and its scales, and how an operator and the
// quantisation of its result are launched as one.
#pragma once

#include <vector>

#include "launch.h"
#include "rows.h"

#include "common/quant.h"
#include "quant/quant_fp8.h"
#include "quant/quant_fp8_cpu.h"

namespace fuselage::binding {

// As an op was given them.
struct QuantOptions {
  const OptionalTensor& scale;
  int64_t group_size;
  bool scales_by_columns, scale_ue8m0;
  ScalarType dtype;
  const char* scale_name = "scale";
};

// `scale` has no elements where one is given: ops return no arguments of theirs.
struct QuantResults {
  Tensor q, scale;
};

// QuantOptions in a schema.
#define FUSELAGE_QUANT_SIZES "int group_size, bool scales_by_columns, bool scale_ue8m0"
#define FUSELAGE_QUANT_OPTIONS "Tensor? scale, " FUSELAGE_QUANT_SIZES
// What comes after them, where it is an operator's result that is quantised.
#define FUSELAGE_QUANT_RESULTS \
  ", bool return_unquantized, ScalarType dtype) -> (Tensor q, Tensor scale_of_q, Tensor out"

QuantResults quant_results(const char* op, const Tensor& x, int64_t columns, DType x_dtype,
                           const QuantOptions& options, QuantForward& p);

// Rows [begin, end) on the CPU, one after the other: `kRow` computes one, which is still in the
// cache when it is quantised.
template <auto kRow, typename Forward>
void quantise_rows(const Quantised<Forward>& given, int64_t begin, int64_t end) {
  Forward p = given;
  QuantForward quant = given.quant;
  std::vector<char> row;
  if (p.out == nullptr) {
    row.resize(p.dim * dtype_size(quant.x_dtype));
    p.out = row.data();
    p.out_stride = 0;
  }
  quant.x = p.out;
  quant.x_stride = p.out_stride;
  for (int64_t i = begin; i < end; ++i) {
    kRow(p, i);
    cpu::quant_fp8(quant, i, i + 1);
  }
}

// On a GPU one kernel does both, `gpu_quant`, where there is one for such rows (`gpu_quantises`).
// Otherwise `gpu_forward` leaves its result for quant_fp8's.
template <auto cpu_row, auto gpu_forward, auto gpu_quantises, auto gpu_quant, typename Forward>
void launch_quantised(const char* op, const Tensor& x, Quantised<Forward>& p) {
  OptionalTensor memory;
  launch(
      op, x, [&] { on_threads<&quantise_rows<cpu_row, Forward>>(p, p.rows, p.dim); },
      [&](int32_t device, void* stream) {
        if (gpu_quantises(p)) return gpu_quant(p, device, stream);
        if (p.out == nullptr) {
          const int64_t elements = p.rows * p.dim;
          memory = empty(&elements, 1, scalar_type_of(p.quant.x_dtype), x);
          p.out = memory->mutable_data_ptr();
        }
        const char* error = gpu_forward(p, device, stream);
        if (error != nullptr) return error;
        p.quant.x = p.out;
        p.quant.x_stride = p.out_stride;
        return gpu::quant_fp8(p.quant, device, stream);
      });
}

}  // namespace fuselage::binding
