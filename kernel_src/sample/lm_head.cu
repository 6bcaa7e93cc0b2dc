// The language-model head on any GPU: formulas in sample/sample.h.
//
// A block has a tile of kHeadRows rows of the weight and up to 128 rows of the batch. The
// vocabulary is the M of the matrix product and the batch its N, so that a small batch wastes
// little. Each sum has one accumulator, to which products are added in ascending order of the
// depth, so that a logit does not depend on the batch, the tile or the shard. Then the epilogue
// writes the tile's logits, or draws from them; a second kernel takes the best candidate of all
// tiles.
//
//   lm_head_sm90.cu     Hopper: wgmma
//   lm_head_mma.h       half precision: tensor cores by mma
//   lm_head_float.h     float32
//   lm_head_plain.h     any dtype, any GPU
//   lm_head_epilogue.h  of all but the first
#if !defined(USE_ROCM)
#include "sample/lm_head_float.h"
#include "sample/lm_head_mma.h"
#include "sample/lm_head_sm90.h"
#endif
#include "sample/lm_head_plain.h"

namespace fuselage {
namespace {

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
template <typename T, bool kFloat8>
gpuError launch_tensor_cores(const LmHead& p, const HeadOutput& out, gpuStream stream) {
  const bool aligned = has_aligned_chunks(p);
  // Rows that are not aligned are read by the word, whatever the tile: two sizes do.
  const int fitting = head_columns(p.batch, kFloat8);
  const HeadTile tile = head_tile(aligned ? fitting : fitting <= 16 ? 16 : 64, kFloat8);
  const int columns = tile.columns;
  const int batch_tiles = static_cast<int>(ceil_div(p.batch, columns));
  const dim3 grid(static_cast<unsigned>(tiles_of(p) * batch_tiles));
  const auto run = [&](auto kernel) {
    return gpu_launch(kernel, grid, dim3(kHeadThreads), head_shared_bytes(tile, kFloat8), 1, stream,
                      p, out, batch_tiles);
  };
  return with_bool(aligned, [&](auto is_aligned) {
    if constexpr (is_aligned) {
      if (columns == 8) return run(&head_kernel<T, 8, true, kFloat8>);
      if (columns == 32) return run(&head_kernel<T, 32, true, kFloat8>);
      if constexpr (!kFloat8) {
        if (columns == 128) return run(&head_kernel<T, 128, true, kFloat8>);
      }
    }
    if (columns == 16) return run(&head_kernel<T, 16, is_aligned, kFloat8>);
    return run(&head_kernel<T, 64, is_aligned, kFloat8>);
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

template <typename T>
gpuError launch_form([[maybe_unused]] HeadForm form, const LmHead& p, const HeadOutput& out,
                     gpuStream stream) {
  const bool float8 = p.weight_type == WeightType::float8_e4m3;
#if !defined(USE_ROCM)
  if constexpr (std::is_same_v<T, float>) {
    if (form == HeadForm::floats) return launch_float(p, out, stream);
  } else if (form == HeadForm::mma) {
    return float8 ? launch_tensor_cores<T, true>(p, out, stream)
                  : launch_tensor_cores<T, false>(p, out, stream);
  }
#endif
  return float8 ? launch_plain<T, Float8>(p, out, stream) : launch_plain<T, T>(p, out, stream);
}

const char* launch_head(const LmHead& p, const HeadOutput& out, int device, gpuStream stream) {
  const DeviceInfo info = device_info(device);
  const HeadForm form = head_form(info, p);
  if (form == HeadForm::plain && !has_plain_form(info, p))
    return "this GPU has too little shared memory for a block";
  if (tiles_of(p) * ceil_div(p.batch, kPlainColumns) >= int64_t{1} << 31)
    return "the batch has too many rows for one launch";
  return message_of(dispatch_dtype(p.dtype, [&](auto tag) {
    return launch_form<typename decltype(tag)::type>(form, p, out, stream);
  }));
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

bool makes_strip_sums(const LmHead& p, int device) {
#if !defined(USE_ROCM)
  return lm_head_sm90_serves(p, device);
#else
  return false;
#endif
}

const char* lm_head_sums(const LmHead& p, const HeadSums& out, void* workspace, int device,
                         void* stream) {
#if !defined(USE_ROCM)
  return lm_head_sums_sm90(p, out, workspace, device, stream);
#else
  return "the GPU makes no sums of strips";
#endif
}

bool draws_before_sums(const LmHeadSample& p, const Filters& filters, int device) {
#if !defined(USE_ROCM)
  // Tiles begin at multiples of 16 in the whole vocabulary. The first may not begin before a shard.
  return !filters.any() && p.draws.vocab_offset % kStrip == 0 && lm_head_sm90_serves(p, device);
#else
  return false;
#endif
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
    if (p.head.batch >= kHeadThresholdsFrom) {
      out.thresholds = reinterpret_cast<uint32_t*>(out.candidates + slots * out.tiles);
      const char* error = message_of(
          gpu_clear(out.thresholds, slots * sizeof(uint32_t), static_cast<gpuStream>(stream)));
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
