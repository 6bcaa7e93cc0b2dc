// What the GPU's kernels of the gate family are made of: activations that are known at run time,
// vectors of rows, and the bias.
#pragma once

#include <type_traits>

#include "common/gpu_compat.h"
#include "common/gpu_math.h"
#include "common/row_vectors.h"
#include "common/vector.h"
#include "gate/activation_math.h"

namespace fuselage {
namespace {

// Whether an aligned row ends within this vector, which is then read and written by the element.
template <bool kAligned, int N>
__device__ __forceinline__ bool is_end(int column, int dim) {
  return kAligned && column < dim && column + N > dim;
}

// With kCalls it is not inlined: it would be half of the code that all threads go through. On an
// H200, bfloat16, silu_and_mul of (128, 4096) took 2.47 us then, and takes 2.39. But in a loop over
// rows a call keeps the compiler from starting loads of the next ones.
template <typename T, int N>
__device__ __noinline__ Vector<T, N> call_load_elements(const T* row, int column, int dim) {
  return Vector<T, N>::load_elements(row, column, dim);
}
template <typename T, int N>
__device__ __noinline__ void call_store_elements(const Vector<T, N> vector, T* row, int column,
                                                 int dim) {
  Vector<T, N>::store_elements(vector, row, column, dim);
}

// A vector of a row on its way. Of rows that start anywhere, kNeighbours: whether neighbouring
// lanes have neighbouring vectors.
template <typename T, int N, bool kAligned, bool kNeighbours, bool kCalls>
struct OperandLoading {
  std::conditional_t<kNeighbours, VectorLoading<T, kAligned>, Loading<T, N, kAligned>> loading;

  __device__ __forceinline__ void start(const T* row, int column, int dim) {
    if (kAligned) keep_in_register(row);
    loading.start(row, column, kAligned ? dim - (N - 1) : dim);  // whole vectors
  }
  // Of is_end(), after start().
  __device__ __forceinline__ void load_end(const T* row, int column, int dim) {
    if constexpr (kAligned)
      loading.first = kCalls ? call_load_elements<T, N>(row, column, dim)
                             : Vector<T, N>::load_elements(row, column, dim);
  }
  __device__ __forceinline__ Vector<T, N> finish(const T* row, int column, int dim) const {
    return loading.finish(row, column, dim);
  }
};

// All lanes of the warp call together unless kAligned.
template <bool kAligned, bool kCalls, int N, typename T>
__device__ __forceinline__ void store_in_row(const Vector<T, N>& vector, T* row, int column,
                                             int dim) {
  if (is_end<kAligned, N>(column, dim)) {
    if (kCalls) {
      call_store_elements(vector, row, column, dim);
    } else {
      Vector<T, N>::store_elements(vector, row, column, dim);
    }
  } else {
    store_vector<kAligned>(vector, row, column, dim);
  }
}

template <int N>
struct Elements {
  float of[N];
};

// f(AddFormula) of one input, for an activation that is known at run time. Not AddFormula<none>: it
// reads no inputs.
template <class Math, typename F>
__device__ __forceinline__ void with_add_formula(Activation activation, F&& f) {
  switch (activation) {
    case Activation::none: break;
    case Activation::relu: f(AddFormula<Math, Activation::relu, false>{}); break;
    case Activation::sigmoid: f(AddFormula<Math, Activation::sigmoid, false>{}); break;
    case Activation::tanh: f(AddFormula<Math, Activation::tanh, false>{}); break;
    case Activation::gelu: f(AddFormula<Math, Activation::gelu, false>{}); break;
    case Activation::gelu_tanh: f(AddFormula<Math, Activation::gelu_tanh, false>{}); break;
    case Activation::gelu_quick: f(AddFormula<Math, Activation::gelu_quick, false>{}); break;
    case Activation::silu: f(AddFormula<Math, Activation::silu, false>{}); break;
    case Activation::relu2: f(AddFormula<Math, Activation::relu2, false>{}); break;
  }
}

// act(x), and grad_out * act'(x). Not inlined: all kernels of other activations share the code.
template <class Math, int N>
__device__ __noinline__ Elements<N> activate_any(Activation activation, Elements<N> x) {
  with_add_formula<Math>(activation, [&](auto formula) {
#pragma unroll
    for (int k = 0; k < N; ++k) x.of[k] = decltype(formula)::forward(x.of[k], 0.0f, Scalars{});
  });
  return x;
}

template <class Math, int N>
__device__ __noinline__ Elements<N> gradient_any(Activation activation, Elements<N> grad_out,
                                                 Elements<N> x) {
  with_add_formula<Math>(activation, [&](auto formula) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      float unused;
      decltype(formula)::backward(grad_out.of[k], x.of[k], 0.0f, Scalars{}, grad_out.of[k], unused);
    }
  });
  return grad_out;
}

// As AddFormula, of any activation but `none`.
template <class Math_, bool kHasY_>
struct AnyAddFormula {
  using Math = typename Math_::Shared;
  static constexpr bool kHasY = kHasY_;
  static constexpr bool kHasBias = true;
  static constexpr bool kReadsInputs = true;
  using Sum = AddFormula<Math, Activation::none, kHasY>;
};

template <class Formula>
constexpr bool kIsAny = false;
template <class Math, bool kHasY>
constexpr bool kIsAny<AnyAddFormula<Math, kHasY>> = true;

// The formula whose kernels do the work of `Formula` where it is rare.
template <class Formula>
struct RareFormula {
  using type = Formula;
};
template <class Math, Activation kActivation, bool kHasY>
struct RareFormula<AddFormula<Math, kActivation, kHasY>> {
  using type = AnyAddFormula<Math, kHasY>;
};
template <class Math, bool kHasY>
struct RareFormula<AddFormula<Math, Activation::none, kHasY>> {
  using type = AddFormula<Math, Activation::none, kHasY>;
};

template <bool kAligned, bool kCalls, int N, typename W>
__device__ __forceinline__ void add_bias(const W* bias, int column, int dim, float (&values)[N]) {
  OperandLoading<W, N, kAligned, false, kCalls> loading;
  loading.start(bias, column, dim);
  if (is_end<kAligned, N>(column, dim)) loading.load_end(bias, column, dim);
  float added[N];
  loading.finish(bias, column, dim).to_floats(added);
#pragma unroll
  for (int k = 0; k < N; ++k) values[k] += added[k];
}

// The same where rows follow each other without a gap: past the end of the bias comes its start.
template <int N, typename W>
__device__ __forceinline__ void add_repeated_bias(const W* bias, int column, int dim,
                                                  float (&values)[N]) {
  constexpr int kPiece = N * sizeof(W) > 16 ? 16 / sizeof(W) : N;
  using Piece = Loading<W, kPiece, false>;
#pragma unroll
  for (int i = 0; i < N; i += kPiece) {
    if (Piece::in_blocks(bias, column, dim, Piece::V::shift_of(bias + column))) {
      float added[kPiece];
      load<false, kPiece>(bias, column, dim).to_floats(added);
#pragma unroll
      for (int k = 0; k < kPiece; ++k) values[i + k] += added[k];
      column += kPiece;
      if (column == dim) column = 0;
    } else {
#pragma unroll
      for (int k = 0; k < kPiece; ++k) {
        values[i + k] += to_float(bias[column]);
        if (++column == dim) column = 0;
      }
    }
  }
}

}  // namespace
}  // namespace fuselage
