// The forward of group_norm of flat groups beyond a cluster, on GPUs with bulk copies, where the
// shared memory of all multiprocessors holds a group: x is read once (formulas: norm/group_norm.h).
//
// Blocks take the chunks of all groups in turn, one group after the other. A block has its chunks
// in a ring of stages, and these warps, which go through them each at its own pace:
//
//   copy      writes the results of a stage back, takes the next chunk and copies it there
//   moments   take those of a chunk, a part of it each
//   publish   adds up the warps' moments, and leaves the chunk's in global memory
//   watch     waits for the moments of all chunks of the group, and adds them up, in a fixed order:
//             every block for itself
//   apply     puts results in the place of x
//
// All blocks are on the GPU at once (a cooperative launch), and can not wait for each other for
// ever. Of the first group whose moments are not complete, those of a chunk that is taken wait for
// its copy alone. If there is a chunk that no block has taken, only chunks of this group and of
// earlier ones are: the earlier groups are complete, and their stages become free. As the group has
// no more chunks than there are stages (the policy sees to it), a block then has a stage without a
// chunk of it, and takes the next: blocks take chunks when they have a free stage, and not before.
//
// x may start anywhere: a chunk is as far past a boundary of 16 bytes in shared memory as it is in
// global memory. Threads have the same vectors then, so that bits do not depend on where a tensor
// starts.
#include <type_traits>

#include "common/cooperative_launch.h"
#include "common/dispatch.h"
#include "norm/group_norm_device.h"
#include "norm/group_norm_policy.h"

#if !defined(USE_ROCM)
#include <cooperative_groups.h>
#endif

namespace fuselage {
namespace {

#if !defined(USE_ROCM)

constexpr int kWatchWarps = kGroupNormGridWatchWarps, kMomentWarps = kGroupNormGridMomentWarps;
constexpr int kApplyWarps = kGroupNormGridApplyWarps;
constexpr int kCopyWarp = 1, kFirstWatchWarp = 2, kFirstMomentWarp = kFirstWatchWarp + kWatchWarps;
constexpr int kFirstApplyWarp = kFirstMomentWarp + kMomentWarps;

// What is in the place of moments that are not there yet. NOTE: no moments have these bits: squares
// are kept without their sign.
constexpr uint64_t kNoMoments = ~uint64_t{0};

struct GridParams {
  Divisor chunks, groups;  // of a group, of a sample
  int64_t items;           // the chunks of all groups
  int stages, chunk_vectors;
};

constexpr int64_t kNoItem = -1;

// A chunk: its vectors within the group, and where these begin in memory. One thread computes this
// for its block: of the kernel's instructions a third were those of every warp for itself.
struct GridChunk {
  int64_t item, group;  // item: kNoItem after the last one of the block
  const void* x;
  void* out;
  int first, count;
  int channel;        // of the sample, the first of the group
  int first_channel;  // of the group, in which the chunk begins,
  int first_vector;   // and with which of its vectors
};

// What a stage has besides its chunk. Mbarriers: the chunk's x is there (full), its moments
// (summed), those of its group (ready), and its results (applied).
struct StageState {
  uint64_t full, summed, ready, applied;
  GridChunk chunk;
  float2 of_warps[kMomentWarps];               // mean and squares
  float2 of_channels[kGroupNormGridChannels];  // rstd * weight, and bias
  float mean;
};
static_assert(sizeof(StageState) <= kGroupNormGridStateBytes, "more than the policy has room for");

// A stage with a chunk in it, and the parity of its mbarriers.
template <typename T>
struct Stage {
  static constexpr int N = 16 / sizeof(T);
  using V = Vector<T, N>;
  char* data;
  StageState& state;
  uint32_t parity;

  // Whether the chunk begins on a boundary of 16 bytes.
  __device__ __forceinline__ bool aligned() const { return is_aligned_16(state.chunk.x); }
  // A vector of x.
  template <bool kAligned>
  __device__ __forceinline__ V load(int i) const {
    const V first = V::load_shared(data + 16 * i);
    if (kAligned || aligned()) return first;
    return V::shifted(first, V::load_shared(data + 16 * i + 16), V::shift_of(state.chunk.x));
  }
};

// Whether the results of a chunk go back through its stage.
__device__ __forceinline__ bool stores_staged(const GridChunk& chunk) {
  return is_aligned_16(chunk.x) && is_aligned_16(chunk.out);
}

// A place in the ring: a block's stages in the order of its chunks, or every `step`-th of them.
template <typename T>
struct Ring {
  const GroupNormForward& p;
  const GridParams& grid;
  char* memory;
  int stage, step;
  uint32_t parity;

