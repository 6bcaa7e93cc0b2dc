// What the process keeps of its GPUs.
//
// NOTE: all state of the GPU code is in here, with internal linkage. A static variable of an inline
// function or a template is one for the whole process (STB_GNU_UNIQUE), so two versions of this
// library would share it.
#include "common/device_info.h"

#if defined(__linux__)
#include <link.h>
#endif

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>

#include "common/gpu_compat.h"
#include "common/tuning_file.h"

namespace fuselage {
namespace {

constexpr int kKeptDevices = 64;  // the driver is asked anew for others

std::mutex infos_mutex;
DeviceInfo infos[kKeptDevices];
std::atomic<bool> is_known[kKeptDevices];

void expect_read(int device, gpuError error) {
  if (error == gpuSuccess) return;
  static_cast<void>(gpuGetLastError());  // or the next launch would report it
  throw std::runtime_error("fuselage: the properties of GPU " + std::to_string(device) +
                           " cannot be read: " + gpuGetErrorString(error));
}

template <typename Attribute>
int attribute_of(int device, Attribute attribute) {
  int value = 0;
  expect_read(device, gpuDeviceGetAttribute(&value, attribute, device));
  return value;
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

// ---- the tuning (docs/tuning.md) ----

// On stderr, not by Python's logging: this may run without the interpreter's lock, or without an
// interpreter.
void print_line(const std::string& line) { std::fprintf(stderr, "fuselage: %s\n", line.c_str()); }

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// The folder of this library, which is that of the Python package; empty if it is not known. NOTE:
// not by dladdr, which in glibc 2.34 changed its library, and its version.
std::string library_folder() {
#if defined(__linux__)
  struct Search {
    uintptr_t address;
    std::string path;
  } search{reinterpret_cast<uintptr_t>(&library_folder), ""};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        Search& its = *static_cast<Search*>(data);
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& part = info->dlpi_phdr[i];
          const uintptr_t begin = info->dlpi_addr + part.p_vaddr;
          if (part.p_type != PT_LOAD || its.address < begin || its.address - begin >= part.p_memsz)
            continue;
          its.path = info->dlpi_name;
          return 1;
        }
        return 0;
      },
      &search);
  const size_t slash = search.path.rfind('/');
  return slash == std::string::npos ? "" : search.path.substr(0, slash);
#else
  return "";
#endif
}

// The text of a file, or false if there is none. Throws what is wrong with one that is there.
bool read_file(const std::string& path, std::string& text) {
  constexpr size_t kMostBytes = 1 << 20;
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) {
    if (errno == ENOENT || errno == ENOTDIR) return false;
    throw std::runtime_error("it cannot be opened");
  }
  text.resize(kMostBytes + 1);
  text.resize(std::fread(&text[0], 1, text.size(), file));
  const bool failed = std::ferror(file) != 0;
  std::fclose(file);
  if (failed) throw std::runtime_error("it cannot be read");
  if (text.size() > kMostBytes) throw std::runtime_error("it has more than a megabyte");
  return true;
}

// Fills `tuning` and returns the line that says what was chosen.
std::string choose_tuning(int device, Tuning& tuning) {
  gpuDeviceProperties properties{};
  expect_read(device, gpuGetDeviceProperties(&properties, device));
  const std::string gpu = properties.name;
  const std::string level = environment("FUSELAGE_LOG");
  const auto debug = [&](const std::string& line) {
    if (level == "debug") print_line("debug: " + line);
  };
  tuning = Tuning{};
  std::string line = gpu + ": the built-in launch policy";
  std::string folder = environment("FUSELAGE_TUNING_DIR");
  if (!folder.empty()) {
    debug("FUSELAGE_TUNING_DIR is " + folder);
  } else {
    folder = library_folder();
    if (!folder.empty()) folder += "/tuning";
    debug("FUSELAGE_TUNING_DIR is not set: the folder is " + folder);
  }
  const std::string path = folder + "/" + tuning_file_name(gpu);
  try {
    std::string text;
    if (folder.empty() || !read_file(path, text)) {
      debug("there is no " + path);
    } else {
      tuning = parse_tuning(text, gpu);
      const std::string changed = describe(tuning, false);
      line = gpu + ": the launch policy of " + path + ": " +
             (changed.empty() ? "as built in" : changed);
    }
  } catch (const std::exception& error) {
    print_line("warning: " + path + " is not used: " + error.what());
  }
  if (level == "info" || level == "debug") print_line("info: " + line);
  debug("all values: " + describe(tuning, true));
  return line;
}

// ---- shared memory ----

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
      DeviceInfo info = query(device);
      choose_tuning(device, info.tuning);
      infos[device] = info;
      is_known[device].store(true, std::memory_order_release);
    }
  }
  return infos[device];
}

const char* gpu::pending_error() { return message_of(gpuGetLastError()); }

std::string gpu::read_tuning(int device) {
  device_info(device);
  if (device >= kKeptDevices) throw std::runtime_error("fuselage: so many GPUs have no tuning");
  const std::lock_guard<std::mutex> lock(infos_mutex);
  return choose_tuning(device, infos[device].tuning);
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
