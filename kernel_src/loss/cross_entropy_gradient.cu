// The loss of rows of float32 logits and its gradient, each logit read once: formulas in
// loss/cross_entropy.h.
//
// The blocks of a cluster have a row together. A warp has the logits that one has in the forward,
// and adds them up in the same order: the bits are the same. It copies them to shared memory, adds
// them up as they come, sends the sums to all blocks, and waits for those of the other warps. Then
// it writes gradients, and starts the copies of its next row over the logits that it has read. So
// most copies of a row are done before its turn, and a warp waits for others once a row.
//
// A warp's last piece, which may end anywhere, stays in registers. With a softcap, x takes the
// place of the logits, as a tanh costs more than a write.

#include "loss/cross_entropy_policy.h"
#include "loss/loss_row.h"

namespace fuselage {
namespace {

// ---- the logits of a warp ----

struct WarpPieces {
  static constexpr int N = 4, kVectors = kLossVectors;
  using V = Vector<float, N>;
  int column;  // the lane's first one in the first piece
  int step;    // columns to the next piece
  int kept;    // in shared memory
  char* memory;
  uint32_t barriers;  // of each

  // Of the warp that is `warp` in the row.
  __device__ __forceinline__ WarpPieces(const OnePassPolicy& policy, int vocab, int warp, int rank,
                                        char* shared) {
    const int warps = policy.row.threads / kWarpSize, lane = threadIdx.x % kWarpSize;
    column = warp / warps * policy.row.part + warp % warps * kPieceLogits + lane * N;
    step = warps * kPieceLogits;
    int before = 0;  // pieces of the block's other warps
    for (int other = rank; other < warp; other += policy.cluster)
      before += max(pieces_of(policy.row, vocab, other) - 1, 0);
    kept = max(pieces_of(policy.row, vocab, warp) - 1, 0);
    memory = shared + before * kPieceLogits * 4;
    barriers = shared_address(shared + policy.kept * kPieceLogits * 4) + before * 8;
  }

  __device__ __forceinline__ void start_barriers() const {
    if (threadIdx.x % kWarpSize == 0) {
      for (int i = 0; i < kept; ++i) mbarrier_init(barriers + i * 8, 1);
      fence_mbarrier_init();
    }
    warp_barrier();
  }
  // Starts the copy of piece `i`. All lanes have read what was there.
  __device__ __forceinline__ void start(int i, const float* row) const {
    warp_barrier();
    if (threadIdx.x % kWarpSize != 0) return;
    constexpr int kBytes = kPieceLogits * 4;
    mbarrier_arrive_expect_tx(barriers + i * 8, kBytes);
    bulk_copy_async(memory + i * kBytes, row + column + i * step, kBytes, barriers + i * 8);
  }
  __device__ __forceinline__ void wait(int i, int parity) const {
    mbarrier_wait_parity(barriers + i * 8, parity);
  }
  __device__ __forceinline__ void read(int i, float (&values)[kVectors][N]) const {
    const char* own = memory + (i * kPieceLogits + threadIdx.x % kWarpSize * N) * 4;
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      V::load_shared(own + j * kWarpSize * 16).to_floats(values[j]);
  }
  // Over what was read.
  __device__ __forceinline__ void write(int i, const float (&values)[kVectors][N]) const {
    char* own = memory + (i * kPieceLogits + threadIdx.x % kWarpSize * N) * 4;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) V::from_floats(values[j]).store(own + j * kWarpSize * 16);
  }
};

// ---- the sums of a row ----

// What the warps of a row send to each block of the cluster. Rows take turns with two: one of them
// may still be read.
struct SharedSums {
  static constexpr int kWarps = kLossThreads / kWarpSize;
  RunningSums of_warps[2][kLossMostParts * kWarps];  // none, where a part has fewer warps
  uint64_t barriers[2];