  __device__ __forceinline__ Ring(const GroupNormForward& p_, const GridParams& grid_,
                                  char* memory_, int first = 0, int step_ = 1)
      : p(p_), grid(grid_), memory(memory_), stage(first), step(step_), parity(0) {
    wrap();
  }
  __device__ __forceinline__ void next() {
    stage += step;
    wrap();
  }
  __device__ __forceinline__ char* data() const {
    return memory + stage * (data_bytes() + kGroupNormGridStateBytes);
  }
  __device__ __forceinline__ StageState& state() const {
    return *reinterpret_cast<StageState*>(data() + data_bytes());
  }
  __device__ __forceinline__ GridChunk chunk(int64_t item) const {
    constexpr int N = 16 / sizeof(T);
    const int vectors = static_cast<int>(p.positions) / N;  // of a channel
    GridChunk c;
    c.item = item;
    c.group = quotient(item, grid.chunks);
    c.first = static_cast<int>(item - c.group * grid.chunks.value) * grid.chunk_vectors;
    c.count = min(grid.chunk_vectors, static_cast<int>(p.group_size) / N - c.first);
    const int64_t sample = quotient(c.group, grid.groups);
    const int64_t of_sample = c.group - sample * p.groups;
    const int64_t offset = of_sample * p.group_size + int64_t{c.first} * N;
    c.x = static_cast<const T*>(p.x) + sample * p.x_stride + offset;
    c.out = static_cast<T*>(p.out) + sample * p.channels * p.positions + offset;
    c.channel = static_cast<int>(of_sample * p.group_channels);
    c.first_channel = c.first / vectors;
    c.first_vector = c.first - c.first_channel * vectors;
    return c;
  }
  // f(chunk, stage) for the block's chunks, each when its x is there.
  template <typename F>
  __device__ __forceinline__ void for_chunks(const F& f) {
#pragma unroll 1
    for (;; next()) {
      mbarrier_wait_parity(shared_address(&state().full), parity);
      StageState& s = state();
      if (s.chunk.item == kNoItem) return;
      f(s.chunk, Stage<T>{data(), s, parity});
    }
  }

