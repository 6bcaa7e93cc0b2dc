// PTX instructions that CUDA C++ has no function for, under PTX's own names. Barriers and tiles are
// named by their 32-bit addresses in shared memory (shared_address).
//
// Where the GPU lacks an instruction its function does nothing, but for cp_async, which copies at
// once, and max_or_nan, which compares. A kernel that depends on more than that is compiled to
// nothing there: kCompilesClusters, kCompilesAsyncCopy, kCompilesMma.
#pragma once

#include <cstdint>

#if defined(USE_ROCM)
#include <hip/hip_runtime.h>
#else
#include <cuda_runtime.h>
#endif

struct CUtensorMap_st;  // CUtensorMap of <cuda.h>

#if defined(__CUDACC__) || defined(__HIPCC__)

// Defined for GPUs of compute capability 8.0 and up: neither for a T4 nor for AMD's.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define FUSELAGE_SM80
#endif

// Instructions of compute capability 9.0 and up: nothing elsewhere.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define FUSELAGE_SM90_ASM(...) asm volatile(__VA_ARGS__)
#else
#define FUSELAGE_SM90_ASM(...) static_cast<void>(0)
#endif

namespace fuselage {

// Whether the code being compiled is for GPUs with clusters and bulk copies. Kernels for those
// alone return at once in other code, which leaves the compiler nothing to do.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kCompilesClusters = true;
#else
constexpr bool kCompilesClusters = false;
#endif

// Likewise GPUs with cp.async, and those whose tensor cores multiply m16n8k16 of half precision.
#if defined(FUSELAGE_SM80)
constexpr bool kCompilesAsyncCopy = true, kCompilesMma = true;
#else
constexpr bool kCompilesAsyncCopy = false, kCompilesMma = false;
#endif

// The threads that an SM has at least: those of a T4, or of all later GPUs.
#if defined(__CUDA_ARCH__) && !defined(FUSELAGE_SM80)
constexpr int kThreadsOfSm = 1024;
#else
constexpr int kThreadsOfSm = 1536;
#endif

// The blocks of `threads` that launch bounds leave registers for: `wanted`, where an SM has the
// threads.
constexpr int bounded_blocks(int threads, int wanted) {
  return threads * wanted <= kThreadsOfSm ? wanted : kThreadsOfSm / threads;
}

// The larger of two values; NaN where one is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
#if defined(FUSELAGE_SM80)
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a > b || a != a ? a : b;
#endif
}

// An address as instructions on shared memory take it.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
#if defined(USE_ROCM)
  static_cast<void>(pointer);
  return 0;
#else
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
#endif
}

// ---- cp.async: copies from global to shared memory, 4, 8 or 16 bytes a thread ----

// Starts the copy of kBytes, both sides aligned to them. Without such an instruction it is done
// when the call returns.
template <int kBytes>
__device__ __forceinline__ void cp_async(void* shared, const void* global) {
#if !defined(FUSELAGE_SM80)
  __builtin_memcpy(__builtin_assume_aligned(shared, kBytes),
                   __builtin_assume_aligned(global, kBytes), kBytes);
#else
  const uint32_t address = shared_address(shared);
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(global),
                 "n"(kBytes)
                 : "memory");
  }
#endif
}

// As cp_async, of which only the first `bytes` (even, from 0 on) are read; the rest is zero. Of 16
// bytes, L2 fetches the whole line: group_norm's backward of (128, 1024, 1024), bfloat16, takes 342
// us on an H200 otherwise, and 331.
template <int kBytes>
__device__ __forceinline__ void cp_async_zfill(void* shared, const void* global, int bytes) {
#if !defined(FUSELAGE_SM80)
  for (int i = 0; i < kBytes / 2; ++i) {
    static_cast<uint16_t*>(shared)[i] =
        2 * i < bytes ? static_cast<const uint16_t*>(global)[i] : uint16_t{0};
  }
#else
  const uint32_t address = shared_address(shared);
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address),
                 "l"(global), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(global),
                 "n"(kBytes), "r"(bytes)
                 : "memory");
  }
#endif
}

