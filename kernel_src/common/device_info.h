// What launch policies need to know of a GPU, by features. Plain C++, so that tests make up
// devices.
#pragma once

#include "common/tuning.h"

namespace fuselage {

// The lanes that exchange values in reductions: a warp on NVIDIA GPUs, half of an AMD wavefront.
constexpr int kWarpSize = 32;

// The most blocks of a cluster that every GPU with clusters takes.
constexpr int kMaxCluster = 8;

enum class TensorCores {
  none,
  mma,    // of a warp, operands in registers: m16n8k16 of half precision
  wgmma,  // and of a warpgroup, operands in shared memory
};

// NOTE: features and no compute capability: HIP reports 9.0 and 9.4 for GPUs that have nothing of
// Hopper's.
struct DeviceInfo {
  int multiprocessors;
  int max_shared_memory;  // bytes of a block, static and dynamic
  int warp_size;          // lanes that run together
  bool has_clusters;      // and distributed shared memory and mbarriers across their blocks
  bool has_bulk_copy;     // cp.async.bulk, completed on an mbarrier
  bool has_async_copy;    // cp.async
  TensorCores tensor_cores;
  Tuning tuning;
};

// The features of an NVIDIA GPU. Nothing else compares compute capabilities.
inline DeviceInfo nvidia_device(int major, int minor, int multiprocessors, int max_shared_memory) {
  const int capability = 10 * major + minor;
  DeviceInfo info{};
  info.multiprocessors = multiprocessors;
  info.max_shared_memory = max_shared_memory;
  info.warp_size = 32;
  info.has_clusters = capability >= 90;
  info.has_bulk_copy = capability >= 90;
  info.has_async_copy = capability >= 80;
  // wgmma is Hopper's alone: later GPUs have other instructions in its place.
  info.tensor_cores = capability == 90   ? TensorCores::wgmma
                      : capability >= 80 ? TensorCores::mma
                                         : TensorCores::none;
  return info;
}

// Of an AMD GPU the kernels use no such feature: what they replace is compiled to nothing there.
inline DeviceInfo amd_device(int multiprocessors, int max_shared_memory, int warp_size) {
  DeviceInfo info{};
  info.multiprocessors = multiprocessors;
  info.max_shared_memory = max_shared_memory;
  info.warp_size = warp_size;
  return info;
}

// Of the GPU of this index; its driver is asked, and its tuning read, once. Throws
// std::runtime_error if the driver does not answer, and asks again the next time.
DeviceInfo device_info(int device);

namespace gpu {

// What is wrong with the current GPU, as after a kernel of any library that failed; or null.
const char* pending_error();

}  // namespace gpu
}  // namespace fuselage
