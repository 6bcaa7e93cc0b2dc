// The draw from a language-model head on Hopper GPUs (see sample/sample.h), for float16 and bfloat16, and for weights
// of float8 beside hidden of these.
//
// The vocabulary is the rows of the matrix product, the batch its columns, and what is accumulated over the
// depth never leaves the registers. A block has two or three warpgroups that multiply, of 64 rows each, and a warp that
// keeps the copy engine busy: tiles of weight and hidden go through a ring of stages in shared memory. The blocks
// of a cluster have rows of their own and share the tiles of hidden, of which each copies its part to all.
//
// Blocks are persistent. The vocabulary is cut into tiles that differ by at most 16 rows, as many for each block: all
// end together.
//
// Noise: three more warps make what the noise of each group of 16 logits is at most, for the next tile, while the products
// run. So of most logits it takes a comparison to see that they cannot win: the bound of their score is below the
// greatest score of the row so far, which all blocks share. The others are queued, and those three warps score them
// exactly, while the next products run.
//
// Weights of float8 stay as they are in shared memory. A warp loads its rows, turns them into float16, which is exact, and
// multiplies them from registers, half a stage at a time: its products run while the other half is widened. Of 16
// columns a lane loads four that are neighbours, where the product wants two times two: a kernel before this one puts
// hidden's columns in that order, and into tiles. It brings bfloat16 to float16 by a power of two for each row: weights
// are widened to float16 by one instruction for two, to bfloat16 by four.
//
// For filters logits are written, and, by the warps that have no noise to make then, the greatest of each strip of 16,
// which tells sample_strips.cu what it need not read. But writes take time, also from the reads of weights: the tiles before
// tell a floor of each row, and strips below it are not written.
//
// A logit is accumulated in the order of the depth, whatever the batch and the tile. The greatest score, of
// equals that of the lowest index, has no order. So a draw depends on neither.
#include "sample/lm_head_sm90.h"

#include <cuda.h>

#include <algorithm>
#include <type_traits>

#include "common/launch_policy.h"
#include "sample/fragments.h"
#include "sample/sample_draw.h"
#include "sample/sample_filter.h"
#include "sample/wgmma.h"

namespace fuselage {
namespace gpu {
namespace {

// ---- the layout of a block ----

constexpr int kGroupRows = 64;  // of a warpgroup's matrix product
constexpr int kUnitRows = 16;   // by which tiles differ, of a warp
static_assert(kUnitRows == kNoiseGroup, "a warp's rows share noise");
constexpr int kHiddenDepth = 64;  // elements of a tile of hidden: rows of 128 bytes
constexpr int kRowBytes = 128;
constexpr int kNarrowDepth = 128;  // float8: the depth is filled up to a multiple
constexpr int kNoiseWarps = 3;
constexpr int kNoiseThreads = 32 * kNoiseWarps;
constexpr int kMostStages = 12;
constexpr int kMultiplyingBarrier = 1, kNoiseBarrier = 2;  // where these warps meet

// The warpgroups that multiply. They also widen float8, which two do not do as fast as memory brings them: on an H200,
// with 151936 rows of 4096, a third takes 211 us to 200 for 64 columns of bfloat16. More columns need the registers.
constexpr int groups_of(int columns, bool narrow) { return narrow && columns <= 64 ? 3 : 2; }
constexpr int multiplying_warps(int columns, bool narrow) { return 4 * groups_of(columns, narrow); }
constexpr int tile_rows(int columns, bool narrow) {
  return groups_of(columns, narrow) * kGroupRows;
}
constexpr int threads_of(int columns, bool narrow) {
  return (multiplying_warps(columns, narrow) + 1 + kNoiseWarps) * 32;
}

struct Registers {
  int multiplying, others;
};

// What the others give back is all there is to take: more is waited for without end.
constexpr Registers registers_of(int groups) {
  return groups == 3 ? Registers{144, 80} : Registers{216, 72};
}
static_assert(2 * registers_of(2).multiplying + registers_of(2).others == 3 * 168,
              "of 65536 for 384 threads");
static_assert(3 * registers_of(3).multiplying + registers_of(3).others == 4 * 128,
              "of 65536 for 512 threads");
constexpr int kQueue = 136;  // entries of a warp; a turn adds up to 128
constexpr int kQueueBytes = kQueue * 8 + 4;
constexpr int kMostShared = kWgmmaSharedBytes;

// Of one column: what its noise is made with, and what its scores have to beat.
struct Columns {
  uint4* noise;              // key, stream, low word of the offset
  uint32_t* offset;          // its high word
  float* inverse;            // 1 / temperature, in the unit of scores
  float* unit;               // of scores; 0 where there is no noise
  float* scale;              // of its products, beside float8
  float* least;              // [samples]: scores below this cannot win
  unsigned long long* best;  // [samples]: key of the score, and the complement of the row
  // Where logits are written, in the place of `least`: the floor below which strips are left out; not a number where
  // there is no row.

