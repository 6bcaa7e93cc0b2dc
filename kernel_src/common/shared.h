// Formulas that GPU and CPU share are written once, in headers that both include:
//
//   namespace FUSELAGE_SHARED_NAMESPACE {
//   FUSELAGE_SHARED float twice(float x) { return 2 * x; }
//   }
//
// For the GPU these are device functions of `fuselage`. For the CPU they are compiled once per
// instruction set, in its namespace: see common/cpu_isa.h.
#pragma once

#if defined(__CUDACC__) || defined(__HIPCC__)
#define FUSELAGE_SHARED __device__ __forceinline__
#define FUSELAGE_SHARED_NAMESPACE fuselage
#else
#include "common/cpu_isa.h"
#define FUSELAGE_SHARED FUSELAGE_INLINE
#define FUSELAGE_SHARED_NAMESPACE fuselage::cpu::FUSELAGE_ISA
#endif
