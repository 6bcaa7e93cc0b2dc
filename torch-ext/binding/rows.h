// How a kernel sees a tensor: as rows of adjacent elements, and whether tensors share memory.
#pragma once

#include "checks.h"

namespace fuselage::binding {

// A tensor seen as [rows, dim] with adjacent elements in a row and `stride` elements between rows.
struct Rows {
  Tensor tensor;  // keeps a contiguous copy alive
  int64_t stride;

  const void* data() const { return tensor.const_data_ptr(); }
};

// The stride between rows, or nothing where the tensor cannot be seen that way.
inline std::optional<int64_t> row_stride_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  const int64_t last = tensor.dim() - 1;
  // Whatever its strides are, a tensor without elements has no rows to read.
  const auto none = [&] {
    return tensor.numel() == 0 ? std::optional<int64_t>(sizes[last]) : std::nullopt;
  };
  if (sizes[last] != 1 && strides[last] != 1) return none();
  int64_t row_stride = sizes[last];
  int64_t next = -1;  // the stride that the next dimension out must have
  for (int64_t i = last - 1; i >= 0; --i) {
    if (sizes[i] == 1) continue;
    if (next == -1) {
      row_stride = strides[i];
    } else if (strides[i] != next) {
      return none();
    }
    next = strides[i] * sizes[i];
  }
  return row_stride;
}

// Reads the tensor in place where it has rows, and copies it otherwise.
inline Rows rows_of(const Tensor& tensor) {
  if (const auto stride = row_stride_of(tensor)) return {tensor, *stride};
  return {contiguous_copy(tensor), tensor.size(tensor.dim() - 1)};
}

// Points a kernel at the rows of a tensor. What comes back keeps a copy alive.
[[nodiscard]] inline Rows read_rows(const void*& data, int64_t& stride, const Tensor& tensor) {
  Rows rows = rows_of(tensor);
  data = rows.data();
  stride = rows.stride;
  return rows;
}

// Likewise; where there is no tensor, `data` stays null.
[[nodiscard]] inline std::optional<Rows> read_rows(const void*& data, int64_t& stride,
                                                   const OptionalTensor& tensor) {
  if (!tensor.has_value()) return std::nullopt;
  return read_rows(data, stride, *tensor);
}

// Points a kernel at a vector of adjacent elements. A kernel without one is told the dtype of x.
inline void read_vector(const void*& data, DType& dtype, const OptionalTensor& vector,
                        DType x_dtype) {
  data = vector.has_value() ? vector->const_data_ptr() : nullptr;
  dtype = vector.has_value() ? *dtype_from(vector->scalar_type()) : x_dtype;
}

inline const void* element(const void* data, int64_t index, DType dtype) {
  return static_cast<const char*>(data) + index * dtype_size(dtype);
}
inline void* element(void* data, int64_t index, DType dtype) {
  return static_cast<char*>(data) + index * dtype_size(dtype);
}

inline int64_t rows_in(const Tensor& x) {
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) rows *= x.size(i);
  return rows;
}

inline int64_t columns_in(const Tensor& x) { return x.size(x.dim() - 1); }

// The stride between the rows of `tensor`, which an op writes in place. `functional_op` does not.
inline int64_t check_written_rows(const char* op, const char* name, const Tensor& tensor,
                                  const char* functional_op) {
  const auto stride = row_stride_of(tensor);
  FUSELAGE_CHECK(op, stride.has_value() && (rows_in(tensor) <= 1 || *stride >= columns_in(tensor)),
                 "`", name,
                 "` is written in place and must be rows of adjacent elements that do not overlap, "
                 "one stride between all of them; pass a contiguous tensor or use ",
                 functional_op);
  return *stride;
}

// Whether some element belongs to both [rows, dim] tensors of one type.
inline bool overlap(const Tensor& a, int64_t a_stride, const Tensor& b, int64_t b_stride,
                    int64_t rows, int64_t dim) {
  if (rows == 0 || dim == 0 || is_meta(a)) return false;
  const int64_t size = dtype_size(*dtype_from(a.scalar_type()));
  const int64_t distance = (static_cast<const char*>(b.const_data_ptr()) -
                            static_cast<const char*>(a.const_data_ptr())) /
                           size;
  const int64_t a_end = (rows - 1) * a_stride + dim, b_end = (rows - 1) * b_stride + dim;
  if (distance >= a_end || -distance >= b_end) return false;
  // The rows of one may lie between the rows of the other.
  if (rows == 1 || a_stride != b_stride) return true;
  const int64_t offset = (distance % a_stride + a_stride) % a_stride;
  return offset < dim || offset > a_stride - dim;
}

// Elements from the first of a tensor to the end of its last, without its first `outer` dimensions.
inline int64_t span_of(const Tensor& tensor, int64_t outer = 0) {
  int64_t span = 1;
  for (int64_t i = outer; i < tensor.dim(); ++i) span += (tensor.size(i) - 1) * tensor.stride(i);
  return span;
}

// Whether the memory from the first element of either to the end of its last meets that of the
// other.
inline bool spans_meet(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0 || is_meta(a)) return false;
  const auto begin_of = [](const Tensor& t) {
    return static_cast<const char*>(t.const_data_ptr());
  };
  const auto end_of = [&](const Tensor& t) {
    const ScalarType type = t.scalar_type();
    const auto dtype = dtype_from(type);
    const int64_t size = dtype.has_value() ? dtype_size(*dtype) : type == ScalarType::Int ? 4 : 8;
    return begin_of(t) + span_of(t) * size;
  };
  return begin_of(a) < end_of(b) && begin_of(b) < end_of(a);
}

// `name`, which is read, has no memory within that of `written_name`, which is written in place.
inline void check_apart(const char* op, const char* written_name, const Tensor& written,
                        const char* name, const OptionalTensor& tensor) {
  FUSELAGE_CHECK(op, !tensor.has_value() || !spans_meet(written, *tensor), "`", written_name,
                 "` is written in place and must not share memory with `", name, "`; pass a copy");
}

// Strides of x and residual, [rows, dim], which are both written in place; `read` are vectors.
inline std::pair<int64_t, int64_t> check_written_sum(
    const char* op, const char* functional_op, const Tensor& x, const Tensor& residual,
    std::initializer_list<std::pair<const char*, const OptionalTensor*>> read) {
  const int64_t x_stride = check_written_rows(op, "x", x, functional_op);
  const int64_t residual_stride = check_written_rows(op, "residual", residual, functional_op);
  FUSELAGE_CHECK(
      op, !overlap(x, x_stride, residual, residual_stride, rows_in(x), columns_in(x)),
      "`x` and `residual` are both written and must not share memory; pass a copy of one");
  for (const auto& [name, vector] : read) {
    check_apart(op, "x", x, name, *vector);
    check_apart(op, "residual", residual, name, *vector);
  }
  return {x_stride, residual_stride};
}

}  // namespace fuselage::binding