  __device__ __forceinline__ NoiseKey key_of(int column) const {
    const uint4 key = noise[column];
    return {{key.x, key.y}, {key.w, offset[column]}, key.z};
  }
};

constexpr int columns_bytes(int columns, int samples) {
  return columns * (16 + 4 + 4 + 4 + samples * 12);
}

// Of samples as many as leave room for the stages.
constexpr int most_samples(int columns) { return columns >= 256 ? 1 : columns >= 64 ? 4 : 16; }

// Elements of a stage. Float8: two tiles of hidden beside rows of 128 bytes, where shared memory has room for them.
constexpr int depth_of(int columns, bool narrow) {
  return narrow && columns < 256 ? kNarrowDepth : kHiddenDepth;
}
constexpr int weight_row_bytes(int columns, bool narrow) {
  return depth_of(columns, narrow) * (narrow ? 1 : 2);
}
constexpr int weight_bytes(int columns, bool narrow) {
  return tile_rows(columns, narrow) * weight_row_bytes(columns, narrow);
}
constexpr int hidden_rows(int columns, bool narrow) {
  return columns * (depth_of(columns, narrow) / kHiddenDepth);
}
constexpr int stage_bytes(int columns, bool narrow) {
  return weight_bytes(columns, narrow) + hidden_rows(columns, narrow) * kRowBytes;
}
// Of a tile; there are two.
constexpr int noises_of(int columns, bool narrow) {
  return tile_rows(columns, narrow) / kUnitRows * columns;
}
constexpr int noise_bytes(int columns, bool narrow) { return 2 * noises_of(columns, narrow) * 4; }
constexpr int queue_bytes(int columns, bool narrow) {
  return multiplying_warps(columns, narrow) * kQueueBytes;
}
constexpr int kBarrierBytes = (2 * kMostStages + 5) * 8;

constexpr int fixed_bytes(int columns, bool narrow) {
  return columns_bytes(columns, most_samples(columns)) + (narrow ? columns * 4 : 0) +
         noise_bytes(columns, narrow) + queue_bytes(columns, narrow) + kBarrierBytes;
}

constexpr int stages_of(int columns, bool narrow) {
  const int stages = (kMostShared - fixed_bytes(columns, narrow)) / stage_bytes(columns, narrow);
  return stages < kMostStages ? stages : kMostStages;
}

constexpr int shared_bytes_of(int columns, bool narrow) {
  return stages_of(columns, narrow) * stage_bytes(columns, narrow) + fixed_bytes(columns, narrow);
}

struct HeadDraw {
  int vocab, batch;
  int64_t vocab_offset;
  int first_row;    // of the vocabulary, at most 0: groups of noise are counted over all shards
  int units;        // of 16 rows, from first_row on
  int tiles;        // as many for each block
  int steps;        // stages of the depth
  int batch_start;  // rows of the batch before those of this launch
  int num_samples;
  Draws draws;
  const float* hidden_scales;  // [columns], of float8
  const float* weight_scale;   // [vocab], [1], or null; of float8
  bool scale_per_row;
  const void* bias;
  DType bias_dtype;
  float softcap;
  HeadLogits out;  // instead of a draw, unless its logits are null
  bool finds_floors;
  uint32_t* arrived;               // 0: warps that have written their first strips
  unsigned long long* candidates;  // [blocks, num_samples, columns]
  uint32_t* shared_least;  // [num_samples, columns]: keys of scores below which none can win;
                           // [num_samples]: blocks that have shared those of their first tiles
};

// Where lane `lane` finds its row of the matrices that are two chunks of 16 bytes of 16 rows, as TMA swizzles rows of 128 or
// 64 bytes. Those of the i-th two are at this ^ i * 32.
template <int kRowBytes>
__device__ __forceinline__ uint32_t narrow_chunk_of(int lane) {
  const int row = lane % 16, chunk = lane / 16;
  const int turned = chunk ^ (kRowBytes == 128 ? row % 8 : row / 2 % 4);
  return static_cast<uint32_t>(row * kRowBytes + turned * 16);
}

// ---- noise ----

// WholeProducts from products of 16 bits each, nine or ten instructions for one. But each instruction that gives the high
// word of a product keeps a warpgroup's matrix product waiting for 8 to 9 cycles (H200, 256 columns), and these
// do not.
//
// Two products with a half of the factor must fit into a word together. The second factor is too great for that: what
// it lacks of 2^32 is taken.
struct HalfProducts {
  static __device__ __forceinline__ WordProduct first(uint32_t v) {
    constexpr uint32_t kLow = kPhiloxFirst & 0xffffu, kHigh = kPhiloxFirst >> 16;
    static_assert(kLow + kHigh < 0xffffu, "no sum exceeds a word");
    const uint32_t low = v & 0xffffu, high = v >> 16;
    const uint32_t middle = high * kLow + low * kHigh + ((low * kLow) >> 16);
    return {high * kHigh + (middle >> 16), kPhiloxFirst * v};
  }
  static __device__ __forceinline__ WordProduct second(uint32_t v) {
    constexpr uint32_t kLack = 0u - kPhiloxSecond;
    constexpr uint32_t kLow = kLack & 0xffffu, kHigh = kLack >> 16;
    static_assert(kLow + kHigh < 0xfffeu, "no sum exceeds a word");
    const uint32_t low = v & 0xffffu, high = v >> 16;
    // The high words of kLack * v + 2^32 - 1: what it lacks is rounded up.
    const uint32_t middle = high * kLow + low * kHigh + 0xffffu + ((low * kLow + 0xffffu) >> 16);
    return {v - high * kHigh - (middle >> 16), kPhiloxSecond * v};
  }
};

// What the noise of a group is at most, with its place in the lowest bits; 0 where a column has no noise.
__device__ __forceinline__ float bound_and_place(const NoiseGroup& group) {
  const uint32_t above = __float_as_uint(noise_bound<SampleMath>(group.least)) + kNoiseGroup;
  return __uint_as_float((above & ~(kNoiseGroup - 1u)) | group.place);
}
__device__ __forceinline__ int place_of(float noise) {
  return static_cast<int>(__float_as_uint(noise) % kNoiseGroup);
}

// The error of the approximate tanh is below 2^-10.
__device__ __forceinline__ float approximate_softcap(float logit, float cap, float inverse) {
  float result;
  asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(logit * inverse));
  return result * cap;
}

// Raises the float in shared memory to `value`, whatever the signs.
__device__ __forceinline__ void raise(float* at, float value) {
  value += 0.0f;
  if (value >= 0.0f) {
    atomicMax(reinterpret_cast<int*>(at), __float_as_int(value));
  } else {
    atomicMin(reinterpret_cast<unsigned int*>(at), __float_as_uint(value));
  }
}

// Four floats of shared memory that other threads write to.
__device__ __forceinline__ float4 read_again(const float* at) {
  float4 value;
  asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(shared_address(at)));
  return value;
}

// Not a branch: a first tile with 64 of those took 6.9 thousand cycles where it takes 3.9 (H200, 256 columns).
__device__ __forceinline__ void store_if(bool is, float* at, float value) {
  asm volatile(
      "{\n"
      ".reg .pred is;\n"
      "setp.ne.b32 is, %0, 0;\n"
      "@is st.shared.f32 [%1], %2;\n"
      "}" ::"r"(static_cast<int>(is)),
      "r"(shared_address(at)), "f"(value)
      : "memory");
}

// As store_if, to global memory, of two values eight apart.
__device__ __forceinline__ void store_global_if(uint32_t is, float* at, float value, float after) {
  asm volatile(
      "{\n"
      ".reg .pred is;\n"
      "setp.ne.b32 is, %0, 0;\n"
      "@is st.global.cs.f32 [%1], %2;\n"
      "@is st.global.cs.f32 [%1 + 32], %3;\n"
      "}" ::"r"(is),
      "l"(at), "f"(value), "f"(after));
}

// ---- the draw from a tile ----

// Of turn kAt, the logits of a thread. NOTE: `volatile` keeps this a branch, and not a choice of registers.
template <int kAt, int kCount>
__device__ __forceinline__ void take(const float (&logits)[kCount], float (&taken)[4]) {
  if constexpr (4 * kAt < kCount) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      asm volatile("mov.b32 %0, %1;" : "=f"(taken[i]) : "f"(logits[4 * kAt + i]));
  }
}

// Of any turn: registers have no run-time index, but a loop over all turns is too long to be unrolled.
template <int kCount>
__device__ __forceinline__ void take_turn(const float (&logits)[kCount], int turn,
                                          float (&taken)[4]) {
#define FUSELAGE_TAKE(i) \
  case i: take<i>(logits, taken); break;
#define FUSELAGE_TAKE_8(i) \
  FUSELAGE_TAKE(i)         \
  FUSELAGE_TAKE(i + 1)     \
  FUSELAGE_TAKE(i + 2)     \
  FUSELAGE_TAKE(i + 3)     \
  FUSELAGE_TAKE(i + 4)     \
  FUSELAGE_TAKE(i + 5)     \
  FUSELAGE_TAKE(i + 6)     \
  FUSELAGE_TAKE(i + 7)
  switch (turn) {
    FUSELAGE_TAKE_8(0)
    FUSELAGE_TAKE_8(8)
    FUSELAGE_TAKE_8(16)
    FUSELAGE_TAKE_8(24)
  }
#undef FUSELAGE_TAKE_8
#undef FUSELAGE_TAKE
}

// body(taken, turns) for all turns, kTurns at once.
template <int kTurns, bool kRolled, int kCount, typename Body>
__device__ __forceinline__ void for_turns(const float (&logits)[kCount], Body body) {
  static_assert(kCount % (4 * kTurns) == 0 && (kTurns == 1 || !kRolled), "as a loop takes them");
  float taken[kTurns][4];
  if constexpr (kRolled) {
#pragma unroll 1
    for (int turn = 0; turn < kCount / 4; ++turn) {
      take_turn(logits, turn, taken[0]);
      body(taken, turn);
    }
  } else {
#pragma unroll
    for (int turns = 0; turns < kCount / 4; turns += kTurns) {
#pragma unroll
      for (int t = 0; t < kTurns; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) taken[t][i] = logits[4 * (turns + t) + i];
      }
      body(taken, turns);
    }
  }
}

// The logits of a warp that could win.
struct Queue {
  float* logits;
  uint32_t* places;  // row of the warp's 16, column
  uint32_t* count;

  __device__ __forceinline__ Queue(char* queues, int warp) {
    logits = reinterpret_cast<float*>(queues + warp * kQueueBytes);
    places = reinterpret_cast<uint32_t*>(logits + kQueue);
    count = places + kQueue;
  }
};

// Scores an entry of a queue. `row` is the first of the warp's rows.
__device__ __forceinline__ void score_queued(const HeadDraw& p, const Columns& columns,
                                             const Queue& queue, int i, int sample, int width,
                                             int row) {
  float logit = queue.logits[i];
  const uint32_t place = queue.places[i];
  const int column = place & 0xffffu, own_row = row + static_cast<int>(place >> 16);
  if (p.softcap != 0.0f) logit = soft_capped<SampleMath>(logit, p.softcap);
  float score = logit;
  if (columns.unit[column] != 0.0f) {
    const int64_t index = p.vocab_offset + own_row;
    const float noise = noise_of<SampleMath>(columns.key_of(column), index, sample);
    score = score_of<SampleMath>(logit, noise, columns.inverse[column], columns.unit[column]);
  }
  float* least = columns.least + sample * width + column;
  // Also false for what is no number.
  if (score > -INFINITY && score >= *least) {
    const unsigned long long key = static_cast<unsigned long long>(key_of<SampleMath>(score))
                                       << 32 |
                                   ~static_cast<uint32_t>(own_row);
    atomicMax(columns.best + sample * width + column, key);
    raise(least, score);
  }
}

// Scores what all warps have queued of a tile whose first row is `row`.
template <int kColumns, int kMultiplyingWarps>
__device__ __forceinline__ void score_all_queued(const HeadDraw& p, const Columns& columns,
                                                 char* queues, int sample, int row, int thread) {
#pragma unroll 1
  for (int i = thread;; i += kNoiseThreads) {
    int left = i, warp = 0;
#pragma unroll 1
    for (; warp < kMultiplyingWarps; ++warp) {
      const int count = static_cast<int>(*Queue(queues, warp).count);
      if (left < count) break;
      left -= count;
    }
    if (warp == kMultiplyingWarps) break;
    score_queued(p, columns, Queue(queues, warp), left, sample, kColumns, row + warp * kUnitRows);
  }
}

struct SoftCap {
  float cap, inverse, error;
};

template <bool kCapped>
__device__ __forceinline__ SoftCap softcap_of(const HeadDraw& p) {
  if (!kCapped) return {};
  return {p.softcap, 1.0f / p.softcap, p.softcap * (1.0f / 1024)};
}

