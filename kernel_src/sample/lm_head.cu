// The language-model head on any GPU: formulas in sample/sample.h.
//
// A block has a tile of kHeadRows rows of the weight and up to 128 rows of the batch. Half types go through the
// tensor cores: the vocabulary is the M of the product and the batch its N, so that a small batch wastes little;
// weights come through a ring of stages in shared memory. Each product has one accumulator, to which columns are
// added in ascending order, so that a logit does not depend on the batch, the tile or the shard.
//
// The tile's logits are turned over in shared memory, and either written, or drawn from at once: a warp has a row of
// the batch, a lane four logits of a group of noise. Each tile leaves a candidate; a second kernel takes the best.
// Tiles that are finished tell the others the best score of a row, below which no logarithm need be taken.
//
// Weights of float8 become those of a half type on their way into the tensor cores, which is exact.
//
// Float32 has a kernel without tensor cores, and AMD GPUs one for all types.

#if !defined(USE_ROCM)
#include "sample/fragments.h"
#include "sample/lm_head_sm90.h"
#endif
#include "sample/sample_draw.h"

namespace fuselage {
namespace {

// What becomes of the logits: they are written, or drawn from.
struct HeadOutput {
  float* logits;  // [batch, vocab], or null
  int64_t stride;
  Candidate* candidates;  // [batch, tiles, num_samples]
  uint32_t* floors;       // [batch, num_samples]: key of the best score so far, or 0; or null
  int64_t tiles;
  Draws draws;
};

// ---- from a sum to a logit ----

__device__ __forceinline__ float product(float a, float b) {
#if defined(USE_ROCM)
  return __builtin_fmaf(a, b, -0.0f);
#else
  return __fmul_rn(a, b);
#endif
}

__device__ __forceinline__ float logit_of_sum(const LmHead& p, float sum, int64_t vocab) {
  if (p.weight_scale != nullptr) sum = product(sum, p.weight_scale[p.scale_per_row ? vocab : 0]);
  if (p.bias != nullptr) sum += element_of(p.bias, p.bias_dtype, vocab);
  if (p.softcap != 0.0f) sum = soft_capped<SampleMath>(sum, p.softcap);
  return sum;
}

// ---- the epilogue ----

// Sums of a tile, [columns, kHeadRows + kHeadPad] in shared memory: a row of the batch is one of it.
constexpr int kHeadPad = 4;
constexpr int kHeadSumsStride = kHeadRows + kHeadPad;

// What the draws of a row of the batch need, fetched before the sums are there.
struct RowOptions {
  NoiseKey key;
  Heat heat;
  uint32_t floor;  // what a score must reach: the key of the best of a tile before, or 0
};

// All threads of the block; a barrier must follow.
__device__ __forceinline__ void fetch_options(const LmHead& p, const HeadOutput& out,
                                              RowOptions* options, int64_t first_row, int columns) {
  if (out.logits != nullptr) return;
  for (int b = threadIdx.x; b < columns; b += blockDim.x) {
    if (first_row + b < p.batch) {
      options[b] = {key_of_row(out.draws, first_row + b), heat_of(out.draws, first_row + b), 0};
    }
  }
}

__device__ __forceinline__ void fetch_floors(const LmHead& p, const HeadOutput& out,
                                             RowOptions* options, int64_t first_row, int columns,
                                             int sample) {
  for (int b = threadIdx.x; b < columns; b += blockDim.x) {
    if (first_row + b >= p.batch) return;
    const volatile uint32_t* floors = out.floors;  // which other blocks write
    options[b].floor = floors[(first_row + b) * out.draws.num_samples + sample];
  }
}

// Of a warp, for one row of the batch.
__device__ __forceinline__ void write_logits(const HeadOutput& out, const float* logits,
                                             int64_t row, int64_t first, int count) {
  float* to = out.logits + row * out.stride + first;
  for (int i = threadIdx.x % kWarpSize; i < count; i += kWarpSize) to[i] = logits[i];
}

// The vocabulary of a tile. Groups of noise start at multiples of their size in the whole vocabulary: the first may begin
// `before` logits before the tile.
struct Stretch {
  int64_t begin;  // in the whole vocabulary
  int before, count;
};

// body(at, logits) of four logits for each lane, from number `at` of the tile on, -inf where there are none. All lanes
// call the body equally often.
template <int kRows, typename Body>
__device__ __forceinline__ void for_each_four(const Stretch& stretch, const float* tile,
                                              Body body) {
#pragma unroll 1
  for (int first = -stretch.before; first < stretch.count; first += 4 * kWarpSize) {
    const int at = first + 4 * static_cast<int>(threadIdx.x % kWarpSize);
    float logits[kRows][4];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float* from = tile + i * kHeadSumsStride + at;
      if (stretch.before == 0) {
        const float4 vector = *reinterpret_cast<const float4*>(from);
        logits[i][0] = vector.x, logits[i][1] = vector.y;
        logits[i][2] = vector.z, logits[i][3] = vector.w;
      } else {
#pragma unroll
        for (int k = 0; k < 4; ++k)
          logits[i][k] = at + k >= 0 && at + k < stretch.count ? from[k] : minus_infinity();
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const bool there = at + k < stretch.count && logits[i][k] == logits[i][k];
        logits[i][k] = there ? logits[i][k] : minus_infinity();
      }
    }
    body(at, logits);
  }
}

// Whether any logit of the kFours rows from `rows` on may reach its floor: a bit for each row, in all lanes.
constexpr int kFours = kNoiseGroup / 4;

__device__ __forceinline__ uint32_t rows_that_may_win(const Stretch& stretch,
                                                      const RowOptions* options, const float* tile,
                                                      int sample) {
  // The lanes that share a group make its noise for a row each.
  const int lane = threadIdx.x % kWarpSize;
  const RowOptions& own = options[lane % kFours];
  bool may[kFours] = {};
  for_each_four<kFours>(stretch, tile, [&](int at, const float(&logits)[kFours][4]) {
    float bound = 0.0f;
    if (!own.heat.greedy) {
      const int64_t group = group_of(stretch.begin + at);
      bound = noise_bound<SampleMath>(noise_group(own.key, group, sample).least) * own.heat.unit;
    }
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const float greatest =
          fmaxf(fmaxf(logits[i][0], logits[i][1]), fmaxf(logits[i][2], logits[i][3]));
      const float noise = shuffle_from(bound, lane / kFours * kFours + i, kWarpSize);
      const float most = SampleMath::fma(greatest, options[i].heat.scale, noise);
      may[i] |= most >= value_or_none(options[i].floor) && most > minus_infinity();
    }
  });
  uint32_t rows = 0;
#pragma unroll
  for (int i = 0; i < kFours; ++i) rows |= warp_any(may[i]) ? 1u << i : 0u;
  return rows;
}

