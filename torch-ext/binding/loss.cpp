// Bindings of the loss family. The formulas are in loss/cross_entropy.h.
#include <vector>

#include "binding.h"
#include "loss/cross_entropy.h"
#include "loss/cross_entropy_cpu.h"

namespace fuselage::binding {
namespace {

// ---- checks ----

// Logits and targets as an op was given them, and what a kernel is given of them.
struct Given {
  const char* op;
  const Tensor& logits;
  LossRows in;
  std::optional<Rows> rows;  // keeps a contiguous copy alive
  Tensor targets;            // likewise
};

// `tensor` has an element for each row of the logits.
void check_of_rows(const char* op, const char* name, const Tensor& tensor, const Tensor& logits) {
  check_same_device(op, name, tensor, logits, "logits");
  bool same = tensor.dim() == logits.dim() - 1;
  for (int64_t i = 0; same && i < tensor.dim(); ++i) same = tensor.size(i) == logits.size(i);
  FUSELAGE_CHECK(op, same, "`", name, "` must have the shape of `logits` ", shape_of(logits),
                 " without its last dimension, got ", shape_of(tensor));
}

// Float32 values of rows, adjacent.
OptionalTensor check_floats_of_rows(const char* op, const char* name, const OptionalTensor& tensor,
                                    const Tensor& logits) {
  if (!tensor.has_value()) return std::nullopt;
  check_of_rows(op, name, *tensor, logits);
  FUSELAGE_CHECK(op, is_float32(*tensor), "`", name, "` must be float32, got ",
                 torch::headeronly::toString(tensor->scalar_type()));
  return with_adjacent_elements(*tensor);
}

const float* floats_in(const OptionalTensor& tensor) {
  return tensor.has_value() ? static_cast<const float*>(tensor->const_data_ptr()) : nullptr;
}

Given check(const char* op, const Tensor& logits, const Tensor& targets, int64_t ignore_index,
            std::optional<double> logit_softcap) {
  Given given{op, logits, {}, std::nullopt, targets};
  LossRows& in = given.in;
  in.dtype = check_rows(op, logits, "logits");
  in.rows = rows_in(logits);
  in.vocab = columns_in(logits);
  FUSELAGE_CHECK(op, in.vocab >= 1 && in.vocab <= kMaxLossVocab,
                 "columns of `logits` must be 1 to 2^26, got ", shape_of(logits));
  check_of_rows(op, "targets", targets, logits);
  const ScalarType type = targets.scalar_type();
  FUSELAGE_CHECK(op, type == ScalarType::Long || type == ScalarType::Int,
                 "`targets` must be int64 or int32, got ", torch::headeronly::toString(type));
  in.int32_targets = type == ScalarType::Int;
  in.ignore_index = ignore_index;
  const double softcap = logit_softcap.value_or(0);
  FUSELAGE_CHECK(op, !logit_softcap.has_value() || (softcap > 1e-30 && softcap < 1e30),
                 "`logit_softcap` must be positive, got ", softcap);
  in.softcap = static_cast<float>(softcap);
  if (is_meta(logits)) return given;
  given.targets = with_adjacent_elements(targets);
  in.targets = given.targets.const_data_ptr();
  given.rows = read_rows(in.logits, in.stride, logits);
  return given;
}

int64_t target_at(const LossRows& in, int64_t row) {
  return in.int32_targets ? static_cast<const int32_t*>(in.targets)[row]
                          : static_cast<const int64_t*>(in.targets)[row];
}

// NOTE: on the CPU alone. A GPU cannot raise.
void check_range(const Given& given) {
  if (!given.logits.is_cpu()) return;
  const LossRows& in = given.in;
  for (int64_t row = 0; row < in.rows; ++row) {
    const int64_t target = target_at(in, row);
    FUSELAGE_CHECK(given.op, (target >= 0 && target < in.vocab) || target == in.ignore_index,
                   "`targets` must be in [0, ", in.vocab, ") or `ignore_index` ", in.ignore_index,
                   ", got ", target);
  }
}

float check_temperature(const char* op, double temperature) {
  FUSELAGE_CHECK(op, temperature >= 1.1754943508222875e-38 && temperature < 3e38,
                 "`temperature` must be in [2^-126, 3e38), got ", temperature);
  // NOTE: in float32, as of a draw.
  return 1.0f / static_cast<float>(temperature);
}

struct CrossEntropyOptions {
  int64_t reduction;
  double label_smoothing, lse_square_scale;
};

Reduction check_options(const char* op, const CrossEntropyOptions& options) {
  FUSELAGE_CHECK(op, options.reduction >= 0 && options.reduction <= 2,
                 "`reduction` must be none, sum or mean, got number ", options.reduction);
  FUSELAGE_CHECK(op, options.label_smoothing >= 0 && options.label_smoothing <= 1,
                 "`label_smoothing` must be in [0, 1], got ", options.label_smoothing);
  FUSELAGE_CHECK(op, std::isfinite(static_cast<float>(options.lse_square_scale)),
                 "`lse_square_scale` must be finite, got ", options.lse_square_scale);
  return static_cast<Reduction>(options.reduction);
}

// ---- results ----

// A value for each row.
Tensor empty_of_rows(const Tensor& logits, ScalarType type = ScalarType::Float) {
  return empty(logits.sizes().data(), logits.dim() - 1, type, logits);
}

Tensor empty_statistics(const Tensor& logits) { return empty_floats({rows_in(logits), 2}, logits); }

float* floats_of(const Tensor& tensor) { return static_cast<float*>(tensor.mutable_data_ptr()); }

RowStatistics* statistics_of(const Tensor& tensor) {
  return static_cast<RowStatistics*>(tensor.mutable_data_ptr());
}

// ---- cross_entropy ----

struct Loss {
  Tensor loss, statistics, count;
};

Loss run_cross_entropy(const char* op, const Tensor& logits, const Tensor& targets,
                       const OptionalTensor& token_weights, int64_t ignore_index,
                       const CrossEntropyOptions& options, std::optional<double> logit_softcap,
                       bool for_gradient) {
  CrossEntropyForward p{};
  p.reduction = check_options(op, options);
  Given given = check(op, logits, targets, ignore_index, logit_softcap);
  const OptionalTensor weights = check_floats_of_rows(op, "token_weights", token_weights, logits);
  const bool is_reduced = p.reduction != Reduction::none;
  Loss results{is_reduced ? empty_floats({}, logits) : empty_of_rows(logits),
               for_gradient ? empty_statistics(logits) : empty_floats({0, 2}, logits),
               empty_floats({is_reduced ? 1 : 0}, logits)};
  if (is_meta(logits) || (given.in.rows == 0 && !is_reduced)) return results;
  check_range(given);
  p.in = given.in;
  p.token_weights = floats_in(weights);
  p.smoothing = static_cast<float>(options.label_smoothing);
  p.square_scale = static_cast<float>(options.lse_square_scale);
  OptionalTensor losses;
  if (is_reduced) {
    p.losses = scratch(losses, p.in.rows, logits);
    p.loss = floats_of(results.loss);
    p.count = floats_of(results.count);
  } else {
    p.losses = floats_of(results.loss);
  }
  if (for_gradient) p.statistics = statistics_of(results.statistics);
  launch(
      op, logits,
      [&] {
        on_threads<cpu::cross_entropy_forward>(p, p.in.rows, p.in.vocab);
        if (is_reduced) cpu::cross_entropy_finish(p);
      },
      [&](int32_t device, void* stream) { return gpu::cross_entropy_forward(p, device, stream); });
  return results;
}

Tensor cross_entropy(const Tensor& logits, const Tensor& targets,
                     const OptionalTensor& token_weights, int64_t reduction, int64_t ignore_index,
                     double label_smoothing, double lse_square_scale,
                     std::optional<double> logit_softcap) {
  return run_cross_entropy("cross_entropy", logits, targets, token_weights, ignore_index,
                           {reduction, label_smoothing, lse_square_scale}, logit_softcap, false)
      .loss;
}

// `inplace_backward` is for the backward that Python registers.
std::tuple<Tensor, Tensor, Tensor> cross_entropy_fwd(
    const Tensor& logits, const Tensor& targets, const OptionalTensor& token_weights,
    int64_t reduction, int64_t ignore_index, double label_smoothing, double lse_square_scale,
    std::optional<double> logit_softcap, bool inplace_backward) {
  const char* op = "cross_entropy";
  if (inplace_backward) check_written_rows(op, "logits", logits, "inplace_backward=False");
  const Loss results =
      run_cross_entropy(op, logits, targets, token_weights, ignore_index,
                        {reduction, label_smoothing, lse_square_scale}, logit_softcap, true);
  return {results.loss, results.statistics, results.count};
}

// ---- the backward ----

void run_backward(Given& given, LossBackward& p, const Tensor& statistics,
                  const Tensor& grad_logits, int64_t grad_stride) {
  if (is_nothing(given.logits, given.in.rows, given.in.vocab)) return;
  p.in = given.in;
  if (p.full_vocab == 0) p.full_vocab = p.in.vocab;
  p.statistics = static_cast<const RowStatistics*>(statistics.const_data_ptr());
  p.grad_logits = grad_logits.mutable_data_ptr();
  p.grad_dtype = *dtype_from(grad_logits.scalar_type());
  p.grad_stride = grad_stride;
  launch<cpu::loss_backward, gpu::loss_backward>(given.op, given.logits, p, p.in.rows, p.in.vocab);
}

// Their row stride: of the logits' shape and dtype, or, of float32 logits, of any dtype.
int64_t check_grad_logits(const Given& given, const Tensor& grad_logits) {
  const char* op = given.op;
  const DType dtype = check_rows(op, grad_logits, "grad_logits");
  FUSELAGE_CHECK(op,
                 rows_in(grad_logits) == given.in.rows && columns_in(grad_logits) == given.in.vocab,
                 "`grad_logits` must have the shape of `logits` ", shape_of(given.logits), ", got ",
                 shape_of(grad_logits));
  FUSELAGE_CHECK(op, dtype == given.in.dtype || given.in.dtype == DType::float32,
                 "`grad_logits` must have the dtype of `logits`, unless that is float32");
  check_same_device(op, "grad_logits", grad_logits, given.logits, "logits");
  return check_written_rows(op, "grad_logits", grad_logits, "a copy");
}

// What the gradient of a row's cross-entropy is multiplied by, or that of all, and divided by.
struct LossFactors {
  OptionalTensor grad_loss, token_weights;