// Closes a group of this thread's copies.
__device__ __forceinline__ void cp_async_commit_group() {
#if defined(FUSELAGE_SM80)
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most `pending` (0 to 3) of this thread's most recent groups are in flight.
__device__ __forceinline__ void cp_async_wait_group(int pending) {
#if defined(FUSELAGE_SM80)
  // Without branches: of a number that is known as the kernel runs a switch takes a jump table.
  asm volatile(
      "{\n"
      ".reg .pred most<3>;\n"
      "setp.le.s32 most0, %0, 0;\n"
      "setp.le.s32 most1, %0, 1;\n"
      "setp.le.s32 most2, %0, 2;\n"
      "cp.async.wait_group 3;\n"
      "@most2 cp.async.wait_group 2;\n"
      "@most1 cp.async.wait_group 1;\n"
      "@most0 cp.async.wait_group 0;\n"
      "}" ::"r"(pending)
      : "memory");
#endif
}

#if !defined(USE_ROCM)
// Copies 16 bytes, of which the first `bytes` are read and the rest is zero. L2 fetches the whole
// line of 128 bytes. NOTE: here and below for kernels that are compiled with kCompilesAsyncCopy
// alone.
__device__ __forceinline__ void cp_async_zfill_16(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}

// The same of 4 bytes.
__device__ __forceinline__ void cp_async_zfill_4(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}
#endif

// ---- programmatic dependent launch (PDL) ----

// A kernel launched with gpu_launch_after may start while the previous one of the stream still
// runs. Waits until that one has ended; all that it wrote is then visible.
__device__ __forceinline__ void grid_dependency_wait() {
  FUSELAGE_SM90_ASM("griddepcontrol.wait;" :: : "memory");
}

// Lets the dependent kernel's blocks start as soon as blocks of this one end and leave room.
__device__ __forceinline__ void launch_dependents() {
  FUSELAGE_SM90_ASM("griddepcontrol.launch_dependents;" :: : "memory");
}

// ---- thread block clusters and distributed shared memory (DSMEM) ----

// The block's number in its cluster.
__device__ __forceinline__ int cluster_rank() {
  uint32_t rank = 0;
  FUSELAGE_SM90_ASM("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// The cluster barrier in two halves, which all threads call. NOTE: relaxed. It orders no memory
// accesses.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  FUSELAGE_SM90_ASM("barrier.cluster.arrive.relaxed.aligned;" :: : "memory");
}
// What was written before, to DSMEM too, is visible after cluster_wait.
__device__ __forceinline__ void cluster_arrive() {
  FUSELAGE_SM90_ASM("barrier.cluster.arrive.release.aligned;" :: : "memory");
}
__device__ __forceinline__ void cluster_wait() {
  FUSELAGE_SM90_ASM("barrier.cluster.wait.acquire.aligned;" :: : "memory");
}

// Waits for all threads of the cluster. What they wrote before, to DSMEM too, is then visible.
__device__ __forceinline__ void cluster_sync() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// The variable of block `rank` that corresponds to `own` of our shared memory. NOTE: that block
// must have started, and not ended.
template <typename T>
__device__ __forceinline__ T* map_shared_rank(T* own, int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint64_t address;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(own), "r"(rank));
  return reinterpret_cast<T*>(address);
#else
  static_cast<void>(rank);
  return own;
#endif
}

// The same of an address.
__device__ __forceinline__ uint32_t mapa(uint32_t own, int rank) {
  uint32_t address = own;
  FUSELAGE_SM90_ASM("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(own), "r"(rank));
  return address;
}

// ---- mbarriers: phases of arrivals and of bytes written by asynchronous copies ----

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  FUSELAGE_SM90_ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier),
                    "r"(arrivals) : "memory");
}

// Makes initialised mbarriers visible to asynchronous copies and to the other blocks of the
// cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  FUSELAGE_SM90_ASM("fence.mbarrier_init.release.cluster;" :: : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  FUSELAGE_SM90_ASM("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and adds to the bytes that the phase waits for.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  FUSELAGE_SM90_ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                    "r"(bytes) : "memory");
}

// Arrives at the mbarrier of block `rank`. NOTE: not `.release.cluster`, which waits for all of the
// thread's memory accesses, half a microsecond: this says only that its reads are done.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier, uint32_t rank) {
  FUSELAGE_SM90_ASM(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}" ::"r"(barrier),
      "r"(rank) : "memory");
}

// Waits until the phase of this parity is complete.
__device__ __forceinline__ void mbarrier_wait_parity(uint32_t barrier, uint32_t parity) {
  FUSELAGE_SM90_ASM(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}" ::"r"(barrier),
      "r"(parity) : "memory");
}

// The same, and acquires what other blocks of the cluster have written.
__device__ __forceinline__ void mbarrier_wait_parity_cluster(uint32_t barrier, uint32_t parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n .reg .pred p;\n"
        " mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
#endif
}

// Whether the phase of this parity is complete.
__device__ __forceinline__ bool mbarrier_test_wait_parity(uint32_t barrier, uint32_t parity) {
  uint32_t done = 1;
  FUSELAGE_SM90_ASM(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}" : "=r"(done) : "r"(barrier),
      "r"(parity) : "memory");
  return done != 0;
}

// Writes `value` to `slot` in the shared memory of block `rank`, and counts its bytes at that
// block's mbarrier.
__device__ __forceinline__ void st_async(float* slot, int rank, float value, uint32_t barrier) {
  [[maybe_unused]] const uint32_t remote_slot = mapa(shared_address(slot), rank);
  [[maybe_unused]] const uint32_t remote_barrier = mapa(barrier, rank);
  FUSELAGE_SM90_ASM(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
          remote_slot),
      "r"(__float_as_uint(value)), "r"(remote_barrier) : "memory");
}

// ---- values that blocks of a grid pass on through global memory ----

