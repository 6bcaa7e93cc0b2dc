// What the process keeps of its GPUs.
//
// NOTE: all state of the GPU code is in here, with internal linkage. A static variable of an inline
// function or a template is one for the whole process (STB_GNU_UNIQUE), so two versions of this
// library would share it.
#include "common/device_info.h"

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>

#include "common/gpu_compat.h"

namespace fuselage {
namespace {

constexpr int kKeptDevices = 64;  // the driver is asked anew for others

std::mutex infos_mutex;
DeviceInfo infos[kKeptDevices];
std::atomic<bool> is_known[kKeptDevices];

template <typename Attribute>
int attribute_of(int device, Attribute attribute) {
  int value = 0;
  const gpuError error = gpuDeviceGetAttribute(&value, attribute, device);
  if (error == gpuSuccess) return value;
  static_cast<void>(gpuGetLastError());  // or the next launch would report it
  throw std::runtime_error("fuselage: the properties of GPU " + std::to_string(device) +
                           " cannot be read: " + gpuGetErrorString(error));
}

DeviceInfo query(int device) {
  const int multiprocessors = attribute_of(device, gpuDevAttrMultiProcessorCount);
  const int shared_memory = attribute_of(device, gpuDevAttrMaxSharedMemoryPerBlockOptin);
#if defined(USE_ROCM)
  return amd_device(multiprocessors, shared_memory, attribute_of(device, gpuDevAttrWarpSize));
#else
  return nvidia_device(attribute_of(device, gpuDevAttrComputeCapabilityMajor),
                       attribute_of(device, gpuDevAttrComputeCapabilityMinor), multiprocessors,
                       shared_memory);
#endif
}

// The devices, a bit each, on which a kernel may use all shared memory. A hash table of open
// addressing.
struct Allowed {
  std::atomic<const void*> kernel;
  std::atomic<uint64_t> devices;
};
constexpr int kAllowedBits = 10;
Allowed allowed[1 << kAllowedBits];

// Null if the table is full: then the driver is told at each launch.
std::atomic<uint64_t>* devices_allowed(const void* kernel) {
  const uint64_t hash = (reinterpret_cast<uintptr_t>(kernel) >> 4) * 0x9e3779b97f4a7c15u;
  uint32_t slot = static_cast<uint32_t>(hash >> (64 - kAllowedBits));
  for (int probe = 0; probe < 1 << kAllowedBits; ++probe) {
    Allowed& entry = allowed[slot];
    const void* owner = entry.kernel.load(std::memory_order_relaxed);
    if (owner == nullptr) entry.kernel.compare_exchange_strong(owner, kernel);
    if (owner == nullptr || owner == kernel) return &entry.devices;
    slot = (slot + 1) % (1 << kAllowedBits);
  }
  return nullptr;
}

}  // namespace

DeviceInfo device_info(int device) {
  if (device < 0 || device >= kKeptDevices) return query(device);
  if (!is_known[device].load(std::memory_order_acquire)) {
    const std::lock_guard<std::mutex> lock(infos_mutex);
    if (!is_known[device].load(std::memory_order_relaxed)) {
      infos[device] = query(device);
      is_known[device].store(true, std::memory_order_release);
    }
  }
  return infos[device];
}

gpuError gpu_allow_shared_memory(const void* kernel) {
  int device = 0;
  gpuError error = gpuGetDevice(&device);
  if (error != gpuSuccess) return error;
  const uint64_t bit = device < kKeptDevices ? uint64_t{1} << device : 0;
  std::atomic<uint64_t>* devices = devices_allowed(kernel);
  if (devices != nullptr && (devices->load(std::memory_order_acquire) & bit) != 0)
    return gpuSuccess;
  gpuFuncAttributes attributes{};
  error = gpuFuncGetAttributes(&attributes, kernel);
  if (error != gpuSuccess) return error;
  const int dynamic_bytes =
      device_info(device).max_shared_memory - static_cast<int>(attributes.sharedSizeBytes);
  error = gpuFuncAllowSharedMemory(kernel, dynamic_bytes);
  if (error == gpuSuccess && devices != nullptr) devices->fetch_or(bit, std::memory_order_release);
  return error;
}

}  // namespace fuselage
