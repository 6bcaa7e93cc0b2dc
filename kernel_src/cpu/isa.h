// Instruction sets. Each operator's .cpp is compiled once per instruction set, inside a namespace
// of that name, and picks one of them at run time:
//
//   rms_norm.cpp      -> fuselage::cpu::baseline, and the public functions that pick
//   isa_avx2.cpp      -> fuselage::cpu::avx2      (includes every operator's .cpp)
//   isa_avx512.cpp    -> fuselage::cpu::avx512    (includes every operator's .cpp)
//
// NOTE: the linker keeps one copy of an inline function or a template instantiation. If that copy
// came from isa_avx512.cpp, an older CPU would run it and crash. So everything with code in it
// lives inside `namespace FUSELAGE_ISA`, and these files use no templates of the standard library.
// NOTE: isa_*.cpp put several operators into one namespace: name helpers after their operator.
#pragma once

// The compilers that understand `#pragma GCC target`: elsewhere isa_*.cpp compile to nothing.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FUSELAGE_HAS_X86_ISAS 1
#else
#define FUSELAGE_HAS_X86_ISAS 0
#endif

// isa_*.cpp define FUSELAGE_ISA and FUSELAGE_VECTOR_BYTES before they include anything.
#ifndef FUSELAGE_ISA
#define FUSELAGE_ISA baseline
#define FUSELAGE_ISA_IS_BASELINE 1
#define FUSELAGE_VECTOR_BYTES 16  // SSE2 and NEON
#else
#define FUSELAGE_ISA_IS_BASELINE 0
#endif

#define FUSELAGE_INLINE inline __attribute__((always_inline))

// Of what the files share, and no other library may see: another version of this one has the same
// names.
#define FUSELAGE_HIDDEN __attribute__((visibility("hidden")))

// Defines `static const Functions& functions_of_this_cpu()`, which asks the CPU once. Each
// instruction set's namespace has a `const Functions table`.
#if FUSELAGE_HAS_X86_ISAS
#define FUSELAGE_PICK_ISA(Functions, table)                                                    \
  namespace avx2 {                                                                             \
  extern FUSELAGE_HIDDEN const Functions table;                                                \
  }                                                                                            \
  namespace avx512 {                                                                           \
  extern FUSELAGE_HIDDEN const Functions table;                                                \
  }                                                                                            \
  static const Functions& pick_##table() {                                                     \
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&   \
                          __builtin_cpu_supports("f16c");                                      \
    const bool has_avx512 =                                                                    \
        has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && \
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");              \
    return has_avx512 ? avx512::table : has_avx2 ? avx2::table : baseline::table;              \
  }                                                                                            \
  static const Functions& functions_of_this_cpu() {                                            \
    static const Functions& picked = pick_##table();                                           \
    return picked;                                                                             \
  }
#else
#define FUSELAGE_PICK_ISA(Functions, table) \
  static const Functions& functions_of_this_cpu() { return baseline::table; }
#endif
