// Runs common/device_info.cu against a made-up runtime (test_policies.py). Prints "ok", or what is
// wrong.
#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "common/gpu_compat.h"

using namespace fuselage;

namespace {

std::atomic<bool> is_broken{false};
std::atomic<int> queries{0}, errors_left{0};
thread_local int current_device = 0;

struct Set {
  int times, least, most;
};
std::mutex sets_mutex;
std::map<std::pair<const void*, int>, Set> sets;  // of a kernel and a device
std::atomic<int> attribute_queries{0};

constexpr int kStaticBytes = 1000, kSharedMemory = 227 * 1024;

}  // namespace

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  ++queries;
  if (is_broken) {
    ++errors_left;
    return cudaErrorMadeUp;
  }
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = 100 + device; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = kSharedMemory; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
  }
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::strcpy(properties->name, "a GPU without a tuning");
  return is_broken ? cudaErrorMadeUp : cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  ++attribute_queries;
  attributes->sharedSizeBytes = kStaticBytes;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  const std::lock_guard<std::mutex> lock(sets_mutex);
  Set& set = sets.try_emplace({kernel, current_device}, Set{0, value, value}).first->second;
  ++set.times;
  if (value < set.least) set.least = value;
  if (value > set.most) set.most = value;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  errors_left = 0;
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t) { return "made up"; }

namespace {

void expect(bool holds, const char* what) {
  if (!holds) throw std::logic_error(what);
}

template <typename F>
void in_threads(int count, F f) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back(f, i);
  for (std::thread& thread : threads) thread.join();
}

bool has_hopper_features(const DeviceInfo& info) {
  return info.has_clusters || info.has_bulk_copy || info.has_async_copy ||
         info.tensor_cores != TensorCores::none;
}

void features() {
  const DeviceInfo h100 = device_info(0);
  expect(h100.multiprocessors == 100 && h100.max_shared_memory == kSharedMemory, "sizes");
  expect(h100.has_clusters && h100.has_bulk_copy && h100.has_async_copy, "features of an H100");
  expect(h100.tensor_cores == TensorCores::wgmma && h100.warp_size == 32, "those of its cores");
  expect(!has_hopper_features(nvidia_device(7, 5, 40, 65536)), "features of a T4");
  const DeviceInfo a100 = nvidia_device(8, 0, 108, 166912);
  expect(!a100.has_clusters && !a100.has_bulk_copy && a100.has_async_copy, "features of an A100");
  expect(a100.tensor_cores == TensorCores::mma, "tensor cores of an A100");
  const DeviceInfo b200 = nvidia_device(10, 0, 148, kSharedMemory);
  expect(b200.has_clusters && b200.tensor_cores == TensorCores::mma, "a B200 has no wgmma");
  // HIP would report capability 9.0 or 9.4 of it.
  const DeviceInfo mi300 = amd_device(304, 65536, 64);
  expect(!has_hopper_features(mi300) && mi300.warp_size == 64, "an AMD GPU has features of Hopper");
}

void failure() {
  is_broken = true;
  for (int i = 0; i < 2; ++i) {
    bool raised = false;
    try {
      device_info(3);
    } catch (const std::runtime_error& error) {
      raised = std::string(error.what()).find("GPU 3") != std::string::npos &&
               std::string(error.what()).find("made up") != std::string::npos;
    }
    expect(raised, "a failure is not raised");
  }
  expect(errors_left == 0, "the runtime keeps the error for the next launch");
  is_broken = false;
  expect(device_info(3).multiprocessors == 103, "a failure is kept");
}

void once() {
  std::atomic<bool> wrong{false};
  in_threads(16, [&](int) {
    for (int device = 0; device < 8; ++device)
      wrong = wrong || device_info(device).multiprocessors != 100 + device;
  });
  expect(!wrong, "a thread sees a half-written device");
  expect(queries == 8 * 4, "a device is asked more than once");
}

void beyond() {
  expect(device_info(64).multiprocessors == 164, "device 64");
  expect(device_info(1000).multiprocessors == 1100, "device 1000");
  is_broken = true;
  bool raised = false;
  try {
    device_info(1000);
  } catch (const std::runtime_error&) {
    raised = true;
  }
  expect(raised, "a failure of device 1000 is not raised");
}

char kernels[5000];

void allowed_once() {
  in_threads(4, [&](int) {
    for (int i = 0; i < 1000; ++i)
      expect(gpu_allow_shared_memory(&kernels[16 * (i % 20)]) == gpuSuccess, "an error");
  });
  expect(sets.size() == 20, "kernels");
  for (const auto& [key, set] : sets) {
    // Threads that come first together may each tell the driver: always the same.
    expect(set.times <= 4, "told at each launch");
    expect(set.least == kSharedMemory - kStaticBytes && set.most == set.least, "not all of it");
  }
}

void many_kernels() {
  for (int turn = 0; turn < 2; ++turn) {
    for (const int device : {0, 5, 70}) {
      current_device = device;
      for (char& kernel : kernels) expect(gpu_allow_shared_memory(&kernel) == gpuSuccess, "error");
    }
  }
  expect(sets.size() == 3 * sizeof kernels, "a kernel or device was taken for another");
  int once_only = 0;
  for (const auto& [key, set] : sets) {
    expect(set.least == kSharedMemory - kStaticBytes && set.most == set.least, "not all of it");
    expect(key.second < 64 || set.times == 2, "a device beyond the kept ones is kept");
    once_only += set.times == 1;
  }
  expect(once_only >= 1000, "few kernels are kept");
}

}  // namespace

int main(int count, char** arguments) {
  const std::map<std::string, void (*)()> cases{
      {"features", features},
      {"failure is raised and not kept", failure},
      {"asked once by many threads", once},
      {"a device beyond the kept ones", beyond},
      {"shared memory is allowed once and to the most", allowed_once},
      {"shared memory of many kernels and devices", many_kernels},
  };
  try {
    cases.at(count > 1 ? arguments[1] : "")();
    std::puts("ok");
  } catch (const std::exception& error) {
    std::puts(error.what());
  }
}