// The best of a row, in every lane.
__device__ __forceinline__ Candidate draw_row(const Stretch& stretch, RowOptions& options,
                                              uint32_t floor, const float* tile, int first,
                                              int sample) {
  Drawing<MadeKeys> drawing{};
  drawing.key = options.key;
  drawing.scale = options.heat.scale;
  drawing.unit = options.heat.unit;
  drawing.sample = sample;
  drawing.shared_floor = &options.floor;
  drawing.best = no_candidate();
  drawing.floor = value_or_none(floor);
  for_each_four<1>(stretch, tile, [&](int at, const float(&logits)[1][4]) {
    if (!options.heat.greedy) {
      drawing.draw(logits[0], stretch.begin + at, first + at);
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) offer(drawing.best, logits[0][k], logits[0][k], first + at + k);
    }
  });
  return warp_best(drawing.best);
}

// All threads of the block, when the sums are there.
__device__ __forceinline__ void finish_tile(const LmHead& p, const HeadOutput& out,
                                            RowOptions* options, float* tile, int64_t first,
                                            int64_t first_row, int columns) {
  const int count = static_cast<int>(p.vocab - first < kHeadRows ? p.vocab - first : kHeadRows);
  const int warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int rows = static_cast<int>(p.batch - first_row < columns ? p.batch - first_row : columns);
  if (p.weight_scale != nullptr || p.bias != nullptr || p.softcap != 0.0f) {
    for (int b = warp; b < rows; b += warps) {
#pragma unroll 1
      for (int i = lane; i < count; i += kWarpSize)
        tile[b * kHeadSumsStride + i] = logit_of_sum(p, tile[b * kHeadSumsStride + i], first + i);
    }
    __syncthreads();
  }
  if (out.logits != nullptr) {
    for (int b = warp; b < rows; b += warps)
      write_logits(out, tile + b * kHeadSumsStride, first_row + b, first, count);
    return;
  }
  const int64_t begin = out.draws.vocab_offset + first;
  const Stretch stretch{begin, static_cast<int>(begin % kNoiseGroup), count};
  // Of so many rows at once it is found out whether they may win.
  const int ahead = out.floors == nullptr ? 1 : kFours;
#pragma unroll 1
  for (int sample = 0; sample < out.draws.num_samples; ++sample) {
    if (out.floors != nullptr) {
      if (sample != 0) __syncthreads();
      fetch_floors(p, out, options, first_row, columns, sample);
      __syncthreads();
    }
#pragma unroll 1
    for (int b = warp * ahead; b < rows; b += warps * ahead) {
      const uint32_t may_win =
          out.floors == nullptr
              ? ~0u
              : rows_that_may_win(stretch, options + b, tile + b * kHeadSumsStride, sample);
#pragma unroll 1
      for (int i = 0; i < ahead && b + i < rows; ++i) {
        const int64_t row = first_row + b + i;
        Candidate best = no_candidate();
        if ((may_win >> i & 1) != 0) {
          RowOptions& own = options[b + i];
          // NOTE: without floors, what stands there is of the sample before.
          best = draw_row(stretch, own, out.floors == nullptr ? 0 : own.floor,
                          tile + (b + i) * kHeadSumsStride, static_cast<int>(first), sample);
        }
        if (lane != 0) continue;
        out.candidates[(row * out.tiles + first / kHeadRows) * out.draws.num_samples + sample] =
            best;
        if (out.floors != nullptr && best.index != kNoIndex)
          atomicMax(out.floors + row * out.draws.num_samples + sample,
                    key_of<SampleMath>(best.score));
      }
    }
  }
}

