// Instruction sets. Each operator's <op>_cpu.cpp is compiled once per instruction set, inside a
// namespace of that name, and picks one of them at run time:
//
//   norm/rms_norm_cpu.cpp -> fuselage::cpu::baseline, and the public functions that pick
//   norm/cpu_avx2.cpp     -> fuselage::cpu::avx2      (includes every <op>_cpu.cpp of the family)
//   norm/cpu_avx512.cpp   -> fuselage::cpu::avx512    (likewise)
//
// NOTE: the linker keeps one copy of an inline function or a template instantiation. If that copy
// came from cpu_avx512.cpp, an older CPU would run it and crash. So everything with code in it
// lives inside `namespace FUSELAGE_ISA`, and these files use no templates of the standard library.
// NOTE: cpu_avx*.cpp put several operators into one namespace: name helpers after their operator.
#pragma once

// The compilers that understand `#pragma GCC target`: elsewhere cpu_avx*.cpp compile to nothing.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FUSELAGE_HAS_X86_ISAS 1
#else
#define FUSELAGE_HAS_X86_ISAS 0
#endif

// cpu_avx*.cpp define FUSELAGE_VECTOR_BYTES, and include this file before any other: the pragma
// holds from here to their end.
#ifndef FUSELAGE_VECTOR_BYTES
#define FUSELAGE_VECTOR_BYTES 16  // SSE2 and NEON
#endif
#define FUSELAGE_ISA_IS_BASELINE (FUSELAGE_VECTOR_BYTES == 16)

#if FUSELAGE_ISA_IS_BASELINE
#define FUSELAGE_ISA baseline
#elif FUSELAGE_VECTOR_BYTES == 32
#define FUSELAGE_ISA avx2
#if FUSELAGE_HAS_X86_ISAS
#pragma GCC target("avx2,fma,f16c")
#endif
#else
#define FUSELAGE_ISA avx512
#if FUSELAGE_HAS_X86_ISAS
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif
#endif

#define FUSELAGE_INLINE inline __attribute__((always_inline))
#define FUSELAGE_NOINLINE static inline __attribute__((noinline))

// Of an instruction set's own functions, which no other library may see: another version of this
// one has the same names.
#define FUSELAGE_HIDDEN __attribute__((visibility("hidden")))

// FUSELAGE_PICK_ISA(name, parameters, arguments) defines the public function `name`, which calls
// that of its namespace which the CPU can run:
//
//   FUSELAGE_PICK_ISA(rms_norm_forward, (const RmsNormForward& p, int64_t begin, int64_t end),
//                     (p, begin, end))
//
// Elsewhere than in the baseline it defines nothing.
#if !FUSELAGE_ISA_IS_BASELINE
#define FUSELAGE_PICK_ISA(name, parameters, arguments)
#elif FUSELAGE_HAS_X86_ISAS
namespace fuselage::cpu {

enum class Isa { baseline, avx2, avx512 };

static inline Isa ask_for_isa() {
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has_avx512 ? Isa::avx512 : has_avx2 ? Isa::avx2 : Isa::baseline;
}

static inline Isa isa_of_this_cpu() {
  static const Isa isa = ask_for_isa();
  return isa;
}

}  // namespace fuselage::cpu

#define FUSELAGE_PICK_ISA(name, parameters, arguments) \
  namespace avx2 {                                     \
  FUSELAGE_HIDDEN decltype(cpu::name) name;            \
  }                                                    \
  namespace avx512 {                                   \
  FUSELAGE_HIDDEN decltype(cpu::name) name;            \
  }                                                    \
  void name parameters {                               \
    switch (isa_of_this_cpu()) {                       \
      case Isa::avx512: return avx512::name arguments; \
      case Isa::avx2: return avx2::name arguments;     \
      case Isa::baseline: break;                       \
    }                                                  \
    baseline::name arguments;                          \
  }
#else
#define FUSELAGE_PICK_ISA(name, parameters, arguments) \
  void name parameters { baseline::name arguments; }
#endif