// NOTE: relaxed. They order no other memory accesses.
__device__ __forceinline__ uint64_t ld_relaxed_gpu(const uint64_t* source) {
  uint64_t value = 0;
  FUSELAGE_SM90_ASM("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(source) : "memory");
  return value;
}
__device__ __forceinline__ void st_relaxed_gpu(uint64_t* target, uint64_t value) {
  FUSELAGE_SM90_ASM("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(target), "l"(value) : "memory");
}

// ---- bulk copies ----

// Orders what the thread has read and written in shared memory before bulk copies to there that are
// started after a barrier.
__device__ __forceinline__ void fence_proxy_async() {
  FUSELAGE_SM90_ASM("fence.proxy.async.shared::cta;" :: : "memory");
}

// Starts the copy of `bytes` (a multiple of 16, both sides aligned to 16) from global to shared
// memory, and counts them at the mbarrier. One thread copies a whole row, beside the queue in which
// the SM's other loads and stores wait.
__device__ __forceinline__ void bulk_copy_async(void* shared, const void* global, int bytes,
                                                uint32_t barrier) {
  FUSELAGE_SM90_ASM(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(barrier) : "memory");
}

// The way back. What threads have written to there, each orders with fence_proxy_async before they
// meet the thread that starts the copy.
__device__ __forceinline__ void bulk_store_async(void* global, const void* shared, int bytes) {
  FUSELAGE_SM90_ASM("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
                    "r"(shared_address(shared)), "r"(bytes) : "memory");
}

// Closes a group of this thread's bulk stores.
__device__ __forceinline__ void bulk_commit_group() {
  FUSELAGE_SM90_ASM("cp.async.bulk.commit_group;" :: : "memory");
}

// Waits until all but the kPending most recent groups have read what they copy.
template <int kPending>
__device__ __forceinline__ void bulk_wait_group_read() {
  FUSELAGE_SM90_ASM("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

#if !defined(USE_ROCM)

// 16 bytes of what is read once, past L1, and is not written while the kernel runs.
__device__ __forceinline__ uint4 ld_global_nc_no_allocate(const void* source) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(source));
  return value;
}

// ---- tensor cores of a warp ----

// sums += a * b of m16n8k16 in half precision, with sums in float32; kIsHalf: float16, otherwise
// bfloat16. NOTE: for kernels that are compiled with kCompilesMma alone.
template <bool kIsHalf>
__device__ __forceinline__ void mma_m16n8k16(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  if constexpr (kIsHalf) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Four matrices of 8 rows of 16 bytes. A lane has the address of row lane % 8 of matrix lane / 8,
// and gets bytes 4 * (lane % 4) to 4 * (lane % 4) + 3 of row lane / 4 of each.
__device__ __forceinline__ void ldmatrix_x4(uint32_t shared, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// ---- Hopper alone: TMA tiles, wgmma, setmaxnreg ----

// How long L2 keeps what a TMA copy reads.
constexpr uint64_t kL2EvictFirst = 0x12f0000000000000;
constexpr uint64_t kL2EvictLast = 0x14f0000000000000;

__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap_st& map) {
  FUSELAGE_SM90_ASM("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies the tile of `map` that begins at (column, row). Elements outside of the matrix are zero.
__device__ __forceinline__ void tma_load_2d(uint32_t shared, const CUtensorMap_st& map, int column,
                                            int row, uint32_t barrier, uint64_t l2_hint) {
  FUSELAGE_SM90_ASM(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(l2_hint) : "memory");
}

// The same to the same address of each block of the cluster that has a bit in `blocks`.
__device__ __forceinline__ void tma_load_2d_multicast(uint32_t blocks, uint32_t shared,
                                                      const CUtensorMap_st& map, int column,
                                                      int row, uint32_t barrier, uint64_t l2_hint) {
  FUSELAGE_SM90_ASM(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(static_cast<uint16_t>(blocks)),
      "l"(l2_hint) : "memory");
}

// Sets the registers of each thread of a warpgroup, all of which call it: more (which waits until
// they are free) or fewer.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  FUSELAGE_SM90_ASM("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  FUSELAGE_SM90_ASM("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// A barrier of kThreads threads of the block, whole warps. __syncthreads has number 0.
template <int kNumber, int kThreads>
__device__ __forceinline__ void named_barrier_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kNumber), "n"(kThreads) : "memory");
}

// The low word of a wgmma descriptor of a matrix in shared memory: 2 more is 32 bytes on. The high
// word is wgmma.h's.
__device__ __forceinline__ uint32_t wgmma_descriptor(uint32_t address) {
  return address >> 4 | 1u << 16;
}

__device__ __forceinline__ void wgmma_fence() {
  FUSELAGE_SM90_ASM("wgmma.fence.sync.aligned;" :: : "memory");
}
__device__ __forceinline__ void wgmma_commit_group() {
  FUSELAGE_SM90_ASM("wgmma.commit_group.sync.aligned;" :: : "memory");
}

// Waits until at most kPending commit groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  FUSELAGE_SM90_ASM("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// NOTE: keeps the compiler from reading accumulators ahead of the wait above this call.
template <int kCount>
__device__ __forceinline__ void wgmma_fence_operand(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

#endif

}  // namespace fuselage

#endif  // a GPU compiler