// ---- tensor cores ----

#if !defined(USE_ROCM)

// Where a chunk of 16 bytes of a row of kChunks lies: turned, so that eight rows have it in different banks.
template <int kChunks>
__device__ __forceinline__ uint32_t chunk_at(int row, int chunk) {
  constexpr int kRowsOfLine = 8 / kChunks;
  return static_cast<uint32_t>(row * kChunks + (chunk ^ (row / kRowsOfLine % kChunks))) * 16;
}

__device__ __forceinline__ void store_word(uint32_t shared, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared), "r"(word) : "memory");
}

__device__ __forceinline__ int last_of(int64_t left, int count) {
  return static_cast<int>(left < count ? left : count) - 1;
}

// Starts the copy of kRows rows of a matrix into a stage: columns [column, column + kChunks * 16 / sizeof(E)), of
// which those from dim on are zero. Behind row `last` it is that row again, whose sums nobody reads. Rows that are not
// aligned to 16 bytes come by the word, or through registers.
template <int kRows, int kChunks, int kThreads, bool kAligned, typename E>
__device__ __forceinline__ void copy_rows(uint32_t shared, const E* matrix, int64_t stride,
                                          int last, int64_t column, int64_t dim) {
  constexpr int kSize = static_cast<int>(sizeof(E));
  constexpr int kPart = kAligned ? 16 : 4;  // bytes
  constexpr int kParts = kChunks * 16 / kPart, kSlots = kRows * kParts;
  constexpr int kTurns = (kSlots + kThreads - 1) / kThreads;
  static_assert(kThreads % kParts == 0, "a thread has the same columns of all its rows");
  const int part = threadIdx.x % kParts, row = threadIdx.x / kParts;
  const int64_t own = column + part * (kPart / kSize);
  const int64_t left = (dim - own) * kSize;
  const int bytes = static_cast<int>(left < 0 ? 0 : left < kPart ? left : kPart);
  const E* from = matrix + (bytes > 0 ? own : 0);
  const auto source = [&](int i) {
    const int at = row + i * (kThreads / kParts);
    return from + (at < last ? at : last) * stride;
  };
  const auto to = [&](int i) {
    const int at = row + i * (kThreads / kParts);
    return shared + chunk_at<kChunks>(at, part * kPart / 16) + part * kPart % 16;
  };
  const auto has = [&](int i) {
    return kSlots % kThreads == 0 || row + i * (kThreads / kParts) < kRows;
  };
  if constexpr (kAligned) {
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      if (has(i)) cp_async_zfill_16(to(i), source(i), bytes);
    }
  } else if (kSize == 4 ||
             (reinterpret_cast<uintptr_t>(matrix) | static_cast<uintptr_t>(stride * kSize)) % 4 ==
                 0) {
#pragma unroll 8
    for (int i = 0; i < kTurns; ++i) {
      if (has(i)) cp_async_zfill_4(to(i), source(i), bytes);
    }
  } else if constexpr (kSize < 4) {
    constexpr int kBatch = kTurns < 8 ? kTurns : 8;  // loaded before the first is stored
    static_assert(kTurns % kBatch == 0, "whole batches");
#pragma unroll 1
    for (int i = 0; i < kTurns; i += kBatch) {
      using Bits = std::conditional_t<kSize == 2, uint16_t, uint8_t>;
      Bits elements[kBatch][4 / kSize] = {};
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
#pragma unroll
        for (int k = 0; k < 4 / kSize; ++k) {
          if (k * kSize < bytes) elements[j][k] = bits_as<Bits>(source(i + j)[k]);
        }
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        uint32_t word = 0;
#pragma unroll
        for (int k = 0; k < 4 / kSize; ++k)
          word |= static_cast<uint32_t>(elements[j][k]) << (k * kSize * 8);
        if (has(i + j)) store_word(to(i + j), word);
      }
    }
  }
}

