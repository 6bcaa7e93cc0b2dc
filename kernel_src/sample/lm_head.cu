// The language-model head on any GPU: formulas in sample/sample.h.
//
// A block has a tile of kHeadRows rows of the weight and up to 64 rows of the batch. Half types go through the
// tensor cores: the vocabulary is the M of the product and the batch its N, so that a small batch wastes little;
// weights come through a ring of stages in shared memory. Each product has one accumulator, to which columns are
// added in ascending order, so that a logit does not depend on the batch, the tile or the shard.
//
// The tile's logits are turned over in shared memory, and either written, or drawn from at once: a warp has a row of
// the batch, a lane four logits of one block of Philox. Each tile leaves a candidate; a second kernel takes the best.
//
// Weights of float8 become those of a half type on their way into the tensor cores, which is exact.
//
// Float32, and AMD GPUs, take a kernel without tensor cores.

#if !defined(USE_ROCM)
#include "sample/lm_head_sm90.h"
#endif
#include "sample/sample_device.h"
#include "sample/sample_policy.h"

namespace fuselage {
namespace {

// What becomes of the logits: they are written, or drawn from.
struct HeadOutput {
  float* logits;  // [batch, vocab], or null
  int64_t stride;
  Candidate* candidates;  // [batch, tiles, num_samples]
  int64_t tiles;
  Draws draws;
};

// ---- from a sum to a logit ----

__device__ __forceinline__ float head_bias(const LmHead& p, int64_t vocab) {
  switch (p.bias_dtype) {
    case DType::float32: return static_cast<const float*>(p.bias)[vocab];
    case DType::float16: return to_float(static_cast<const float16*>(p.bias)[vocab]);
    default: return to_float(static_cast<const bfloat16*>(p.bias)[vocab]);
  }
}

__device__ __forceinline__ float product(float a, float b) {
#if defined(USE_ROCM)
  return __builtin_fmaf(a, b, -0.0f);
#else
  return __fmul_rn(a, b);
#endif
}

__device__ __forceinline__ float logit_of_sum(const LmHead& p, float sum, int64_t vocab) {
  if (p.weight_scale != nullptr) sum = product(sum, p.weight_scale[p.scale_per_row ? vocab : 0]);
  if (p.bias != nullptr) sum += head_bias(p, vocab);
  if (p.softcap != 0.0f) sum = soft_capped<SampleMath>(sum, p.softcap);
  return sum;
}

// ---- the epilogue ----

// Sums of a tile, [columns, kHeadRows + kHeadPad] in shared memory: a row of the batch is one of it.
constexpr int kHeadPad = 4;
constexpr int kHeadSumsStride = kHeadRows + kHeadPad;

// Of a warp, for one row of the batch.
__device__ __forceinline__ void write_logits(const LmHead& p, const HeadOutput& out,
                                             const float* sums, int64_t row, int64_t first,
                                             int count) {
  float* logits = out.logits + row * out.stride + first;
  for (int i = threadIdx.x % kWarpSize; i < count; i += kWarpSize)
    logits[i] = logit_of_sum(p, sums[i], first + i);
}

__device__ __forceinline__ void draw_tile(const LmHead& p, const HeadOutput& out, const float* sums,
                                          int64_t row, int64_t first, int count) {
  const Heat heat = heat_of(out.draws, row);
  const NoiseKey key = key_of_row(out.draws, row);
  const int lane = threadIdx.x % kWarpSize;
  // Blocks of Philox start at multiples of four of the whole vocabulary: the first may begin before the tile.
  const int64_t begin = out.draws.vocab_offset + first;
  const int before = static_cast<int>(begin & 3);
  for (int sample = 0; sample < out.draws.num_samples; ++sample) {
    Candidate best = no_candidate();
    for (int group = 0; group * 4 < count + before; group += kWarpSize) {
      const int at = (group + lane) * 4 - before;  // of the lane's first logit in the tile
      float logits[4], bounds[4];
      uint32_t words[4] = {};
      const bool inside = at < count;
      if (inside && !heat.greedy) {
        const PhiloxWords four = noise_words(key, (begin + at) >> 2, sample);
#pragma unroll
        for (int k = 0; k < 4; ++k) words[k] = four.words[k];
      }
      int likely = 0;
      float likely_bound = minus_infinity();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int i = at + k;
        const bool there = i >= 0 && i < count;
        const float logit = there ? logit_of_sum(p, sums[i], first + i) : minus_infinity();
        logits[k] = logit == logit ? logit : minus_infinity();
        bounds[k] = heat.greedy ? logits[k]
                                : SampleMath::fma(logits[k], heat.inv_temperature,
                                                  gumbel_bound<SampleMath>(words[k]));
        likely = bounds[k] > likely_bound ? k : likely;
        likely_bound = bounds[k] > likely_bound ? bounds[k] : likely_bound;
      }
      if (heat.greedy) {
#pragma unroll
        for (int k = 0; k < 4; ++k)
          offer(best, logits[k], logits[k], static_cast<int>(first) + at + k);
        continue;
      }
      // The one that is likeliest by its bound, in every lane; then those that may still be better than the best.
      const auto try_one = [&](int k) {
        float logit = logits[0];
        uint32_t word = words[0];
#pragma unroll
        for (int j = 1; j < 4; ++j) {
          logit = j == k ? logits[j] : logit;
          word = j == k ? words[j] : word;
        }
        const float score =
            SampleMath::fma(logit, heat.inv_temperature, gumbel_of<SampleMath>(word));
        offer(best, score, logit, static_cast<int>(first) + at + k);
      };
      try_one(likely);
      const float floor = warp_greatest(best.score);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (k != likely && bounds[k] >= floor && logits[k] > minus_infinity()) try_one(k);
      }
    }
    best = warp_best(best);
    if (lane == 0) {
      out.candidates[(row * out.tiles + first / kHeadRows) * out.draws.num_samples + sample] = best;
    }
  }
}

