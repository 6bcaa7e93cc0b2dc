// The sigmoid, written once for the GPU and the CPU; and what formulas of activations are computed
// with.
//
// `Math` says what they are computed with: `Math::Floats`, one float32 or a vector of them, and
//   exp_negative(v)           e^v for v <= 0
//   exp_minus_half_square(v)  e^(-v^2 / 2)
//   reciprocal(v)             1 / v for v in [1, inf]
//   quotient(u, v)            u / v for u and v in [1e-2, 1e7]
//   absolute(v), minus_absolute(v)
//   at_most(v, limit)         the minimum; of a NaN it may be either
//   at_least(v, limits)       the maximum, of two zeros v; of a NaN it may be either
//   if_below(v, limit, x, y)  v < limit ? x : y (limit: one float32); also if_at_most, if_above
//   if_negative(v, x, y)      v < 0 ? x : y, where x and y are the same for a zero
//   kRoundsToHalf             results have 11 bits or fewer
//
// Large arguments: everything is built on e^-|v|, which does not overflow, so results have no inf
// or NaN that the formula has not. Nothing is got by subtracting from one what is close to it, so
// that the tails are relatively accurate, as if the argument had been rounded to float32 once more.
#pragma once

#include "common/shared.h"

namespace FUSELAGE_SHARED_NAMESPACE {

template <class Floats>
struct ValueAndSlope {
  Floats value, slope;
};

// sigmoid(v), and sigmoid(-v) = 1 - sigmoid(v) as accurately.
template <class Floats>
struct Sigmoid {
  Floats of, of_minus;
};

template <class Math, class Floats = typename Math::Floats>
FUSELAGE_SHARED Sigmoid<Floats> sigmoid_of(Floats v) {
  const Floats e = Math::exp_negative(Math::minus_absolute(v));
  const Floats larger = Math::reciprocal(1.0f + e);
  const Floats lesser = e * larger;
  return {Math::if_negative(v, lesser, larger), Math::if_negative(v, larger, lesser)};
}

// The activation of a gate, silu(v) = v * sigmoid(v) or sigmoid(v), and its slope.
template <class Math, class Floats = typename Math::Floats>
FUSELAGE_SHARED ValueAndSlope<Floats> gate_of(bool silu, Floats v) {
  const Sigmoid<Floats> s = sigmoid_of<Math>(v);
  const Floats value = v * s.of;
  if (silu) return {value, s.of + value * s.of_minus};
  return {s.of, s.of * s.of_minus};
}

}  // namespace FUSELAGE_SHARED_NAMESPACE