template <typename T>
__device__ __forceinline__ void multiply(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  if constexpr (std::is_same_v<T, float16>) {
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

// Weights of float8 lie as they are, a step of 16 columns to a chunk.

__device__ __forceinline__ uint32_t load_pair(uint32_t shared) {
  uint16_t pair;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(pair) : "r"(shared) : "memory");
  return pair;
}

// Two numbers times a power of two.
template <typename T>
__device__ __forceinline__ uint32_t scale_pair(uint32_t pair, float scale) {
  if constexpr (std::is_same_v<T, float16>) {
    return bits_as<uint32_t>(__hmul2(bits_as<__half2>(pair), __float2half2_rn(scale)));
  } else {
    return bits_as<uint32_t>(__hmul2(bits_as<__nv_bfloat162>(pair), __float2bfloat162_rn(scale)));
  }
}

// Two float8_e4m3 in the lower half of a word as two T, exactly: exponent and mantissa are moved into place, and a
// multiplication corrects the exponent, subnormal or not.
template <typename T>
__device__ __forceinline__ uint32_t widened(uint32_t pair) {
  constexpr bool kIsHalf = std::is_same_v<T, float16>;
  const uint32_t apart = (pair & 0xffu) | (pair & 0xff00u) << 8;
  const uint32_t magnitude = apart & 0x007f007fu;
  const uint32_t nan = ((magnitude + 0x00010001u) >> 7 & 0x00010001u) * 0x7fffu;
  const uint32_t moved = (apart & 0x00800080u) << 8 | magnitude << (kIsHalf ? 7 : 4);
  return scale_pair<T>(moved, kIsHalf ? 256.0f : 1.329227995784916e36f) | nan;  // 2^8, 2^120
}

constexpr int weight_stage_bytes(HeadTile tile, bool narrow) {
  return kHeadRows * tile.step * (narrow ? 1 : 2);
}

constexpr int stage_bytes(HeadTile tile, bool narrow) {
  return weight_stage_bytes(tile, narrow) + tile.columns * tile.step * 2;
}

// The stages, or the sums that take their place; behind them the rows' options.
constexpr int options_at(HeadTile tile, bool narrow) {
  const int stages = tile.stages * stage_bytes(tile, narrow);
  const int sums = tile.columns * kHeadSumsStride * static_cast<int>(sizeof(float));
  return stages > sums ? stages : sums;
}

constexpr int head_shared_bytes(HeadTile tile, bool narrow) {
  return options_at(tile, narrow) + tile.columns * static_cast<int>(sizeof(RowOptions));
}

template <typename T, int kColumns, bool kAligned, bool kNarrow>
__global__ void __launch_bounds__(kHeadThreads, kAligned ? head_tile(kColumns, kNarrow).blocks : 2)
    head_kernel(const LmHead p, const HeadOutput out, const int batch_tiles) {
  extern __shared__ __align__(128) char shared_bytes[];
  constexpr HeadTile kTile = head_tile(kColumns, kNarrow);
  static_assert(head_shared_bytes(kTile, kNarrow) <= kHeadSharedBytes,
                "what a block may have on every GPU");
  constexpr int kWarpsDown = kHeadRows / kTile.warp_rows;
  static_assert(kWarpsDown * (kColumns / kTile.warp_columns) * kWarpSize == kHeadThreads,
                "every part of the tile has a warp");
  constexpr int kFragments = kTile.warp_rows / 16, kColumnFragments = kTile.warp_columns / 8;
  constexpr int kPairs = (kColumnFragments + 1) / 2;  // of column fragments
  constexpr int kTurns = kTile.step / 16;             // products of a stage
  static_assert(kTurns % 2 == 0, "fragments take turns");
  constexpr int kChunks = kTile.step / 8, kWeightChunks = kNarrow ? kChunks / 2 : kChunks;
  constexpr int kStageBytes = stage_bytes(kTile, kNarrow);
  constexpr int kWeightBytes = weight_stage_bytes(kTile, kNarrow);
  const int64_t first = int64_t{blockIdx.x / batch_tiles} * kHeadRows;
  const int64_t first_row = int64_t{blockIdx.x % batch_tiles} * kColumns;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int warp_row = warp % kWarpsDown * kTile.warp_rows;
  const int warp_column = warp / kWarpsDown * kTile.warp_columns;
  using W = std::conditional_t<kNarrow, uint8_t, T>;
  const W* weight = static_cast<const W*>(p.weight) + first * p.weight_stride;
  const T* hidden = static_cast<const T*>(p.hidden) + first_row * p.hidden_stride;
  const int last_weight = last_of(p.vocab - first, kHeadRows);
  const int last_hidden = last_of(p.batch - first_row, kColumns);
  const uint32_t shared = shared_address(shared_bytes);
  const int steps = static_cast<int>((p.dim + kTile.step - 1) / kTile.step);

  int filled = 0;        // steps that are started
  uint32_t filling = 0;  // where the next one goes
  const auto start_stage = [&] {
    if (filled < steps) {
      const uint32_t stage = shared + filling;
      const int64_t column = int64_t{filled} * kTile.step;
      copy_rows<kHeadRows, kWeightChunks, kHeadThreads, kAligned>(stage, weight, p.weight_stride,
                                                                  last_weight, column, p.dim);
      copy_rows<kColumns, kChunks, kHeadThreads, kAligned>(
          stage + kWeightBytes, hidden, p.hidden_stride, last_hidden, column, p.dim);
    }
    ++filled;
    filling = filling == (kTile.stages - 1) * kStageBytes ? 0 : filling + kStageBytes;
    cp_async_commit_group();
  };

  // Two sets: one is loaded while the other is multiplied.
  uint32_t a[2][kFragments][4], b[2][kPairs][4];
  const auto load_fragments = [&](int set, uint32_t stage, int turn) {
  // Of a: rows 0-7, rows 8-15, and both again eight columns on, as four matrices.
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      if constexpr (kNarrow) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = warp_row + f * 16 + lane / 4 + i % 2 * 8;
          a[set][f][i] =
              load_pair(stage + chunk_at<kWeightChunks>(row, turn) + lane % 4 * 2 + i / 2 * 8);
        }
      } else {
        const int row = warp_row + f * 16 + lane % 16;
        ldmatrix_x4(stage + chunk_at<kChunks>(row, turn * 2 + lane / 16), a[set][f]);
      }
    }
    // Of b: eight rows of the batch, both halves of the columns, and the next eight. Where there are but eight
    // rows, the upper lanes' addresses are those of the lower ones again.
