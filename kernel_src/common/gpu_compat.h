// One set of names for CUDA and HIP, and the few instructions whose spelling differs between them.
// Instructions that NVIDIA GPUs alone have are in common/ptx.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/device_info.h"

#if defined(USE_ROCM)
#include <hip/hip_fp16.h>
#include <hip/hip_runtime.h>
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

namespace fuselage {

#if defined(USE_ROCM)

using gpuStream = hipStream_t;
using gpuError = hipError_t;
constexpr gpuError gpuSuccess = hipSuccess;
constexpr gpuError gpuErrorInvalidValue = hipErrorInvalidValue;
constexpr auto gpuDevAttrMultiProcessorCount = hipDeviceAttributeMultiprocessorCount;
constexpr auto gpuDevAttrMaxSharedMemoryPerBlockOptin = hipDeviceAttributeMaxSharedMemoryPerBlock;
constexpr auto gpuDevAttrWarpSize = hipDeviceAttributeWarpSize;
using gpuFuncAttributes = hipFuncAttributes;
inline gpuError gpuDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int device) {
  return hipDeviceGetAttribute(value, attribute, device);
}
inline gpuError gpuGetDevice(int* device) { return hipGetDevice(device); }
using gpuDeviceProperties = hipDeviceProp_t;
inline gpuError gpuGetDeviceProperties(gpuDeviceProperties* properties, int device) {
  return hipGetDeviceProperties(properties, device);
}
inline gpuError gpuFuncGetAttributes(gpuFuncAttributes* attributes, const void* kernel) {
  return hipFuncGetAttributes(attributes, kernel);
}
inline gpuError gpuFuncAllowSharedMemory(const void* kernel, int bytes) {
  return hipFuncSetAttribute(kernel, hipFuncAttributeMaxDynamicSharedMemorySize, bytes);
}
inline gpuError gpuGetLastError() { return hipGetLastError(); }
inline const char* gpuGetErrorString(gpuError error) { return hipGetErrorString(error); }

#else

using gpuStream = cudaStream_t;
using gpuError = cudaError_t;
constexpr gpuError gpuSuccess = cudaSuccess;
constexpr gpuError gpuErrorInvalidValue = cudaErrorInvalidValue;
constexpr auto gpuDevAttrMultiProcessorCount = cudaDevAttrMultiProcessorCount;
constexpr auto gpuDevAttrMaxSharedMemoryPerBlockOptin = cudaDevAttrMaxSharedMemoryPerBlockOptin;
constexpr auto gpuDevAttrComputeCapabilityMajor = cudaDevAttrComputeCapabilityMajor;
constexpr auto gpuDevAttrComputeCapabilityMinor = cudaDevAttrComputeCapabilityMinor;
using gpuFuncAttributes = cudaFuncAttributes;
inline gpuError gpuDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return cudaDeviceGetAttribute(value, attribute, device);
}
inline gpuError gpuGetDevice(int* device) { return cudaGetDevice(device); }
using gpuDeviceProperties = cudaDeviceProp;
inline gpuError gpuGetDeviceProperties(gpuDeviceProperties* properties, int device) {
  return cudaGetDeviceProperties(properties, device);
}
inline gpuError gpuFuncGetAttributes(gpuFuncAttributes* attributes, const void* kernel) {
  return cudaFuncGetAttributes(attributes, kernel);
}
inline gpuError gpuFuncAllowSharedMemory(const void* kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}
inline gpuError gpuGetLastError() { return cudaGetLastError(); }
inline const char* gpuGetErrorString(gpuError error) { return cudaGetErrorString(error); }

#endif

// Null, or what is wrong.
inline const char* message_of(gpuError error) {
  return error == gpuSuccess ? nullptr : gpuGetErrorString(error);
}

// Lets `kernel` use all the shared memory of the current device, and not just the 48 KB every block
// may have. The driver is told once a kernel and device (common/device_info.cu). NOTE: never to
// less than all: another thread might launch the same kernel with more at that moment.
gpuError gpu_allow_shared_memory(const void* kernel);

#if defined(__CUDACC__) || defined(__HIPCC__)

// Value of the lane whose index differs from ours in the bit `lane_mask`, within `width` lanes.
template <typename V>
__device__ __forceinline__ V shuffle_xor(V value, int lane_mask, int width) {
#if defined(USE_ROCM)
  return __shfl_xor(value, lane_mask, width);
#else
  return __shfl_xor_sync(0xffffffffu, value, lane_mask, width);
#endif
}

// Value of lane `lane` of our group of `width` lanes.
__device__ __forceinline__ float shuffle_from(float value, int lane, int width) {
#if defined(USE_ROCM)
  return __shfl(value, lane, width);
#else
  return __shfl_sync(0xffffffffu, value, lane, width);
#endif
}

// Value of the lane before ours, within groups of `width` lanes.
__device__ __forceinline__ uint32_t shuffle_up(uint32_t value, int width) {
#if defined(USE_ROCM)
  return __shfl_up(value, 1, width);
#else
  return __shfl_up_sync(0xffffffffu, value, 1, width);
#endif
}

// Whether `value` is true in any of the lanes that run together.
__device__ __forceinline__ bool warp_any(bool value) {
#if defined(USE_ROCM)
  return __any(value);
#else
  return __any_sync(0xffffffffu, value);
#endif
}

// A value that the kWarpSize lanes of a warp have alike, as a vote, by which the compiler knows
// that they do: a shuffle in a branch on it needs no code for lanes that went elsewhere. NOTE: not
// on AMD GPUs, where two warps may run together.
__device__ __forceinline__ bool same_in_warp(bool value) {
#if defined(USE_ROCM)
  return value;
#else
  return __any_sync(0xffffffffu, value);
#endif
}

