// Bindings of the sampling family. The formulas are in sample/sample.h.
#include "binding.h"

#include "sample/sample.h"
#include "sample/sample_cpu.h"

namespace fuselage::binding {
namespace {

// ---- checks ----

// `tensor` has one element, or one for each row.
void check_rows(const char* op, const char* name, const Tensor& tensor, ScalarType type,
                const Tensor& x, const char* x_name) {
  check_same_device(op, name, tensor, x, x_name);
  FUSELAGE_CHECK(op, tensor.scalar_type() == type, "`", name, "` must be ",
                 type == ScalarType::Long ? "int64" : "float32", ", got ",
                 torch::headeronly::toString(tensor.scalar_type()));
  FUSELAGE_CHECK(op, tensor.dim() == 1 && (tensor.size(0) == 1 || tensor.size(0) == x.size(0)), "`",
                 name, "` must have shape [1] or [", x.size(0), "] for `", x_name, "` ",
                 shape_of(x), ", got ", shape_of(tensor));
}

int64_t stride_of_rows(const Tensor& tensor) { return tensor.size(0) == 1 ? 0 : tensor.stride(0); }

RowFloats check_floats(const char* op, const char* name, const OptionalTensor& tensor, double value,
                       const Tensor& x, const char* x_name) {
  if (!tensor.has_value()) return {nullptr, 0, static_cast<float>(value)};
  check_rows(op, name, *tensor, ScalarType::Float, x, x_name);
  return {static_cast<const float*>(tensor->const_data_ptr()), stride_of_rows(*tensor), 0.0f};
}

struct Options {
  const Tensor& seed;
  const OptionalTensor& offset;
  const OptionalTensor& temperature;
  double temperature_value;
  const OptionalTensor& top_k;
  std::optional<int64_t> top_k_value;
  const OptionalTensor& top_p;
  std::optional<double> top_p_value;
  const OptionalTensor& min_p;
  std::optional<double> min_p_value;
  int64_t num_samples, vocab_offset;
};

// `x`: hidden or logits, whose rows are the batch.
Draws check_draws(const char* op, const Tensor& x, const char* x_name, int64_t vocab,
                  const char* vocab_name, const Options& options) {
  Draws draws{};
  draws.batch = x.size(0);
  draws.vocab = vocab;
  FUSELAGE_CHECK(op, options.num_samples >= 1 && options.num_samples <= kMaxSamples,
                 "`num_samples` must be in [1, ", kMaxSamples, "], got ", options.num_samples);
  draws.num_samples = static_cast<int>(options.num_samples);
  FUSELAGE_CHECK(op, vocab <= kMaxVocab, vocab_name, " must be at most 2^26, got ", vocab);
  FUSELAGE_CHECK(op,
                 options.vocab_offset >= 0 && options.vocab_offset <= (int64_t{1} << 34) - vocab,
                 "`vocab_offset` must be in [0, 2^34 - ", vocab, "], got ", options.vocab_offset);
  draws.vocab_offset = options.vocab_offset;
  FUSELAGE_CHECK(op, draws.batch <= int64_t{1} << 24, "`", x_name,
                 "` must have at most 2^24 rows, got ", shape_of(x));
  check_rows(op, "seed", options.seed, ScalarType::Long, x, x_name);
  draws.seed_per_row = options.seed.size(0) == draws.batch && draws.batch != 1;
  draws.seed_stride = stride_of_rows(options.seed);
  if (options.offset.has_value()) {
    const Tensor& offset = *options.offset;
    check_rows(op, "offset", offset, ScalarType::Long, x, x_name);
    draws.offset_per_row = offset.size(0) == draws.batch && draws.batch != 1;
    draws.offset_stride = stride_of_rows(offset);
    FUSELAGE_CHECK(op, !draws.offset_per_row || draws.batch == 0 || draws.offset_stride != 0,
                   "`offset` is written to, and must have memory of its own for each row, got "
                   "stride 0 (an expanded tensor)");
  }
  FUSELAGE_CHECK(op, options.temperature_value >= 0 && options.temperature_value < 3e38,
                 "`temperature` must be in [0, 3e38), got ", options.temperature_value);
  draws.temperature =
      check_floats(op, "temperature", options.temperature, options.temperature_value, x, x_name);
  return draws;
}

Filters check_filters(const char* op, const Tensor& x, const char* x_name, const Options& options) {
  Filters filters{};
  const int64_t top_k = options.top_k_value.value_or(0);
  filters.has_top_k = options.top_k.has_value() || top_k >= 1;
  filters.has_top_p = options.top_p.has_value() || options.top_p_value.has_value();
  filters.has_min_p = options.min_p.has_value() || options.min_p_value.has_value();
  const double top_p = options.top_p_value.value_or(1), min_p = options.min_p_value.value_or(0);
  FUSELAGE_CHECK(op, top_p > 0 && top_p <= 1, "`top_p` must be in (0, 1], got ", top_p);
  FUSELAGE_CHECK(op, min_p >= 0 && min_p <= 1, "`min_p` must be in [0, 1], got ", min_p);
  filters.top_k = {nullptr, 0, top_k};
  if (options.top_k.has_value()) {
    check_rows(op, "top_k", *options.top_k, ScalarType::Long, x, x_name);
    filters.top_k = {static_cast<const int64_t*>(options.top_k->const_data_ptr()),
                     stride_of_rows(*options.top_k), 0};
  }
  filters.top_p = check_floats(op, "top_p", options.top_p, top_p, x, x_name);
  filters.min_p = check_floats(op, "min_p", options.min_p, min_p, x, x_name);
  return filters;
}

// Past the checks: what is written must be asked for as such.
void set_noise(Draws& draws, const Options& options) {
  draws.seeds = static_cast<const int64_t*>(options.seed.const_data_ptr());
  if (options.offset.has_value())
    draws.offsets = static_cast<int64_t*>(options.offset->mutable_data_ptr());
}

// A batch without rows takes a step, too.
void skip_step(const char* op, const Options& options, const Tensor& x) {
  if (is_meta(x) || !options.offset.has_value() || options.offset->numel() == 0) return;
  int64_t* offset = static_cast<int64_t*>(options.offset->mutable_data_ptr());
  launch(
      op, x, [&] { ++*offset; },
      [&](int32_t, void* stream) { return gpu::advance_offset(offset, stream); });
}

struct Head {
  LmHead params;
  std::optional<Rows> hidden, weight;  // keep contiguous copies alive
  OptionalTensor bias, scale;
};

Head check_head(const char* op, const Tensor& hidden, const Tensor& weight,
                const OptionalTensor& weight_scale, const OptionalTensor& bias,
                std::optional<double> logit_softcap) {
  Head head{};
  LmHead& p = head.params;
  FUSELAGE_CHECK(op, hidden.dim() == 2, "`hidden` must have shape [batch, dim], got ",
                 shape_of(hidden));
  p.dtype = check_dtype(op, "hidden", hidden);
  check_same_device(op, "weight", weight, hidden, "hidden");
  FUSELAGE_CHECK(op, weight.dim() == 2 && weight.size(1) == hidden.size(1),
                 "`weight` must have shape [vocab, ", hidden.size(1), "] for `hidden` ",
                 shape_of(hidden), ", got ", shape_of(weight));
  const bool narrow = weight.scalar_type() == ScalarType::Float8_e4m3fn;
  FUSELAGE_CHECK(op, narrow || weight.scalar_type() == hidden.scalar_type(), "`weight` must be ",
                 dtype_name(p.dtype), " as `hidden`, or float8_e4m3fn, got ",
                 torch::headeronly::toString(weight.scalar_type()));
  p.weight_type = narrow ? WeightType::float8_e4m3 : WeightType::as_hidden;
  p.batch = hidden.size(0);
  p.vocab = weight.size(0);
  p.dim = hidden.size(1);
  check_columns(op, "hidden", hidden);
  if (weight_scale.has_value()) {
    const Tensor& scale = *weight_scale;
    check_same_device(op, "weight_scale", scale, hidden, "hidden");
    FUSELAGE_CHECK(op, narrow, "`weight_scale` must be None unless `weight` is float8_e4m3fn");
    FUSELAGE_CHECK(op, scale.scalar_type() == ScalarType::Float,
                   "`weight_scale` must be float32, got ",
                   torch::headeronly::toString(scale.scalar_type()));
    FUSELAGE_CHECK(op, scale.dim() == 1 && (scale.size(0) == 1 || scale.size(0) == p.vocab),
                   "`weight_scale` must have shape [1] or [", p.vocab, "], got ", shape_of(scale));
    head.scale = scale.is_contiguous() ? scale : contiguous_copy(scale);
    p.weight_scale = static_cast<const float*>(head.scale->const_data_ptr());
    p.scale_per_row = scale.size(0) != 1;
  }
  if (bias.has_value()) {
    check_same_device(op, "bias", *bias, hidden, "hidden");
    FUSELAGE_CHECK(op, bias->dim() == 1 && bias->size(0) == p.vocab, "`bias` must have shape [",
                   p.vocab, "], got ", shape_of(*bias));
    p.bias_dtype = check_dtype(op, "bias", *bias);
    check_like_or_float32(op, "bias", p.bias_dtype, p.dtype, "hidden");
    head.bias = bias->is_contiguous() ? *bias : contiguous_copy(*bias);
    p.bias = head.bias->const_data_ptr();
  }
  const double softcap = logit_softcap.value_or(0);
  FUSELAGE_CHECK(op, !logit_softcap.has_value() || (softcap > 1e-30 && softcap < 1e30),
                 "`logit_softcap` must be positive, got ", softcap);
  p.softcap = static_cast<float>(softcap);
  head.hidden = rows_of(hidden);
  head.weight = rows_of(weight);
  p.hidden = head.hidden->data();
  p.hidden_stride = head.hidden->stride;
  p.weight = head.weight->data();
  p.weight_stride = head.weight->stride;
  return head;
}

// ---- results ----

struct Results {
  Tensor tokens, logprobs, filtered_logprobs;
};

Tensor empty_2d(int64_t rows, int64_t columns, ScalarType type, const Tensor& like) {
  const int64_t sizes[2] = {rows, columns};
  return empty(sizes, 2, type, like);
}

Tensor no_floats(const Tensor& like) {
  const int64_t size = 0;
  return empty(&size, 1, ScalarType::Float, like);
}

Results empty_results(const Draws& draws, bool logprobs, const Tensor& like) {
  const auto floats = [&] {
    return logprobs ? empty_2d(draws.batch, draws.num_samples, ScalarType::Float, like)
                    : no_floats(like);
  };
  return {empty_2d(draws.batch, draws.num_samples, ScalarType::Long, like), floats(), floats()};
}

float* floats_in(const Tensor& tensor) { return static_cast<float*>(tensor.mutable_data_ptr()); }

DrawResults pointers_of(const Results& results, bool logprobs) {
  DrawResults pointers{};
  pointers.tokens = static_cast<int64_t*>(results.tokens.mutable_data_ptr());
  if (logprobs) {
    pointers.logprobs = floats_in(results.logprobs);
    pointers.filtered_logprobs = floats_in(results.filtered_logprobs);
  }
  return pointers;
}

Tensor workspace_of(int64_t bytes, const Tensor& like) {
  const int64_t words = (bytes + 3) / 4;
  return empty(&words, 1, ScalarType::Float, like);
}

// ---- runs ----

template <class Work>
void in_parallel(int64_t size, int64_t elements_each, const Work& work) {
  torch::stable::parallel_for(0, size, tasks_of(elements_each),
                              [&](int64_t begin, int64_t end) { work(begin, end); });
}

void run_cpu(const GumbelSample& p) {
  const int64_t pieces = cpu::sample_pieces(p.draws.vocab);
  std::vector<cpu::SampleCandidate> candidates(p.draws.batch * pieces * p.draws.num_samples);
  std::vector<cpu::SampleRow> rows;
  if (p.filters.any() || p.results.needs_sums()) {
    rows.resize(p.draws.batch);
    in_parallel(p.draws.batch, p.draws.vocab,
                [&](int64_t begin, int64_t end) { cpu::sample_rows(p, rows.data(), begin, end); });
  }
  const cpu::SampleRow* found = rows.empty() ? nullptr : rows.data();
  in_parallel(p.draws.batch * pieces, cpu::kSamplePiece * p.draws.num_samples,
              [&](int64_t begin, int64_t end) {
                cpu::sample_draw(p, found, candidates.data(), begin, end);
              });
  cpu::sample_finish(p.draws, p.results, found, candidates.data(), pieces);
}

std::vector<float> float_hidden(const LmHead& head) {
  std::vector<float> hidden(head.batch * head.dim);
  in_parallel(head.batch, head.dim, [&](int64_t begin, int64_t end) {
    cpu::lm_head_hidden(head, hidden.data(), begin, end);
  });
  return hidden;
}

void run_cpu(const LmHeadSample& p) {
  const std::vector<float> hidden = float_hidden(p.head);
  const int64_t pieces = cpu::lm_head_pieces(p.head.vocab);
  std::vector<cpu::SampleCandidate> candidates(p.draws.batch * pieces * p.draws.num_samples);
  in_parallel(pieces, cpu::kLmHeadPiece * p.head.dim, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(cpu::lm_head_draw_scratch(p.head));
    cpu::lm_head_draw(p.head, p.draws, hidden.data(), scratch.data(), candidates.data(), begin,
                      end);
  });
  cpu::sample_finish(p.draws, p.results, nullptr, candidates.data(), pieces);
}

void logits_cpu(const LmHead& head, float* logits, int64_t stride) {
  const std::vector<float> hidden = float_hidden(head);
  in_parallel(cpu::lm_head_pieces(head.vocab), cpu::kLmHeadPiece * head.dim,
              [&](int64_t begin, int64_t end) {
                std::vector<float> scratch(cpu::lm_head_logits_scratch(head));
                cpu::lm_head_logits(head, hidden.data(), scratch.data(), logits, stride, begin,
                                    end);
              });
}

template <auto gpu_workspace, auto gpu_kernel, typename Params>
const char* run_gpu(Params& p, const Tensor& x, int32_t device, void* stream) {
  const Tensor workspace = workspace_of(gpu_workspace(p, device), x);
  p.workspace = workspace.mutable_data_ptr();
  return gpu_kernel(p, device, stream);
}

template <auto gpu_workspace, auto gpu_kernel, typename Params>
void run(const char* op, Params& p, const Tensor& x) {
  if (is_meta(x)) return;
  launch(
      op, x, [&] { run_cpu(p); },
      [&](int32_t device, void* stream) {
        return run_gpu<gpu_workspace, gpu_kernel>(p, x, device, stream);
      });
}

void run(const char* op, GumbelSample& p, const Tensor& x) {
  run<gpu::gumbel_sample_workspace, gpu::gumbel_sample>(op, p, x);
}

void run(const char* op, LmHeadSample& p, const Tensor& x) {
  run<gpu::lm_head_sample_workspace, gpu::lm_head_sample>(op, p, x);
}

// Rows start on boundaries of 64 bytes: they are written as whole strips, and read as whole
// vectors.
Tensor empty_strips(int64_t batch, int64_t size, const Tensor& like) {
  return empty_2d(batch, (size + kStrip - 1) / kStrip * kStrip, ScalarType::Float, like);
}

const char* logits_gpu(const LmHead& head, const gpu::HeadLogits& out, const Tensor& logits,
                       int32_t device, void* stream) {
  const int64_t bytes = gpu::lm_head_logits_workspace(head, device);
  const Tensor workspace = bytes == 0 ? logits : workspace_of(bytes, logits);
  return gpu::lm_head_logits(head, out, workspace.mutable_data_ptr(), device, stream);
}

// Sums of strips, in rows of whole pairs.
Tensor empty_strip_sums(const LmHead& head, const Tensor& like, StripSums& p) {
  p.stride = (head.vocab + 2 * kStrip - 1) / (2 * kStrip) * 2;
  const Tensor sums = empty_2d(head.batch, 2 * p.stride, ScalarType::Float, like);
  p.sums = static_cast<StripSum*>(sums.mutable_data_ptr());
  return sums;
}

// A draw from the head: without filters and sums its logits are never in memory. On some GPUs with
// sums only those are that are drawn.
void draw_from_head(const char* op, const LmHead& head, const Draws& draws, const Filters& filters,
                    const DrawResults& results, const Tensor& hidden) {
  if (is_meta(hidden)) return;
  if (!filters.any() && !results.needs_sums()) {
    LmHeadSample p{head, draws, results, nullptr, nullptr, 0, {}};
    return run(op, p, hidden);
  }
  const Tensor logits = empty_strips(head.batch, head.vocab, hidden);
  OptionalTensor strips, of_strips;
  GumbelSample p{};
  p.draws = draws;
  p.filters = filters;
  p.logits = logits.const_data_ptr();
  p.dtype = DType::float32;
  p.stride = logits.size(1);
  p.results = results;
  bool is_drawn = false;
  const auto on_cpu = [&] { logits_cpu(head, floats_in(logits), p.stride); };
  const auto on_gpu = [&](int32_t device, void* stream) {
    LmHeadSample both{head, draws, results, nullptr, floats_in(logits), p.stride, {}};
    is_drawn = gpu::draws_before_sums(both, filters, device);
    if (is_drawn) strips = empty_strip_sums(head, hidden, both.strips);
    if (is_drawn)
      return run_gpu<gpu::lm_head_sample_workspace, gpu::lm_head_sample>(both, hidden, device,
                                                                         stream);
    if (gpu::takes_strips(head, p, device)) {
      strips = empty_strips(head.batch, p.stride / kStrip, hidden);
      of_strips = workspace_of(Strips::words(head.batch) * int64_t{sizeof(uint32_t)}, hidden);
      uint32_t* fallback = static_cast<uint32_t*>(of_strips->mutable_data_ptr());
      p.strips = {floats_in(*strips), strips->size(1), fallback,
                  head.batch >= kThresholdsFrom ? fallback + 2 + head.batch : nullptr};
      p.draws.is_advanced = gpu::advances_offset(draws);
    }
    const gpu::HeadLogits out{floats_in(logits), p.stride,
                              p.strips,          filters,
                              draws.temperature, p.draws.is_advanced ? draws.offsets : nullptr};
    return logits_gpu(head, out, logits, device, stream);
  };
  if (logits.numel() > 0) launch(op, hidden, on_cpu, on_gpu);
  if (!is_drawn) run(op, p, hidden);
}

// Of an op that has no float8 weights.
Head check_whole_head(const char* op, const Tensor& hidden, const Tensor& weight,
                      const OptionalTensor& bias, std::optional<double> logit_softcap) {
  Head head = check_head(op, hidden, weight, std::nullopt, bias, logit_softcap);
  const LmHead& p = head.params;
  FUSELAGE_CHECK(op, p.weight_type == WeightType::as_hidden, "`weight` must be ",
                 dtype_name(p.dtype), " as `hidden`, got float8_e4m3fn");
  FUSELAGE_CHECK(op, p.vocab >= 1,
                 "`weight` has no rows: one that is partitioned must be gathered first");
  FUSELAGE_CHECK(op, p.vocab <= kMaxVocab, "rows of `weight` must be at most 2^26, got ", p.vocab);
  return head;
}

// The logits themselves: float32 [batch, vocab], rows in whole strips.
Tensor head_logits(const Tensor& hidden, const Tensor& weight, const OptionalTensor& bias) {
  const char* op = "head_logits";
  const Head head = check_whole_head(op, hidden, weight, bias, std::nullopt);
  const LmHead& p = head.params;
  Tensor strips = empty_strips(p.batch, p.vocab, hidden);
  const Tensor logits = torch::stable::narrow(strips, 1, 0, p.vocab);
  if (is_nothing(hidden, p.batch, p.vocab)) return logits;
  gpu::HeadLogits out{};
  out.logits = floats_in(logits);
  out.stride = strips.size(1);
  launch(
      op, hidden, [&] { logits_cpu(p, out.logits, out.stride); },
      [&](int32_t device, void* stream) { return logits_gpu(p, out, logits, device, stream); });
  return logits;
}

// Whether head_strip_sums is for this head and GPU.
bool makes_strip_sums(const Tensor& hidden, const Tensor& weight) {
  if (hidden.numel() == 0 || is_meta(hidden)) return false;
  const char* op = "head_logits";
  const Head head = check_whole_head(op, hidden, weight, std::nullopt, std::nullopt);
  bool is = false;
  launch(
      op, hidden, [] {},
      [&](int32_t device, void*) -> const char* {
        is = gpu::makes_strip_sums(head.params, device);
        return nullptr;
      });
  return is;
}

// What log_probs_of_strips needs of the logits, which are never in memory: a maximum and a sum of
// weights, float32 and uint32, of each 16, and the logits of the targets.
std::tuple<Tensor, Tensor> head_strip_sums(const Tensor& hidden, const Tensor& weight,
                                           const OptionalTensor& bias, const Tensor& targets,
                                           double temperature,
                                           std::optional<double> logit_softcap) {
  const char* op = "head_logits";
  const Head head = check_whole_head(op, hidden, weight, bias, logit_softcap);
  const LmHead& p = head.params;
  check_same_device(op, "targets", targets, hidden, "hidden");
  const ScalarType type = targets.scalar_type();
  FUSELAGE_CHECK(op, type == ScalarType::Long || type == ScalarType::Int,
                 "`targets` must be int64 or int32, got ", torch::headeronly::toString(type));
  FUSELAGE_CHECK(op, targets.dim() == 1 && targets.size(0) == p.batch && targets.is_contiguous(),
                 "`targets` must be contiguous, one for each row of `hidden`");
  gpu::HeadSums out{};
  const Tensor sums = empty_strip_sums(p, hidden, out.strips);
  const Tensor logits = empty(&p.batch, 1, ScalarType::Float, hidden);
  out.inv_temperature = 1.0f / static_cast<float>(temperature);
  out.targets = targets.const_data_ptr();
  out.int32_targets = type == ScalarType::Int;
  out.target_logits = floats_in(logits);
  launch(
      op, hidden, [] {},
      [&](int32_t device, void* stream) -> const char* {
        if (!gpu::makes_strip_sums(p, device)) return "the GPU makes no sums of strips";
        const int64_t bytes = gpu::lm_head_logits_workspace(p, device);
        const Tensor workspace = bytes == 0 ? sums : workspace_of(bytes, sums);
        return gpu::lm_head_sums(p, out, workspace.mutable_data_ptr(), device, stream);
      });
  return {sums, logits};
}

// (tokens, logprobs, filtered_logprobs), the latter two empty unless asked for. `offset`, unless it
// is none, grows by one.
std::tuple<Tensor, Tensor, Tensor> gumbel_sample(
    const Tensor& logits, const OptionalTensor& bias, const OptionalTensor& bitmask,
    const Tensor& seed, const OptionalTensor& offset, const OptionalTensor& temperature,
    double temperature_value, const OptionalTensor& top_k, std::optional<int64_t> top_k_value,
    const OptionalTensor& top_p, std::optional<double> top_p_value, const OptionalTensor& min_p,
    std::optional<double> min_p_value, int64_t num_samples, int64_t vocab_offset,
    bool return_logprobs) {
  const char* op = "gumbel_sample";
  GumbelSample p{};
  FUSELAGE_CHECK(op, logits.dim() == 2, "`logits` must have shape [batch, vocab], got ",
                 shape_of(logits));
  p.dtype = check_dtype(op, "logits", logits);
  const Options options{seed,  offset,      temperature, temperature_value,
                        top_k, top_k_value, top_p,       top_p_value,
                        min_p, min_p_value, num_samples, vocab_offset};
  p.draws = check_draws(op, logits, "logits", logits.size(1), "columns of `logits`", options);
  p.filters = check_filters(op, logits, "logits", options);
  std::optional<Rows> bias_rows, mask_rows;
  if (bias.has_value()) {
    check_same_device(op, "bias", *bias, logits, "logits");
    p.bias_dtype = check_dtype(op, "bias", *bias);
    check_like_or_float32(op, "bias", p.bias_dtype, p.dtype, "logits");
    const int64_t last = bias->dim() - 1;
    FUSELAGE_CHECK(
        op,
        (last == 0 || (last == 1 && (bias->size(0) == 1 || bias->size(0) == p.draws.batch))) &&
            bias->size(last) == p.draws.vocab,
        "`bias` must have shape [", p.draws.vocab, "] or [", p.draws.batch, " or 1, ",
        p.draws.vocab, "], got ", shape_of(*bias));
    bias_rows = rows_of(*bias);
    p.bias = bias_rows->data();
    p.bias_stride = last == 0 || bias->size(0) == 1 ? 0 : bias_rows->stride;
  }
  if (bitmask.has_value()) {
    check_same_device(op, "bitmask", *bitmask, logits, "logits");
    FUSELAGE_CHECK(op, bitmask->scalar_type() == ScalarType::Int, "`bitmask` must be int32, got ",
                   torch::headeronly::toString(bitmask->scalar_type()));
    const int64_t last = bitmask->dim() - 1, words = (p.draws.vocab + 31) / 32;
    FUSELAGE_CHECK(op,
                   (last == 0 ||
                    (last == 1 && (bitmask->size(0) == 1 || bitmask->size(0) == p.draws.batch))) &&
                       bitmask->size(last) == words,
                   "`bitmask` must have shape [", words, "] or [", p.draws.batch, " or 1, ", words,
                   "], 32 logits a word, got ", shape_of(*bitmask));
    mask_rows = rows_of(*bitmask);
    p.bitmask = static_cast<const int32_t*>(mask_rows->data());
    p.bitmask_stride = last == 0 || bitmask->size(0) == 1 ? 0 : mask_rows->stride;
  }
  const Rows rows = rows_of(logits);
  p.logits = rows.data();
  p.stride = rows.stride;
  const Results results = empty_results(p.draws, return_logprobs, logits);
  p.results = pointers_of(results, return_logprobs);
  set_noise(p.draws, options);
  if (p.draws.batch == 0) {
    skip_step(op, options, logits);
  } else {
    run(op, p, logits);
  }
  return {results.tokens, results.logprobs, results.filtered_logprobs};
}

std::tuple<Tensor, Tensor, Tensor> lm_head_sample(
    const Tensor& hidden, const Tensor& weight, const OptionalTensor& weight_scale,
    const OptionalTensor& bias, std::optional<double> logit_softcap, const Tensor& seed,
    const OptionalTensor& offset, const OptionalTensor& temperature, double temperature_value,
    const OptionalTensor& top_k, std::optional<int64_t> top_k_value, const OptionalTensor& top_p,
    std::optional<double> top_p_value, const OptionalTensor& min_p,
    std::optional<double> min_p_value, int64_t num_samples, int64_t vocab_offset,
    bool return_logprobs) {
  const char* op = "lm_head_sample";
  const Head head = check_head(op, hidden, weight, weight_scale, bias, logit_softcap);
  const Options options{seed,  offset,      temperature, temperature_value,
                        top_k, top_k_value, top_p,       top_p_value,
                        min_p, min_p_value, num_samples, vocab_offset};
  Draws draws = check_draws(op, hidden, "hidden", head.params.vocab, "rows of `weight`", options);
  const Filters filters = check_filters(op, hidden, "hidden", options);
  const Results results = empty_results(draws, return_logprobs, hidden);
  set_noise(draws, options);
  if (draws.batch == 0) {
    skip_step(op, options, hidden);
  } else {
    draw_from_head(op, head.params, draws, filters, pointers_of(results, return_logprobs), hidden);
  }
  return {results.tokens, results.logprobs, results.filtered_logprobs};
}

// (scores, tokens, tempered logits of the tokens, log_sum_exp), the latter empty unless asked for.
std::tuple<Tensor, Tensor, Tensor, Tensor> lm_head_sample_shard(
    const Tensor& hidden, const Tensor& weight, const OptionalTensor& weight_scale,
    const OptionalTensor& bias, std::optional<double> logit_softcap, const Tensor& seed,
    const OptionalTensor& offset, const OptionalTensor& temperature, double temperature_value,
    int64_t num_samples, int64_t vocab_offset, bool return_log_sum_exp) {
  const char* op = "lm_head_sample_shard";
  const Head head = check_head(op, hidden, weight, weight_scale, bias, logit_softcap);
  const OptionalTensor none;
  const Options options{seed, offset,       temperature, temperature_value,
                        none, std::nullopt, none,        std::nullopt,
                        none, std::nullopt, num_samples, vocab_offset};
  Draws draws = check_draws(op, hidden, "hidden", head.params.vocab, "rows of `weight`", options);
  const Results results = empty_results(draws, false, hidden);
  const Tensor scores = empty_2d(draws.batch, draws.num_samples, ScalarType::Float, hidden);
  const Tensor logits = empty_2d(draws.batch, draws.num_samples, ScalarType::Float, hidden);
  const int64_t sums = return_log_sum_exp ? draws.batch : 0;
  const Tensor log_sum_exp = empty(&sums, 1, ScalarType::Float, hidden);
  DrawResults pointers = pointers_of(results, false);
  pointers.scores = floats_in(scores);
  pointers.logits = floats_in(logits);
  if (return_log_sum_exp) pointers.log_sum_exp = floats_in(log_sum_exp);
  set_noise(draws, options);
  if (draws.batch == 0) {
    skip_step(op, options, hidden);
  } else {
    draw_from_head(op, head.params, draws, Filters{}, pointers, hidden);
  }
  return {scores, results.tokens, logits, log_sum_exp};
}

}  // namespace