  LossFactors(const Given& given, const OptionalTensor& grad, const OptionalTensor& weights,
              const OptionalTensor& count, LossBackward& p)
      : grad_loss(grad) {
    const char* op = given.op;
    if (grad.has_value()) {
      p.grad_per_row = grad->dim() > 0;
      if (p.grad_per_row) grad_loss = check_floats_of_rows(op, "grad_loss", grad, given.logits);
      check_same_device(op, "grad_loss", *grad, given.logits, "logits");
      FUSELAGE_CHECK(op, is_float32(*grad), "`grad_loss` must be float32");
    }
    if (count.has_value())
      check_saved(op, "count", *count, 1, given.logits, "logits", "count of targets");
    token_weights = check_floats_of_rows(op, "token_weights", weights, given.logits);
    p.grad_loss = floats_in(grad_loss);
    p.token_weights = floats_in(token_weights);
    p.count = floats_in(count);
  }
};

void check_statistics(const char* op, const Tensor& statistics, const Tensor& logits) {
  check_saved(op, "statistics", statistics, 2 * rows_in(logits), logits, "logits", "float32 [",
              rows_in(logits), ", 2]");
}

struct CrossEntropyGradient {
  const Tensor& grad_out;
  const Tensor& statistics;
  const Tensor& count;
  const OptionalTensor& token_weights;
  CrossEntropyOptions options;
};

void run_cross_entropy_bwd(Given& given, const CrossEntropyGradient& g, const Tensor& grad_logits,
                           int64_t grad_stride) {
  const char* op = given.op;
  const Tensor& logits = given.logits;
  LossBackward p{};
  const Reduction reduction = check_options(op, g.options);
  check_statistics(op, g.statistics, logits);
  check_same_device(op, "grad_out", g.grad_out, logits, "logits");
  const bool is_reduced = reduction != Reduction::none;
  const int64_t wanted = is_reduced ? 1 : given.in.rows;
  FUSELAGE_CHECK(op, g.grad_out.numel() == wanted && is_float32(g.grad_out),
                 "`grad_out` must be float32 of ", wanted, " elements, got ", shape_of(g.grad_out));
  check_saved(op, "count", g.count, is_reduced ? 1 : 0, logits, "logits", "count of targets");
  const Tensor grad_out = with_adjacent_elements(g.grad_out);
  const OptionalTensor weights = check_floats_of_rows(op, "token_weights", g.token_weights, logits);
  p.inv_temperature = 1.0f;
  p.grad_loss = static_cast<const float*>(grad_out.const_data_ptr());
  p.grad_per_row = !is_reduced;
  p.token_weights = floats_in(weights);
  if (reduction == Reduction::mean) p.count = static_cast<const float*>(g.count.const_data_ptr());
  p.smoothing = static_cast<float>(g.options.label_smoothing);
  p.square_scale = static_cast<float>(g.options.lse_square_scale);
  run_backward(given, p, g.statistics, grad_logits, grad_stride);
}

Tensor cross_entropy_bwd(const Tensor& grad_out, const Tensor& logits, const Tensor& targets,
                         const OptionalTensor& token_weights, const Tensor& statistics,
                         const Tensor& count, int64_t reduction, int64_t ignore_index,
                         double label_smoothing, double lse_square_scale,
                         std::optional<double> logit_softcap) {
  Given given = check("cross_entropy_bwd", logits, targets, ignore_index, logit_softcap);
  const Tensor grad_logits = empty_like(logits, logits.scalar_type());
  run_cross_entropy_bwd(
      given,
      {grad_out, statistics, count, token_weights, {reduction, label_smoothing, lse_square_scale}},
      grad_logits, given.in.vocab);
  return grad_logits;
}

// The same, written over the logits.
void cross_entropy_bwd_(const Tensor& logits, const Tensor& grad_out, const Tensor& targets,
                        const OptionalTensor& token_weights, const Tensor& statistics,
                        const Tensor& count, int64_t reduction, int64_t ignore_index,
                        double label_smoothing, double lse_square_scale,
                        std::optional<double> logit_softcap) {
  const char* op = "cross_entropy_bwd_";
  Given given = check(op, logits, targets, ignore_index, logit_softcap);
  const int64_t stride = check_written_rows(op, "logits", logits, "cross_entropy_bwd");
  run_cross_entropy_bwd(
      given,
      {grad_out, statistics, count, token_weights, {reduction, label_smoothing, lse_square_scale}},
      logits, stride);
}

// The losses of rows and their gradients at once, of which `count` is known before: as
// cross_entropy without a reduction, and loss_columns_bwd_ of all columns.
void cross_entropy_fwd_bwd_(const Tensor& grad_logits, const Tensor& losses,
                            const Tensor& statistics, const Tensor& logits, const Tensor& targets,
                            const OptionalTensor& token_weights, const Tensor& grad_loss,
                            const OptionalTensor& count, int64_t ignore_index,
                            double label_smoothing, double lse_square_scale,
                            std::optional<double> logit_softcap) {
  const char* op = "cross_entropy";
  CrossEntropyForward f{};
  LossBackward b{};
  f.reduction = check_options(op, {0, label_smoothing, lse_square_scale});
  const Given given = check(op, logits, targets, ignore_index, logit_softcap);
  const LossFactors factors(given, grad_loss, token_weights, count, b);
  b.grad_stride = check_grad_logits(given, grad_logits);
  check_saved(op, "losses", losses, given.in.rows, logits, "logits", "losses");
  check_statistics(op, statistics, logits);
  if (is_nothing(logits, given.in.rows, given.in.vocab)) return;
  check_range(given);
  f.in = b.in = given.in;
  f.token_weights = b.token_weights;
  f.smoothing = b.smoothing = static_cast<float>(label_smoothing);
  f.square_scale = b.square_scale = static_cast<float>(lse_square_scale);
  f.losses = floats_of(losses);
  b.statistics = f.statistics = statistics_of(statistics);
  b.inv_temperature = 1.0f;
  b.grad_logits = grad_logits.mutable_data_ptr();
  b.grad_dtype = *dtype_from(grad_logits.scalar_type());
  b.full_vocab = f.in.vocab;
  launch(
      op, logits,
      [&] {
        on_threads<cpu::cross_entropy_forward>(f, f.in.rows, f.in.vocab);
        on_threads<cpu::loss_backward>(b, b.in.rows, b.in.vocab);
      },
      [&](int32_t device, void* stream) {
        return gpu::cross_entropy_with_gradient(f, b, device, stream);
      });
}

// ---- log_probs ----

struct LogProbs {
  Tensor log_probs, entropy, log_sum_exp, is_greatest, statistics;
};

LogProbs run_log_probs(const Tensor& logits, const Tensor& targets, double temperature,
                       std::optional<double> logit_softcap, int64_t ignore_index,
                       bool return_entropy, bool for_gradient) {
  const char* op = "log_probs";
  LogProbsForward p{};
  p.inv_temperature = check_temperature(op, temperature);
  Given given = check(op, logits, targets, ignore_index, logit_softcap);
  LogProbs results{empty_of_rows(logits),
                   return_entropy ? empty_of_rows(logits) : empty_floats({0}, logits),
                   empty_of_rows(logits), empty_of_rows(logits, ScalarType::Bool),
                   for_gradient ? empty_statistics(logits) : empty_floats({0, 2}, logits)};
  if (is_nothing(logits, given.in.rows, given.in.vocab)) return results;
  check_range(given);
  p.in = given.in;
  p.log_probs = floats_of(results.log_probs);
  if (return_entropy) p.entropy = floats_of(results.entropy);
  p.log_sum_exp = floats_of(results.log_sum_exp);
  p.is_greatest = static_cast<bool*>(results.is_greatest.mutable_data_ptr());
  if (for_gradient) p.statistics = statistics_of(results.statistics);
  launch(
      op, logits,
      [&] {
        std::vector<cpu::LogProbsRow> rows(p.in.rows);
        torch::stable::parallel_for(0, p.in.rows, tasks_of(p.in.vocab),
                                    [&](int64_t begin, int64_t end) {
                                      cpu::log_probs_forward(p, rows.data(), begin, end);
                                    });
        cpu::log_probs_finish(p, rows.data());
      },
      [&](int32_t device, void* stream) { return gpu::log_probs_forward(p, device, stream); });
  return results;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> log_probs(const Tensor& logits, const Tensor& targets,
                                                     double temperature,
                                                     std::optional<double> logit_softcap,
                                                     int64_t ignore_index, bool return_entropy) {
  const LogProbs r = run_log_probs(logits, targets, temperature, logit_softcap, ignore_index,
                                   return_entropy, false);
  return {r.log_probs, r.entropy, r.log_sum_exp, r.is_greatest};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> log_probs_fwd(
    const Tensor& logits, const Tensor& targets, double temperature,
    std::optional<double> logit_softcap, int64_t ignore_index, bool return_entropy) {
  const LogProbs r = run_log_probs(logits, targets, temperature, logit_softcap, ignore_index,
                                   return_entropy, true);
  return {r.log_probs, r.entropy, r.log_sum_exp, r.is_greatest, r.statistics};
}

// log_probs_fwd, without entropy, of what head_strip_sums gives.
std::tuple<Tensor, Tensor, Tensor, Tensor> log_probs_of_strips(const Tensor& sums,
                                                               const Tensor& target_logits,
                                                               const Tensor& targets, int64_t vocab,
                                                               double temperature,
                                                               int64_t ignore_index) {
  const char* op = "log_probs";
  FUSELAGE_CHECK(op,
                 sums.dim() == 2 && sums.is_contiguous() && is_float32(sums) &&
                     sums.size(1) % 4 == 0 && sums.size(1) / 2 >= (vocab + kStrip - 1) / kStrip,
                 "`sums` must be those of strips of ", vocab, " logits, got ", shape_of(sums));
  check_of_rows(op, "targets", targets, sums);
  const OptionalTensor of_targets = check_floats_of_rows(op, "target_logits", target_logits, sums);
  LogProbsForward p{};
  p.in.rows = sums.size(0);
  p.in.vocab = vocab;
  p.in.stride = sums.size(1) / 2;
  p.in.int32_targets = targets.scalar_type() == ScalarType::Int;
  p.in.ignore_index = ignore_index;
  const Tensor adjacent = with_adjacent_elements(targets);
  p.in.targets = adjacent.const_data_ptr();
  p.inv_temperature = check_temperature(op, temperature);
  p.strips = static_cast<const StripSum*>(sums.const_data_ptr());
  p.target_logits = floats_in(of_targets);
  const Tensor log_probs = empty_of_rows(sums), log_sum_exp = empty_of_rows(sums);
  const Tensor is_greatest = empty_of_rows(sums, ScalarType::Bool);
  const Tensor statistics = empty_statistics(sums);
  p.log_probs = floats_of(log_probs);
  p.log_sum_exp = floats_of(log_sum_exp);
  p.is_greatest = static_cast<bool*>(is_greatest.mutable_data_ptr());
  p.statistics = statistics_of(statistics);
  launch(
      op, sums, [] {},
      [&](int32_t device, void* stream) { return gpu::log_probs_forward(p, device, stream); });
  return {log_probs, log_sum_exp, is_greatest, statistics};
}

// The gradients of the results of log_probs, adjacent.
struct LogProbsGradients {
  OptionalTensor of_log_probs, of_entropy, of_log_sum_exp;

  LogProbsGradients(const Given& given, const OptionalTensor& grad_log_probs,
                    const OptionalTensor& grad_entropy, const OptionalTensor& grad_log_sum_exp,
                    const OptionalTensor& entropy, LossBackward& p)
      : of_log_probs(
            check_floats_of_rows(given.op, "grad_log_probs", grad_log_probs, given.logits)),
        of_entropy(check_floats_of_rows(given.op, "grad_entropy", grad_entropy, given.logits)),
        of_log_sum_exp(
            check_floats_of_rows(given.op, "grad_log_sum_exp", grad_log_sum_exp, given.logits)) {
    if (of_entropy.has_value()) {
      FUSELAGE_CHECK(given.op, entropy.has_value(),
                     "`entropy` must be what the forward returned, got None");
      check_saved(given.op, "entropy", *entropy, given.in.rows, given.logits, "logits", "float32 [",
                  given.in.rows, "]");
      p.entropy = floats_in(entropy);
    }
    p.grad_log_probs = floats_in(of_log_probs);
    p.grad_entropy = floats_in(of_entropy);
    p.grad_log_sum_exp = floats_in(of_log_sum_exp);
  }
};

Tensor log_probs_bwd(const OptionalTensor& grad_log_probs, const OptionalTensor& grad_entropy,
                     const OptionalTensor& grad_log_sum_exp, const Tensor& logits,
                     const Tensor& targets, const OptionalTensor& entropy, const Tensor& statistics,
                     double temperature, std::optional<double> logit_softcap,
                     int64_t ignore_index) {
  const char* op = "log_probs_bwd";
  LossBackward p{};
  p.inv_temperature = check_temperature(op, temperature);
  Given given = check(op, logits, targets, ignore_index, logit_softcap);
  check_statistics(op, statistics, logits);
  const LogProbsGradients gradients(given, grad_log_probs, grad_entropy, grad_log_sum_exp, entropy,
                                    p);
  const Tensor grad_logits = empty_like(logits, logits.scalar_type());
  run_backward(given, p, statistics, grad_logits, given.in.vocab);
  return grad_logits;
}

// The backward of either loss for some of the columns, `vocab` in all, from `first_column` on.
// `grad_logits` may be `logits`.
// `grad_loss`: of each row's cross-entropy, or one for all; without it, of log_probs. It is divided
// by `count`, if given.
void loss_columns_bwd_(const Tensor& grad_logits, const Tensor& logits, const Tensor& targets,
                       const Tensor& statistics, const OptionalTensor& grad_loss,
                       const OptionalTensor& token_weights, const OptionalTensor& count,
                       double label_smoothing, double lse_square_scale,
                       const OptionalTensor& grad_log_probs, const OptionalTensor& grad_entropy,
                       const OptionalTensor& grad_log_sum_exp, const OptionalTensor& entropy,
                       double temperature, std::optional<double> logit_softcap,
                       int64_t ignore_index, int64_t first_column, int64_t vocab) {
  const char* op = "loss_columns_bwd_";
  LossBackward p{};
  p.inv_temperature = check_temperature(op, temperature);
  Given given = check(op, logits, targets, ignore_index, logit_softcap);
  check_statistics(op, statistics, logits);
  FUSELAGE_CHECK(op, first_column >= 0 && first_column + given.in.vocab <= vocab,
                 "`logits` must be columns of ", vocab, ", got ", shape_of(logits), " from ",
                 first_column);
  const int64_t stride = check_grad_logits(given, grad_logits);
  const LogProbsGradients gradients(given, grad_log_probs, grad_entropy, grad_log_sum_exp, entropy,
                                    p);
  const LossFactors factors(given, grad_loss, token_weights, count, p);
  p.smoothing = static_cast<float>(label_smoothing);
  p.square_scale = static_cast<float>(lse_square_scale);
  p.first_column = first_column;
  p.full_vocab = vocab;
  run_backward(given, p, statistics, grad_logits, stride);
}

// x *= factor, one float32.
void multiply_(const Tensor& x, const Tensor& factor) {
  const char* op = "multiply_";
  Multiply p{};
  p.dtype = check_dtype(op, "x", x);
  FUSELAGE_CHECK(op, x.is_contiguous(), "`x` must be contiguous, as it is written in place");
  check_same_device(op, "factor", factor, x);
  FUSELAGE_CHECK(op, is_float32(factor) && factor.numel() == 1, "`factor` must be one float32");
  if (x.numel() == 0 || is_meta(x)) return;
  p.x = x.mutable_data_ptr();
  p.count = x.numel();
  p.factor = static_cast<const float*>(factor.const_data_ptr());
  launch<cpu::multiply, gpu::multiply>(op, x, p, p.count, 1);
}

}  // namespace

void register_loss_ops(const Ops& ops) {
  const std::string arguments =
      "Tensor logits, Tensor targets, Tensor? token_weights, int reduction, int ignore_index, "
      "float label_smoothing, float lse_square_scale, float? logit_softcap";
  const std::string gradient_arguments =
      "Tensor targets, Tensor? token_weights, Tensor statistics, Tensor count, int reduction, "
      "int ignore_index, float label_smoothing, float lse_square_scale, float? logit_softcap";
  ops.op("cross_entropy(" + arguments + ") -> Tensor loss", TORCH_BOX(&cross_entropy));
  ops.op("cross_entropy_fwd(" + arguments +
             ", bool inplace_backward) -> (Tensor loss, Tensor statistics, Tensor count)",
         TORCH_BOX(&cross_entropy_fwd));
  ops.op("cross_entropy_bwd(Tensor grad_out, Tensor logits, " + gradient_arguments +
             ") -> Tensor grad_logits",
         TORCH_BOX(&cross_entropy_bwd));
  ops.op("cross_entropy_bwd_(Tensor(a!) logits, Tensor grad_out, " + gradient_arguments + ") -> ()",
         TORCH_BOX(&cross_entropy_bwd_));
  ops.op(
      "cross_entropy_fwd_bwd_(Tensor(a!) grad_logits, Tensor(b!) losses, Tensor(c!) statistics, "
      "Tensor logits, Tensor targets, Tensor? token_weights, Tensor grad_loss, Tensor? count, "
      "int ignore_index, float label_smoothing, float lse_square_scale, float? logit_softcap) "
      "-> ()",
      TORCH_BOX(&cross_entropy_fwd_bwd_));
  ops.forward("log_probs",
              "Tensor logits, Tensor targets, float temperature, float? logit_softcap, int "
              "ignore_index, bool return_entropy",
              "Tensor log_probs, Tensor entropy, Tensor log_sum_exp, Tensor is_greatest",
              "Tensor statistics", TORCH_BOX(&log_probs), TORCH_BOX(&log_probs_fwd));
  ops.op(
      "log_probs_of_strips(Tensor sums, Tensor target_logits, Tensor targets, int vocab, float "
      "temperature, int ignore_index) -> (Tensor log_probs, Tensor log_sum_exp, Tensor "
      "is_greatest, Tensor statistics)",
      TORCH_BOX(&log_probs_of_strips));
  ops.op(
      "log_probs_bwd(Tensor? grad_log_probs, Tensor? grad_entropy, Tensor? grad_log_sum_exp, "
      "Tensor logits, Tensor targets, Tensor? entropy, Tensor statistics, float temperature, "
      "float? logit_softcap, int ignore_index) -> Tensor grad_logits",
      TORCH_BOX(&log_probs_bwd));
  ops.op(
      "loss_columns_bwd_(Tensor(a!) grad_logits, Tensor logits, Tensor targets, Tensor statistics, "
      "Tensor? grad_loss, Tensor? token_weights, Tensor? count, float label_smoothing, "
      "float lse_square_scale, Tensor? grad_log_probs, Tensor? grad_entropy, "
      "Tensor? grad_log_sum_exp, Tensor? entropy, float temperature, float? logit_softcap, "
      "int ignore_index, int first_column, int vocab) -> ()",
      TORCH_BOX(&loss_columns_bwd_));
  ops.op("multiply_(Tensor(a!) x, Tensor factor) -> ()", TORCH_BOX(&multiply_));
}

}  // namespace fuselage::binding