  // NOTE: before a cluster_sync.
  __device__ __forceinline__ void start() {
    for (int i = threadIdx.x; i < kLossMostParts * kWarps; i += blockDim.x)
      of_warps[0][i] = of_warps[1][i] = RunningSums::none();
    if (threadIdx.x != 0) return;
    for (uint64_t& barrier : barriers) mbarrier_init(shared_address(&barrier), 1);
    fence_mbarrier_init();
  }

  // The sums of the row, in every thread of the cluster, of those of each lane. In the order of the
  // forward's.
  __device__ __forceinline__ RunningSums share(const OnePassPolicy& policy, int warp, int turn,
                                               RunningSums sums) {
    const int lane = threadIdx.x % kWarpSize, warps = policy.row.threads / kWarpSize;
    const uint32_t barrier = shared_address(&barriers[turn % 2]);
    RunningSums* row = of_warps[turn % 2];
    sums = warp_join(sums, kWarpSize);
    if (threadIdx.x == 0)
      mbarrier_arrive_expect_tx(barrier, policy.warps * static_cast<int>(sizeof(RunningSums)));
    if (lane < policy.cluster && warp < policy.warps) {
      RunningSums* own = row + warp / warps * kWarps + warp % warps;
      st_async(&own->max, lane, sums.max, barrier);
      st_async(&own->sum, lane, sums.sum, barrier);
      st_async(&own->total, lane, sums.total, barrier);
    }
    mbarrier_wait_parity_cluster(barrier, turn / 2 % 2);
    // Half a warp has a part: parts 0 and 1, then 2 and 3.
    static_assert(kLossMostParts == 4 && 2 * kWarps == kWarpSize, "two parts of a warp each");
    sums = warp_join(row[lane], kWarps);
    RunningSums others = warp_join(row[kWarpSize + lane], kWarps);
    float most = fmaxf(sums.max, others.max);
    most = fmaxf(most, shuffle_xor(most, kWarps, kWarpSize));
    sums.raise(most);
    others.raise(most);
    sums.sum += others.sum;
    sums.total += others.total;
    sums.sum += shuffle_xor(sums.sum, kWarps, kWarpSize);
    sums.total += shuffle_xor(sums.total, kWarps, kWarpSize);
    return sums;
  }
};
static_assert(sizeof(SharedSums) <= kOnePassFixedBytes, "the policy reserves as much");

// ---- the kernel ----

// Writes the gradients of a piece from `column` on, of which the row has `left` columns, of its x.
template <bool kAligned, typename U, int kVectors, int N>
__device__ __forceinline__ void write_gradients(const GradientRow& row, DType dtype,
                                                const float (&x)[kVectors][N], U* grad_row,
                                                int column, int left) {
  RowStoring<U, N, kVectors, kAligned> storing(grad_row + column, left);
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    float grads[N];
    row.differentiate(x[j], column + j * kWarpSize * N, grads);
    storing.put(j, pack<U>(grads, dtype));
  }
  storing.end();
}