// At least the logit.
template <bool kCapped>
__device__ __forceinline__ float bound_of(float logit, const SoftCap& softcap) {
  return kCapped ? approximate_softcap(logit, softcap.cap, softcap.inverse) + softcap.error : logit;
}

__device__ __forceinline__ float2 two_of(const float* at) {
  return *reinterpret_cast<const float2*>(at);
}

// Of each column's noise, the greatest in a warp's rows, that logit's score: at least this. Of rows that are not there it
// is no number. The arguments are those of `draw`.
template <int kColumns, bool kCapped>
__device__ __forceinline__ void score_places(const HeadDraw& p, const Columns& columns,
                                             const float* noise,
                                             const float (&logits)[kColumns / 2], float* scores,
                                             int lane) {
  const SoftCap softcap = softcap_of<kCapped>(p);
  for_turns<1, kCapped>(logits, [&](const float(&four)[1][4], int turn) {
    const int column = 8 * turn + 2 * (lane & 3);
    const float2 noises = two_of(noise + column), inverses = two_of(columns.inverse + column);
    const float2 units = two_of(columns.unit + column);
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const float its = t == 0 ? noises.x : noises.y;
      const float logit =
          bound_of<kCapped>(place_of(its) >= 8 ? four[0][t + 2] : four[0][t], softcap);
      const float sure = its > kNoiseBoundSure ? its - kNoiseBoundError
                         : its == 0.0f         ? 0.0f
                                               : kLeastNoise;
      const float score =
          score_of<SampleMath>(logit - 2.0f * softcap.error, sure, t == 0 ? inverses.x : inverses.y,
                               t == 0 ? units.x : units.y);
      store_if(place_of(its) % 8 == lane >> 2, scores + column + t, score);
    }
  });
}

// Puts what the logits of a warp's rows have to reach in the place of the bounds of their noise.
template <int kColumns>
__device__ __forceinline__ void find_thresholds(float* noise, const Columns& columns,
                                                const float* least, int lane) {
#pragma unroll
  for (int first = 0; first < kColumns; first += 128) {
    const int column = first + 4 * lane;
    if (column >= kColumns) break;
    const float4 n = *reinterpret_cast<const float4*>(noise + column);
    const float4 i = *reinterpret_cast<const float4*>(columns.inverse + column);
    const float4 u = *reinterpret_cast<const float4*>(columns.unit + column);
    const float4 l = read_again(least + column);
    *reinterpret_cast<float4*>(noise + column) =
        make_float4(threshold_of(l.x, n.x, i.x, u.x), threshold_of(l.y, n.y, i.y, u.y),
                    threshold_of(l.z, n.z, i.z, u.z), threshold_of(l.w, n.w, i.w, u.w));
  }
  __syncwarp();
}

// Queues what could win; of a queue that is full, all is scored. `logits`: the fragment of a thread, of rows lane / 4 and
// 8 more and of two columns in each eight. `row` is the first of the warp's rows.
template <int kColumns, bool kCapped>
__device__ __forceinline__ void draw(const HeadDraw& p, const Columns& columns, const Queue& queue,
                                     const float* thresholds, const float (&logits)[kColumns / 2],
                                     int row, int sample, int lane) {
  const int own_column = 2 * (lane & 3);
  const SoftCap softcap = softcap_of<kCapped>(p);
  const uint32_t below = (1u << lane) - 1;

  // Which turns have a logit that could win.
  uint32_t turns = 0;
  for_turns<1, kCapped>(logits, [&](const float(&four)[1][4], int turn) {
    const float2 reach = two_of(thresholds + own_column + 8 * turn);
    const float first = bound_of<kCapped>(fmaxf(four[0][0], four[0][2]), softcap);
    const float second = bound_of<kCapped>(fmaxf(four[0][1], four[0][3]), softcap);
    if (first >= reach.x || second >= reach.y) turns |= 1u << turn;
  });
  turns = __reduce_or_sync(0xffffffffu, turns);

  int count = 0;
#pragma unroll 1
  while (true) {
    float four[1][4];
    uint32_t winners[4] = {};
    const int turn = __ffs(turns) - 1, column = 8 * turn + own_column;
    if (turns != 0) {
      take_turn(logits, turn, four[0]);
      const float2 reach = two_of(thresholds + own_column + 8 * turn);
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const float logit = bound_of<kCapped>(four[0][t], softcap);
        winners[t] = __ballot_sync(0xffffffffu, logit >= (t & 1 ? reach.y : reach.x));
      }
    }
    const int more =
        __popc(winners[0]) + __popc(winners[1]) + __popc(winners[2]) + __popc(winners[3]);
    if (turns == 0 || count + more > kQueue) {
      if (turns == 0) break;
      __syncwarp();
#pragma unroll 1
      for (int i = lane; i < count; i += 32)
        score_queued(p, columns, queue, i, sample, kColumns, row);
      __syncwarp();
      count = 0;
    }
    turns &= turns - 1;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      if (winners[t] >> lane & 1) {
        const int at = count + __popc(winners[t] & below);
        queue.logits[at] = four[0][t];
        queue.places[at] =
            ((lane >> 2) + 8 * (t >> 1)) << 16 | static_cast<uint32_t>(column + (t & 1));
      }
      count += __popc(winners[t]);
    }
  }
  if (lane == 0) *queue.count = count;
}

// Noise is made in parts of four units and a column for each lane.
constexpr int kUnitsOfPart = 4;

constexpr int parts_of(int columns, bool narrow) {
  return (noises_of(columns, narrow) / kUnitsOfPart + 31) / 32;
}

template <typename Products, int kColumns>
__device__ __forceinline__ void make_noise(const HeadDraw& p, const Columns& columns, float* noise,
                                           int row, int units, int sample, int part, int lane) {
  const int i = 32 * part + lane, column = i % kColumns, first = i / kColumns * kUnitsOfPart;
  if (first >= units) return;
  float made[kUnitsOfPart] = {};
  if (column < p.batch && columns.unit[column] != 0.0f) {
    const NoiseKey key = columns.key_of(column);
    const int64_t group = group_of(p.vocab_offset + row) + first;
    // All at once: one waits for its own results most of the time.
#pragma unroll
    for (int k = 0; k < kUnitsOfPart; ++k)
      made[k] = bound_and_place(noise_group<Products>(key, group + k, sample));
  }
#pragma unroll
  for (int k = 0; k < kUnitsOfPart; ++k) noise[(first + k) * kColumns + column] = made[k];
}

// What scores have to beat in the other blocks, on its way to a thread for its columns. Late news only cost time.
template <int kColumns, int kThreads>
struct News {
  static constexpr int kEach = (kColumns + kThreads - 1) / kThreads;
  uint32_t greatest[kEach];

  __device__ __forceinline__ void start(const HeadDraw& p, int sample, int thread) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int column = i * kThreads + thread;
      if (column < p.batch)
        greatest[i] =
            const_cast<const volatile uint32_t*>(p.shared_least)[sample * kColumns + column];
    }
  }
  // And tells them what is new here.
  __device__ __forceinline__ void finish(const HeadDraw& p, const Columns& columns, int sample,
                                         int thread) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int column = i * kThreads + thread, at = sample * kColumns + column;
      if (column >= p.batch) break;
      const uint32_t key = key_of<SampleMath>(const_cast<const volatile float*>(columns.least)[at]);
      if (greatest[i] > key) raise(columns.least + at, value_of_key<SampleMath>(greatest[i]));
      if (greatest[i] < key) atomicMax(p.shared_least + at, key);
    }
  }
};

// Raises what scores have to beat to the greatest of score_places in the first tile: without any, all of its logits would
// be queued. With many columns, the threads that multiply wait, but not for long, for those of an eighth of the blocks.
// NOTE: without fences: what comes late only costs time.
template <int kColumns, int kMultiplyingWarps>
__device__ __forceinline__ void raise_least(const HeadDraw& p, const Columns& columns, char* queues,
                                            int units, int sample, int thread) {
  constexpr int kThreadsHere = 32 * kMultiplyingWarps, kPatience = 40;
  constexpr bool kExchanges = kColumns >= 64;
  static_assert(kColumns * sizeof(float) <= kQueueBytes, "scores are in the place of queues");
  const auto together = [] { named_barrier_sync<kMultiplyingBarrier, kThreadsHere>(); };
  together();
  for (int column = thread; column < p.batch; column += kThreadsHere) {
    float greatest = -INFINITY;
#pragma unroll
    for (int warp = 0; warp < kMultiplyingWarps; ++warp) {
      if (warp < units) greatest = fmaxf(greatest, Queue(queues, warp).logits[column]);
    }
    const int at = sample * kColumns + column;
    raise(columns.least + at, greatest);
    if (kExchanges) atomicMax(p.shared_least + at, key_of<SampleMath>(greatest));
  }
  together();
  if (!kExchanges) return;
  if (thread == 0) {
    uint32_t* arrived = p.shared_least + p.num_samples * kColumns + sample;
    atomicAdd(arrived, 1u);
    for (int i = 0; i < kPatience && *const_cast<volatile uint32_t*>(arrived) < gridDim.x / 8;
         ++i) {
      __nanosleep(100);
    }
  }
  together();
  News<kColumns, kThreadsHere> news;
  news.start(p, sample, thread);
  news.finish(p, columns, sample, thread);
  together();
}