// One 16-byte load from global memory. NOTE: spelled out, because the compiler splits predicated
// ones in two.
__device__ __forceinline__ uint4 load_global_16(const void* source) {
#if defined(USE_ROCM)
  return *static_cast<const uint4*>(source);
#else
  uint4 value;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(source));
  return value;
#endif
}

// The same from shared memory. NOTE: spelled out, because the compiler makes several loads of four
// bytes of one that is used in part, and lanes that are 16 bytes apart meet in the banks.
__device__ __forceinline__ uint4 load_shared_16(const void* source) {
#if defined(USE_ROCM)
  return *static_cast<const uint4*>(source);
#else
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(source)))
               : "memory");
  return value;
#endif
}

// 1 / sqrt(value), correctly rounded or nearly so: rsqrtf may be two units off.
__device__ __forceinline__ float reciprocal_sqrt(float value) {
#if defined(USE_ROCM)
  return 1.0f / sqrtf(value);
#else
  return __frsqrt_rn(value);
#endif
}

// 2^value with a relative error of two units; results below 2^-126 are zero.
__device__ __forceinline__ float exp2_approximate(float value) {
#if defined(USE_ROCM)
  return exp2f(value);
#else
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
#endif
}

// log2(value) with an absolute error of 2^-22, or a relative one as small away from 1. NOTE: for
// normal values.
__device__ __forceinline__ float log2_approximate(float value) {
#if defined(USE_ROCM)
  return log2f(value);
#else
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
#endif
}

// 1 / value, off by one unit at most, for values in [1, 2^126]; 0 for infinity.
__device__ __forceinline__ float reciprocal_of_normal(float value) {
#if defined(USE_ROCM)
  return 1.0f / value;
#else
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
#endif
}

// A barrier for the threads of one row of the block: those with our threadIdx.y, up to a warp or
// whole warps of them. NOTE: at most 15 rows of more than a warp. AMD GPUs have barriers for whole
// blocks only, so all rows of a block must call it equally often.
__device__ __forceinline__ void row_barrier() {
#if defined(USE_ROCM)
  __syncthreads();
#else
  if (blockDim.x <= 32) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.y + 1), "r"(blockDim.x) : "memory");
  }
#endif
}

// A barrier for the lanes of a warp: each sees after it what the others wrote before. NOTE: on AMD
// GPUs it is one for the block, so all of its threads must call it equally often.
__device__ __forceinline__ void warp_barrier() {
#if defined(USE_ROCM)
  __syncthreads();
#else
  __syncwarp();
#endif
}

#endif  // device compilation

#if defined(__CUDACC__) || defined(__HIPCC__)

// Of a kernel with blocks of up to so many threads. HIP's compiler is told the threads alone.
#if defined(USE_ROCM)
#define FUSELAGE_MAX_REGISTERS(threads, registers) __launch_bounds__(threads)
#else
#define FUSELAGE_MAX_REGISTERS(threads, registers) __maxnreg__(registers)
#endif

// What a launch returned. An error is also kept for the next one that asks, which would take it for
// its own.
inline gpuError gpu_launched(gpuError error) {
  if (error != gpuSuccess) static_cast<void>(gpuGetLastError());
  return error;
}

inline gpuError gpu_clear(void* memory, size_t bytes, gpuStream stream) {
#if defined(USE_ROCM)
  return hipMemsetAsync(memory, 0, bytes, stream);
#else
  return cudaMemsetAsync(memory, 0, bytes, stream);
#endif
}

// Of a kernel's own shared arrays, which count too towards the 48 KB that every block may have.
constexpr int kMostArrayBytes = 8 * 1024;

// Launches kernel(args...) with blocks in clusters of `cluster` along x, and reports the launch's
// error. With `after`, a kernel that calls grid_dependency_wait, so that its start overlaps the end
// of the kernel launched before it on the stream. (Without effect, and harmless, before compute
// capability 9.0.)
template <typename... Params, typename... Args>
inline gpuError gpu_launch_as(bool after, void (*kernel)(Params...), dim3 grid, dim3 block,
                              int shared_bytes, int cluster, gpuStream stream, Args&&... args) {
  if (shared_bytes + kMostArrayBytes > 48 * 1024) {
    const gpuError error = gpu_allow_shared_memory(reinterpret_cast<const void*>(kernel));
    if (error != gpuSuccess) return gpu_launched(error);
  }
#if !defined(USE_ROCM)
  if (after || cluster > 1) {
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    if (cluster > 1) {
      attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
      attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    }
    if (after) {
      attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    return gpu_launched(cudaLaunchKernelEx(&config, kernel, Params(args)...));
  }
#endif
  kernel<<<grid, block, shared_bytes, stream>>>(args...);
  return gpuGetLastError();
}

template <typename... Params, typename... Args>
inline gpuError gpu_launch(void (*kernel)(Params...), dim3 grid, dim3 block, int shared_bytes,
                           int cluster, gpuStream stream, Args&&... args) {
  return gpu_launch_as(false, kernel, grid, block, shared_bytes, cluster, stream, args...);
}

template <typename... Params, typename... Args>
inline gpuError gpu_launch_after(void (*kernel)(Params...), dim3 grid, dim3 block, gpuStream stream,
                                 Args&&... args) {
  return gpu_launch_as(true, kernel, grid, block, 0, 1, stream, args...);
}

#endif  // a GPU compiler

}  // namespace fuselage
