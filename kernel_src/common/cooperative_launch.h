// Launches of kernels whose blocks wait for each other. NVIDIA GPUs alone.
#pragma once

#include "common/driver_function.h"
#include "common/gpu_compat.h"

#if !defined(USE_ROCM) && defined(__CUDACC__)

namespace fuselage {

// Whether a graph is captured on a stream of a green context, which has a part of the GPU's
// multiprocessors. NOTE: a launch of more blocks than these hold is refused, but not while it is
// captured: the graph then runs without an error, and without the kernel (driver 580).
inline bool gpu_captures_in_green_context(gpuStream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) {
    static_cast<void>(gpuGetLastError());  // the launch will say what is wrong
    return false;
  }
  if (status == cudaStreamCaptureStatusNone) return false;
  void* const found = gpu_driver_function("cuStreamGetGreenCtx", 12040);
  if (found == nullptr) return false;  // and no green contexts
  void* context = nullptr;
  return reinterpret_cast<int (*)(gpuStream, void**)>(found)(stream, &context) != 0 ||
         context != nullptr;
}

// Launches kernel(args...) if all of its blocks can be on the GPU at once. `refused` says that they
// cannot, as where the process or the stream has a part of the GPU: nothing has been launched then,
// and it is no error.
template <typename... Params, typename... Args>
inline gpuError gpu_launch_cooperative(bool& refused, void (*kernel)(Params...), dim3 grid,
                                       dim3 block, int shared_bytes, gpuStream stream,
                                       Args&&... args) {
  refused = gpu_captures_in_green_context(stream);
  if (refused) return gpuSuccess;
  gpuError error = gpu_allow_shared_memory(reinterpret_cast<const void*>(kernel));
  if (error != gpuSuccess) return gpu_launched(error);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  error = gpu_launched(cudaLaunchKernelEx(&config, kernel, Params(args)...));
  refused = error == cudaErrorCooperativeLaunchTooLarge || error == cudaErrorNotSupported;
  return refused ? gpuSuccess : error;
}

}  // namespace fuselage

#endif