// Tells the producers of all blocks of the cluster that a warp's products have read a stage.
template <int kCluster>
__device__ __forceinline__ void free_stage(uint32_t empty, int lane) {
  if (kCluster == 1) {
    if (lane == 0) mbarrier_arrive(empty);
  } else if (lane < kCluster) {
    mbarrier_arrive_cluster(empty, lane);
  }
}

// The greatest of a warp's logits in each column of kTurns turns. A lane gets those of its two columns in one of the
// turns, its number in bits 2 to 4 of the lane's, the highest first.
template <int kTurns>
__device__ __forceinline__ float2 greatest_of_columns(const float (&taken)[kTurns][4], int lane) {
  float2 most[kTurns];
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    most[t] = make_float2(fmaxf(taken[t][0], taken[t][2]), fmaxf(taken[t][1], taken[t][3]));
  }
#pragma unroll
  for (int bit = 4, half = kTurns / 2; bit <= 16; bit *= 2, half /= 2) {
    const bool high = (lane & bit) != 0;
    const auto greatest = [&](float first, float second) {
      return fmaxf(high ? second : first, __shfl_xor_sync(0xffffffffu, high ? first : second, bit));
    };
#pragma unroll
    for (int t = 0; t < (half > 0 ? half : 1); ++t) {
      most[t].x = greatest(most[t].x, most[t + half].x);
      most[t].y = greatest(most[t].y, most[t + half].y);
    }
  }
  return most[0];
}

// Writes a warp's logits, of rows from `row` on, but for strips below a column's floor. The greatest of each strip goes to
// `greatest`. What is not there is no number.
//
// NOTE: without branches, so that the shuffles and stores of several turns are on their way together: one turn after the
// other, of those that have anything to be written, took longer. Four bytes a lane, but whole sectors: longer vectors take
// more shuffles than they save (H200).
template <bool kCapped, int kCount>
__device__ __forceinline__ void write_logits(const HeadDraw& p, const Columns& columns,
                                             const float (&logits)[kCount], float* greatest,
                                             int row, int lane) {
  static_assert(kUnitRows == kStrip, "a warp has a strip");
  constexpr int kTurns = kCapped ? 1 : kCount < 32 ? kCount / 4 : 8;
  // Where a lane finds what is told of a turn, as an offset to its two lowest bits, and the turn that it tells.
  constexpr auto teller_of = [](int turn) {
    return 4 * (2 * turn / kTurns % 2) + 8 * (4 * turn / kTurns % 2) + 16 * (8 * turn / kTurns % 2);
  };
  const int told =
      (kTurns * (lane >> 2 & 1) / 2) + (kTurns * (lane >> 3 & 1) / 4) + (kTurns * (lane >> 4) / 8);
  const int own_column = 2 * (lane & 3), told_column = 8 * told + own_column;
  float* to = p.out.logits + (int64_t{p.batch_start} + own_column) * p.out.stride + row + lane / 4;
  for_turns<kTurns, kCapped>(logits, [&](float(&taken)[kTurns][4], int turns) {
#pragma unroll
    for (int i = 0; i < 4 && kCapped; ++i)
      taken[0][i] = soft_capped<SampleMath>(taken[0][i], p.softcap);
    const float2 floor = two_of(columns.least + 8 * turns + told_column);
    float2 most = greatest_of_columns(taken, lane);
    // NOTE: of a number and what is none, fmaxf takes the number.
    most = make_float2(fmaxf(most.x, -INFINITY), fmaxf(most.y, -INFINITY));
    *reinterpret_cast<float2*>(greatest + 8 * turns + told_column) = most;
    const uint32_t first = __ballot_sync(0xffffffffu, most.x >= floor.x) >> own_column / 2;
    const uint32_t second = __ballot_sync(0xffffffffu, most.y >= floor.y) >> own_column / 2;
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      const uint32_t teller = 1u << teller_of(t);
      store_global_if(first & teller, to, taken[t][0], taken[t][2]);
      store_global_if(second & teller, to + p.out.stride, taken[t][1], taken[t][3]);
      to += 8 * p.out.stride;
    }
  });
}

struct Tile {
  int row;    // its first
  int units;  // of rows
};

// NOTE: as whole multiples of `tiles` on both sides, so that nothing overflows.
__device__ __forceinline__ Tile tile_of(const HeadDraw& p, int number) {
  const int each = p.units / p.tiles, more = p.units % p.tiles;
  const int unit = number * each + min(number, more);
  return {p.first_row + unit * kUnitRows, each + (number < more ? 1 : 0)};
}

// ---- floors ----

// Where logits are written, the warps that otherwise make noise write the greatest logits of strips, and find floors.
// Whether a floor comes in time does not matter.

// The floors of top_k, of columns that the warps of all blocks deal out, from the strips of all first tiles. As many as
// top_k are not below: strips are dealt into groups, and the top_k greatest of the groups' greatest are as many.
// NOTE: not in shared memory: each access waits for hundreds of cycles beside the products.
__device__ __forceinline__ void find_top_k_floors(const HeadDraw& p, int thread) {
  constexpr int kPatience = 400;
  constexpr int kGroupsEach = 12, kMostOfGroups = 32 * kGroupsEach * 2 / 3;
  named_barrier_sync<kNoiseBarrier, kNoiseThreads>();
  const int lane = thread % 32;
  if (thread == 0) {
    __threadfence();
    atomicAdd(p.arrived, 1u);
  }
  bool arrived = false;
  for (int i = 0; i < kPatience && !arrived; ++i) {
    arrived = *const_cast<const volatile uint32_t*>(p.arrived) >= gridDim.x;
    if (!arrived) __nanosleep(500);
  }
  if (!__all_sync(0xffffffffu, arrived)) return;
  __threadfence();
  const int strips = tile_of(p, gridDim.x).row / kStrip;
  for (int column = blockIdx.x + thread / 32 * gridDim.x; column < p.batch;
       column += kNoiseWarps * gridDim.x) {
    const int64_t row = int64_t{p.batch_start} + column;
    const int64_t top_k = Wanted(p.out.filters, p.vocab, row).top_k;
    if (top_k == 0 || top_k > kMostOfGroups) continue;
    const float* greatest = p.out.strips.greatest + row * p.out.strips.stride;
    uint32_t keys[kGroupsEach] = {};
    for (int first = lane; first < strips; first += 32 * kGroupsEach) {
#pragma unroll
      for (int i = 0; i < kGroupsEach; ++i) {
        const int at = first + 32 * i;
        if (at < strips) keys[i] = max(keys[i], key_of<SampleMath>(__ldcg(greatest + at)));
      }
    }
    // The greatest key that as many are not below, from its highest bit on.
    uint32_t found = 0;
#pragma unroll 1
    for (uint32_t bit = 1u << 31; bit != 0; bit /= 2) {
      uint32_t count = 0;
#pragma unroll
      for (int i = 0; i < kGroupsEach; ++i) count += keys[i] >= (found | bit);
      if (__reduce_add_sync(0xffffffffu, count) >= top_k) found |= bit;
    }
    if (lane == 0) atomicMax(p.out.strips.floors + row, found);
  }
}

// The least distance from the greatest logit that a row's filters look at, where that is all there is to them; -inf
// otherwise. top_p is of what top_k leaves, whether min_p leaves it or not, or else of all that has weight.
__device__ __forceinline__ float least_distance(const HeadDraw& p, const Heat& heat, int64_t row) {
  const Wanted wanted(p.out.filters, p.vocab, row);
  return heat.greedy           ? 0.0f
         : wanted.weighs_all() ? kNoWeight
         : wanted.weighs()     ? -INFINITY
                               : wanted.farthest;
}