#pragma unroll
    for (int c = 0; c < kPairs; ++c) {
      const int upper = kColumnFragments == 1 ? 0 : lane / 16 * 8;
      const int row = warp_column + c * 16 + upper + lane % 8;
      ldmatrix_x4(stage + kWeightBytes + chunk_at<kChunks>(row, turn * 2 + lane / 8 % 2),
                  b[set][c]);
    }
  };

  RowOptions* options = reinterpret_cast<RowOptions*>(shared_bytes + options_at(kTile, kNarrow));
  fetch_options(p, out, options, first_row, kColumns);
  float sums[kFragments][kColumnFragments][4] = {};
#pragma unroll
  for (int i = 0; i < kTile.stages - 1; ++i) start_stage();
  cp_async_wait_group(kTile.stages - 2);
  __syncthreads();
  uint32_t reading = 0;
  load_fragments(0, shared, 0);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (turn == kTurns - 1) {
        // The next stage is there, and nobody reads the one before any more.
        reading = reading == (kTile.stages - 1) * kStageBytes ? 0 : reading + kStageBytes;
        cp_async_wait_group(kTile.stages - 2);
        __syncthreads();
      }
      load_fragments((turn + 1) % 2, shared + reading, (turn + 1) % kTurns);
      if (turn == 0) start_stage();
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        uint32_t(&rows)[4] = a[turn % 2][f];
        if constexpr (kNarrow) {
#pragma unroll
          for (int i = 0; i < 4; ++i) rows[i] = widened<T>(rows[i]);
        }
#pragma unroll
        for (int c = 0; c < kColumnFragments; ++c) {
          const uint32_t(&columns)[4] = b[turn % 2][c / 2];
          multiply<T>(sums[f][c], rows, columns[c % 2 * 2], columns[c % 2 * 2 + 1]);
        }
      }
    }
  }
  cp_async_wait_group(0);
  __syncthreads();

  // Turned over: the stages are no longer needed.
  float* tile = reinterpret_cast<float*>(shared_bytes);
  float* own = tile + (warp_column + lane % 4 * 2) * kHeadSumsStride + warp_row + lane / 4;
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
#pragma unroll
    for (int c = 0; c < kColumnFragments; ++c) {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        own[(c * 8 + k % 2) * kHeadSumsStride + f * 16 + k / 2 * 8] = sums[f][c][k];
    }
  }
  __syncthreads();
  finish_tile(p, out, options, tile, first, first_row, kColumns);
  launch_dependents();
}

// ---- float32 ----

constexpr int float_stage_bytes(FloatTile tile) {
  return (kHeadRows + tile.columns) * kFloatStep * static_cast<int>(sizeof(float));
}

constexpr int float_options_at(FloatTile tile) {
  const int stages = tile.stages * float_stage_bytes(tile);
  const int sums = tile.columns * kHeadSumsStride * static_cast<int>(sizeof(float));
  return stages > sums ? stages : sums;
}

constexpr int float_shared_bytes(FloatTile tile) {
  return float_options_at(tile) + tile.columns * static_cast<int>(sizeof(RowOptions));
}