// All threads of the block, when the sums are there.
__device__ __forceinline__ void finish_tile(const LmHead& p, const HeadOutput& out,
                                            const float* sums, int64_t first, int64_t first_row,
                                            int columns) {
  const int count = static_cast<int>(p.vocab - first < kHeadRows ? p.vocab - first : kHeadRows);
  for (int b = threadIdx.x / kWarpSize; b < columns; b += blockDim.x / kWarpSize) {
    const int64_t row = first_row + b;
    if (row >= p.batch) return;
    if (out.logits != nullptr) {
      write_logits(p, out, sums + b * kHeadSumsStride, row, first, count);
    } else {
      draw_tile(p, out, sums + b * kHeadSumsStride, row, first, count);
    }
  }
}

// ---- tensor cores ----

#if !defined(USE_ROCM)

constexpr int kHeadChunks = kHeadStep / 8;  // of 16 bytes, of a row of a stage

// Where a chunk of 16 bytes of a row lies: turned, so that eight rows have it in different banks.
__device__ __forceinline__ uint32_t chunk_at(int row, int chunk) {
  return static_cast<uint32_t>(row * kHeadChunks + (chunk ^ (row & 7))) * 16;
}

// As async_copy<16>, of which the first `bytes` are read and the rest is zero.
__device__ __forceinline__ void copy_or_zero(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void store_chunk(uint32_t shared, const uint32_t (&words)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Starts the copy of a chunk of a row: columns [column, column + 8), of which those from dim on are zero.
template <typename T, bool kAligned>
__device__ __forceinline__ void copy_chunk(uint32_t shared, const T* row, int64_t column,
                                           int64_t dim, bool inside) {
  const int64_t left = inside ? dim - column : 0;
  const int count = static_cast<int>(left < 0 ? 0 : left < 8 ? left : 8);
  if constexpr (kAligned) {
    copy_or_zero(shared, count > 0 ? row + column : row, count * 2);
  } else {
    uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (k < count) {
        words[k / 2] |= static_cast<uint32_t>(bits_as<uint16_t>(row[column + k])) << (k % 2 * 16);
      }
    }
    store_chunk(shared, words);
  }
}

__device__ __forceinline__ void load_matrices(uint32_t shared, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
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

__device__ __forceinline__ uint32_t narrow_chunk_at(int row, int chunk) {
  return static_cast<uint32_t>(row * kHeadStep + (chunk ^ (row / 2 % 4)) * 16);
}

// As copy_chunk, of 16 columns.
template <bool kAligned>
__device__ __forceinline__ void copy_narrow_chunk(uint32_t shared, const uint8_t* row,
                                                  int64_t column, int64_t dim, bool inside) {
  const int64_t left = inside ? dim - column : 0;
  const int count = static_cast<int>(left < 0 ? 0 : left < 16 ? left : 16);
  if constexpr (kAligned) {
    copy_or_zero(shared, count > 0 ? row + column : row, count);
  } else {
    uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      if (k < count) words[k / 4] |= static_cast<uint32_t>(row[column + k]) << (k % 4 * 8);
    }
    store_chunk(shared, words);
  }
}

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

constexpr int weight_stage_bytes(bool narrow) { return kHeadRows * kHeadStep * (narrow ? 1 : 2); }

constexpr int stage_bytes(int columns, bool narrow) {
  return weight_stage_bytes(narrow) + columns * kHeadStep * 2;
}

inline int head_shared_bytes(int columns, bool narrow) {
  return std::max(head_stages(columns) * stage_bytes(columns, narrow),
                  columns * kHeadSumsStride * static_cast<int>(sizeof(float)));
}

template <typename T, int kColumns, int kStages, bool kAligned, bool kNarrow>
__global__ void __launch_bounds__(kHeadThreads, 2)
    head_kernel(const LmHead p, const HeadOutput out, const int batch_tiles) {
  extern __shared__ __align__(128) char shared_bytes[];
  constexpr int kWarps = kHeadThreads / kWarpSize;
  constexpr int kWarpRows = kHeadRows / kWarps;  // 32: two fragments of 16
  constexpr int kFragments = kWarpRows / 16, kColumnFragments = kColumns / 8;
  const int64_t first = int64_t{blockIdx.x / batch_tiles} * kHeadRows;
  const int64_t first_row = int64_t{blockIdx.x % batch_tiles} * kColumns;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  using W = std::conditional_t<kNarrow, uint8_t, T>;
  constexpr int kStageBytes = stage_bytes(kColumns, kNarrow);
  const W* weight = static_cast<const W*>(p.weight);
  const T* hidden = static_cast<const T*>(p.hidden);
  const uint32_t shared = static_cast<uint32_t>(__cvta_generic_to_shared(shared_bytes));
  const int64_t steps = (p.dim + kHeadStep - 1) / kHeadStep;

  const auto start_stage = [&](int64_t step) {
    if (step < steps) {
      const uint32_t stage = shared + static_cast<uint32_t>(step % kStages) * kStageBytes;
      constexpr int kRowChunks = kNarrow ? kHeadChunks / 2 : kHeadChunks;
#pragma unroll
      for (int i = 0; i < kHeadRows * kRowChunks / kHeadThreads; ++i) {
        const int slot = i * kHeadThreads + threadIdx.x;
        const int row = slot / kRowChunks, chunk = slot % kRowChunks;
        const bool inside = first + row < p.vocab;
        const W* from = weight + (inside ? first + row : first) * p.weight_stride;
        if constexpr (kNarrow) {
          copy_narrow_chunk<kAligned>(stage + narrow_chunk_at(row, chunk), from,
                                      step * kHeadStep + chunk * 16, p.dim, inside);
        } else {
          copy_chunk<T, kAligned>(stage + chunk_at(row, chunk), from, step * kHeadStep + chunk * 8,
                                  p.dim, inside);
        }
      }
      constexpr int kSlots = kColumns * kHeadChunks;
#pragma unroll
      for (int i = 0; i < (kSlots + kHeadThreads - 1) / kHeadThreads; ++i) {
        const int slot = i * kHeadThreads + threadIdx.x;
        if (slot >= kSlots) break;
        const int row = slot / kHeadChunks, chunk = slot % kHeadChunks;
        const bool inside = first_row + row < p.batch;
        copy_chunk<T, kAligned>(stage + weight_stage_bytes(kNarrow) + chunk_at(row, chunk),
                                hidden + (inside ? first_row + row : first_row) * p.hidden_stride,
                                step * kHeadStep + chunk * 8, p.dim, inside);
      }
    }
    async_copy_commit();
  };

  float sums[kFragments][kColumnFragments][4] = {};
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) start_stage(i);
  for (int64_t step = 0; step < steps; ++step) {
    async_copy_wait(kStages - 2);
    __syncthreads();
    start_stage(step + kStages - 1);
    const uint32_t stage = shared + static_cast<uint32_t>(step % kStages) * kStageBytes;
    const uint32_t batch_stage = stage + weight_stage_bytes(kNarrow);
#pragma unroll
    for (int k = 0; k < kHeadStep / 16; ++k) {
      // Of a: rows 0-7, rows 8-15, and both again eight columns on, as four matrices.
      uint32_t a[kFragments][4];
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        if constexpr (kNarrow) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int row = warp * kWarpRows + f * 16 + lane / 4 + i % 2 * 8;
            a[f][i] =
                widened<T>(load_pair(stage + narrow_chunk_at(row, k) + lane % 4 * 2 + i / 2 * 8));
          }
        } else {
          const int row = warp * kWarpRows + f * 16 + lane % 16;
          load_matrices(stage + chunk_at(row, k * 2 + lane / 16), a[f]);
        }
      }
      if constexpr (kColumnFragments == 1) {
        // Both halves of this step's columns; the upper lanes' addresses are those of the lower ones again.
        uint32_t b[4];
        load_matrices(batch_stage + chunk_at(lane % 8, k * 2 + lane / 8 % 2), b);
#pragma unroll
        for (int f = 0; f < kFragments; ++f) multiply<T>(sums[f][0], a[f], b[0], b[1]);
      } else {
#pragma unroll
        for (int c = 0; c < kColumnFragments; c += 2) {
          // Eight rows of the batch, both halves of the columns, and the next eight.
          uint32_t b[4];
          const int row = c * 8 + lane / 16 * 8 + lane % 8;
          load_matrices(batch_stage + chunk_at(row, k * 2 + lane / 8 % 2), b);
#pragma unroll
          for (int f = 0; f < kFragments; ++f) {
            multiply<T>(sums[f][c], a[f], b[0], b[1]);
            multiply<T>(sums[f][c + 1], a[f], b[2], b[3]);
          }
        }
      }
    }
  }
  async_copy_wait(0);
  __syncthreads();

  // Turned over: the stages are no longer needed.
  float* tile = reinterpret_cast<float*>(shared_bytes);
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
#pragma unroll
    for (int c = 0; c < kColumnFragments; ++c) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int row = warp * kWarpRows + f * 16 + lane / 4 + k / 2 * 8;
        const int column = c * 8 + lane % 4 * 2 + k % 2;
        tile[column * kHeadSumsStride + row] = sums[f][c][k];
      }
    }
  }
  __syncthreads();
  finish_tile(p, out, tile, first, first_row, kColumns);
  let_kernel_after_start();
}