void register_sample_ops(const Ops& ops) {
  ops.op("head_logits(Tensor hidden, Tensor weight, Tensor? bias) -> Tensor logits",
         TORCH_BOX(&head_logits));
  ops.op("makes_strip_sums(Tensor hidden, Tensor weight) -> bool", TORCH_BOX(&makes_strip_sums));
  ops.op(
      "head_strip_sums(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, float "
      "temperature, float? logit_softcap) -> (Tensor sums, Tensor target_logits)",
      TORCH_BOX(&head_strip_sums));
  ops.op(
      "gumbel_sample(Tensor logits, Tensor? bias, Tensor? bitmask, Tensor seed, Tensor(a!)? "
      "offset, Tensor? temperature, float temperature_value, Tensor? top_k, int? top_k_value, "
      "Tensor? top_p, float? top_p_value, Tensor? min_p, float? min_p_value, int num_samples, int "
      "vocab_offset, bool return_logprobs) -> (Tensor tokens, Tensor logprobs, Tensor "
      "filtered_logprobs)",
      TORCH_BOX(&gumbel_sample));
  ops.op(
      "lm_head_sample(Tensor hidden, Tensor weight, Tensor? weight_scale, Tensor? bias, float? "
      "logit_softcap, Tensor seed, Tensor(a!)? offset, Tensor? temperature, float "
      "temperature_value, Tensor? top_k, int? top_k_value, Tensor? top_p, float? top_p_value, "
      "Tensor? min_p, float? min_p_value, int num_samples, int vocab_offset, bool "
      "return_logprobs) -> (Tensor tokens, Tensor logprobs, Tensor filtered_logprobs)",
      TORCH_BOX(&lm_head_sample));
  ops.op(
      "lm_head_sample_shard(Tensor hidden, Tensor weight, Tensor? weight_scale, Tensor? bias, "
      "float? logit_softcap, Tensor seed, Tensor(a!)? offset, Tensor? temperature, float "
      "temperature_value, int num_samples, int vocab_offset, bool return_log_sum_exp) -> (Tensor "
      "scores, Tensor tokens, Tensor logits, Tensor log_sum_exp)",
      TORCH_BOX(&lm_head_sample_shard));
}

}  // namespace fuselage::binding