 private:
  __device__ __forceinline__ int data_bytes() const { return (grid.chunk_vectors + 1) * 16; }
  __device__ __forceinline__ void wrap() {
    while (stage >= grid.stages) {
      stage -= grid.stages;
      parity ^= 1;
    }
  }
};

// Starts the copy of a chunk: of the whole blocks of 16 bytes that it lies in, and at once of the
// elements past the last of them. NOTE: the first block may begin before x, but not before x's
// allocation.
template <typename T>
__device__ __forceinline__ void start_copy(const GridChunk& chunk, char* data, uint64_t* mbarrier) {
  const T* x = static_cast<const T*>(chunk.x);
  const int shift = Stage<T>::V::shift_of(x), bytes = chunk.count * 16;
  const int whole = shift == 0 ? bytes : (shift + bytes) / 16 * 16;
  const char* source = reinterpret_cast<const char*>(x) - shift;
  for (int i = whole; i < shift + bytes; i += static_cast<int>(sizeof(T)))
    *reinterpret_cast<T*>(data + i) = *reinterpret_cast<const T*>(source + i);
  fence_proxy_async();
  const uint32_t full = shared_address(mbarrier);
  mbarrier_arrive_expect_tx(full, whole);
  bulk_copy_async(data, source, whole, full);
}

// Copies a chunk to a stage that is free, or marks the end of the block's chunks.
template <typename T>
__device__ __forceinline__ void fill(const Ring<T>& ring, int64_t item) {
  StageState& state = ring.state();
  if (item < ring.grid.items) {
    const GridChunk chunk = ring.chunk(item);
    state.chunk = chunk;
    start_copy<T>(chunk, ring.data(), &state.full);
  } else {
    state.chunk.item = kNoItem;
    mbarrier_arrive(shared_address(&state.full));
  }
}

// Writes results back, and fills the stages that are free by that. By one thread.
template <typename T>
__device__ __forceinline__ void refill(Ring<T> ring, unsigned long long* ticket) {
  const int64_t first = int64_t{ring.grid.stages} * gridDim.x;
  bool has_more = first < ring.grid.items;
#pragma unroll 1
  for (; ring.state().chunk.item != kNoItem; ring.next()) {
    const GridChunk& chunk = ring.state().chunk;
    mbarrier_wait_parity(shared_address(&ring.state().applied), ring.parity);
    if (stores_staged(chunk)) bulk_store_async(chunk.out, ring.data(), chunk.count * 16);
    bulk_commit_group();
    // The next chunk, while the store reads the stage.
    int64_t item = ring.grid.items;
    if (has_more) item = first + static_cast<int64_t>(atomicAdd(ticket, 1ull));
    bulk_wait_group_read<0>();
    has_more = item < ring.grid.items;
    fill(ring, item);
  }
}

// Moments of the warps' vectors.
template <typename T>
__device__ __forceinline__ void take_moments(const GroupNormForward& p, const GridParams& grid,
                                             char* memory) {
  constexpr int N = 16 / sizeof(T);
  const int thread = static_cast<int>(threadIdx.x) - kFirstMomentWarp * kWarpSize;
  Ring<T>(p, grid, memory).for_chunks([&](const GridChunk& chunk, const Stage<T>& stage) {
    const int count = chunk.count;
    ThreadMoments<N> own;
    const auto add = [&](auto aligned) {
#pragma unroll 2
      for (int i = thread; i < count; i += kMomentWarps * kWarpSize) {
        float values[N];
        unpack(stage.template load<aligned>(i), p.dtype, values);
        own.add(values);
      }
    };
    if (stage.aligned()) {
      add(std::true_type{});
    } else {
      add(std::false_type{});
    }
    const GroupMoments m = warp_moments(own.moments());
    if (thread % kWarpSize == 0) {
      stage.state.of_warps[thread / kWarpSize] = make_float2(m.mean, m.squares);
      mbarrier_arrive(shared_address(&stage.state.summed));
    }
  });
}

// Vectors of a chunk that a warp has taken moments of.
__device__ __forceinline__ int vectors_of_warp(int count, int warp) {
  constexpr int kThreads = kMomentWarps * kWarpSize;
  return count / kThreads * kWarpSize + max(0, min(count % kThreads - warp * kWarpSize, kWarpSize));
}

// Moments of the chunks, from those of the warps.
template <typename T>
__device__ __forceinline__ void publish(const GroupNormForward& p, const GridParams& grid,
                                        char* memory, uint64_t* partials) {
  constexpr int N = 16 / sizeof(T);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  Ring<T>(p, grid, memory).for_chunks([&](const GridChunk& chunk, const Stage<T>& stage) {
    mbarrier_wait_parity(shared_address(&stage.state.summed), stage.parity);
    GroupMoments m{0.0f, 0.0f, 0.0f};
    if (lane < kMomentWarps) {
      const float2 of_warp = stage.state.of_warps[lane];
      m = {static_cast<float>(N * vectors_of_warp(chunk.count, lane)), of_warp.x, of_warp.y};
    }
    m = warp_moments(m);
    if (lane == 0) {
      st_relaxed_gpu(
          partials + chunk.item,
          uint64_t{__float_as_uint(m.squares) & 0x7fffffffu} << 32 | __float_as_uint(m.mean));
    }
  });
}

// Of the whole group, from those of its chunks as they arrive: in all lanes of a warp.
template <int N>
__device__ __forceinline__ GroupMoments moments_of_group(const GroupNormForward& p,
                                                         const GridParams& grid,
                                                         const uint64_t* partials) {
  constexpr int kAhead = 16;
  const int chunks = static_cast<int>(grid.chunks.value), size = grid.chunk_vectors * N;
  const int last_size = static_cast<int>(p.group_size) - (chunks - 1) * size;
  GroupMoments m{0.0f, 0.0f, 0.0f};
  // The last chunk is one of the last that are there: all blocks asking for all chunks all the time
  // hold up the copies. On an H200, (256, 512, 512) takes 85 us so, and 82 with this.
  while (ld_relaxed_gpu(partials + chunks - 1) == kNoMoments) {
  }
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x) % kWarpSize; first < chunks;
       first += kAhead * kWarpSize) {
    // All that are missing are asked for at once: an answer takes a microsecond or more.
    uint64_t ahead[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) ahead[j] = first + j * kWarpSize < chunks ? kNoMoments : 0;
    bool is_complete;
    do {
      is_complete = true;
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (ahead[j] == kNoMoments) ahead[j] = ld_relaxed_gpu(partials + first + j * kWarpSize);
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) is_complete = is_complete && ahead[j] != kNoMoments;
    } while (!is_complete);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int i = first + j * kWarpSize;
      if (i >= chunks) break;
      m = merged(m, {static_cast<float>(i == chunks - 1 ? last_size : size),
                     __uint_as_float(static_cast<uint32_t>(ahead[j])),
                     __uint_as_float(static_cast<uint32_t>(ahead[j] >> 32))});
    }
  }
  return warp_moments(m);
}

