// How the sampling kernels are laid out on a GPU: pure functions of the device and the shape.
// Results do not depend on any of it.
#pragma once

#include "common/alignment.h"
#include "common/launch_policy.h"
#include "sample/sample.h"

namespace fuselage {

constexpr int kSampleThreads = 256;
constexpr int kSampleBlocks = 4;     // of a draw, on an SM
constexpr int kSampleVector = 8;     // neighbouring logits of a thread
constexpr int kSampleLoads = 16;     // logits of a thread in flight
constexpr int kChooseThreads = 512;  // of the block that looks for a filter's bound in a row
constexpr int kListed = 8192;        // logits of a bin in a list; for more, the row is read again

struct SamplePolicy {
  int64_t part;  // logits of a row for one block
  int64_t parts;
};

inline SamplePolicy sample_policy(const DeviceInfo& device, int64_t batch, int64_t vocab) {
  // At least the loads of all threads at once, which make the first threshold. At most a few
  // times that, or the last blocks keep few SMs busy.
  constexpr int64_t kAtOnce = int64_t{kSampleThreads} * kSampleLoads;
  const int64_t blocks = int64_t{device.multiprocessors} * kSampleBlocks;
  const int64_t wanted = ceil_div(ceil_div(vocab * batch, blocks), kAtOnce) * kAtOnce;
  SamplePolicy policy{};
  policy.part =
      std::min<int64_t>(std::max<int64_t>(wanted, kAtOnce), device.tuning.sample_turns * kAtOnce);
  policy.parts = ceil_div(vocab, policy.part);
  return policy;
}

// A row in the shared memory of a cluster.
constexpr int kClusterThreads = 512;
constexpr int kClusterBlocks = 2;              // on an SM
constexpr int kClusterListed = 4096;           // logits that a list holds
constexpr int kClusterFixedBytes = 34 * 1024;  // of a block, besides its part of the row
constexpr int kClusterWanted = 8192;           // logits of a row for one block

struct ClusterPolicy {
  int64_t part;      // logits of a row for one block
  int blocks;        // of a cluster; 0: the GPU has no clusters, or the row does not fit
  int64_t clusters;  // that run at once: no more are launched where most rows are already drawn
};

inline ClusterPolicy cluster_policy(const DeviceInfo& device, int64_t batch, int64_t vocab) {
  constexpr int64_t kMaxRows = ((int64_t{1} << 31) - 1) / kMaxCluster;
  if (!device.has_clusters || vocab == 0 || batch > kMaxRows) return {};
  ClusterPolicy policy{};
  policy.blocks = cluster_for(device, vocab, kClusterWanted);
  policy.part = ceil_div(ceil_div(vocab, policy.blocks), 32) * 32;  // words of a bitmask
  policy.clusters =
      std::max<int64_t>(kClusterBlocks * int64_t{device.multiprocessors} / policy.blocks, 1);
  const int64_t max_part =
      (device.max_shared_memory - kClusterFixedBytes) / static_cast<int64_t>(sizeof(float));
  return policy.part <= max_part ? policy : ClusterPolicy{};
}

constexpr int kFinishThreads = 128;

// The head. Rows of weight are tiled by kHeadRows; rows of the batch by 8 to 128, as there are.
constexpr int kHeadRows = 128;
constexpr int kHeadThreads = 128;
// Rows of the batch from which on thresholds pay: with fewer, noise takes less time than loads.
constexpr int kHeadThresholdsFrom = 17;
constexpr int kHeadSharedBytes = 99 * 1024;  // what a block may have on every GPU from 8.0 on

struct HeadTile {
  int columns;                  // rows of the batch
  int warp_rows, warp_columns;  // of the tile, a warp's
  int step;                     // depth of a stage
  int stages;
  int blocks;  // on an SM
};

constexpr int head_columns(int64_t batch, bool narrow) {
  return batch <= 8 ? 8 : batch <= 16 ? 16 : batch <= 32 ? 32 : batch <= 64 || narrow ? 64 : 128;
}

// Few rows of the batch are bound by global memory: deep stages. Many are bound by shared memory,
// which square warp tiles read least; the registers hold two blocks of those, of which one draws
// while the other multiplies. (One block with twice the rows takes an eighth longer: H200,
// bfloat16, batch 128, vocab 151936, dim 4096.) Weights of float8 are converted by each warp that
// reads them: it should be one.
constexpr HeadTile head_tile(int columns, bool narrow) {
  return columns == 128             ? HeadTile{128, 64, 64, 32, 5, 2}
         : columns == 64 && !narrow ? HeadTile{64, 64, 32, 32, 4, 3}
         : columns == 64            ? HeadTile{64, 32, 64, 32, 4, 3}
                                    : HeadTile{columns, 32, columns, 64, 4, 2};
}

// Float32, without tensor cores.
constexpr int kFloatStep = 32;

struct FloatTile {
  int columns, threads;
  int rows_each, columns_each;  // of a thread
  int stages;
};

constexpr int float_columns(int64_t batch) { return batch <= 32 ? 16 : 64; }

constexpr FloatTile float_tile(int columns) {
  return columns == 16 ? FloatTile{16, 128, 2, 8, 4} : FloatTile{64, 128, 4, 16, 3};
}

// The form for all types and GPUs, without tensor cores.
constexpr int kPlainThreads = 256;
constexpr int kPlainRows = 128;
constexpr int kPlainColumns = 16;
constexpr int kPlainStep = 16;

// What multiplies: threads, in the form for all GPUs; threads, in the form for float32; or tensor
// cores by mma or by wgmma.
enum class HeadForm { plain, floats, mma, wgmma };

constexpr int kWgmmaSharedBytes = 227 * 1024;  // of a block of the wgmma form

// Whether the wgmma form serves. It needs rows that TMA can copy: they start on 16 bytes, and end
// anywhere. With float8, hidden is copied into tiles first, and may have any alignment.
inline bool has_wgmma_form(const DeviceInfo& device, const LmHead& p) {
  const bool narrow = p.weight_type == WeightType::float8_e4m3;
  constexpr int64_t kMax = (int64_t{1} << 31) - 1024;
  const auto in_place = [](const void* data, int64_t stride, int64_t rows, int element_size) {
    return aligned_rows(data, rows <= 1 ? 0 : stride, 0, element_size);
  };
  return device.tensor_cores == TensorCores::wgmma && device.has_clusters && device.has_bulk_copy &&
         device.max_shared_memory >= kWgmmaSharedBytes && p.dtype != DType::float32 &&
         (narrow || p.weight_scale == nullptr) && p.dim >= 1 && p.dim < (int64_t{1} << 24) &&
         p.vocab >= 1 && p.batch >= 1 && p.vocab < kMax && p.batch < kMax &&
         (narrow || in_place(p.hidden, p.hidden_stride, p.batch, 2)) &&
         in_place(p.weight, p.weight_stride, p.vocab, narrow ? 1 : 2);
}

// The form where that does not serve.
inline HeadForm head_form(const DeviceInfo& device, const LmHead& p) {
  const bool narrow = p.weight_type == WeightType::float8_e4m3;
  if (!device.has_async_copy || device.max_shared_memory < kHeadSharedBytes) return HeadForm::plain;
  if (p.dtype == DType::float32) return narrow ? HeadForm::plain : HeadForm::floats;
  return device.tensor_cores == TensorCores::none ? HeadForm::plain : HeadForm::mma;
}

// Whether the plain form has code for the GPU. With cp.async there are other forms for all but
// float32 beside float8.
inline bool has_plain_form(const DeviceInfo& device, const LmHead& p) {
  const bool narrow = p.weight_type == WeightType::float8_e4m3;
  return !device.has_async_copy || (p.dtype == DType::float32 && narrow);
}

// Whether all rows can be copied in chunks of 16 bytes. They may end within one.
inline bool has_aligned_chunks(const LmHead& p) {
  const int size = dtype_size(p.dtype);
  const bool narrow = p.weight_type == WeightType::float8_e4m3;
  return aligned_rows(p.weight, p.weight_stride, 0, narrow ? 1 : size) &&
         aligned_rows(p.hidden, p.hidden_stride, 0, size);
}

}  // namespace fuselage
