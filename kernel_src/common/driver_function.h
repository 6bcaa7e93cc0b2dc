// Functions of CUDA's driver, without linking to it.
#pragma once

#include "common/gpu_compat.h"

#if !defined(USE_ROCM) && defined(__CUDACC__)

namespace fuselage {

// The function of this name as CUDA `version` has it (12040: 12.4); null if the driver has none.
inline void* gpu_driver_function(const char* name, unsigned version) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult query = cudaDriverEntryPointSymbolNotFound;
  if (cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &query) ==
          cudaSuccess &&
      query == cudaDriverEntryPointSuccess)
    return found;
  static_cast<void>(gpuGetLastError());
  return nullptr;
}

}  // namespace fuselage

#endif