// Of each tile, writes the greatest logits of its strips, which the warps that multiply leave in shared memory, and raises
// the floors by them. Takes floors of other blocks meanwhile.
template <int kColumns, int kNoises>
__device__ __forceinline__ void keep_strips(const HeadDraw& p, const Columns& columns,
                                            const float* greatest, uint32_t read, uint32_t written,
                                            int thread) {
  constexpr int kEach = (kColumns + kNoiseThreads - 1) / kNoiseThreads;
  grid_dependency_wait();  // that has cleared what strips need
  const Strips& strips = p.out.strips;
  float seen[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) seen[i] = -INFINITY;
  const auto for_columns = [&](auto body) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int column = i * kNoiseThreads + thread;
      if (column < p.batch) body(column, int64_t{p.batch_start} + column, seen[i]);
    }
  };
  int turn = 0;
  for (int number = blockIdx.x; number < p.tiles; number += gridDim.x, ++turn) {
    const int half = turn & 1;
    const uint32_t parity = turn >> 1 & 1;
    const bool is_last = number + gridDim.x >= p.tiles;  // after which the next kernel waits
    while (p.finds_floors &&
           !__all_sync(0xffffffffu, mbarrier_test_wait_parity(written + 8 * half, parity))) {
      for_columns([&](int column, int64_t row, float) {
        const uint32_t key = const_cast<const volatile uint32_t*>(strips.floors)[row];
        if (key != 0)
          const_cast<volatile float*>(columns.least)[column] = value_of_key<SampleMath>(key);
      });
      __nanosleep(is_last ? 100 : 1000);
    }
    mbarrier_wait_parity(written + 8 * half, parity);
    const Tile tile = tile_of(p, number);
    for_columns([&](int column, int64_t row, float& most) {
      const float* of_units = greatest + half * kNoises + column;
      float* to = strips.greatest + row * strips.stride + tile.row / kStrip;
      float of_tile = -INFINITY;
      for (int unit = 0; unit < tile.units; ++unit) {
        const float its = of_units[unit * kColumns];
        to[unit] = its;
        of_tile = fmaxf(of_tile, its);
      }
      if (!p.finds_floors || !(of_tile > most)) return;
      most = of_tile;
      const Heat heat = heat_of(p.out.temperature, row);
      const float distance = least_distance(p, heat, row);
      if (distance > -INFINITY) {
        atomicMax(strips.floors + row,
                  key_at_distance<SampleMath>(distance, of_tile, heat.inv_temperature));
      }
    });
    __syncwarp();
    if (thread % 32 == 0) mbarrier_arrive(read + 8 * half);
    if (turn == 0 && p.finds_floors && p.out.filters.has_top_k) find_top_k_floors(p, thread);
  }
}

// ---- the kernel ----

