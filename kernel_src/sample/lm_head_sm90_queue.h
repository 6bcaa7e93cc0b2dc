// What the epilogue and the bounds warps of sample/lm_head_sm90.cu share: the queues of candidates,
// their exact scores, and the thresholds that scores raise, in the block and across blocks.
#pragma once

#include "sample/lm_head_sm90_layout.h"

namespace fuselage {
namespace gpu {
namespace {

// Raises the float in shared memory to `value`, whatever the signs.
__device__ __forceinline__ void atomic_max(float* at, float value) {
  value += 0.0f;
  if (value >= 0.0f) {
    atomicMax(reinterpret_cast<int*>(at), __float_as_int(value));
  } else {
    atomicMin(reinterpret_cast<unsigned int*>(at), __float_as_uint(value));
  }
}

// The candidates of a warp: logits whose scores may reach the threshold.
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

// Scores entry `i` of a queue. `row` is the first of the warp's rows, `width` the columns.
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
  float* threshold = columns.thresholds + sample * width + column;
  // Also false for NaN.
  if (score > -INFINITY && score >= *threshold) {
    const unsigned long long key = static_cast<unsigned long long>(key_of<SampleMath>(score))
                                       << 32 |
                                   ~static_cast<uint32_t>(own_row);
    const unsigned long long before = atomicMax(columns.best + sample * width + column, key);
    if (before < key && p.drawn_logits != nullptr)
      p.drawn_logits[(int64_t{p.batch_start} + column) * p.drawn_stride + own_row] = logit;
    atomic_max(threshold, score);
  }
}

// Scores the queues of all warps, of a tile whose first row is `row`.
template <typename Traits>
__device__ __forceinline__ void score_all_queued(const HeadDraw& p, const Block<Traits>& block,
                                                 int sample, int row, int thread) {
#pragma unroll 1
  for (int i = thread;; i += kBoundsThreads) {
    int left = i, warp = 0;
#pragma unroll 1
    for (; warp < Traits::kConsumerWarps; ++warp) {
      const int count = static_cast<int>(*Queue(block.queues, warp).count);
      if (left < count) break;
      left -= count;
    }
    if (warp == Traits::kConsumerWarps) break;
    score_queued(p, block.columns, Queue(block.queues, warp), left, sample, Traits::kColumns,
                 row + warp * kUnitRows);
  }
}

// The exchange of thresholds with the other blocks, a thread for some columns. A late value only
// costs time: it makes more candidates, and no difference to the result.
template <int kColumns, int kThreads>
struct ThresholdExchange {
  static constexpr int kEach = (kColumns + kThreads - 1) / kThreads;
  uint32_t shared[kEach];

  // Starts to load those of the other blocks.
  __device__ __forceinline__ void start(const HeadDraw& p, int sample, int thread) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int column = i * kThreads + thread;
      if (column < p.batch)
        shared[i] =
            const_cast<const volatile uint32_t*>(p.shared_thresholds)[sample * kColumns + column];
    }
  }
  // Takes theirs where they are higher, and shares ours where not.
  __device__ __forceinline__ void finish(const HeadDraw& p, const Columns& columns, int sample,
                                         int thread) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int column = i * kThreads + thread, at = sample * kColumns + column;
      if (column >= p.batch) break;
      const uint32_t key =
          key_of<SampleMath>(const_cast<const volatile float*>(columns.thresholds)[at]);
      if (shared[i] > key) atomic_max(columns.thresholds + at, value_of_key<SampleMath>(shared[i]));
      if (shared[i] < key) atomicMax(p.shared_thresholds + at, key);
    }
  }
};

}  // namespace
}  // namespace gpu
}  // namespace fuselage