// kAligned: rows end on 16-byte boundaries too.
template <typename U, bool kAligned>
__global__ void __launch_bounds__(kOnePassWarps* kWarpSize, kOnePassBlocks)
    one_pass_kernel(const CrossEntropyForward f, const LossBackward b, const OnePassPolicy policy) {
  extern __shared__ __align__(16) char memory[];
  __shared__ SharedSums shared;
  if constexpr (!kCompilesClusters) return;
  constexpr int N = WarpPieces::N, kVectors = WarpPieces::kVectors;
  const int rank = cluster_rank();
  const int warp = rank + static_cast<int>(threadIdx.x) / kWarpSize * policy.cluster;
  const bool is_first = rank == 0 && threadIdx.x == 0, is_capped = f.in.softcap != 0.0f;
  const int vocab = static_cast<int>(f.in.vocab);
  const WarpPieces pieces(policy, vocab, warp, rank, memory);
  const int last = pieces.column + pieces.kept * pieces.step;  // column of the last piece
  const int left = vocab - last;
  int64_t row = blockIdx.x / static_cast<unsigned>(policy.cluster);
  bool is_read = is_counted(f.in, row);

  // Starts a row. Where it is read, its copies have been started.
  const auto start_copies = [&](int64_t of_row) {
    const float* data = row_of<float>(f.in, of_row);
#pragma unroll 1
    for (int i = 0; i < pieces.kept; ++i) pieces.start(i, data);
  };
  pieces.start_barriers();
  if (is_read) start_copies(row);
  shared.start();
  cluster_sync();

  int turn = 0;  // of the rows that are read
#pragma unroll 1
  for (; row < f.in.rows; row += policy.clusters) {
    const int64_t next = row + policy.clusters;
    const bool is_next_read = is_counted(f.in, next);
    RowLoading<float, kVectors, kAligned> loading;
    loading.start(row_of<float>(f.in, row) + last, is_read ? left : -N);
    float x[kVectors][N] = {};
    GradientRow own(b);
    if (is_read) {
      const float target = is_first ? target_logit(f.in, row) : 0.0f;
      RunningSums sums = RunningSums::none();
#pragma unroll 1
      for (int i = 0; i < pieces.kept; ++i) {
        pieces.wait(i, turn % 2);
        pieces.read(i, x);
        sums.add(f, x, kPieceLogits);
        if (is_capped) pieces.write(i, x);
      }
      if (is_capped) fence_proxy_async();
#pragma unroll
      for (int j = 0; j < kVectors; ++j) loading.finish(j).to_floats(x[j]);
      sums.add(f, x, left);
      own.read(b, row);
      sums = shared.share(policy, warp, turn++, sums);
      own.finish(b, {sums.max, log_of_sum(sums.sum)});
      own.f.of_log2 = 0.0f;  // as it is: the compiler is to know
      if (is_first) write_loss(f, row, sums, target);
    } else {
      if (is_next_read) start_copies(next);
      if (is_first) write_nothing(f, row);
    }

    U* grads = static_cast<U*>(b.grad_logits) + row * b.grad_stride;
    const float* next_data = row_of<float>(f.in, is_next_read ? next : row);
#pragma unroll 1
    for (int i = 0; i < pieces.kept; ++i) {
      float x[kVectors][N] = {};
      if (is_read) pieces.read(i, x);
      const int column = pieces.column + i * pieces.step;
      write_gradients<true>(own, b.grad_dtype, x, grads, column, kPieceLogits);
      // NOTE: after all lanes have used what they read. A load from shared memory may wait behind
      // stores to global memory, and a copy does not.
      if (is_read && is_next_read) pieces.start(i, next_data);
    }
    write_gradients<kAligned>(own, b.grad_dtype, x, grads, last, left);
    is_read = is_next_read;
  }
}

// ---- launchers ----

template <typename U>
gpuError launch_one_pass(const CrossEntropyForward& f, const LossBackward& b,
                         const OnePassPolicy& policy, gpuStream stream) {
  const dim3 grid(static_cast<unsigned>(policy.clusters * policy.cluster)), block(policy.threads);
  const auto kernel = is_aligned(b) ? &one_pass_kernel<U, true> : &one_pass_kernel<U, false>;
  return gpu_launch(kernel, grid, block, policy.shared_bytes, policy.cluster, stream, f, b, policy);
}

}  // namespace

namespace gpu {

const char* cross_entropy_with_gradient(const CrossEntropyForward& forward,
                                        const LossBackward& backward, int device, void* stream) {
  const OnePassPolicy policy = one_pass_policy(device_info(device), forward.in.rows,
                                               forward.in.vocab, forward.in.softcap != 0.0f);
  if (!policy.fits || forward.in.dtype != DType::float32 || !starts_aligned(backward)) {
    const char* error = cross_entropy_forward(forward, device, stream);
    return error != nullptr ? error : loss_backward(backward, device, stream);
  }
  return message_of(dispatch_size(backward.grad_dtype, [&](auto tag) {
    using U = typename decltype(tag)::type;
    return launch_one_pass<U>(forward, backward, policy, static_cast<gpuStream>(stream));
  }));
}

}  // namespace gpu
}  // namespace fuselage
