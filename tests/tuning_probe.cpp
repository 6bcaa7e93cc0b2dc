// Runs the reading of a GPU's tuning (common/device_info.cu) against a made-up runtime, as a
// library that test_tuning.py loads: the folder of the files is that of the library.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "common/gpu_compat.h"
#include "common/tuning_file.h"

using namespace fuselage;

namespace {

const char* gpu_name = "";
std::atomic<int> property_queries{0};

}  // namespace

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  ++property_queries;
  std::snprintf(properties->name, sizeof properties->name, "%s", gpu_name);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 9;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) { return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "made up"; }

namespace {

void print(const std::string& line) { std::printf("%s\n", line.c_str()); }

// The parameters, the built-in value first.
void parameters(const char*) {
  for (const Tunable& tunable : kTunables) {
    std::string line = std::string(tunable.name) + " " + std::to_string(Tuning{}.*tunable.value);
    for (const int value : tunable.values) line += value == 0 ? "" : " " + std::to_string(value);
    print(line);
  }
}

// What policies see.
void seen(const char*) { print(describe(device_info(0).tuning, true)); }

void file_name(const char*) { print(tuning_file_name(gpu_name)); }

// Many threads at once, and a GPU of which nothing is kept.
void threads(const char*) {
  std::vector<std::thread> all;
  std::atomic<int> wrong{0};
  const Tuning first = device_info(0).tuning;
  for (int i = 0; i < 16; ++i) {
    all.emplace_back([&] {
      for (int device = 0; device < 4; ++device)
        wrong += describe(device_info(device).tuning, true) != describe(first, true);
    });
  }
  for (std::thread& each : all) each.join();
  const int queries = property_queries;
  device_info(64);
  print(std::to_string(queries) + " queries, " + std::to_string(property_queries - queries) +
        " of device 64, " + std::to_string(wrong) + " wrong");
}

// Reads again, from the folder given.
void again(const char* folder) {
  seen(nullptr);
  setenv("FUSELAGE_TUNING_DIR", folder, 1);
  seen(nullptr);
  print(gpu::read_tuning(0));
  seen(nullptr);
}

// Spoils `text` in one to three places, again and again: it is refused, or has values that kernels
// know.
void spoil(const char* text) {
  uint64_t state = 1;
  const auto random = [&](size_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<size_t>((state >> 33) % below);
  };
  int refused = 0, taken = 0;
  for (int turn = 0; turn < 100000; ++turn) {
    std::string spoilt = text;
    for (size_t places = 1 + random(3); places > 0 && !spoilt.empty(); --places) {
      static const char kBytes[] = "\"\\{}[]:,0123456789-.eEtrufalsn \n\0\x80";
      const char byte = kBytes[random(sizeof kBytes)];
      const size_t at = random(spoilt.size());
      switch (random(4)) {
        case 0: spoilt[at] = byte; break;
        case 1: spoilt.insert(at, 1, byte); break;
        case 2: spoilt.erase(at, 1 + random(8)); break;
        case 3: spoilt.resize(at); break;
      }
    }
    try {
      const Tuning tuning = parse_tuning(spoilt, gpu_name);
      for (const Tunable& tunable : kTunables) {
        if (!tunable.takes(tuning.*tunable.value)) print("taken: " + spoilt);
      }
      ++taken;
    } catch (const std::runtime_error&) {
      ++refused;
    }
  }
  print(refused > 50000 && taken > 100 ? "ok" : std::to_string(taken) + " taken");
}

struct Command {
  const char* name;
  void (*run)(const char* argument);
};

const Command kCommands[] = {{"parameters", parameters}, {"seen", seen},   {"file name", file_name},
                             {"threads", threads},       {"again", again}, {"spoil", spoil}};

}  // namespace

extern "C" int run(const char* command, const char* gpu, const char* argument) {
  gpu_name = gpu;
  try {
    for (const Command& each : kCommands) {
      if (std::strcmp(each.name, command) == 0) each.run(argument);
    }
  } catch (const std::exception& error) {
    print(std::string("raised: ") + error.what());
  }
  return std::fflush(stdout);
}
