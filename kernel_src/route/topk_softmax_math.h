// What the GPU and the CPU share: the order of experts and groups.
#pragma once

#include <cstdint>

#include "common/shared.h"
#include "route/topk_softmax.h"

namespace FUSELAGE_SHARED_NAMESPACE {

// Experts are compared by integers, which have the order of the values: NaN is the largest, and
// both zeros are one.
constexpr int32_t kKeyOfNan = 0x7fffffff;
constexpr int32_t kNoKey = -0x7fffffff - 1;  // of what cannot be chosen; -inf has a larger one

template <class Math>
FUSELAGE_SHARED int32_t key_of(float value) {
  if (value != value) return kKeyOfNan;
  const int32_t bits = Math::integers_of(value + 0.0f);  // of -0, those of 0
  return bits >= 0 ? bits : bits ^ 0x7fffffff;
}

template <class Math>
FUSELAGE_SHARED float value_of(int32_t key) {
  return Math::floats_of(key >= 0 ? key : key ^ 0x7fffffff);
}

// The two largest keys of a group.
struct LargestKeys {
  int32_t first, second;
};

FUSELAGE_SHARED void add_key(LargestKeys& largest, int32_t key) {
  const bool is_first = key > largest.first;
  const int32_t other = is_first ? largest.first : key;
  largest.first = is_first ? key : largest.first;
  largest.second = other > largest.second ? other : largest.second;
}

// What the group is compared by.
template <class Math>
FUSELAGE_SHARED int32_t group_key(LargestKeys largest, Score score) {
  if (score == Score::softmax) return largest.first;
  return key_of<Math>(value_of<Math>(largest.first) + value_of<Math>(largest.second));
}

// Whether group `other` comes before `group`.
FUSELAGE_SHARED bool comes_before(const int32_t* keys, int other, int group) {
  return keys[other] > keys[group] || (keys[other] == keys[group] && other < group);
}

// What is added to the sum of the chosen scores.
FUSELAGE_SHARED float divisor_epsilon(Score score) {
  return score == Score::sigmoid ? 1e-20f : 0.0f;
}

}  // namespace FUSELAGE_SHARED_NAMESPACE