#endif  // tensor cores

// ---- without tensor cores ----

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
  __shared__ float tile[kPlainColumns * kHeadSumsStride];
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
  finish_tile(p, out, tile, first, first_row, kPlainColumns);
  let_kernel_after_start();
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
  // Of float8, half as many bytes: twice the alignment of the same numbers in a half type.
  const bool aligned = aligned_rows(p.weight, p.weight_stride, p.dtype, kNarrow ? 32 : 16) &&
                       aligned_rows(p.hidden, p.hidden_stride, p.dtype);
  // Rows that are not aligned are read by the element, whatever the tile: two sizes do.
  const int fitting = head_columns(p.batch);
  const int columns = aligned ? fitting : fitting <= 16 ? 16 : 64;
  const int batch_tiles = static_cast<int>(ceil_div(p.batch, columns));
  const dim3 grid(static_cast<unsigned>(tiles_of(p) * batch_tiles));
  const auto run = [&](auto kernel) {
    return gpu_launch(kernel, grid, dim3(kHeadThreads), head_shared_bytes(columns, kNarrow), 1,
                      stream, p, out, batch_tiles);
  };
  return with_bool(aligned, [&](auto is_aligned) {
    if constexpr (is_aligned) {
      if (columns == 8) return run(&head_kernel<T, 8, head_stages(8), true, kNarrow>);
      if (columns == 32) return run(&head_kernel<T, 32, head_stages(32), true, kNarrow>);
    }
    if (columns == 16) return run(&head_kernel<T, 16, head_stages(16), is_aligned, kNarrow>);
    return run(&head_kernel<T, 64, head_stages(64), is_aligned, kNarrow>);
  });
}
#endif

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

