// HIP's runtime and device functions for a CPU: what the GPU kernels of kernel_src/ use of them.
//
// Every thread of a block is a fiber. It runs until it waits for others, at a barrier or for the
// lanes of its warp, or ends. Blocks run one after the other. All is deterministic: in which order
// threads and blocks run is an option, so that a race shows.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static

// ---- types ----

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// Rounded at every conversion, which the compiler's own type need not be without instructions for
// its arithmetic.
struct EmulatedFloat16 {
  uint16_t bits;
  EmulatedFloat16() = default;
  explicit EmulatedFloat16(float value) : bits(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT)) {}
  explicit operator float() const { return _cvtsh_ss(bits); }
};
#define _Float16 EmulatedFloat16

// ---- threads ----

namespace emulated_gpu {

struct Index {
  unsigned x, y, z;
};

// What the fiber that runs knows of itself.
extern Index thread_index, block_index;
extern dim3 block_size, grid_size;

// What a lane leaves for the others.
struct Left {
  unsigned char bytes[16];
};

// These wait for other threads: of the `width` lanes around the one that runs, of its warp, and of
// its block. The first gives what all lanes of the warp left; who ended has left 0xff bytes.
const Left* exchange(const void* value, size_t bytes, int width);
bool vote(bool value);
void barrier();

int lane();
int warp_size();
void* dynamic_shared();

template <typename T>
T shuffle(T value, int lane, int width) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(Left));
  const Left* all = exchange(&value, sizeof(value), width);
  std::memcpy(&value, all[lane].bytes, sizeof(value));
  return value;
}

// Runs body() in every thread of a grid.
void run(dim3 grid, dim3 block, size_t shared_bytes, void (*body)(void*), void* data);

template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, Args&&... args) {
  // A kernel's parameters are copied, and each thread sees the same.
  struct Call {
    void (*kernel)(Params...);
    std::tuple<std::decay_t<Params>...> params;
  } call{kernel, {std::forward<Args>(args)...}};
  run(
      grid, block, shared_bytes,
      [](void* data) {
        Call& its = *static_cast<Call*>(data);
        std::apply(its.kernel, its.params);
      },
      &call);
}

}  // namespace emulated_gpu

#define threadIdx (::emulated_gpu::thread_index)
#define blockIdx (::emulated_gpu::block_index)
#define blockDim (::emulated_gpu::block_size)
#define gridDim (::emulated_gpu::grid_size)
#define warpSize (::emulated_gpu::warp_size())

inline void __syncthreads() { emulated_gpu::barrier(); }
inline void __threadfence() {}

template <typename T>
T __shfl(T value, int lane, int width) {
  return emulated_gpu::shuffle(value, emulated_gpu::lane() / width * width + lane % width, width);
}
template <typename T>
T __shfl_xor(T value, int mask, int width) {
  const int lane = emulated_gpu::lane(), other = lane ^ mask;
  return emulated_gpu::shuffle(value, other / width == lane / width ? other : lane, width);
}
template <typename T>
T __shfl_up(T value, unsigned delta, int width) {
  const int lane = emulated_gpu::lane();
  const int other = lane - static_cast<int>(delta);
  return emulated_gpu::shuffle(value, lane % width < static_cast<int>(delta) ? lane : other, width);
}
inline int __any(int value) { return emulated_gpu::vote(value != 0); }

// ---- device functions ----

inline unsigned __float_as_uint(float v) {
  unsigned bits;
  std::memcpy(&bits, &v, 4);
  return bits;
}
inline int __float_as_int(float v) { return static_cast<int>(__float_as_uint(v)); }
inline float __uint_as_float(unsigned bits) {
  float v;
  std::memcpy(&v, &bits, 4);
  return v;
}
inline float __int_as_float(int bits) { return __uint_as_float(static_cast<unsigned>(bits)); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline int __float2int_rn(float v) {  // saturates
  if (!(v == v)) return 0;
  if (v >= 2147483648.0f) return INT32_MAX;
  if (v <= -2147483648.0f) return INT32_MIN;
  return static_cast<int>(std::nearbyint(v));
}

// The larger and the smaller, as GPUs have them: of zeros +0 and -0, which C++ leaves open.
inline float emulated_fmaxf(float a, float b) {
  if (a != a || b != b) return a != a ? b : a;
  return a > b || (a == b && !std::signbit(a)) ? a : b;
}
inline float emulated_fminf(float a, float b) {
  if (a != a || b != b) return a != a ? b : a;
  return a < b || (a == b && std::signbit(a)) ? a : b;
}
#define fmaxf emulated_fmaxf
#define fminf emulated_fminf

inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(static_cast<unsigned>(v)); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}

template <typename T>
T atomicAdd(T* at, T value) {
  const T before = *at;
  *at = before + value;
  return before;
}
template <typename T>
T atomicMin(T* at, T value) {
  const T before = *at;
  if (value < before) *at = value;
  return before;
}
template <typename T>
T atomicMax(T* at, T value) {
  const T before = *at;
  if (before < value) *at = value;
  return before;
}

using std::isinf;

// The global min and max of device code, for any two arithmetic types.
template <typename A, typename B,
          typename = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
constexpr auto min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <typename A, typename B,
          typename = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
constexpr auto max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

// ---- the runtime ----

using hipStream_t = void*;
enum hipError_t { hipSuccess = 0, hipErrorInvalidValue = 1 };
enum hipDeviceAttribute_t {
  hipDeviceAttributeMultiprocessorCount,
  hipDeviceAttributeMaxSharedMemoryPerBlock,
  hipDeviceAttributeWarpSize,
};
enum hipFuncAttribute { hipFuncAttributeMaxDynamicSharedMemorySize };
struct hipFuncAttributes {
  size_t sharedSizeBytes;
};
struct hipDeviceProp_t {
  char name[256];
};
hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int device);
hipError_t hipGetDevice(int* device);
hipError_t hipGetDeviceProperties(hipDeviceProp_t* properties, int device);
hipError_t hipFuncGetAttributes(hipFuncAttributes* attributes, const void* kernel);
hipError_t hipFuncSetAttribute(const void* kernel, hipFuncAttribute attribute, int value);
hipError_t hipGetLastError();
const char* hipGetErrorString(hipError_t error);
hipError_t hipMemsetAsync(void* memory, int value, size_t bytes, hipStream_t stream);