// A warp has neighbouring rows of the weight, each lane its own, and the same columns: their numbers are read by all
// lanes at once.
template <int kColumns>
__global__ void __launch_bounds__(float_tile(kColumns).threads, 2)
    float_head_kernel(const LmHead p, const HeadOutput out, const int batch_tiles,
                      const bool aligned) {
  extern __shared__ __align__(128) char shared_bytes[];
  constexpr FloatTile kTile = float_tile(kColumns);
  constexpr int kThreads = kTile.threads, kChunks = kFloatStep / 4;
  constexpr int kRowsEach = kTile.rows_each, kColumnsEach = kTile.columns_each;
  constexpr int kAcross = kHeadRows / kRowsEach;  // threads that share their columns
  static_assert(kAcross * (kColumns / kColumnsEach) == kThreads && kAcross % kWarpSize == 0,
                "every product has a thread, and a warp the same columns");
  constexpr int kStageBytes = float_stage_bytes(kTile);
  constexpr int kWeightBytes = kHeadRows * kFloatStep * static_cast<int>(sizeof(float));
  const int64_t first = int64_t{blockIdx.x / batch_tiles} * kHeadRows;
  const int64_t first_row = int64_t{blockIdx.x % batch_tiles} * kColumns;
  const float* weight = static_cast<const float*>(p.weight) + first * p.weight_stride;
  const float* hidden = static_cast<const float*>(p.hidden) + first_row * p.hidden_stride;
  const int last_weight = last_of(p.vocab - first, kHeadRows);
  const int last_hidden = last_of(p.batch - first_row, kColumns);
  const uint32_t shared = shared_address(shared_bytes);
  const int steps = static_cast<int>((p.dim + kFloatStep - 1) / kFloatStep);
  const int r = threadIdx.x % kAcross, c = threadIdx.x / kAcross * kColumnsEach;

  const auto copy_stage = [&](auto is_aligned, uint32_t stage, int64_t column) {
    copy_rows<kHeadRows, kChunks, kThreads, is_aligned>(stage, weight, p.weight_stride, last_weight,
                                                        column, p.dim);
    copy_rows<kColumns, kChunks, kThreads, is_aligned>(stage + kWeightBytes, hidden,
                                                       p.hidden_stride, last_hidden, column, p.dim);
  };
  const auto start_stage = [&](int step) {
    if (step < steps) {
      const uint32_t stage = shared + static_cast<uint32_t>(step % kTile.stages) * kStageBytes;
      const int64_t column = int64_t{step} * kFloatStep;
      if (aligned) {
        copy_stage(std::true_type{}, stage, column);
      } else {
        copy_stage(std::false_type{}, stage, column);
      }
    }
    cp_async_commit_group();
  };

  RowOptions* options = reinterpret_cast<RowOptions*>(shared_bytes + float_options_at(kTile));
  fetch_options(p, out, options, first_row, kColumns);
  float sums[kRowsEach][kColumnsEach] = {};
#pragma unroll 1
  for (int i = 0; i < kTile.stages - 1; ++i) start_stage(i);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    cp_async_wait_group(kTile.stages - 2);
    __syncthreads();
    start_stage(step + kTile.stages - 1);
    const char* stage = shared_bytes + step % kTile.stages * kStageBytes;
#pragma unroll 2
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      float4 w[kRowsEach];
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i)
        w[i] = *reinterpret_cast<const float4*>(stage + chunk_at<kChunks>(r + i * kAcross, chunk));
#pragma unroll
      for (int j = 0; j < kColumnsEach; ++j) {
        const float4 h = *reinterpret_cast<const float4*>(stage + kWeightBytes +
                                                          chunk_at<kChunks>(c + j, chunk));
#pragma unroll
        for (int i = 0; i < kRowsEach; ++i) {
          float sum = SampleMath::fma(w[i].x, h.x, sums[i][j]);
          sum = SampleMath::fma(w[i].y, h.y, sum);
          sum = SampleMath::fma(w[i].z, h.z, sum);
          sums[i][j] = SampleMath::fma(w[i].w, h.w, sum);
        }
      }
    }
  }
  cp_async_wait_group(0);
  __syncthreads();
  float* tile = reinterpret_cast<float*>(shared_bytes);
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
#pragma unroll
    for (int j = 0; j < kColumnsEach; ++j)
      tile[(c + j) * kHeadSumsStride + r + i * kAcross] = sums[i][j];
  }
  __syncthreads();
  finish_tile(p, out, options, tile, first, first_row, kColumns);
  launch_dependents();
}

#endif  // CUDA

// ---- for all GPUs ----

// float8_e4m3: four bits of exponent around 7, three of mantissa, and no infinities.
struct Float8 {
  uint8_t bits;
};

__device__ __forceinline__ float head_to_float(Float8 value) {
  const uint32_t bits = value.bits;
  if ((bits & 0x7f) == 0x7f) return __uint_as_float(0x7fc00000u);
  const float normal = __uint_as_float(((bits & 0x7f) << 20) + (120u << 23));
  const float magnitude = (bits & 0x78) == 0 ? static_cast<float>(bits & 7) * 0.001953125f : normal;
  return bits & 0x80 ? -magnitude : magnitude;
}

template <typename T>
__device__ __forceinline__ float head_to_float(T value) {
  return to_float(value);
}

