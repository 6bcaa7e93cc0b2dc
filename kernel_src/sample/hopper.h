// What the pipelines of Hopper kernels are made of: mailboxes (mbarriers) between threads and the copy engine,
// copies of tiles, and the order of matrix products. All addresses are of shared memory, as 32-bit numbers.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/gpu_compat.h"

namespace fuselage {

// ---- registers ----

// The registers of each thread of a warpgroup, all of which call this.
template <int kCount>
__device__ __forceinline__ void registers_take() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void registers_give_back() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// ---- barriers ----

__device__ __forceinline__ void barrier_create(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes created barriers known to the copy engine and to the other blocks of the cluster.
__device__ __forceinline__ void barriers_created() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Waits until the phase of this parity is complete.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Whether it is.
__device__ __forceinline__ bool barrier_is_done(uint32_t barrier, uint32_t parity) {
  uint32_t is;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(is)
      : "r"(barrier), "r"(parity)
      : "memory");
  return is != 0;
}

// Arrives, and says how many bytes the phase has to wait for.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the barrier that block `rank` of the cluster has at this address. NOTE: not `.release.cluster`, which
// waits for all of the thread's memory accesses, half a microsecond: this only says that products are done reading.
__device__ __forceinline__ void barrier_arrive_at(uint32_t rank, uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// ---- copies of tiles ----

// How long the L2 cache should keep what a copy reads.
constexpr uint64_t kReadOnce = 0x12f0000000000000;   // evict first
constexpr uint64_t kReadOften = 0x14f0000000000000;  // evict last

__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// The tile of `map` that begins at (column, row). Outside of the matrix it is zero.
__device__ __forceinline__ void copy_tile(uint32_t to, const CUtensorMap& map, int column, int row,
                                          uint32_t barrier, uint64_t keep) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(keep)
      : "memory");
}

// The same to the same address in each block of the cluster that has a bit in `blocks`.
__device__ __forceinline__ void copy_tile_to(uint32_t blocks, uint32_t to, const CUtensorMap& map,
                                             int column, int row, uint32_t barrier, uint64_t keep) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(static_cast<uint16_t>(blocks)), "l"(keep)
      : "memory");
}

// Where lane `lane` finds its row of the matrices that are two chunks of 16 bytes of 16 rows, as the copy engine
// swizzles rows of 128 or 64 bytes. Those of the i-th two are at this ^ i * 32.
template <int kRowBytes>
__device__ __forceinline__ uint32_t narrow_chunk_of(int lane) {
  const int row = lane % 16, chunk = lane / 16;
  const int turned = chunk ^ (kRowBytes == 128 ? row % 8 : row / 2 % 4);
  return static_cast<uint32_t>(row * kRowBytes + turned * 16);
}

// Where kThreads of a block meet, whole warps. Number 0 is that of __syncthreads.
template <int kNumber, int kThreads>
__device__ __forceinline__ void meet() {
  asm volatile("bar.sync %0, %1;" ::"n"(kNumber), "n"(kThreads) : "memory");
}

// ---- matrix products ----

// Tells Wgmma of a matrix in shared memory; 2 more is 32 bytes on.
__device__ __forceinline__ uint32_t matrix_of(uint32_t address) { return address >> 4 | 1u << 16; }

__device__ __forceinline__ void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kLeft commits are not done.
template <int kLeft>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// NOTE: keeps the compiler from using the values before a wait that stands above.
template <int kCount>
__device__ __forceinline__ void hold(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

}  // namespace fuselage