template <typename T, int kColumns, int kCluster, bool kNarrow>
__global__ void __launch_bounds__(threads_of(kColumns, kNarrow), 1)
    lm_head_kernel(const __grid_constant__ CUtensorMap weight_more,  // the rows of greater tiles
                   const __grid_constant__ CUtensorMap weight_less,  // 16 fewer
                   const __grid_constant__ CUtensorMap hidden_tile,  // a block's part of a stage
                   const __grid_constant__ HeadDraw p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kStages = stages_of(kColumns, kNarrow);
  constexpr int kMultiplyingWarps = multiplying_warps(kColumns, kNarrow);
  constexpr int kThreads = threads_of(kColumns, kNarrow);
  constexpr Registers kRegisters = registers_of(groups_of(kColumns, kNarrow));
  constexpr int kStageBytes = stage_bytes(kColumns, kNarrow);
  constexpr int kWeightBytes = weight_bytes(kColumns, kNarrow);
  constexpr int kWeightRowBytes = weight_row_bytes(kColumns, kNarrow);
  constexpr int kDepth = depth_of(kColumns, kNarrow);
  constexpr int kSamples = most_samples(kColumns);
  constexpr int kParts = parts_of(kColumns, kNarrow);
  extern __shared__ __align__(1024) char shared[];
  const uint32_t stages = shared_address(shared);
  Columns columns;
  columns.noise = reinterpret_cast<uint4*>(shared + kStages * kStageBytes);
  columns.best = reinterpret_cast<unsigned long long*>(columns.noise + kColumns);
  columns.least = reinterpret_cast<float*>(columns.best + kSamples * kColumns);
  columns.inverse = columns.least + kSamples * kColumns;
  columns.offset = reinterpret_cast<uint32_t*>(columns.inverse + kColumns);
  columns.unit = reinterpret_cast<float*>(columns.offset + kColumns);
  columns.scale = columns.unit + kColumns;
  constexpr int kNoises = noises_of(kColumns, kNarrow);
  float* noise = columns.scale + (kNarrow ? kColumns : 0);  // [2, units, columns]
  char* queues = reinterpret_cast<char*>(noise + 2 * kNoises);
  const uint32_t full =
      shared_address(queues + queue_bytes(kColumns, kNarrow));  // [stages] by copies
  const uint32_t empty = full + kMostStages * 8;                // [stages] by all that read it
  const uint32_t noise_full = empty + kMostStages * 8, noise_empty = noise_full + 16;  // [2]
  const uint32_t queue_empty = noise_empty + 16;

  // NOTE: from a shuffle the compiler can tell that it is the same for all lanes.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int rank = kCluster > 1 ? cluster_rank() : 0;

  if (threadIdx.x == 0) {
    prefetch_tensormap(weight_more);
    prefetch_tensormap(weight_less);
    prefetch_tensormap(hidden_tile);
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(full + 8 * i, 1);
      mbarrier_init(empty + 8 * i, kMultiplyingWarps * kCluster);
    }
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(noise_full + 8 * i, kNoiseWarps);
      mbarrier_init(noise_empty + 8 * i, kMultiplyingWarps);
    }
    mbarrier_init(queue_empty, kNoiseWarps);
    fence_mbarrier_init();
    if (stages % 1024 != 0) __trap();  // the swizzle goes by address
  }
  if (p.out.logits == nullptr) {
    for (int column = threadIdx.x; column < kColumns; column += kThreads) {
      const bool present = column < p.batch;
      const int64_t row = p.batch_start + (present ? column : 0);
      const NoiseKey key = key_of_row(p.draws, row);
      const Heat heat = heat_of(p.draws, row);
      columns.noise[column] = make_uint4(key.key[0], key.key[1], key.stream, key.offset[0]);
      columns.offset[column] = key.offset[1];
      columns.inverse[column] = heat.scale;
      columns.unit[column] = heat.unit;
      for (int sample = 0; sample < p.num_samples; ++sample) {
        columns.least[sample * kColumns + column] = present ? -INFINITY : INFINITY;
        columns.best[sample * kColumns + column] = 0;
      }
    }
  }
  for (int column = threadIdx.x; column < kColumns && p.out.logits != nullptr; column += kThreads) {
    columns.least[column] = column < p.batch ? -INFINITY : NAN;
  }
  __syncthreads();
  if (kCluster > 1) cluster_sync();

  // All blocks of a cluster have as many tiles.
  const int most_units = (p.units + p.tiles - 1) / p.tiles;
  int stage = 0;
  uint32_t phase = 0;

  if (warp >= kMultiplyingWarps) {
    setmaxnreg_dec<kRegisters.others>();
    if (warp == kMultiplyingWarps && lane == 0) {
      constexpr int kHiddenRows = hidden_rows(kColumns, kNarrow);
      const auto copy_weight = [&](const Tile& tile, int step, int stage) {
        mbarrier_arrive_expect_tx(
            full + 8 * stage, tile.units * (kUnitRows * kWeightRowBytes) + kHiddenRows * kRowBytes);
        if (tile.units != 0) {
          tma_load_2d(stages + stage * kStageBytes,
                      tile.units == most_units ? weight_more : weight_less, step * kDepth, tile.row,
                      full + 8 * stage, kL2EvictFirst);
        }
      };
      // Stages whose weights are on their way. The kernel before makes nothing that weights need.
      int early = 0;
      if (kNarrow) {
        const Tile tile = tile_of(p, blockIdx.x);
        for (; early < kStages && early < p.steps; ++early) copy_weight(tile, early, early);
        grid_dependency_wait();
      }
      for (int number = blockIdx.x; number < p.tiles; number += gridDim.x) {
        const Tile tile = tile_of(p, number);
        for (int step = 0; step < p.steps; ++step) {
          const uint32_t hidden = stages + stage * kStageBytes + kWeightBytes;
          mbarrier_wait_parity(empty + 8 * stage, phase ^ 1);
          if (!kNarrow || early == 0) {
            copy_weight(tile, step, stage);
          } else {
            --early;
          }
          const int column = kNarrow ? 0 : step * kDepth, row = kNarrow ? step * kHiddenRows : 0;
          if (kCluster > 1) {
            constexpr int kPart = kHiddenRows / kCluster;
            tma_load_2d_multicast((1u << kCluster) - 1, hidden + rank * kPart * kRowBytes,
                                  hidden_tile, column, row + rank * kPart, full + 8 * stage,
                                  kL2EvictLast);
          } else {
            tma_load_2d(hidden, hidden_tile, column, row, full + 8 * stage, kL2EvictLast);
          }
          if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
          }
        }
      }
    }
    if (warp > kMultiplyingWarps && p.out.strips.greatest != nullptr) {
      keep_strips<kColumns, kNoises>(p, columns, noise, noise_full, noise_empty,
                                     threadIdx.x - 32 * (kMultiplyingWarps + 1));
    }
    if (warp > kMultiplyingWarps && p.out.logits == nullptr) {
      const int thread = threadIdx.x - 32 * (kMultiplyingWarps + 1);
      grid_dependency_wait();  // that has set shared_least
      // Of each turn the noise is made, and two turns later, when it is drawn from, what it left is scored.
      const int turns = p.tiles / static_cast<int>(gridDim.x) * p.num_samples;
      const auto tile_of_turn = [&](int turn) {
        return tile_of(p, blockIdx.x + turn / p.num_samples * gridDim.x);
      };
      for (int turn = 0; turn < turns + 2; ++turn) {
        const int half = turn & 1;
        if (turn >= 2) {
          mbarrier_wait_parity(noise_empty + 8 * half, (turn >> 1 & 1) ^ 1);
          score_all_queued<kColumns, kMultiplyingWarps>(
              p, columns, queues, (turn - 2) % p.num_samples, tile_of_turn(turn - 2).row, thread);
          __syncwarp();
          if (lane == 0) mbarrier_arrive(queue_empty);
        }
        if (turn >= turns) continue;
        const Tile tile = tile_of_turn(turn);
        const int sample = turn % p.num_samples;
        for (int first = 0; first < kParts; first += kNoiseWarps) {
          News<kColumns, kNoiseThreads> news;
          news.start(p, sample, thread);
          // Where products wait for memory it does not matter which.
          using Products = std::conditional_t<(kColumns > 64), HalfProducts, WholeProducts>;
          const int part = first + thread / 32;
          if (part < kParts) {
            make_noise<Products, kColumns>(p, columns, noise + half * kNoises, tile.row, tile.units,
                                           sample, part, lane);
          }
          news.finish(p, columns, sample, thread);
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(noise_full + 8 * half);
      }
    }
  } else {
    setmaxnreg_inc<kRegisters.multiplying>();
    const Queue queue(queues, warp);
    const int group = warp / 4;
    int turn = 0;
    for (int number = blockIdx.x; number < p.tiles; number += gridDim.x) {
      const Tile tile = tile_of(p, number);
      float logits[kColumns / 2];
      // The rows of this warp, and those of them that are there.
      const int row = tile.row + warp * kUnitRows;
      const int upper = row + (lane >> 2), lower = upper + 8;
      const bool has_upper = upper >= 0 && upper < p.vocab,
                 has_lower = lower >= 0 && lower < p.vocab;
      float upper_scale = 1.0f, lower_scale = 1.0f;  // on their way beside the products
      if (kNarrow && p.weight_scale != nullptr && warp < tile.units) {
        if (has_upper) upper_scale = p.weight_scale[p.scale_per_row ? upper : 0];
        if (has_lower) lower_scale = p.weight_scale[p.scale_per_row ? lower : 0];
      }

      if constexpr (kNarrow) {
        // Two halves of a stage, of which the products of one run while the other is loaded and widened.
        constexpr int kBlocks = kDepth / 32;  // of 16 elements
        uint32_t fragments[2][kBlocks][4];
        uint32_t own = stages + warp * (kUnitRows * kWeightRowBytes);
        own += narrow_chunk_of<kWeightRowBytes>(lane);
        asm volatile("" : "+r"(own));  // NOTE: not to be computed again for each stage
        uint32_t weight = own + stage * kStageBytes;
        // NOTE: as above, and so in the registers that products take it from.
        const auto hidden_of = [&](int stage) {
          return __shfl_sync(0xffffffffu,
                             wgmma_descriptor(stages + stage * kStageBytes + kWeightBytes), 0);
        };
        uint32_t hidden = hidden_of(stage);
        for (int step = 0; step < p.steps; ++step) {
          const int next = stage + 1 == kStages ? 0 : stage + 1;
          uint32_t next_hidden = 0;
          mbarrier_wait_parity(full + 8 * stage, phase);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint32_t words[kBlocks / 2][4];
#pragma unroll
            for (int i = 0; i < kBlocks / 2; ++i) {
              ldmatrix_x4(weight ^ (half * kBlocks / 2 + i) * 32, words[i]);
            }
            // All but the other half are done: these registers are free, and, after the first, the stage before.
            wgmma_wait_group<1>();
            if (half == 1 && step > 0) {
              free_stage<kCluster>(empty + 8 * (stage == 0 ? kStages - 1 : stage - 1), lane);
            }
#pragma unroll
            for (int i = 0; i < kBlocks; ++i) {
              const uint32_t* two = words[i / 2] + i % 2 * 2;
              widen(two[0], fragments[half][i][0], fragments[half][i][2]);
              widen(two[1], fragments[half][i][1], fragments[half][i][3]);
            }
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < kBlocks; ++i) {
              const int k = half * kBlocks + i;
              Wgmma<T, kColumns>::run(logits, fragments[half][i],
                                      hidden + k / 4 * (kColumns * kRowBytes / 16) + k % 4 * 2,
                                      step > 0 || k > 0);
            }
            wgmma_commit_group();
            if (half == 0) next_hidden = hidden_of(next);
          }
          if (next == 0) phase ^= 1;
          stage = next;
          hidden = next_hidden;
          weight = own + stage * kStageBytes;
        }
      }
      for (int step = 0; step < p.steps && !kNarrow; ++step) {
        const uint32_t weight =
            wgmma_descriptor(stages + stage * kStageBytes + group * kGroupRows * kRowBytes);
        const uint32_t hidden = wgmma_descriptor(stages + stage * kStageBytes + kWeightBytes);
        mbarrier_wait_parity(full + 8 * stage, phase);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDepth / 16; ++k) {
          Wgmma<T, kColumns>::run(logits, weight + 2 * k, hidden + 2 * k, step > 0 || k > 0);
        }
        wgmma_commit_group();
        if (step > 0) {
          wgmma_wait_group<1>();
          free_stage<kCluster>(empty + 8 * (stage == 0 ? kStages - 1 : stage - 1), lane);
        }
        if (++stage == kStages) {
          stage = 0;
          phase ^= 1;
        }
      }
      const bool is_first = number < gridDim.x;
      const auto own_noise = [&] { return noise + (turn & 1) * kNoises + warp * kColumns; };
      const auto begin_turn = [&] {
        mbarrier_wait_parity(noise_full + 8 * (turn & 1), turn >> 1 & 1);
        if (turn > 0) mbarrier_wait_parity(queue_empty, (turn - 1) & 1);
        if (lane == 0) *queue.count = 0;
      };
      const auto set_thresholds = [&](int sample) {
        find_thresholds<kColumns>(own_noise(), columns, columns.least + sample * kColumns, lane);
      };
      if (p.out.logits == nullptr && !is_first) {  // beside the last products
        begin_turn();
        set_thresholds(0);
      }
      wgmma_wait_group<0>();
      free_stage<kCluster>(empty + 8 * (stage == 0 ? kStages - 1 : stage - 1), lane);
      wgmma_fence_operand(logits);

      if (kNarrow) {
        if (is_first) {  // from the kernel before, which the copies have waited for
          for (int column = threadIdx.x; column < kColumns; column += 32 * kMultiplyingWarps)
            columns.scale[column] = __ldcg(p.hidden_scales + column);
          named_barrier_sync<kMultiplyingBarrier, 32 * kMultiplyingWarps>();
        }
#pragma unroll
        for (int turn = 0; turn < kColumns / 8; ++turn) {
          const float2 scale = two_of(columns.scale + 8 * turn + 2 * (lane & 3));
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& logit = logits[4 * turn + i];
            logit = __fmul_rn(logit, i & 1 ? scale.y : scale.x);
            logit = __fmul_rn(logit, i & 2 ? lower_scale : upper_scale);
          }
        }
      }
      if (p.bias != nullptr) {
        const float upper_bias =
            has_upper && warp < tile.units ? element_of(p.bias, p.bias_dtype, upper) : 0.0f;
        const float lower_bias =
            has_lower && warp < tile.units ? element_of(p.bias, p.bias_dtype, lower) : 0.0f;
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) logits[i] += i & 2 ? lower_bias : upper_bias;
      }
      if (warp < tile.units && (row < 0 || row + kUnitRows > p.vocab)) {
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) {
          if (!(i & 2 ? has_lower : has_upper)) logits[i] = NAN;
        }
      }
      if (p.out.logits != nullptr) {
        const bool has_strips = p.out.strips.greatest != nullptr;
        if (has_strips) mbarrier_wait_parity(noise_full + 8 * (turn & 1), (turn >> 1 & 1) ^ 1);
        if (warp < tile.units && p.softcap == 0.0f) {
          write_logits<false>(p, columns, logits, own_noise(), row, lane);
        } else if (warp < tile.units) {
          write_logits<true>(p, columns, logits, own_noise(), row, lane);
        }
        __syncwarp();
        if (has_strips && lane == 0) mbarrier_arrive(noise_empty + 8 * (turn & 1));
        ++turn;
        continue;
      }
      for (int sample = 0; sample < p.num_samples; ++sample) {
        const bool begun = sample == 0 && !is_first;
        if (!begun) begin_turn();
        const auto with_softcap = [&](auto capped) {
          constexpr bool kCapped = decltype(capped)::value;
          if (is_first) {
            if (warp < tile.units)
              score_places<kColumns, kCapped>(p, columns, own_noise(), logits, queue.logits, lane);
            raise_least<kColumns, kMultiplyingWarps>(p, columns, queues, tile.units, sample,
                                                     threadIdx.x);
          }
          if (!begun) set_thresholds(sample);
          if (warp < tile.units)
            draw<kColumns, kCapped>(p, columns, queue, own_noise(), logits, row, sample, lane);
        };
        if (p.softcap == 0.0f) {
          with_softcap(std::false_type());
        } else {
          with_softcap(std::true_type());
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(noise_empty + 8 * (turn & 1));
        ++turn;
      }
    }
  }
  __syncthreads();
  if (p.out.logits == nullptr) {
    for (int i = threadIdx.x; i < p.num_samples * kColumns; i += kThreads) {
      p.candidates[int64_t{blockIdx.x} * p.num_samples * kColumns + i] = columns.best[i];
    }
  }
  launch_dependents();
  // A block's memory is written to by the others as long as they run.
  if (kCluster > 1) cluster_sync();
