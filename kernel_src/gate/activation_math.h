// The activations and their slopes, written once for the GPU and the CPU.
//
// `Math` says what they are computed with, and what holds of large arguments:
// common/sigmoid_math.h.
#pragma once

#include "common/shared.h"
#include "common/sigmoid_math.h"
#include "gate/activation.h"

namespace FUSELAGE_SHARED_NAMESPACE {

// tanh(v) = v + v^3 P(v^2) where |v| is small, and 1 - 2 e / (1 + e) with e = e^(-2 |v|) elsewhere.
// P has a relative error of 4.6e-9 (fitted by weighted least squares, as all polynomials here).
// Float32 results are within 5.8e-8, one ulp below 1: the larger e is the more of its error is in
// the quotient, so P reaches further there.
template <class Math, class Floats = typename Math::Floats>
FUSELAGE_SHARED ValueAndSlope<Floats> tanh_of(Floats v) {
  constexpr float kSmall = Math::kRoundsToHalf ? 0.625f : 1.0f;
  const Floats size = Math::absolute(v);
  const Floats e = Math::exp_negative(-2.0f * size);
  const Floats r = Math::reciprocal(1.0f + e);
  const Floats large = 1.0f - 2.0f * e * r;
  const Floats square = v * v;
  Floats p = {};
  if constexpr (Math::kRoundsToHalf) {
    p = -5.704987418e-3f * square + 2.063908765e-2f;
    p = p * square - 5.373971522e-2f;
    p = p * square + 1.333144220e-1f;
    p = p * square - 3.333328194e-1f;
  } else {
    p = -3.584510156e-4f * square + 2.301361250e-3f;
    p = p * square - 7.946101985e-3f;
    p = p * square + 2.148665465e-2f;
    p = p * square - 5.387980173e-2f;
    p = p * square + 1.333234456e-1f;
    p = p * square - 3.333329543e-1f;
  }
  const Floats small = v + v * (square * p);
  const Floats value = Math::if_below(size, kSmall, small, Math::if_negative(v, -large, large));
  const Floats slope = 4.0f * e * r * r;
  if constexpr (Math::kRoundsToHalf) return {value, slope};
  // Around 0 the errors of e and r are those of the slope, but only a small part of them that of 1
  // - large^2.
  return {value, Math::if_below(size, kSmall, 1.0f - large * large, slope)};
}

// gelu(v) = v Phi(v), and its slope. Phi is that of the normal distribution: Phi(-a) = e^(-a^2 / 2)
// R(a) for a >= 0, where R is a quotient of polynomials, with a relative error of 6.0e-9, or 4.1e-7
// where results are rounded to half precision. All coefficients are positive, so that nothing
// cancels. R is not needed beyond 15: e^(-a^2 / 2) is zero there in float32.
template <class Math, class Floats = typename Math::Floats>
FUSELAGE_SHARED ValueAndSlope<Floats> gelu_of(Floats v) {
  const Floats a = Math::at_most(Math::absolute(v), 15.0f);
  Floats p, q;
  if constexpr (Math::kRoundsToHalf) {
    p = 3.988990726e-1f * a + 2.787341273f;
    p = p * a + 8.422179377f;
    p = p * a + 1.159921823e1f;
    q = a + 6.982345710f;
    q = q * a + 2.218716822e1f;
    q = q * a + 3.535357925e1f;
    q = q * a + 2.319844582e1f;
  } else {
    p = a + 9.865535409f;
    p = p * a + 4.446958139e1f;
    p = p * a + 1.063324769e2f;
    p = p * a + 1.212465804e2f;
    q = 2.506599646f * a + 2.473077676e1f;
    q = q * a + 1.139392947e2f;
    q = q * a + 2.917495140e2f;
    q = q * a + 4.061466050e2f;
    q = q * a + 2.424931593e2f;
  }
  const Floats e = Math::exp_minus_half_square(v);
  const Floats tail = e * Math::quotient(p, q);
  const Floats phi = Math::if_negative(v, tail, 1.0f - tail);
  // NOTE: of -infinity the formula is infinity times zero, NaN; of infinity it is not. Of -0 it is
  // -0.
  const Floats value = Math::at_least(v, -Floats{}) - Math::at_least(a, -v) * tail;
  return {value, phi + v * (3.989422804e-1f * e)};
}

// act(v) and act'(v). What is not used of the two is not computed. The slopes of relu and relu2 are
// those for v > 0: times_slope applies them.
template <class Math, Activation kActivation, class Floats = typename Math::Floats>
FUSELAGE_SHARED ValueAndSlope<Floats> activate(Floats v) {
  const Floats zero = {};
  if constexpr (kActivation == Activation::none) {
    return {v, zero + 1.0f};
  } else if constexpr (kActivation == Activation::relu) {
    return {Math::if_below(v, 0.0f, zero, v), zero + 1.0f};
  } else if constexpr (kActivation == Activation::relu2) {
    const Floats positive = Math::if_below(v, 0.0f, zero, v);
    return {positive * positive, 2.0f * positive};
  } else if constexpr (kActivation == Activation::sigmoid) {
    const Sigmoid<Floats> s = sigmoid_of<Math>(v);
    return {s.of, s.of * s.of_minus};
  } else if constexpr (kActivation == Activation::tanh) {
    return tanh_of<Math>(v);
  } else if constexpr (kActivation == Activation::gelu) {
    return gelu_of<Math>(v);
  } else if constexpr (kActivation == Activation::silu) {
    const Sigmoid<Floats> s = sigmoid_of<Math>(v);
    const Floats value = v * s.of;
    return {value, s.of + value * s.of_minus};
  } else if constexpr (kActivation == Activation::gelu_quick) {
    const Sigmoid<Floats> s = sigmoid_of<Math>(1.702f * v);
    const Floats value = v * s.of;
    return {value, s.of + 1.702f * (value * s.of_minus)};
  } else {
    static_assert(kActivation == Activation::gelu_tanh, "an activation is missing here");
    // (1 + tanh(w)) / 2 = sigmoid(2 w), with w = sqrt(2 / pi) (v + 0.044715 v^3)
    const Floats square = v * v;
    const Sigmoid<Floats> s = sigmoid_of<Math>(v * (7.135481283e-2f * square + 1.595769122f));
    const Floats value = v * s.of;
    // Bounded, because its factor is zero where it would be infinite.
    const Floats unbounded = 2.140644385e-1f * square + 1.595769122f;
    const Floats slope_of_argument = Math::if_below(unbounded, 1e30f, unbounded, zero + 1e30f);
    return {value, s.of + value * s.of_minus * slope_of_argument};
  }
}

// grad * act'(v), for a slope of `activate`. As in PyTorch a relu passes no gradient where v <= 0,
// not even an infinite one, and passes it where v is NaN.
template <class Math, Activation kActivation, class Floats = typename Math::Floats>
FUSELAGE_SHARED Floats times_slope(Floats grad, Floats v, Floats slope) {
  if constexpr (kActivation == Activation::relu) return Math::if_at_most(v, 0.0f, Floats{}, grad);
  if constexpr (kActivation == Activation::relu2)
    return Math::if_at_most(v, 0.0f, Floats{}, grad * slope);
  return grad * slope;
}

// The formulas of gate/activation.h. A bias has been added to x.

struct Scalars {
  float alpha, limit;
};

template <class Math, Activation kActivation, bool kHasY_>
struct AddFormula {
  using Floats = typename Math::Floats;
  static constexpr bool kHasY = kHasY_;
  static constexpr bool kHasBias = true;
  static constexpr bool kReadsInputs = kActivation != Activation::none;  // in the backward

