// Bindings of the route family. The formulas are in route/topk_softmax.h.
#include "binding.h"
#include "route/topk_softmax.h"
#include "route/topk_softmax_cpu.h"

namespace fuselage::binding {
namespace {

// ---- checks ----

// Logits as an op was given them, and what a kernel is given of them.
struct Given {
  ExpertLogits logits;
  std::optional<Rows> rows;  // keeps a contiguous copy alive
};

Given check_logits(const char* op, const Tensor& logits) {
  Given given{};
  given.logits.dtype = check_rows(op, logits, "logits");
  given.logits.rows = rows_in(logits);
  const int64_t experts = columns_in(logits);
  FUSELAGE_CHECK(op, experts >= 1 && experts <= kMaxExperts,
                 "the last dimension of `logits`, that of experts, must be 1 to ", kMaxExperts,
                 ", got ", shape_of(logits));
  given.logits.experts = static_cast<int>(experts);
  if (!is_meta(logits)) given.rows = read_rows(given.logits.data, given.logits.stride, logits);
  return given;
}

Score check_score(const char* op, int64_t score) {
  FUSELAGE_CHECK(op, score == 0 || score == 1, "`score` must be softmax or sigmoid, got number ",
                 score);
  return static_cast<Score>(score);
}

// Fills the groups of p, whose other members are there.
void check_groups(const char* op, TopkForward& p, std::optional<int64_t> num_groups,
                  std::optional<int64_t> topk_groups) {
  FUSELAGE_CHECK(op, num_groups.has_value() == topk_groups.has_value(),
                 "`num_groups` and `topk_groups` must be given together");
  const int64_t experts = p.logits.experts;
  const int64_t groups = num_groups.value_or(1), chosen = topk_groups.value_or(1);
  FUSELAGE_CHECK(op, groups >= 1 && groups <= experts && experts % groups == 0,
                 "`num_groups` must divide the ", experts, " experts, got ", groups);
  FUSELAGE_CHECK(op, chosen >= 1 && chosen <= groups, "`topk_groups` must be 1 to the ", groups,
                 " of `num_groups`, got ", chosen);
  const int64_t size = experts / groups;
  FUSELAGE_CHECK(op, p.score == Score::softmax || chosen == groups || size >= 2,
                 "`num_groups` must leave groups of two experts at least, whose scores are added "
                 "up, got ",
                 groups, " for ", experts, " experts");
  FUSELAGE_CHECK(op, p.k <= chosen * size, "`k` must be at most the ", chosen * size,
                 " experts of `topk_groups` groups, got ", p.k);
  p.groups = static_cast<int>(groups);
  p.group_size = static_cast<int>(size);
  p.chosen_groups = static_cast<int>(chosen);
}

// ---- ops ----

std::tuple<Tensor, Tensor> topk_softmax(const Tensor& logits, int64_t k, int64_t score,
                                        const OptionalTensor& bias,
                                        std::optional<int64_t> num_groups,
                                        std::optional<int64_t> topk_groups, bool renormalize) {
  const char* op = "topk_softmax";
  TopkForward p{};
  const Given given = check_logits(op, logits);
  p.logits = given.logits;
  p.score = check_score(op, score);
  p.renormalize = renormalize;
  const OptionalTensor adjacent_bias = check_vector(op, "bias", bias, logits, "logits");
  const int64_t most = std::min(p.logits.experts, kMaxChosen);
  FUSELAGE_CHECK(op, k >= 1 && k <= most, "`k` must be 1 to ", most, ", got ", k);
  p.k = static_cast<int>(k);
  check_groups(op, p, num_groups, topk_groups);
  const Tensor weights = empty_with_columns(logits, k, ScalarType::Float);
  const Tensor indices = empty_with_columns(logits, k, ScalarType::Long);
  if (is_nothing(logits, p.logits.rows, k)) return {weights, indices};
  read_vector(p.bias, p.bias_dtype, adjacent_bias, p.logits.dtype);
  p.weights = static_cast<float*>(weights.mutable_data_ptr());
  p.indices = static_cast<int64_t*>(indices.mutable_data_ptr());
  launch<cpu::topk_softmax_forward, gpu::topk_softmax_forward>(op, logits, p, p.logits.rows,
                                                               p.logits.experts);
  return {weights, indices};
}

Tensor topk_softmax_bwd(const Tensor& grad_weights, const Tensor& logits, const Tensor& weights,
                        const Tensor& indices, int64_t score, bool renormalize) {
  const char* op = "topk_softmax_bwd";
  TopkBackward p{};
  const Given given = check_logits(op, logits);
  p.logits = given.logits;
  p.score = check_score(op, score);
  p.renormalize = renormalize;
  check_rows(op, weights, "weights");
  const int64_t rows = p.logits.rows, k = columns_in(weights);
  FUSELAGE_CHECK(op, k >= 1 && k <= kMaxChosen, "`weights` must be what the forward returned, got ",
                 shape_of(weights));
  p.k = static_cast<int>(k);
  check_saved(op, "weights", weights, rows * k, logits, "logits", "float32 [", rows, ", ", k, "]");
  check_same_device(op, "indices", indices, logits, "logits");
  check_same_shape(op, "indices", indices, weights, "weights");
  FUSELAGE_CHECK(op, indices.scalar_type() == ScalarType::Long && indices.is_contiguous(),
                 "`indices` must be the int64 that the forward returned");
  check_like(op, "grad_weights", grad_weights, weights, "weights");
  const Tensor adjacent_grads = with_adjacent_elements(grad_weights);
  const Tensor grad_logits = empty_like(logits, logits.scalar_type());
  if (is_nothing(logits, rows, k)) return grad_logits;
  p.grad_weights = static_cast<const float*>(adjacent_grads.const_data_ptr());
  p.weights = static_cast<const float*>(weights.const_data_ptr());
  p.indices = static_cast<const int64_t*>(indices.const_data_ptr());
  p.grad_logits = grad_logits.mutable_data_ptr();
  launch<cpu::topk_softmax_backward, gpu::topk_softmax_backward>(op, logits, p, rows,
                                                                 p.logits.experts);
  return grad_logits;
}

}  // namespace

void register_route_ops(const Ops& ops) {
  ops.with_fwd(
      "topk_softmax(Tensor logits, int k, int score, Tensor? bias, int? num_groups, "
      "int? topk_groups, bool renormalize) -> (Tensor weights, Tensor indices)",
      TORCH_BOX(&topk_softmax));
  ops.op(
      "topk_softmax_bwd(Tensor grad_weights, Tensor logits, Tensor weights, Tensor indices, "
      "int score, bool renormalize) -> Tensor grad_logits",
      TORCH_BOX(&topk_softmax_bwd));
}

}  // namespace fuselage::binding
