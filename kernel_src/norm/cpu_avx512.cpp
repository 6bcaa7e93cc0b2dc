// The family's CPU kernels, compiled for AVX-512: see common/cpu_isa.h.
#define FUSELAGE_VECTOR_BYTES 64
#include "common/cpu_isa.h"

#if FUSELAGE_HAS_X86_ISAS
#include "norm/ada_norm_cpu.cpp"
#include "norm/gated_rms_norm_cpu.cpp"
#include "norm/group_norm_cpu.cpp"
#include "norm/poly_norm_cpu.cpp"
#include "norm/rms_norm_cpu.cpp"
#include "norm/shard_norm_cpu.cpp"
#endif