const char* launch_head(const LmHead& p, const HeadOutput& out, gpuStream stream) {
  if (tiles_of(p) * ceil_div(p.batch, kPlainColumns) >= int64_t{1} << 31)
    return "the batch has too many rows for one launch";
  switch (p.dtype) {
    case DType::float16: return message_of(launch_half<float16>(p, out, stream));
    case DType::bfloat16: return message_of(launch_half<bfloat16>(p, out, stream));
    default:
      return message_of(p.weight_type == WeightType::float8_e4m3
                            ? launch_plain<float, Float8>(p, out, stream)
                            : launch_plain<float, float>(p, out, stream));
  }
}

}  // namespace

namespace gpu {

const char* lm_head_logits(const LmHead& p, float* logits, int64_t stride, int device,
                           void* stream) {
#if !defined(USE_ROCM)
  if (lm_head_sm90_serves(p, device)) return lm_head_logits_sm90(p, logits, stride, device, stream);
#endif
  HeadOutput out{};
  out.stride = stride;
  out.logits = logits;
  return launch_head(p, out, static_cast<gpuStream>(stream));
}

int64_t lm_head_sample_workspace(const LmHeadSample& p, int device) {
#if !defined(USE_ROCM)
  if (lm_head_sm90_serves(p, device)) return lm_head_sample_sm90_workspace(p, device);
#endif
  return p.head.batch * tiles_of(p.head) * p.draws.num_samples *
         static_cast<int64_t>(sizeof(Candidate));
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
    const char* error = launch_head(p.head, out, static_cast<gpuStream>(stream));
    if (error != nullptr) return error;
  }
  return message_of(draw_finish(p.draws, p.results, nullptr, out.candidates, out.tiles,
                                static_cast<gpuStream>(stream)));
}

}  // namespace gpu
}  // namespace fuselage