// A thread has the sums of four rows of the weight and two of the batch.
template <typename T, typename W>
__global__ void __launch_bounds__(kPlainThreads, 2)
    plain_head_kernel(const LmHead p, const HeadOutput out, const int batch_tiles) {
  constexpr int kRowsEach = 4, kColumnsEach = 2;
  static_assert(kPlainRows == kHeadRows, "candidates are those of tiles of one size");
  static_assert(kPlainThreads == kPlainRows / kRowsEach * (kPlainColumns / kColumnsEach),
                "every product has a thread");
  __shared__ float weights[kPlainStep][kPlainRows + 4];
  __shared__ float hiddens[kPlainStep][kPlainColumns + 4];
  __shared__ __align__(16) float tile[kPlainColumns * kHeadSumsStride];
  __shared__ RowOptions options[kPlainColumns];
  const int64_t first = int64_t{blockIdx.x / batch_tiles} * kPlainRows;
  const int64_t first_row = int64_t{blockIdx.x % batch_tiles} * kPlainColumns;
  const W* weight = static_cast<const W*>(p.weight);
  const T* hidden = static_cast<const T*>(p.hidden);
  const int r = threadIdx.x % (kPlainRows / kRowsEach) * kRowsEach;
  const int c = threadIdx.x / (kPlainRows / kRowsEach) * kColumnsEach;
  // Of the next step, on their way while this one is computed.
  constexpr int kWeightsEach = kPlainRows * kPlainStep / kPlainThreads;
  constexpr int kHiddensEach = kPlainColumns * kPlainStep / kPlainThreads;
  float next_weights[kWeightsEach], next_hiddens[kHiddensEach];
  const auto load_step = [&](int64_t begin) {
#pragma unroll
    for (int i = 0; i < kWeightsEach; ++i) {
      const int slot = i * kPlainThreads + threadIdx.x;
      const int64_t row = first + slot / kPlainStep, column = begin + slot % kPlainStep;
      next_weights[i] = row < p.vocab && column < p.dim
                            ? head_to_float(weight[row * p.weight_stride + column])
                            : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kHiddensEach; ++i) {
      const int slot = i * kPlainThreads + threadIdx.x;
      const int64_t row = first_row + slot / kPlainStep, column = begin + slot % kPlainStep;
      next_hiddens[i] = row < p.batch && column < p.dim
                            ? head_to_float(hidden[row * p.hidden_stride + column])
                            : 0.0f;
    }
  };
  fetch_options(p, out, options, first_row, kPlainColumns);
  float sums[kRowsEach][kColumnsEach] = {};
  load_step(0);
  for (int64_t begin = 0; begin < p.dim; begin += kPlainStep) {
#pragma unroll
    for (int i = 0; i < kWeightsEach; ++i) {
      const int slot = i * kPlainThreads + threadIdx.x;
      weights[slot % kPlainStep][slot / kPlainStep] = next_weights[i];
    }
#pragma unroll
    for (int i = 0; i < kHiddensEach; ++i) {
      const int slot = i * kPlainThreads + threadIdx.x;
      hiddens[slot % kPlainStep][slot / kPlainStep] = next_hiddens[i];
    }
    __syncthreads();
    if (begin + kPlainStep < p.dim) load_step(begin + kPlainStep);
#pragma unroll
    for (int k = 0; k < kPlainStep; ++k) {
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i) {
#pragma unroll
        for (int j = 0; j < kColumnsEach; ++j)
          sums[i][j] = SampleMath::fma(weights[k][r + i], hiddens[k][c + j], sums[i][j]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
#pragma unroll
    for (int j = 0; j < kColumnsEach; ++j) tile[(c + j) * kHeadSumsStride + r + i] = sums[i][j];
  }
  __syncthreads();
  finish_tile(p, out, options, tile, first, first_row, kPlainColumns);
  launch_dependents();
}

// ---- launchers ----

int64_t tiles_of(const LmHead& p) { return ceil_div(p.vocab, kHeadRows); }

template <typename T, typename W>
gpuError launch_plain(const LmHead& p, const HeadOutput& out, gpuStream stream) {
  const int batch_tiles = static_cast<int>(ceil_div(p.batch, kPlainColumns));
  return gpu_launch(&plain_head_kernel<T, W>,
                    dim3(static_cast<unsigned>(tiles_of(p) * batch_tiles)), dim3(kPlainThreads), 0,
                    1, stream, p, out, batch_tiles);
}

#if !defined(USE_ROCM)
template <typename T, bool kNarrow>
gpuError launch_tensor_cores(const LmHead& p, const HeadOutput& out, gpuStream stream) {
  const bool aligned = has_aligned_chunks(p);
  // Rows that are not aligned are read by the word, whatever the tile: two sizes do.
  const int fitting = head_columns(p.batch, kNarrow);
  const HeadTile tile = head_tile(aligned ? fitting : fitting <= 16 ? 16 : 64, kNarrow);
  const int columns = tile.columns;
  const int batch_tiles = static_cast<int>(ceil_div(p.batch, columns));
  const dim3 grid(static_cast<unsigned>(tiles_of(p) * batch_tiles));
  const auto run = [&](auto kernel) {
    return gpu_launch(kernel, grid, dim3(kHeadThreads), head_shared_bytes(tile, kNarrow), 1, stream,
                      p, out, batch_tiles);
  };
  return with_bool(aligned, [&](auto is_aligned) {
    if constexpr (is_aligned) {
      if (columns == 8) return run(&head_kernel<T, 8, true, kNarrow>);
      if (columns == 32) return run(&head_kernel<T, 32, true, kNarrow>);
      if constexpr (!kNarrow) {
        if (columns == 128) return run(&head_kernel<T, 128, true, kNarrow>);
      }
    }
    if (columns == 16) return run(&head_kernel<T, 16, is_aligned, kNarrow>);
    return run(&head_kernel<T, 64, is_aligned, kNarrow>);
  });
}

gpuError launch_float(const LmHead& p, const HeadOutput& out, gpuStream stream) {
  const bool aligned = has_aligned_chunks(p);
  const FloatTile tile = float_tile(float_columns(p.batch));
  const int batch_tiles = static_cast<int>(ceil_div(p.batch, tile.columns));
  return gpu_launch(tile.columns == 16 ? &float_head_kernel<16> : &float_head_kernel<64>,
                    dim3(static_cast<unsigned>(tiles_of(p) * batch_tiles)), dim3(tile.threads),
                    float_shared_bytes(tile), 1, stream, p, out, batch_tiles, aligned);
}
#endif

gpuError launch_full(const LmHead& p, const HeadOutput& out, gpuStream stream) {
  if (p.weight_type == WeightType::float8_e4m3) return launch_plain<float, Float8>(p, out, stream);
#if defined(USE_ROCM)
  return launch_plain<float, float>(p, out, stream);
#else
  return launch_float(p, out, stream);
#endif
}

template <typename T>
gpuError launch_half(const LmHead& p, const HeadOutput& out, gpuStream stream) {
  const bool narrow = p.weight_type == WeightType::float8_e4m3;
#if defined(USE_ROCM)
  return narrow ? launch_plain<T, Float8>(p, out, stream) : launch_plain<T, T>(p, out, stream);
#else
  return narrow ? launch_tensor_cores<T, true>(p, out, stream)
                : launch_tensor_cores<T, false>(p, out, stream);
#endif
}

const char* launch_head(const LmHead& p, const HeadOutput& out, int device, gpuStream stream) {
#if !defined(USE_ROCM)
  const bool narrow = p.weight_type == WeightType::float8_e4m3;
  const bool is_plain = p.dtype == DType::float32 && narrow;  // of the forms that are compiled here
  if (!is_plain && head_form(device_info(device), p) == HeadForm::plain)
    return "this GPU has no asynchronous copies or no tensor cores for half precision";
#endif
  if (tiles_of(p) * ceil_div(p.batch, kPlainColumns) >= int64_t{1} << 31)
    return "the batch has too many rows for one launch";
  switch (p.dtype) {
    case DType::float16: return message_of(launch_half<float16>(p, out, stream));
    case DType::bfloat16: return message_of(launch_half<bfloat16>(p, out, stream));
    default: return message_of(launch_full(p, out, stream));
  }
}

}  // namespace

namespace gpu {

int64_t lm_head_logits_workspace(const LmHead& p, int device) {
#if !defined(USE_ROCM)
  if (lm_head_sm90_serves(p, device)) return lm_head_logits_sm90_workspace(p);
#endif
  return 0;
}

const char* lm_head_logits(const LmHead& p, const HeadLogits& out, void* workspace, int device,
                           void* stream) {
#if !defined(USE_ROCM)
  if (lm_head_sm90_serves(p, device)) {
    return lm_head_logits_sm90(p, out, workspace, device, stream);
  }
#endif
  HeadOutput output{};
  output.stride = out.stride;
  output.logits = out.logits;
  return launch_head(p, output, device, static_cast<gpuStream>(stream));
}

int64_t lm_head_sample_workspace(const LmHeadSample& p, int device) {
#if !defined(USE_ROCM)
  if (lm_head_sm90_serves(p, device)) return lm_head_sample_sm90_workspace(p, device);
#endif
  const int64_t slots = p.head.batch * p.draws.num_samples;
  return slots * (tiles_of(p.head) * static_cast<int64_t>(sizeof(Candidate)) +
                  static_cast<int64_t>(sizeof(uint32_t)));
}

const char* lm_head_sample(const LmHeadSample& p, int device, void* stream) {
#if !defined(USE_ROCM)
  if (lm_head_sm90_serves(p, device)) return lm_head_sample_sm90(p, device, stream);
#endif
  if (p.draws.batch * p.draws.num_samples >= int64_t{1} << 31)
    return "the batch has too many rows for one launch";
  HeadOutput out{};
  out.candidates = static_cast<Candidate*>(p.workspace);
  out.tiles = tiles_of(p.head);
  out.draws = p.draws;
  if (out.tiles > 0) {
    const int64_t slots = p.head.batch * p.draws.num_samples;
    if (p.head.batch >= kHeadFloorsFrom) {
      out.floors = reinterpret_cast<uint32_t*>(out.candidates + slots * out.tiles);
      const char* error = message_of(
          gpu_clear(out.floors, slots * sizeof(uint32_t), static_cast<gpuStream>(stream)));
      if (error != nullptr) return error;
    }
    const char* error = launch_head(p.head, out, device, static_cast<gpuStream>(stream));
    if (error != nullptr) return error;
  }
  return message_of(draw_finish(p.draws, p.results, nullptr, out.candidates, out.tiles,
                                static_cast<gpuStream>(stream)));
}

}  // namespace gpu
}  // namespace fuselage
