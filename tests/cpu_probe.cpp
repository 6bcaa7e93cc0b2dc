// Runs one CPU kernel, forward and backward, without PyTorch: for instruction sets that the machine
// of the tests has not (test_aarch64.py).
//
//   cpu_probe <op> <dtype 0, 1 or 2> <rows> <dim> <eps>
//
// reads the tensors of the op from standard input, one after the other, contiguous and in native
// byte order, and writes its results to standard output likewise. Vectors have the rows' dtype.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "gate/activation_cpu.h"
#include "loss/cross_entropy_cpu.h"
#include "norm/ada_norm_cpu.h"
#include "norm/poly_norm_cpu.h"
#include "norm/rms_norm_cpu.h"
#include "rope/rotary_cpu.h"
#include "route/topk_softmax_cpu.h"
#include "sample/sample_cpu.h"

namespace {

using namespace fuselage;

DType dtype;
int64_t rows, dim;
float eps;

using Bytes = std::vector<char>;

Bytes buffer(int64_t elements, int size = dtype_size(dtype)) { return Bytes(elements * size); }

Bytes read(int64_t elements, int size = dtype_size(dtype)) {
  Bytes bytes = buffer(elements, size);
  if (std::fread(bytes.data(), 1, bytes.size(), stdin) != bytes.size()) std::exit(3);
  return bytes;
}

void write(const Bytes& bytes) { std::fwrite(bytes.data(), 1, bytes.size(), stdout); }

float* floats(Bytes& bytes) { return reinterpret_cast<float*>(bytes.data()); }

// x, residual, weight, grad_out, grad_new_residual -> out, new_residual, grad_x, grad_weight
void fused_add_rms_norm() {
  const Bytes x = read(rows * dim), residual = read(rows * dim), weight = read(dim);
  const Bytes grad_out = read(rows * dim), grad_new_residual = read(rows * dim);
  Bytes out = buffer(rows * dim), sum = buffer(rows * dim), rstd = buffer(rows, 4);
  RmsNormForward p{};
  p.x = x.data(), p.residual = residual.data(), p.weight = weight.data();
  p.out = out.data(), p.new_residual = sum.data(), p.rstd = floats(rstd);
  p.rows = rows, p.dim = dim, p.eps = eps;
  p.x_stride = p.residual_stride = p.out_stride = p.new_residual_stride = dim;
  p.x_dtype = p.weight_dtype = p.out_dtype = dtype;
  cpu::rms_norm_forward(p, 0, rows);

  const int64_t chunks = cpu::rms_norm_backward_chunks(rows, dim);
  Bytes grad_x = buffer(rows * dim), grad_weight = buffer(dim), partials = buffer(chunks * dim, 4);
  RmsNormBackward b{};
  b.grad_out = grad_out.data(), b.grad_new_residual = grad_new_residual.data();
  b.x = sum.data(), b.weight = weight.data(), b.rstd = p.rstd;
  b.grad_x = grad_x.data(), b.grad_weight = grad_weight.data(), b.partials = floats(partials);
  b.partial_count = chunks, b.rows = rows, b.dim = dim;
  b.grad_out_stride = b.grad_new_residual_stride = b.x_stride = dim, b.rstd_stride = 1;
  b.x_dtype = b.weight_dtype = b.out_dtype = dtype;
  cpu::rms_norm_backward(b, 0, chunks);
  cpu::rms_norm_backward_weight(b, 0, dim);
  for (const Bytes& result : {out, sum, grad_x, grad_weight}) write(result);
}

// x, weight, bias, grad_out -> out, grad_x, grad_weight, grad_bias
void layer_norm() {
  const Bytes x = read(rows * dim), weight = read(dim), bias = read(dim);
  const Bytes grad_out = read(rows * dim);
  Bytes out = buffer(rows * dim), statistics = buffer(2 * rows, 4);
  AdaNormForward p{};
  p.x = x.data(), p.out = out.data(), p.statistics = floats(statistics);
  p.weight = {weight.data(), dtype}, p.bias = {bias.data(), dtype};
  p.rows = rows, p.dim = p.x_stride = p.out_stride = dim;
  p.eps = eps, p.layer = true, p.dtype = dtype;
  cpu::ada_norm_forward(p, 0, rows);

  Bytes grad_x = buffer(rows * dim), grad_weight = buffer(dim), grad_bias = buffer(dim);
  AdaNormBackward b{};
  b.grad_out = grad_out.data(), b.s = x.data(), b.statistics = p.statistics;
  b.weight = p.weight, b.bias = p.bias;
  b.grad_x = grad_x.data(), b.grad_weight = grad_weight.data(), b.grad_bias = grad_bias.data();
  b.gate_rows = b.scale_rows = b.group_rows = b.rows = rows, b.dim = dim;
  b.grad_out_stride = b.s_stride = dim;
  b.shift_dtype = b.bias_dtype = b.dtype = dtype, b.layer = true;
  ada_norm_choose_sums(b);
  b.blocks_per_group = cpu::ada_norm_backward_chunks(rows, rows);
  Bytes partials = buffer(b.blocks_per_group * b.partial_rows * dim, 4);
  b.partials = floats(partials);
  cpu::ada_norm_backward(b, 0, b.blocks_per_group);
  cpu::ada_norm_backward_sums(b, 0, dim);
  for (const Bytes& result : {out, grad_x, grad_weight, grad_bias}) write(result);
}

// gate, up, grad_out -> out, grad_gate, grad_up
void swiglu() {
  const Bytes gate = read(rows * dim), up = read(rows * dim), grad_out = read(rows * dim);
  Bytes out = buffer(rows * dim), grad_gate = buffer(rows * dim), grad_up = buffer(rows * dim);
  ActivationForward p{};
  p.x = gate.data(), p.y = up.data(), p.out = out.data(), p.rows = rows;
  p.dim = p.x_stride = p.y_stride = p.out_stride = dim;
  p.formula = Formula::gate, p.activation = Activation::silu, p.dtype = p.bias_dtype = dtype;
  cpu::activation_forward(p, 0, cpu::activation_pieces(rows, dim));

  ActivationBackward b{};
  b.grad_out = grad_out.data(), b.x = gate.data(), b.y = up.data();
  b.grad_x = grad_gate.data(), b.grad_y = grad_up.data(), b.rows = rows;
  b.dim = b.grad_out_stride = b.x_stride = b.y_stride = b.grad_x_stride = b.grad_y_stride = dim;
  b.formula = p.formula, b.activation = p.activation, b.dtype = b.bias_dtype = dtype;
  cpu::activation_backward(b, 0, cpu::activation_pieces(rows, dim));
  for (const Bytes& result : {out, grad_gate, grad_up}) write(result);
}

// x, weight, bias, grad_out -> out, grad_x, grad_weight, grad_bias
void poly_norm() {
  const Bytes x = read(rows * dim), weight = read(3), bias = read(1), grad_out = read(rows * dim);
  Bytes out = buffer(rows * dim), rstd = buffer(3 * rows, 4);
  PolyNormForward p{};
  p.x = x.data(), p.weight = weight.data(), p.bias = bias.data();
  p.out = out.data(), p.rstd = floats(rstd), p.rows = rows, p.dim = p.x_stride = dim;
  p.experts = 1, p.eps = eps, p.hidden_clamp = INFINITY;
  p.dtype = p.weight_dtype = p.bias_dtype = dtype;
  cpu::poly_norm_forward(p, 0, rows);

  Bytes grad_x = buffer(rows * dim), grad_weight = buffer(3), grad_bias = buffer(1);
  Bytes partials = buffer(4 * rows, 4);
  PolyNormBackward b{};
  b.grad_out = grad_out.data(), b.x = p.x, b.weight = p.weight, b.bias = p.bias, b.rstd = p.rstd;
  b.grad_x = grad_x.data(), b.grad_weight = grad_weight.data(), b.grad_bias = grad_bias.data();
  b.partials = floats(partials), b.partial_count = b.rows = rows, b.dim = dim, b.experts = 1;
  b.grad_out_stride = b.x_stride = b.grad_x_stride = dim, b.hidden_clamp = INFINITY;
  b.dtype = b.weight_dtype = b.bias_dtype = dtype;
  cpu::poly_norm_backward(b, 0, rows);
  cpu::poly_norm_backward_weight(b, 0, 1);
  for (const Bytes& result : {out, grad_x, grad_weight, grad_bias}) write(result);
}

// q [tokens, dim], cos and sin [tokens, dim] -> the rotated q, and that rotated back
void apply_rotary() {
  Bytes q = read(rows * dim), cos = read(rows * dim), sin = read(rows * dim);
  Bytes out = buffer(rows * dim), back = buffer(rows * dim);
  Rotary p{};
  p.shape = {1, rows, dim, dim, false, dtype};
  p.table.cos = cos.data(), p.table.sin = sin.data(), p.table.rows = rows, p.table.step = 1;
  p.table.cos_stride = p.table.sin_stride = dim, p.table.dtype = dtype;
  const auto heads = [](Bytes& bytes) { return Heads{bytes.data(), rows * dim, dim, dim}; };
  p.q = {heads(q), heads(out), 1};
  cpu::rotary(p, 0, rows);
  p.q = {heads(out), heads(back), 1};
  p.inverse = true;
  cpu::rotary(p, 0, rows);
  for (const Bytes& result : {out, back}) write(result);
}

// logits -> tokens of seed 7, int64
void gumbel_sample() {
  const Bytes logits = read(rows * dim);
  Bytes tokens = buffer(rows, 8);
  const int64_t seed = 7;
  GumbelSample p{};
  p.draws.batch = rows, p.draws.vocab = dim, p.draws.num_samples = 1, p.draws.seeds = &seed;
  p.draws.temperature.value = 1.0f;
  p.logits = logits.data(), p.dtype = dtype, p.stride = dim;
  p.results.tokens = reinterpret_cast<int64_t*>(tokens.data());
  const int64_t pieces = cpu::sample_pieces(dim);
  std::vector<cpu::SampleCandidate> candidates(rows * pieces);
  cpu::sample_draw(p, nullptr, candidates.data(), 0, rows * pieces);
  cpu::sample_finish(p.draws, p.results, nullptr, candidates.data(), pieces);
  write(tokens);
}

LossRows loss_rows(const Bytes& logits, const Bytes& targets, float softcap) {
  LossRows in{};
  in.logits = logits.data(), in.dtype = dtype, in.targets = targets.data();
  in.rows = rows, in.vocab = in.stride = dim, in.ignore_index = -100, in.softcap = softcap;
  return in;
}

// logits, int64 targets, float32 grad_loss -> losses, grad_logits
// Label smoothing 0.125 and a square of 0.25.
void cross_entropy() {
  const Bytes logits = read(rows * dim), targets = read(rows, 8);
  Bytes grad_loss = read(rows, 4), losses = buffer(rows, 4), grad_logits = buffer(rows * dim);
  std::vector<RowStatistics> statistics(rows);
  CrossEntropyForward p{};
  p.in = loss_rows(logits, targets, 0), p.smoothing = 0.125f, p.square_scale = 0.25f;
  p.reduction = Reduction::none, p.losses = floats(losses), p.statistics = statistics.data();
  cpu::cross_entropy_forward(p, 0, rows);

  LossBackward b{};
  b.in = p.in, b.full_vocab = p.in.vocab, b.inv_temperature = 1, b.statistics = p.statistics;
  b.grad_loss = floats(grad_loss), b.grad_per_row = true;
  b.smoothing = p.smoothing, b.square_scale = p.square_scale;
  b.grad_logits = grad_logits.data(), b.grad_dtype = b.in.dtype, b.grad_stride = dim;
  cpu::loss_backward(b, 0, rows);
  for (const Bytes& result : {losses, grad_logits}) write(result);
}

// logits, int64 targets, and float32 gradients of the next three
//   -> log_probs, entropy, log_sum_exp, is_greatest, grad_logits
// Temperature 0.5 and a soft cap of 4.
void log_probs() {
  const Bytes logits = read(rows * dim), targets = read(rows, 8);
  Bytes grads[3] = {read(rows, 4), read(rows, 4), read(rows, 4)};
  Bytes found = buffer(rows, 4), entropy = buffer(rows, 4), log_sum_exp = buffer(rows, 4);
  Bytes is_greatest = buffer(rows, 1), grad_logits = buffer(rows * dim);
  std::vector<RowStatistics> statistics(rows);
  std::vector<cpu::LogProbsRow> of_rows(rows);
  LogProbsForward p{};
  p.in = loss_rows(logits, targets, 4), p.inv_temperature = 2;
  p.log_probs = floats(found), p.entropy = floats(entropy), p.log_sum_exp = floats(log_sum_exp);
  p.is_greatest = reinterpret_cast<bool*>(is_greatest.data()), p.statistics = statistics.data();
  cpu::log_probs_forward(p, of_rows.data(), 0, rows);
  cpu::log_probs_finish(p, of_rows.data());

  LossBackward b{};
  b.in = p.in, b.full_vocab = p.in.vocab, b.inv_temperature = p.inv_temperature;
  b.statistics = p.statistics;
  b.grad_log_probs = floats(grads[0]), b.grad_entropy = floats(grads[1]);
  b.grad_log_sum_exp = floats(grads[2]), b.entropy = p.entropy;
  b.grad_logits = grad_logits.data(), b.grad_dtype = b.in.dtype, b.grad_stride = dim;
  cpu::loss_backward(b, 0, rows);
  for (const Bytes& result : {found, entropy, log_sum_exp, is_greatest, grad_logits}) write(result);
}

// logits, float32 bias, float32 grad_weights -> weights, indices, grad_logits
// Sigmoid scores, the best 2 of 4 groups, and 6 experts.
void topk_softmax() {
  constexpr int kChosen = 6;
  const Bytes logits = read(rows * dim), bias = read(dim, 4);
  Bytes grad_weights = read(rows * kChosen, 4), weights = buffer(rows * kChosen, 4);
  Bytes indices = buffer(rows * kChosen, 8), grad_logits = buffer(rows * dim);
  TopkForward p{};
  p.logits = {logits.data(), dtype, rows, dim, static_cast<int>(dim)};
  p.score = Score::sigmoid, p.bias = bias.data(), p.bias_dtype = DType::float32;
  p.k = kChosen, p.groups = 4, p.group_size = p.logits.experts / 4, p.chosen_groups = 2;
  p.renormalize = true;
  p.weights = floats(weights), p.indices = reinterpret_cast<int64_t*>(indices.data());
  cpu::topk_softmax_forward(p, 0, rows);

  TopkBackward b{};
  b.logits = p.logits, b.score = p.score, b.k = p.k, b.renormalize = p.renormalize;
  b.grad_weights = floats(grad_weights), b.weights = p.weights, b.indices = p.indices;
  b.grad_logits = grad_logits.data();
  cpu::topk_softmax_backward(b, 0, rows);
  for (const Bytes& result : {weights, indices, grad_logits}) write(result);
}

constexpr struct {
  const char* name;
  void (*run)();
} kOps[] = {{"fused_add_rms_norm", fused_add_rms_norm},
            {"layer_norm", layer_norm},
            {"swiglu", swiglu},
            {"poly_norm", poly_norm},
            {"apply_rotary", apply_rotary},
            {"gumbel_sample", gumbel_sample},
            {"cross_entropy", cross_entropy},
            {"log_probs", log_probs},
            {"topk_softmax", topk_softmax}};

}  // namespace

int main(int, char** arguments) {
  dtype = static_cast<DType>(std::atoi(arguments[2]));
  rows = std::atoll(arguments[3]), dim = std::atoll(arguments[4]);
  eps = static_cast<float>(std::atof(arguments[5]));
  for (const auto& op : kOps) {
    if (std::strcmp(op.name, arguments[1]) != 0) continue;
    op.run();
    return 0;
  }
  return 2;
}
