// Whether tensors may be read and written by whole vectors, and their rows by bulk copies. Plain
// C++.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace fuselage {

// The one test: whether every row of a [rows, columns] tensor, `stride` elements apart, starts and
// ends on a boundary of so many bytes. It is asked of every tensor of a launch: where types differ,
// the rows of one may and those of another not. A tensor that is not there (null) does.
// NOTE: the ends too: a bulk copy whose size is no multiple of 16 bytes never completes. `columns`
// is 0 where something else sees to the ends of rows, such as a kernel that cuts the last vector
// short.
inline bool aligned_rows(const void* data, int64_t stride, int64_t columns, int element_size,
                         int64_t bytes = 16) {
  return data == nullptr ||
         (reinterpret_cast<uintptr_t>(data) % bytes == 0 && stride * element_size % bytes == 0 &&
          columns * element_size % bytes == 0);
}
inline bool aligned_rows(const void* data, int64_t stride, int64_t columns, DType dtype,
                         int64_t bytes = 16) {
  return aligned_rows(data, stride, columns, dtype_size(dtype), bytes);
}

}  // namespace fuselage