  static FUSELAGE_SHARED Floats sum(Floats x, Floats y, const Scalars& scalars) {
    if constexpr (kHasY) return x + scalars.alpha * y;
    return x;
  }
  static FUSELAGE_SHARED Floats forward(Floats x, Floats y, const Scalars& scalars) {
    return activate<Math, kActivation>(sum(x, y, scalars)).value;
  }
  static FUSELAGE_SHARED void backward(Floats grad_out, Floats x, Floats y, const Scalars& scalars,
                                       Floats& grad_x, Floats& grad_y) {
    grad_x = grad_out;
    if constexpr (kReadsInputs) {
      const Floats v = sum(x, y, scalars);
      grad_x = times_slope<Math, kActivation>(grad_out, v, activate<Math, kActivation>(v).slope);
    }
    grad_y = scalars.alpha * grad_x;
  }
};

template <class Math, Activation kActivation>
struct GateFormula {
  using Floats = typename Math::Floats;
  static constexpr bool kHasY = true;
  static constexpr bool kHasBias = false;
  static constexpr bool kReadsInputs = true;

  static FUSELAGE_SHARED Floats forward(Floats x, Floats y, const Scalars&) {
    return activate<Math, kActivation>(x).value * y;
  }
  static FUSELAGE_SHARED void backward(Floats grad_out, Floats x, Floats y, const Scalars&,
                                       Floats& grad_x, Floats& grad_y) {
    const ValueAndSlope<Floats> act = activate<Math, kActivation>(x);
    grad_x = times_slope<Math, kActivation>(grad_out * y, x, act.slope);
    grad_y = grad_out * act.value;
  }
};

template <class Math>
struct ClampedGateFormula {
  using Floats = typename Math::Floats;
  static constexpr bool kHasY = true;
  static constexpr bool kHasBias = false;
  static constexpr bool kReadsInputs = true;

  struct Terms {
    Floats g, u;
    Sigmoid<Floats> s;
  };
  // NOTE: comparisons that a NaN passes unchanged.
  static FUSELAGE_SHARED Terms terms(Floats x, Floats y, const Scalars& scalars) {
    const Floats limit = Floats{} + scalars.limit;
    const Floats g = Math::if_above(x, scalars.limit, limit, x);
    const Floats u =
        Math::if_above(y, scalars.limit, limit, Math::if_below(y, -scalars.limit, -limit, y));
    return {g, u, sigmoid_of<Math>(scalars.alpha * g)};
  }
  static FUSELAGE_SHARED Floats forward(Floats x, Floats y, const Scalars& scalars) {
    const Terms t = terms(x, y, scalars);
    return t.g * t.s.of * (t.u + 1.0f);
  }
  // As in PyTorch a clamp passes the gradient at its limits, and none where its argument is NaN.
  static FUSELAGE_SHARED void backward(Floats grad_out, Floats x, Floats y, const Scalars& scalars,
                                       Floats& grad_x, Floats& grad_y) {
    const Floats zero = {};
    const Terms t = terms(x, y, scalars);
    const Floats value = t.g * t.s.of;
    const Floats slope = t.s.of + scalars.alpha * (value * t.s.of_minus);
    grad_x = Math::if_at_most(x, scalars.limit, grad_out * (t.u + 1.0f) * slope, zero);
    grad_y = Math::if_at_most(Math::absolute(y), scalars.limit, grad_out * value, zero);
  }
};

}  // namespace FUSELAGE_SHARED_NAMESPACE