// What the channels of each chunk are mapped with, once the moments of its group are known.
template <typename T>
__device__ __forceinline__ void watch(const GroupNormForward& p, const GridParams& grid,
                                      char* memory, const uint64_t* partials) {
  constexpr int N = 16 / sizeof(T);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize - kFirstWatchWarp;
  int64_t group = -1;
  float2 statistics{};
  Ring<T>(p, grid, memory, warp, kWatchWarps)
      .for_chunks([&](const GridChunk& chunk, const Stage<T>& stage) {
        const int channel = chunk.first_channel + lane, of_sample = chunk.channel + channel;
        const bool is_inside = lane < kGroupNormGridChannels && channel < p.group_channels;
        const ChannelValues values(p, of_sample, is_inside);
        if (chunk.group != group) {
          group = chunk.group;
          statistics = statistics_of(
              moments_of_group<N>(p, grid, partials + group * grid.chunks.value), p.eps);
        }
        const float2 pair = values.pair(p);
        if (is_inside) stage.state.of_channels[lane] = make_float2(statistics.y * pair.x, pair.y);
        if (lane == 0) {
          stage.state.mean = statistics.x;
          if (chunk.first == 0 && p.statistics != nullptr)
            reinterpret_cast<float2*>(p.statistics)[group] = statistics;
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(shared_address(&stage.state.ready));
      });
}

// Results. A warp has neighbouring vectors of a chunk.
template <typename T>
__device__ __forceinline__ void apply(const GroupNormForward& p, const GridParams& grid,
                                      char* memory) {
  constexpr int N = 16 / sizeof(T);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize - kFirstApplyWarp;
  // A vector is one of a channel: there is a whole number of them in each, and more than a warp's:
  // chunks have half of the most bytes, at least, and parts of few channels.
  static_assert(kGroupNormGridChunkBytes / 2 / 16 / (kGroupNormGridChannels - 2) > kWarpSize,
                "a warp's next vectors may be more than one channel further");
  const int vectors = static_cast<int>(p.positions) / N;
  Ring<T>(p, grid, memory).for_chunks([&](const GridChunk& chunk, const Stage<T>& stage) {
    const int count = chunk.count, of_warp = (count + kApplyWarps - 1) / kApplyWarps;
    const int begin = min(warp * of_warp, count), end = min(begin + of_warp, count);
    const bool staged = stores_staged(chunk);
    int channel = 0, vector = chunk.first_vector + begin + lane;  // of those of the chunk
    for (; vector >= vectors; vector -= vectors) ++channel;
    const auto next = [&] {
      vector += kWarpSize;
      if (vector >= vectors) {
        vector -= vectors;
        ++channel;
      }
    };
    mbarrier_wait_parity(shared_address(&stage.state.ready), stage.parity);
    const float mean = stage.state.mean;
    const auto result = [&](const Vector<T, N>& x) {
      const float2 of_channel = stage.state.of_channels[channel];
      float values[N];
      unpack(x, p.dtype, values);
#pragma unroll
      for (int k = 0; k < N; ++k) values[k] = fmaf(values[k] - mean, of_channel.x, of_channel.y);
      activate<T>(p.silu, values);
      return pack<T>(values, p.dtype);
    };
    if (staged) {
#pragma unroll 1
      for (int i = begin + lane; i < end; i += kWarpSize, next())
        result(stage.template load<true>(i)).store(stage.data + 16 * i);
      fence_proxy_async();
    } else {
      T* out = static_cast<T*>(chunk.out);
      const bool out_aligned = is_aligned_16(out);
#pragma unroll 1
      for (int base = begin; base < end; base += kWarpSize, next()) {
        const int i = base + lane;
        Vector<T, N> results{};
        if (i < end) results = result(stage.template load<false>(i));
        // NOTE: where vectors are not aligned lanes store together, also those without a vector.
        store_vector(results, out, out_aligned, i * N, end * N);
      }
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared_address(&stage.state.applied));
  });
}

// Grid: no more blocks than there are on the GPU at once.
template <typename T>
__global__ void __launch_bounds__(kGroupNormGridThreads, 1)
    group_norm_grid_kernel(const GroupNormForward p, const GridParams grid) {
  if constexpr (!kCompilesClusters) return;
  extern __shared__ uint4 shared[];
  char* memory = reinterpret_cast<char*>(shared);
  uint64_t* partials = reinterpret_cast<uint64_t*>(p.partials);
  // Counts the chunks that are taken besides those that every block begins with.
  unsigned long long* ticket = reinterpret_cast<unsigned long long*>(partials + grid.items);
  const Ring<T> stages(p, grid, memory);
  if (threadIdx.x == 0) {
    Ring<T> ring = stages;
#pragma unroll 1
    for (int k = 0; k < grid.stages; ++k, ring.next()) {
      StageState& state = ring.state();
      mbarrier_init(shared_address(&state.full), 1);
      mbarrier_init(shared_address(&state.summed), kMomentWarps);
      mbarrier_init(shared_address(&state.ready), 1);
      mbarrier_init(shared_address(&state.applied), kApplyWarps);
    }
    fence_mbarrier_init();
    if (blockIdx.x == 0) *ticket = 0;
  }
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < grid.items;
       i += int64_t{gridDim.x} * blockDim.x)
    partials[i] = kNoMoments;
  // NOTE: before the copies. With them under way this took until they were done, 10 us and more.
  cooperative_groups::this_grid().sync();
  if (threadIdx.x == kCopyWarp * kWarpSize) {
    Ring<T> ring = stages;
#pragma unroll 1
    for (int k = 0; k < grid.stages; ++k, ring.next())
      fill(ring, blockIdx.x + int64_t{k} * gridDim.x);
  }

  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  if (warp == kCopyWarp) {
    if (threadIdx.x == kCopyWarp * kWarpSize) refill(stages, ticket);
  } else if (warp < kFirstWatchWarp) {
    publish<T>(p, grid, memory, partials);
  } else if (warp < kFirstMomentWarp) {
    watch<T>(p, grid, memory, partials);
  } else if (warp < kFirstApplyWarp) {
    take_moments<T>(p, grid, memory);
  } else {
    apply<T>(p, grid, memory);
  }
}

#endif

}  // namespace

gpuError launch_group_norm_grid(const GroupNormForward& p, const GroupNormGridPolicy& policy,
                                bool& refused, gpuStream stream) {
#if defined(USE_ROCM)
  static_cast<void>(p), static_cast<void>(policy), static_cast<void>(stream);
  refused = true;
  return gpuSuccess;
#else
  const GridParams grid{Divisor(policy.chunks), Divisor(p.groups),
                        p.samples * p.groups * policy.chunks, policy.stages,
                        static_cast<int>(policy.chunk_vectors)};
  const dim3 blocks(static_cast<unsigned>(policy.blocks));
  return dispatch_size(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return gpu_launch_cooperative(refused, &group_norm_grid_kernel<T>, blocks,
                                  dim3(kGroupNormGridThreads), policy.shared_bytes, stream, p,
                                  grid);
  });
#endif
}

}  // namespace fuselage
