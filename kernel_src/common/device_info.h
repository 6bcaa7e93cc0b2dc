// What a launch policy needs to know of a GPU, asked once per device and process.
#pragma once

#include "common/gpu_compat.h"

namespace fuselage {

struct DeviceInfo {
  int multiprocessors;
  int shared_bytes_per_block;  // the most dynamic shared memory one block may ask for
  int compute_capability;      // 10 * major + minor
};

constexpr int kMaxDevices = 64;

// An attribute, or 0 if the driver does not answer; the launch that follows then reports the error.
template <typename Attribute>
inline int device_attribute(Attribute attribute, int device) {
  int value = 0;
  return gpuDeviceGetAttribute(&value, attribute, device) == gpuSuccess ? value : 0;
}

inline const DeviceInfo& device_info(int device) {
  // NOTE: a race here writes the same values twice; `ready` is set last.
  static DeviceInfo infos[kMaxDevices];
  static std::atomic<bool> ready[kMaxDevices];
  if (!ready[device].load(std::memory_order_acquire)) {
    infos[device].multiprocessors = device_attribute(gpuDevAttrMultiProcessorCount, device);
    infos[device].shared_bytes_per_block =
        device_attribute(gpuDevAttrMaxSharedMemoryPerBlockOptin, device);
    infos[device].compute_capability =
        10 * device_attribute(gpuDevAttrComputeCapabilityMajor, device) +
        device_attribute(gpuDevAttrComputeCapabilityMinor, device);
    ready[device].store(true, std::memory_order_release);
  }
  return infos[device];
}

}  // namespace fuselage
