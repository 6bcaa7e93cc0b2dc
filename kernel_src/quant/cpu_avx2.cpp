// The family's CPU kernels, compiled for AVX2: see common/cpu_isa.h.
#define FUSELAGE_VECTOR_BYTES 32
#include "common/cpu_isa.h"

#if FUSELAGE_HAS_X86_ISAS
#include "quant/fp8_product_cpu.cpp"
#include "quant/quant_fp8_cpu.cpp"
#endif