#endif
}

// What is made ready for a launch.
struct Cleared {
  uint32_t* values;  // [count]: set to 0
  int count;
  int64_t* offset;  // advanced, or null

  __device__ __forceinline__ void run() const {
    for (int i = threadIdx.x; i < count; i += blockDim.x) values[i] = 0;
    if (offset != nullptr && threadIdx.x == 0) ++*offset;
  }
};

// NOTE: the kernel that follows may start once all that was launched before is done.
__global__ void clear_kernel(const Cleared cleared) {
  grid_dependency_wait();
  launch_dependents();
  cleared.run();
}

struct HiddenTiles {
  const uint16_t* hidden;  // [batch, dim]
  bool is_bfloat16;
  int64_t stride, dim;
  int batch, columns;
  int blocks;     // of 16 elements, with those that fill up the depth
  uint4* tiles;   // float16, [blocks / 4, columns, 64], and in each block the order of the products
  float* scales;  // [columns]: by which products are to be multiplied
  Cleared cleared;
};

constexpr int kTilesThreads = 256;

__device__ __forceinline__ float power_of_2(int exponent) {
  return __int_as_float((exponent + 127) << 23);
}

// Of bfloat16, by how many powers of two the elements become greater: the greatest that is finite comes near to what is the
// greatest of float16. What is less than 2^-32 of it is rounded then, by 2^-40 of it at most, and all else is exact.
__device__ __forceinline__ int powers_up(uint32_t greatest) {
  const int exponent = max(static_cast<int>(greatest >> 7), 1) - 127;
  return min(15 - exponent, 126);
}

// Puts hidden into tiles, a column a block, and clears as the kernel above. NOTE: its note holds here.
__global__ void __launch_bounds__(kTilesThreads) hidden_tiles_kernel(const HiddenTiles p) {
  __shared__ uint32_t greatest;  // bits of its magnitude
  grid_dependency_wait();
  launch_dependents();
  if (blockIdx.x == 0) p.cleared.run();
  const int column = blockIdx.x;
  const auto load = [&](int block, uint32_t(&pairs)[8]) {
#pragma unroll
    for (uint32_t& pair : pairs) pair = 0;
    if (column >= p.batch) return;
    const int64_t first = int64_t{block} * 16;
    const uint16_t* from = p.hidden + column * p.stride + first;
    if (first + 16 <= p.dim && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint4 four = load_global_16(from + 8 * k);
        pairs[4 * k] = four.x;
        pairs[4 * k + 1] = four.y;
        pairs[4 * k + 2] = four.z;
        pairs[4 * k + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int k = 0; k < 16; ++k) {
        if (first + k < p.dim) pairs[k / 2] |= uint32_t{from[k]} << (k % 2 * 16);
      }
    }
  };

  int up = 0;
  if (p.is_bfloat16) {
    if (threadIdx.x == 0) greatest = 0;
    __syncthreads();
    uint32_t most = 0;
    for (int block = threadIdx.x; block < p.blocks; block += kTilesThreads) {
      uint32_t pairs[8];
      load(block, pairs);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const uint32_t magnitude = pairs[i / 2] >> (i % 2 * 16) & 0x7fffu;
        if (magnitude < 0x7f80u) most = max(most, magnitude);
      }
    }
    most = __reduce_max_sync(0xffffffffu, most);
    if (threadIdx.x % 32 == 0) atomicMax(&greatest, most);
    __syncthreads();
    up = powers_up(greatest);
  }
  if (threadIdx.x == 0) p.scales[column] = power_of_2(-up);

  for (int block = threadIdx.x; block < p.blocks; block += kTilesThreads) {
    uint32_t pairs[8];
    load(block, pairs);
    if (p.is_bfloat16) {
#pragma unroll
      for (uint32_t& pair : pairs) {
        float values[2];
        WordTraits<bfloat16>::unpack(pair, values);
        for (float& value : values) value *= power_of_2(up);
        pair = WordTraits<float16>::pack(values);
      }
    }
    // A lane has four neighbours, and multiplies the first two as of the lower half, the others as of the upper half.
    uint4* to = p.tiles + (int64_t{block / 4} * p.columns + column) * 8 + block % 4 * 2;
    to[0] = make_uint4(pairs[0], pairs[2], pairs[4], pairs[6]);
    to[1] = make_uint4(pairs[1], pairs[3], pairs[5], pairs[7]);
  }
}

struct Finish {
  const unsigned long long* candidates;  // [blocks, num_samples, columns]
  int blocks, columns, batch, num_samples, batch_start;
  int64_t vocab_offset;
  int64_t* tokens;
  float* scores;
  int64_t* offsets;  // to be advanced, or null
  bool offset_per_row;
  int64_t offset_stride;
};

constexpr int kHeadFinishThreads = 128;

// A warp for each token.
__global__ void __launch_bounds__(kHeadFinishThreads) head_finish_kernel(Finish p) {
  const int i = blockIdx.x * (kHeadFinishThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  launch_dependents();
  grid_dependency_wait();
  if (i >= p.batch * p.num_samples) return;
  const int b = i / p.num_samples, sample = i % p.num_samples;
  unsigned long long best = 0;
  constexpr int kAtOnce = 5;  // on an H200 all
  for (int first = lane; first < p.blocks; first += 32 * kAtOnce) {
    unsigned long long keys[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int64_t block = first + 32 * k;
      keys[k] =
          block < p.blocks ? p.candidates[(block * p.num_samples + sample) * p.columns + b] : 0;
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) best = keys[k] > best ? keys[k] : best;
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    const unsigned long long other = __shfl_xor_sync(0xffffffffu, best, mask);
    best = other > best ? other : best;
  }
  if (lane == 0) {
    if (p.offsets != nullptr && sample == 0 && (p.offset_per_row || b == 0)) {
      ++p.offsets[(p.batch_start + b) * p.offset_stride];
    }
    const int64_t at = int64_t{p.batch_start + b} * p.num_samples + sample;
    const bool none = best == 0;
    p.tokens[at] = none ? -1 : p.vocab_offset + static_cast<uint32_t>(~best);
    if (p.scores != nullptr) {
      p.scores[at] = none ? -INFINITY : value_of_key<SampleMath>(static_cast<uint32_t>(best >> 32));
    }
  }
}

// ---- launchers ----

// The columns of a launch for `batch` rows: the least that has room for them.
int columns_of(int64_t batch, bool narrow) {
  if (batch <= 8 && !narrow) return 8;
  for (const int columns : {16, 32, 64, 128}) {
    if (batch <= columns) return columns;
  }
  return 256;
}

// The most columns that leave room for what is kept of each sample; 0 if there are too many samples. It may not depend
// on the batch, nor may whether this kernel serves: a row's draw does not.
constexpr int most_columns(int num_samples) {
  return num_samples <= most_samples(256)   ? 256
         : num_samples <= most_samples(128) ? 128
         : num_samples <= most_samples(32)  ? 32
                                            : 0;
}

// Beside float8, hidden is twice as much of what is read.
constexpr int cluster_of(int columns, bool narrow) { return columns <= (narrow ? 16 : 32) ? 1 : 2; }

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's function, without linking to the driver; null if it has none.
EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status = cudaDriverEntryPointSymbolNotFound;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                         &status) != cudaSuccess ||
        status != cudaDriverEntryPointSuccess) {
      static_cast<void>(cudaGetLastError());
      found = nullptr;
    }
    return reinterpret_cast<EncodeTiled>(found);
  }();
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

bool is_narrow(const LmHead& head) { return head.weight_type == WeightType::float8_e4m3; }

// Bytes of the tiles of hidden for so many columns, and of their scales.
int64_t hidden_tiles_bytes(const LmHead& head, int columns) {
  return is_narrow(head) ? (ceil_div(head.dim, kNarrowDepth) * kNarrowDepth * 2 + 4) * columns : 0;
}

