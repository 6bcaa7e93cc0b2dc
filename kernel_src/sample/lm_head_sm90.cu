// The draw from a language-model head on Hopper GPUs (see sample/sample.h), for float16 and
// bfloat16, and for weights of float8 beside hidden of these.
//
// The vocabulary is the M of the matrix product, the batch its N, and the accumulators stay in
// registers from the first step of the depth to the last. A block has two or three consumer
// warpgroups, which multiply 64 rows each; a producer warp; and three bounds warps. The blocks of a
// cluster have rows of their own, and share the tiles of hidden.
//
// Blocks are persistent. The vocabulary is cut into tiles that differ by 16 rows at most, the same
// number for each block: all end together.
//
//   producer           fills the ring of stages by TMA             lm_head_sm90_producer.h
//   consumers          multiply by wgmma                           lm_head_sm90_consumer.h
//     their epilogue   queues candidates, or writes logits         lm_head_sm90_epilogue.h
//                      adds up weights                             lm_head_sm90_weights.h
//   bounds warps       bound the noise, and score candidates       lm_head_sm90_bounds.h
//     or               write the maxima of strips                  lm_head_sm90_strips.h
//
// The mbarriers. `full` and `empty` are one for each stage of the ring; `bounds_full` and
// `bounds_empty` one for each of two buffers, which hold the bounds of a tile, or the maxima of its
// strips. Who arrives is in parentheses:
//
//   +----------+  full (TMA, by bytes)  +-----------+  bounds_full (3 bounds warps)  +--------+
//   |          | ---------------------> |           | <----------------------------- |        |
//   |          |                        |           |  bounds_empty (consumer warps) |        |
//   | producer |                        | consumers | -----------------------------> | bounds |
//   |          | <--------------------- |           |  queue_empty (3 bounds warps)  |        |
//   +----------+  empty (the cluster's  +-----------+ <----------------------------- +--------+
//                 consumer warps)
//
//   a draw, of each sample of each tile:        logits for filters, of each tile:
//     bounds     make bounds                      consumers  write logits, and maxima to the buffer
//                arrive at bounds_full                       arrive at bounds_empty
//     consumers  queue candidates                 bounds     copy the maxima to global memory
//                arrive at bounds_empty                      arrive at bounds_full
//     bounds     score the candidates
//                arrive at queue_empty
//
// A draw: the noise of 16 rows of a column has an upper bound, which is known before the logits
// are. So for most logits a comparison shows that their scores are below the best score of the row
// so far, the threshold, which all blocks share. The others are candidates: the bounds warps score
// them exactly, while the consumers multiply the next tile.
//
// For log-probabilities, of a draw (lm_head_sm90_sums.cu) or of targets, the sums of strips of 16
// weights are written. Of these alone, and of logits, two groups of 256 columns share the tiles of
// the weight.
//
// For filters, logits are written, and the maximum of each strip of 16, which tells
// sample_strips.cu what it need not read. But writes cost time, also of the reads of weights: each
// tile raises a threshold of its rows of the batch, and later strips below it are not written.
//
// A logit is accumulated in the order of the depth, whatever the batch and the tile. The best
// score, of equals the one of the lowest index, has no order. So a draw depends on neither.
#include "sample/lm_head_sm90.h"

#include <cuda.h>

#include <algorithm>
#include <type_traits>

#include "common/driver_function.h"
#include "common/launch_policy.h"
#include "sample/lm_head_sm90_bounds.h"
#include "sample/lm_head_sm90_consumer.h"
#include "sample/lm_head_sm90_prepare.h"
#include "sample/lm_head_sm90_producer.h"
#include "sample/lm_head_sm90_strips.h"

