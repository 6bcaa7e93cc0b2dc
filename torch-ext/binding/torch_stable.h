// Torch's stable headers, whose errors are raised without streams. Include those from here alone:
// the macro must be ours before they use it.
//
// NOTE: the locales of streams crash where a compiler's C++ library is newer than the one that
// Torch has loaded, and linked statically. A None in place of a tensor, which no API of Torch's
// takes, was a segmentation fault there instead of an error.
#pragma once

#include <torch/headeronly/util/shim_utils.h>

#include <stdexcept>
#include <string>

namespace fuselage::binding {

[[noreturn]] inline void fail_call(const char* call, const char* file, int line) {
  throw std::runtime_error(std::string(call) + " API call failed at " + file + ", line " +
                           std::to_string(line));
}

}  // namespace fuselage::binding

// In braces, as the headers use it with and without a semicolon.
#undef TORCH_ERROR_CODE_CHECK
#define TORCH_ERROR_CODE_CHECK(call)                           \
  if ((call) != TORCH_SUCCESS) {                               \
    ::fuselage::binding::fail_call(#call, __FILE__, __LINE__); \
  }

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

// The stable headers of Torch 2.10 to 2.12 have it under another name.
#if !defined(STABLE_TORCH_ERROR_CODE_CHECK)
#define STABLE_TORCH_ERROR_CODE_CHECK TORCH_ERROR_CODE_CHECK
#endif