int blocks_for(const DeviceInfo& device, int64_t units, int cluster) {
  const int64_t clusters = std::min<int64_t>(std::max(device.multiprocessors / cluster, 1),
                                             std::max<int64_t>(ceil_div(units, cluster), 1));
  return static_cast<int>(clusters) * cluster;
}

template <typename T, int kColumns, bool kNarrow>
const char* launch(const LmHead& head, HeadDraw p, uint4* hidden_tiles, int blocks,
                   gpuStream stream) {
  constexpr int kCluster = cluster_of(kColumns, kNarrow);
  constexpr int kDepth = depth_of(kColumns, kNarrow);
  constexpr int kHiddenRows = hidden_rows(kColumns, kNarrow);
  constexpr int kShared = shared_bytes_of(kColumns, kNarrow);
  static_assert(kShared <= kMostShared, "the stages leave room for the rest");
  static_assert(stages_of(kColumns, kNarrow) >= 4, "three stages are too few to hide latency");
  const CUtensorMapDataType type = std::is_same_v<T, __nv_bfloat16>
                                       ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                       : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const int64_t hidden_stride = stride_of(head.hidden_stride, head.batch, head.dim);
  const uint16_t* from =
      static_cast<const uint16_t*>(head.hidden) + int64_t{p.batch_start} * hidden_stride;
  const Matrix weight{head.weight,     kNarrow ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : type,
                      kNarrow ? 1 : 2, head.vocab,
                      head.dim,        stride_of(head.weight_stride, head.vocab, head.dim)};
  const Matrix hidden = kNarrow
                            ? Matrix{hidden_tiles, type,        2, int64_t{p.steps} * kHiddenRows,
                                     kHiddenDepth, kHiddenDepth}
                            : Matrix{from, type, 2, p.batch, head.dim, hidden_stride};
  CUtensorMap weight_more, weight_less, hidden_tile;
  const int most_rows = static_cast<int>(ceil_div(p.units, p.tiles)) * kUnitRows;
  if (!encode(&weight_more, weight, most_rows, kDepth) ||
      !encode(&weight_less, weight, std::max(most_rows - kUnitRows, kUnitRows), kDepth) ||
      !encode(&hidden_tile, hidden, kHiddenRows / kCluster, kHiddenDepth)) {
    return "cuTensorMapEncodeTiled failed";
  }
  const auto kernel = lm_head_kernel<T, kColumns, kCluster, kNarrow>;
  gpuError error = gpu_allow_shared_memory(reinterpret_cast<const void*>(kernel));
  if (error != gpuSuccess) return message_of(gpu_launched(error));
  // They are for the tiles after the first ones.
  p.finds_floors = p.out.strips.floors != nullptr && p.tiles > blocks;
  if (p.finds_floors) p.arrived = p.out.strips.floors + head.batch + p.batch_start;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kCluster, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  const Strips& strips = p.out.strips;
  Cleared cleared{};
  if (p.out.logits == nullptr) {
    cleared = {p.shared_least, p.num_samples * (kColumns + 1), nullptr};
  } else if (strips.greatest != nullptr && p.batch_start == 0) {  // what all launches share
    cleared = {strips.left, static_cast<int>(Strips::words(head.batch)), p.out.offset};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads_of(kColumns, kNarrow));
  config.dynamicSmemBytes = kShared;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = kNarrow || cleared.count > 0 ? 2 : 1;
  if (kNarrow) {
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

template <typename T, bool kNarrow>
const char* launch_columns(int columns, const LmHead& head, const HeadDraw& p, uint4* hidden_tiles,
                           int blocks, gpuStream stream) {
  switch (columns) {
    // NOTE: columns_of has no 8 for float8.
    case 8: return launch<T, kNarrow ? 16 : 8, kNarrow>(head, p, hidden_tiles, blocks, stream);
    case 16: return launch<T, 16, kNarrow>(head, p, hidden_tiles, blocks, stream);
    case 32: return launch<T, 32, kNarrow>(head, p, hidden_tiles, blocks, stream);
    case 64: return launch<T, 64, kNarrow>(head, p, hidden_tiles, blocks, stream);
    case 128: return launch<T, 128, kNarrow>(head, p, hidden_tiles, blocks, stream);
    default: return launch<T, 256, kNarrow>(head, p, hidden_tiles, blocks, stream);
  }
}

template <bool kNarrow>
const char* launch_type(int columns, const LmHead& head, const HeadDraw& p, uint4* hidden_tiles,
                        int blocks, gpuStream stream) {
  if constexpr (!kNarrow) {
    if (head.dtype == DType::bfloat16)
      return launch_columns<__nv_bfloat16, false>(columns, head, p, hidden_tiles, blocks, stream);
  }
  return launch_columns<__half, kNarrow>(columns, head, p, hidden_tiles, blocks, stream);
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
  const int most = most_columns(p.num_samples);
  const bool narrow = is_narrow(head);
  for (int64_t start = 0; start < head.batch; start += most) {
    p.batch_start = static_cast<int>(start);
    p.batch = static_cast<int>(std::min<int64_t>(head.batch - start, most));
    const int columns = columns_of(p.batch, narrow);
    const int blocks = blocks_for(info, p.units, cluster_of(columns, narrow));
    const int depth = depth_of(columns, narrow);
    // NOTE: float8: as many zeros are added for any batch.
    p.steps = static_cast<int>(narrow ? ceil_div(head.dim, kNarrowDepth) * (kNarrowDepth / depth)
                                      : ceil_div(head.dim, depth));
    p.tiles = static_cast<int>(
                  ceil_div(p.units, int64_t{blocks} * (tile_rows(columns, narrow) / kUnitRows))) *
              blocks;
    const char* error = narrow ? launch_type<true>(columns, head, p, hidden_tiles, blocks, stream)
                               : launch_type<false>(columns, head, p, hidden_tiles, blocks, stream);
    if (error == nullptr) error = after(p, columns, blocks);
    if (error != nullptr) return error;
  }
  return nullptr;
}

// The columns of the greatest launch.
int greatest_columns(const LmHead& head, int num_samples) {
  return columns_of(std::min<int64_t>(head.batch, most_columns(num_samples)), is_narrow(head));
}

// Its columns and samples, and those of all blocks.
int64_t entries_of(const LmHeadSample& p) {
  return int64_t{greatest_columns(p.head, p.draws.num_samples)} * p.draws.num_samples;
}
int64_t candidates_of(const LmHeadSample& p, int device) {
  return entries_of(p) * device_info(device).multiprocessors;
}

}  // namespace

bool lm_head_sm90_serves(const LmHead& p, int device) {
  return has_wgmma_form(device_info(device), p) && encode_tiled() != nullptr;
}

bool lm_head_sm90_serves(const LmHeadSample& p, int device) {
  return most_columns(p.draws.num_samples) > 0 && !p.results.needs_sums() &&
         p.results.logits == nullptr && lm_head_sm90_serves(p.head, device);
}

int64_t lm_head_sample_sm90_workspace(const LmHeadSample& p, int device) {
  return hidden_tiles_bytes(p.head, greatest_columns(p.head, p.draws.num_samples)) +
         candidates_of(p, device) * 8 + (entries_of(p) + p.draws.num_samples) * 4;
}

const char* lm_head_sample_sm90(const LmHeadSample& p, int device, void* stream) {
  HeadDraw draw{};
  draw.vocab_offset = p.draws.vocab_offset;
  draw.num_samples = p.draws.num_samples;
  draw.draws = p.draws;
  char* after_tiles = static_cast<char*>(p.workspace) +
                      hidden_tiles_bytes(p.head, greatest_columns(p.head, p.draws.num_samples));
  draw.candidates = reinterpret_cast<unsigned long long*>(after_tiles);
  draw.shared_least = reinterpret_cast<uint32_t*>(draw.candidates + candidates_of(p, device));
  const gpuStream on = static_cast<gpuStream>(stream);
  return for_each_launch(
      p.head, draw, static_cast<uint4*>(p.workspace), device, on,
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
        return message_of(
            gpu_launch_after(head_finish_kernel,
                             dim3(static_cast<unsigned>(ceil_div(warps, kHeadFinishThreads / 32))),
                             dim3(kHeadFinishThreads), on, finish));
      });
}

int64_t lm_head_logits_sm90_workspace(const LmHead& p) {
  return hidden_tiles_bytes(p, greatest_columns(p, 0));
}

const char* lm_head_logits_sm90(const LmHead& p, const HeadLogits& out, void* workspace, int device,
                                void* stream) {
  HeadDraw draw{};
  draw.out = out;
  return for_each_launch(p, draw, static_cast<uint4*>(workspace), device,
                         static_cast<gpuStream>(stream),
                         [](const HeadDraw&, int, int) -> const char* { return nullptr; });
}

}  // namespace gpu
}  // namespace fuselage