namespace fuselage {
namespace gpu {
namespace {

// ---- the kernel ----

template <typename T, int kColumns, int kCluster, bool kFloat8>
__global__ void __launch_bounds__(threads_of(kColumns, kFloat8), 1)
    lm_head_kernel(const __grid_constant__ CUtensorMap weight_more,  // the rows of larger tiles
                   const __grid_constant__ CUtensorMap weight_less,  // 16 fewer
                   const __grid_constant__ CUtensorMap hidden_tile,  // a block's part of a stage
                   const __grid_constant__ HeadDraw p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Own = Traits<T, kColumns, kCluster, kFloat8>;
  extern __shared__ __align__(1024) char shared[];
  const Block<Own> block(shared);
  // NOTE: of a shuffle the compiler knows that it is uniform.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int rank = kCluster > 1 ? cluster_rank() : 0;

  if (threadIdx.x == 0) {
    prefetch_tensormap(weight_more);
    prefetch_tensormap(weight_less);
    prefetch_tensormap(hidden_tile);
    block.init_barriers();
    if (block.stages % 1024 != 0) __trap();  // the swizzle goes by address
  }
  const Share share = Share::of<Own>(p, rank);
  block.init_columns(p, share.first_column);
  __syncthreads();
  if (kCluster > 1) cluster_sync();

  if (warp >= Own::kConsumerWarps) {
    setmaxnreg_dec<Own::kRegisters.others>();
    const int thread = threadIdx.x - 32 * (Own::kConsumerWarps + 1);  // of the bounds warps
    if (warp == Own::kConsumerWarps && lane == 0) {
      produce(p, block, TensorMaps{weight_more, weight_less, hidden_tile}, share, rank);
    }
    if (warp > Own::kConsumerWarps && p.out.strips.maxima != nullptr) {
      run_strips_warps(p, block, thread);
    }
    if (warp > Own::kConsumerWarps && p.draws_samples()) run_bounds_warps(p, block, thread);
  } else {
    setmaxnreg_inc<Own::kRegisters.consumer>();
    consume(p, block, share, warp, lane);
  }
  __syncthreads();
  if (p.draws_samples()) {
    for (int i = threadIdx.x; i < p.num_samples * kColumns; i += Own::kThreads) {
      p.candidates[int64_t{blockIdx.x} * p.num_samples * kColumns + i] = block.columns.best[i];
    }
  }
  launch_dependents();
  // The other blocks write to this one's shared memory as long as they run.
  if (kCluster > 1) cluster_sync();
#endif
}

// ---- launchers ----

// The columns of a launch: the fewest that `batch` rows fit into.
int columns_of(int64_t batch, bool float8) {
  if (batch <= 8 && !float8) return 8;
  for (const int columns : {16, 32, 64, 128}) {
    if (batch <= columns) return columns;
  }
  return 256;
}

// The most columns beside which so many samples fit into shared memory; 0 if there are too many
// samples. It may not depend on the batch, nor may whether this kernel serves: a row's draw does
// not.
constexpr int max_columns(int num_samples) {
  return num_samples <= max_samples(256)   ? 256
         : num_samples <= max_samples(128) ? 128
         : num_samples <= max_samples(32)  ? 32
                                           : 0;
}

// With float8, hidden is twice the share of what is read.
constexpr int cluster_of(int columns, bool float8) { return columns <= (float8 ? 16 : 32) ? 1 : 2; }

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Null if the driver has none.
EncodeTiled encode_tiled() {
  static const EncodeTiled function =
      reinterpret_cast<EncodeTiled>(gpu_driver_function("cuTensorMapEncodeTiled", 12000));
  return function;
}

struct Matrix {
  const void* data;  // [rows, dim]
  CUtensorMapDataType type;
  int element_bytes;
  int64_t rows, dim, stride;
};

// Tiles of `tile_rows` rows, of 128 or 64 bytes.
bool encode(CUtensorMap* map, const Matrix& matrix, int tile_rows, int tile_dim) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(matrix.dim),
                               static_cast<cuuint64_t>(matrix.rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(matrix.stride) * matrix.element_bytes};
  const cuuint32_t tile[2] = {static_cast<cuuint32_t>(tile_dim),
                              static_cast<cuuint32_t>(tile_rows)};
  const cuuint32_t steps[2] = {1, 1};
  return encode_tiled()(map, matrix.type, 2, const_cast<void*>(matrix.data), sizes, strides, tile,
                        steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        tile_dim * matrix.element_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B
                                                               : CU_TENSOR_MAP_SWIZZLE_64B,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Of a single row the stride may be anything.
int64_t stride_of(int64_t stride, int64_t rows, int64_t dim) {
  return rows <= 1 ? ceil_div(dim, 16) * 16 : stride;
}

bool is_float8(const LmHead& head) { return head.weight_type == WeightType::float8_e4m3; }

// Bytes of the tiles of hidden for so many columns, and of their scales.
int64_t hidden_tiles_bytes(const LmHead& head, int columns) {
  return is_float8(head) ? (ceil_div(head.dim, kFloat8Depth) * kFloat8Depth * 2 + 4) * columns : 0;
}

// The groups of columns of a launch for so many rows of the batch. With one, 256 rows read the
// weight from memory each time, and wait for it: of 3072 rows of 4096 and 151936 of bfloat16 each
// 256 took 554 us on an H100, 471 with two groups and 472 with three; by cuBLAS 256 rows take 590,
// 512 rows twice 493. Draws, strips and float8 are made for one.
int groups_for(const HeadDraw& p, int64_t rows, bool float8) {
  constexpr int kMostGroups = 2, kColumns = 256;
  if (p.draws_samples() || p.out.strips.maxima != nullptr || float8) return 1;
  // A last group of few rows is for a launch with fewer columns.
  return rows > kColumns + 128 ? kMostGroups : 1;
}

// Of a group.
int blocks_for(const DeviceInfo& device, int64_t units, int cluster, int groups) {
  const int64_t clusters = std::min<int64_t>(std::max(device.multiprocessors / cluster / groups, 1),
                                             std::max<int64_t>(ceil_div(units, cluster), 1));
  return static_cast<int>(clusters) * cluster;
}

template <typename T, int kColumns, bool kFloat8>
const char* launch(const LmHead& head, HeadDraw p, uint4* hidden_tiles, int blocks,
                   gpuStream stream) {
  constexpr int kCluster = cluster_of(kColumns, kFloat8);
  constexpr int kDepth = depth_of(kColumns, kFloat8);
  constexpr int kHiddenRows = hidden_rows(kColumns, kFloat8);
  constexpr int kShared = shared_bytes_of(kColumns, kFloat8);
  static_assert(kShared <= kWgmmaSharedBytes, "the stages leave room for the rest");
  static_assert(stages_of(kColumns, kFloat8) >= 4, "three stages are too few to hide latency");
  const CUtensorMapDataType type = std::is_same_v<T, __nv_bfloat16>
                                       ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                       : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const int64_t hidden_stride = stride_of(head.hidden_stride, head.batch, head.dim);
  const uint16_t* from =
      static_cast<const uint16_t*>(head.hidden) + int64_t{p.batch_start} * hidden_stride;
  const Matrix weight{head.weight,     kFloat8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : type,
                      kFloat8 ? 1 : 2, head.vocab,
                      head.dim,        stride_of(head.weight_stride, head.vocab, head.dim)};
  const Matrix hidden = kFloat8
                            ? Matrix{hidden_tiles, type,        2, int64_t{p.steps} * kHiddenRows,
                                     kHiddenDepth, kHiddenDepth}
                            : Matrix{from, type, 2, p.batch, head.dim, hidden_stride};
  CUtensorMap weight_more, weight_less, hidden_tile;
  const int max_rows = static_cast<int>(ceil_div(p.units, p.tiles)) * kUnitRows;
  if (!encode(&weight_more, weight, max_rows, kDepth) ||
      !encode(&weight_less, weight, std::max(max_rows - kUnitRows, kUnitRows), kDepth) ||
      !encode(&hidden_tile, hidden, kHiddenRows / kCluster, kHiddenDepth)) {
    return "cuTensorMapEncodeTiled failed";
  }
  const auto kernel = lm_head_kernel<T, kColumns, kCluster, kFloat8>;
  gpuError error = gpu_allow_shared_memory(reinterpret_cast<const void*>(kernel));
  if (error != gpuSuccess) return message_of(gpu_launched(error));
  // They serve the tiles after the first of each block.
  p.finds_thresholds = p.out.strips.thresholds != nullptr && p.tiles > blocks;
  if (p.finds_thresholds) p.arrived = p.out.strips.thresholds + head.batch + p.batch_start;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kCluster, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  const Strips& strips = p.out.strips;
  Cleared cleared{};
  if (p.draws_samples()) {
    cleared = {p.shared_thresholds, p.num_samples * (kColumns + 1), nullptr};
  } else if (strips.maxima != nullptr && p.batch_start == 0) {  // what all launches share
    cleared = {strips.fallback, static_cast<int>(Strips::words(head.batch)), p.out.offset};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads_of(kColumns, kFloat8));
  config.dynamicSmemBytes = kShared;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = kFloat8 || cleared.count > 0 ? 2 : 1;
  if (kFloat8) {
    HiddenTiles tiles{};
    tiles.hidden = from;
    tiles.is_bfloat16 = head.dtype == DType::bfloat16;
    tiles.stride = hidden_stride;
    tiles.dim = head.dim;
    tiles.batch = p.batch;
    tiles.columns = kColumns;
    tiles.blocks = p.steps * (kDepth / 16);
    tiles.tiles = hidden_tiles;
    tiles.scales = reinterpret_cast<float*>(hidden_tiles + int64_t{tiles.blocks} * kColumns * 2);
    tiles.cleared = cleared;
    p.hidden_scales = tiles.scales;
    error =
        gpu_launch_after(hidden_tiles_kernel, dim3(kColumns), dim3(kTilesThreads), stream, tiles);
  } else if (cleared.count > 0) {
    error = gpu_launch_after(clear_kernel, dim3(1), dim3(256), stream, cleared);
  }
  if (error != gpuSuccess) return message_of(error);
  return message_of(
      gpu_launched(cudaLaunchKernelEx(&config, kernel, weight_more, weight_less, hidden_tile, p)));
}

template <typename T, bool kFloat8>
const char* launch_columns(int columns, const LmHead& head, const HeadDraw& p, uint4* hidden_tiles,
                           int blocks, gpuStream stream) {
  switch (columns) {
    // NOTE: columns_of has no 8 for float8.
    case 8: return launch<T, kFloat8 ? 16 : 8, kFloat8>(head, p, hidden_tiles, blocks, stream);
    case 16: return launch<T, 16, kFloat8>(head, p, hidden_tiles, blocks, stream);
    case 32: return launch<T, 32, kFloat8>(head, p, hidden_tiles, blocks, stream);
    case 64: return launch<T, 64, kFloat8>(head, p, hidden_tiles, blocks, stream);
    case 128: return launch<T, 128, kFloat8>(head, p, hidden_tiles, blocks, stream);
    default: return launch<T, 256, kFloat8>(head, p, hidden_tiles, blocks, stream);
  }
}

template <bool kFloat8>
const char* launch_type(int columns, const LmHead& head, const HeadDraw& p, uint4* hidden_tiles,
                        int blocks, gpuStream stream) {
  if constexpr (!kFloat8) {
    if (head.dtype == DType::bfloat16)
      return launch_columns<__nv_bfloat16, false>(columns, head, p, hidden_tiles, blocks, stream);
  }
  return launch_columns<__half, kFloat8>(columns, head, p, hidden_tiles, blocks, stream);
}

// Launches for as many rows of the batch as fit, and what comes after each.
template <typename After>
const char* for_each_launch(const LmHead& head, HeadDraw p, uint4* hidden_tiles, int device,
                            gpuStream stream, After after) {
  const DeviceInfo& info = device_info(device);
  p.vocab = static_cast<int>(head.vocab);
  p.first_row = -static_cast<int>(p.vocab_offset % kNoiseGroup);
  p.units = static_cast<int>(ceil_div(head.vocab - p.first_row, kUnitRows));
  p.weight_scale = head.weight_scale;
  p.scale_per_row = head.scale_per_row;
  p.bias = head.bias;
  p.bias_dtype = head.bias_dtype;
  p.softcap = head.softcap;
  const int most = max_columns(p.num_samples);
  const bool float8 = is_float8(head);
  for (int64_t start = 0; start < head.batch; start += p.batch) {
    const int64_t rows = head.batch - start;
    p.groups = groups_for(p, rows, float8);
    p.batch_start = static_cast<int>(start);
    p.batch = static_cast<int>(std::min<int64_t>(rows, int64_t{most} * p.groups));
    const int columns = columns_of(p.batch, float8);
    const int blocks = blocks_for(info, p.units, cluster_of(columns, float8), p.groups);
    const int depth = depth_of(columns, float8);
    // NOTE: float8: as many zeros are added for any batch.
    p.steps = static_cast<int>(float8 ? ceil_div(head.dim, kFloat8Depth) * (kFloat8Depth / depth)
                                      : ceil_div(head.dim, depth));
    p.tiles = static_cast<int>(
                  ceil_div(p.units, int64_t{blocks} * (tile_rows(columns, float8) / kUnitRows))) *
              blocks;
    const int all = blocks * p.groups;
    const char* error = float8 ? launch_type<true>(columns, head, p, hidden_tiles, all, stream)
                               : launch_type<false>(columns, head, p, hidden_tiles, all, stream);
    if (error == nullptr) error = after(p, columns, all);
    if (error != nullptr) return error;
  }
  return nullptr;
}

const char* launch_without_draws(const LmHead& head, const HeadDraw& p, void* workspace, int device,
                                 void* stream) {
  return for_each_launch(head, p, static_cast<uint4*>(workspace), device,
                         static_cast<gpuStream>(stream),
                         [](const HeadDraw&, int, int) -> const char* { return nullptr; });
}

// The columns of the largest launch.
int largest_columns(const LmHead& head, int num_samples) {
  return columns_of(std::min<int64_t>(head.batch, max_columns(num_samples)), is_float8(head));
}

// Its columns and samples, and those of all blocks.
int64_t entries_of(const LmHeadSample& p) {
  return int64_t{largest_columns(p.head, p.draws.num_samples)} * p.draws.num_samples;
}
int64_t candidates_of(const LmHeadSample& p, int device) {
  return entries_of(p) * device_info(device).multiprocessors;
}

}  // namespace

bool lm_head_sm90_serves(const LmHead& p, int device) {
  return has_wgmma_form(device_info(device), p) && encode_tiled() != nullptr;
}

bool lm_head_sm90_serves(const LmHeadSample& p, int device) {
  const bool wants_logits = p.results.needs_sums() || p.results.logits != nullptr;
  return max_columns(p.draws.num_samples) > 0 && (p.logits != nullptr || !wants_logits) &&
         lm_head_sm90_serves(p.head, device);
}

int64_t lm_head_sample_sm90_workspace(const LmHeadSample& p, int device) {
  return hidden_tiles_bytes(p.head, largest_columns(p.head, p.draws.num_samples)) +
         candidates_of(p, device) * 8 + (entries_of(p) + p.draws.num_samples) * 4;
}

const char* lm_head_sample_sm90(const LmHeadSample& p, int device, void* stream) {
  HeadDraw draw{};
  draw.vocab_offset = p.draws.vocab_offset;
  draw.num_samples = p.draws.num_samples;
  draw.draws = p.draws;
  draw.sums.strips = p.strips;
  draw.drawn_logits = p.logits;
  draw.drawn_stride = p.logits_stride;
  char* after_tiles = static_cast<char*>(p.workspace) +
                      hidden_tiles_bytes(p.head, largest_columns(p.head, p.draws.num_samples));
  draw.candidates = reinterpret_cast<unsigned long long*>(after_tiles);
  draw.shared_thresholds = reinterpret_cast<uint32_t*>(draw.candidates + candidates_of(p, device));
  const gpuStream on = static_cast<gpuStream>(stream);
  const char* error =
      for_each_launch(p.head, draw, static_cast<uint4*>(p.workspace), device, on,
                      [&](const HeadDraw& launched, int columns, int blocks) {
                        Finish finish{};
                        finish.candidates = launched.candidates;
                        finish.blocks = blocks;
                        finish.columns = columns;
                        finish.batch = launched.batch;
                        finish.num_samples = launched.num_samples;
                        finish.batch_start = launched.batch_start;
                        finish.vocab_offset = launched.vocab_offset;
                        finish.tokens = p.results.tokens;
                        finish.scores = p.results.scores;
                        // One for all rows is read by all launches.
                        const bool last = launched.batch_start + launched.batch == p.head.batch;
                        finish.offset_per_row = p.draws.offset_per_row;
                        finish.offset_stride = p.draws.offset_stride;
                        finish.offsets = p.draws.offset_per_row || last ? p.draws.offsets : nullptr;
                        const int64_t warps = int64_t{launched.batch} * launched.num_samples;
                        return message_of(gpu_launch_after(
                            head_finish_kernel,
                            dim3(static_cast<unsigned>(ceil_div(warps, kHeadFinishThreads / 32))),
                            dim3(kHeadFinishThreads), on, finish));
                      });
  return error != nullptr || p.logits == nullptr ? error
                                                 : lm_head_draw_sums_sm90(p, device, stream);
}

const char* lm_head_sums_sm90(const LmHead& p, const HeadSums& out, void* workspace, int device,
                              void* stream) {
  HeadDraw draw{};
  draw.sums = out;
  return launch_without_draws(p, draw, workspace, device, stream);
}

int64_t lm_head_logits_sm90_workspace(const LmHead& p) {
  return hidden_tiles_bytes(p, largest_columns(p, 0));
}

const char* lm_head_logits_sm90(const LmHead& p, const HeadLogits& out, void* workspace, int device,
                                void* stream) {
  HeadDraw draw{};
  draw.out = out;
  return launch_without_draws(p, draw, workspace, device, stream);
}

}  // namespace gpu
}  // namespace fuselage
