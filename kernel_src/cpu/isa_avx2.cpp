// Every CPU operator, compiled for AVX2: see isa.h.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx2,fma,f16c")

#define FUSELAGE_ISA avx2
#define FUSELAGE_VECTOR_BYTES 32

#include "cpu/activation.cpp"
#include "cpu/ada_norm.cpp"
#include "cpu/poly_norm.cpp"
#include "cpu/rms_norm.cpp"
#include "cpu/rotary.cpp"
#include "cpu/sample.cpp"
#endif
