// What launch policies have measured, as data: a few integers of a GPU. Plain C++, so that tests
// sweep all values.
//
// NOTE: none may change a bit of any result. What cuts a sum, over rows or within one, is no
// parameter (docs/tuning.md).
#pragma once

#include <string>

namespace fuselage {

// The values here are the built-in policy: those of an H200, mostly.
struct Tuning {
  // Norms, forward. Threads on a multiprocessor up to which all rows count as there at once: then
  // a thread has fewer vectors. norm/row_forward_policy.h says what was measured.
  int norm_resident_threads = 1024;
  // Waves of rows from which a row of one warp has eight vectors a thread.
  int norm_wide_waves = 5;
  // Activations without sums. Threads of a block, at most; blocks on a multiprocessor from which a
  // thread has two vectors.
  int activation_threads = 128;
  int activation_full_blocks = 32;
  // apply_rotary. Threads of a block, at most; threads on a multiprocessor below which a thread has
  // fewer heads.
  int rotary_threads = 256;
  int rotary_resident_threads = 512;
  // qk_norm_rotary, forward: turns, of four heads each, that a row of threads makes at most.
  int qk_norm_turns = 4;
  // gumbel_sample without filters: loads of all threads that a block makes at most.
  int sample_turns = 4;
};

constexpr int kMostTunedValues = 5;

// A parameter and all the values it may have, the built-in one among them. The tuner tries them, a
// file is refused for any other, and tests sweep them.
struct Tunable {
  const char* name;
  int Tuning::* value;
  int values[kMostTunedValues];  // ascending; zeros past the last

  constexpr bool takes(long wanted) const {
    for (const int each : values) {
      if (each == wanted && each != 0) return true;
    }
    return false;
  }
};

constexpr Tunable kTunables[] = {
    {"norm_resident_threads", &Tuning::norm_resident_threads, {256, 512, 1024, 1536, 2048}},
    {"norm_wide_waves", &Tuning::norm_wide_waves, {2, 3, 5, 8}},
    {"activation_threads", &Tuning::activation_threads, {32, 64, 128}},
    {"activation_full_blocks", &Tuning::activation_full_blocks, {4, 8, 16, 32, 64}},
    {"rotary_threads", &Tuning::rotary_threads, {64, 128, 256}},
    {"rotary_resident_threads", &Tuning::rotary_resident_threads, {256, 512, 1024, 2048}},
    {"qk_norm_turns", &Tuning::qk_norm_turns, {1, 2, 4, 8}},
    {"sample_turns", &Tuning::sample_turns, {1, 2, 4, 8}},
};

constexpr bool takes_its_default(const Tuning& tuning) {
  for (const Tunable& tunable : kTunables) {
    if (!tunable.takes(tuning.*tunable.value)) return false;
  }
  return true;
}
static_assert(takes_its_default(Tuning{}), "a built-in value is one of those that are swept");

namespace gpu {

// Reads the tuning of this GPU again and returns the line that says what was chosen. For the tuner
// and for tests. NOTE: no other thread may launch a kernel meanwhile: device_info()
// copies the tuning without a lock, which each launch would pay for.
std::string read_tuning(int device);

}  // namespace gpu

}  // namespace fuselage
