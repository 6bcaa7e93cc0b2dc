// Bindings of group_norm. The formulas are in norm/group_norm.h.
#include "binding.h"

#include "norm/group_norm.h"
#include "norm/group_norm_cpu.h"

namespace fuselage::binding {
namespace {

constexpr int64_t kSilu = 7;  // of gate/activation.h; 0 is none

// What an op is given, forward or backward, as it was called.
struct Arguments {
  const char* op;
  const Tensor& x;
  int64_t num_groups;
  const OptionalTensor &weight, &bias;
  int64_t activation;
};

// Whether the dimensions of a sample lie in memory without gaps: channels first, or last.
bool is_dense(const Tensor& t, bool channels_last) {
  const auto sizes = t.sizes(), strides = t.strides();
  int64_t expected = 1;
  const auto fits = [&](int64_t i) {
    const bool fit = sizes[i] == 1 || strides[i] == expected;
    expected *= sizes[i];
    return fit;
  };
  bool dense = !channels_last || fits(1);
  for (int64_t i = t.dim() - 1; i >= 2; --i) dense = fits(i) && dense;
  return (channels_last || fits(1)) && dense;
}

// Which order a tensor has, where it has one: of samples that are the same in either, the first.
// Without elements it has the first.
bool is_channels_last(const Tensor& t) {
  return t.numel() != 0 && t.dim() > 2 && !is_dense(t, false) && is_dense(t, true);
}

// A tensor of the sizes and dtype of `t`, in one of the orders.
Tensor empty_in_order(const Tensor& t, bool channels_last) {
  if (!channels_last) return empty_like(t, t.scalar_type());
  int64_t strides[kMaxDim];
  int64_t stride = t.size(1);
  strides[1] = 1;
  for (int64_t i = t.dim() - 1; i >= 2; --i) {
    strides[i] = stride;
    stride *= t.size(i);
  }
  strides[0] = stride;
  return empty_strided(t.sizes().data(), strides, t.dim(), t.scalar_type(), t);
}

// The tensor itself, or a copy in this order. `stride`: between its samples.
Tensor in_order(const Tensor& t, bool channels_last, int64_t& stride) {
  stride = t.stride(0);
  if (is_dense(t, channels_last)) return t;
  Tensor copy = empty_in_order(t, channels_last);
  torch::stable::copy_(copy, t);
  stride = copy.stride(0);
  return copy;
}

// `vector` [channels] in x's dtype or float32, as adjacent elements.
OptionalTensor check_channels(const Arguments& a, const char* name, const OptionalTensor& vector) {
  if (!vector.has_value()) return std::nullopt;
  check_same_device(a.op, name, *vector, a.x);
  const int64_t channels = a.x.size(1);
  FUSELAGE_CHECK(a.op, vector->dim() == 1 && vector->size(0) == channels, "`", name,
                 "` must have shape [", channels, "], the second dimension of `x` ", shape_of(a.x),
                 ", got ", shape_of(*vector));
  check_like_or_float32(a.op, name, check_dtype(a.op, name, *vector),
                        *dtype_from(a.x.scalar_type()));
  return with_adjacent_elements(*vector);
}

// What is checked, and lives as long as the kernels are being launched.
struct Checked {
  OptionalTensor weight, bias;
};

Checked check(const Arguments& a, GroupNormInput& p) {
  FUSELAGE_CHECK(a.op, a.x.dim() >= 2, "`x` must be [samples, channels, ...], got ", shape_of(a.x));
  FUSELAGE_CHECK(a.op, a.x.dim() <= kMaxDim, "`x` must have at most ", kMaxDim, " dimensions, got ",
                 a.x.dim());
  p.dtype = check_dtype(a.op, "x", a.x);
  const int64_t channels = a.x.size(1);
  FUSELAGE_CHECK(a.op, channels <= kMaxColumns,
                 "the second dimension of `x` must be at most 2^31 - 2^16, got ", shape_of(a.x));
  FUSELAGE_CHECK(a.op, a.num_groups > 0 && channels % a.num_groups == 0,
                 "`num_groups` must divide the second dimension of `x` ", shape_of(a.x), ", got ",
                 a.num_groups);
  const Checked checked{check_channels(a, "weight", a.weight), check_channels(a, "bias", a.bias)};
  FUSELAGE_CHECK(a.op, a.activation == 0 || a.activation == kSilu,
                 "`activation` must be 0 (none) or 7 (silu), got ", a.activation);
  p.samples = a.x.size(0);
  p.groups = a.num_groups;
  p.channels = channels;
  p.positions = 1;
  for (int64_t i = 2; i < a.x.dim(); ++i) p.positions *= a.x.size(i);
  p.group_channels = channels / a.num_groups;
  p.group_size = p.group_channels * p.positions;
  p.silu = a.activation == kSilu;
  p.channels_last = is_channels_last(a.x);
  read_vector(p.weight, p.weight_dtype, checked.weight, p.dtype);
  read_vector(p.bias, p.bias_dtype, checked.bias, p.dtype);
  return checked;
}

bool has_nothing(const Tensor& x, const GroupNormInput& p) {
  return is_nothing(x, p.samples, p.channels * p.positions);
}

void forward_on_cpu(const GroupNormForward& p) {
  const int64_t groups = p.samples * p.groups;
  if (p.partials == nullptr) return on_threads<cpu::group_norm_whole>(p, groups, p.group_size);
  const int64_t pieces = cpu::group_norm_pieces(p);
  const int64_t size = groups * p.group_size / pieces;
  on_threads<cpu::group_norm_moments>(p, pieces, size);
  on_threads<cpu::group_norm_combine>(p, groups, p.chunks);
  on_threads<cpu::group_norm_apply>(p, pieces, size);
}

template <bool kForGradient>
auto group_norm(const Tensor& x, int64_t num_groups, const OptionalTensor& weight,
                const OptionalTensor& bias, double eps, int64_t activation) {
  const Arguments a{"group_norm", x, num_groups, weight, bias, activation};
  GroupNormForward p{};
  const Checked checked = check(a, p);
  check_eps(a.op, eps);
  p.eps = static_cast<float>(eps);
  const Tensor out = empty_in_order(x, p.channels_last);
  OptionalTensor statistics;
  if (kForGradient) statistics = empty_floats({p.samples * p.groups, 2}, x);
  if (!has_nothing(x, p)) {
    const Tensor x_read = in_order(x, p.channels_last, p.x_stride);
    p.x = x_read.const_data_ptr();
    p.out = out.mutable_data_ptr();
    if (kForGradient) p.statistics = static_cast<float*>(statistics->mutable_data_ptr());
    OptionalTensor memory;
    // NOTE: statistics first: they are read in pairs, which must be aligned.
    const auto make_workspace = [&](int64_t partials) {
      const int64_t pairs = kForGradient || partials == 0 ? 0 : 2 * p.samples * p.groups;
      float* workspace = scratch(memory, pairs + partials, x);
      if (pairs != 0) p.statistics = workspace;
      if (partials != 0) p.partials = workspace + pairs;
    };
    launch(
        a.op, x,
        [&] {
          make_workspace(cpu::group_norm_forward_workspace(p));
          forward_on_cpu(p);
        },
        [&](int32_t device, void* stream) {
          make_workspace(gpu::group_norm_forward_workspace(p, device));
          return gpu::group_norm_forward(p, device, stream);
        });
  }
  return returned<kForGradient>(out, statistics);
}

void backward_on_cpu(const GroupNormBackward& p) {
  const int64_t pieces = cpu::group_norm_backward_pieces(p);
  const int64_t size = p.samples * p.channels * p.positions / pieces;
  on_threads<cpu::group_norm_backward_partials>(p, pieces, size);
  on_threads<cpu::group_norm_backward_sums>(p, p.samples * p.groups,
                                            2 * p.group_channels * p.chunks);
  if (p.grad_x != nullptr) on_threads<cpu::group_norm_backward_x>(p, pieces, size);
  if (p.grad_weight != nullptr || p.grad_bias != nullptr)
    on_threads<cpu::group_norm_backward_channels>(p, p.channels, 2 * p.samples);
}

// (grad_x, grad_weight, grad_bias), each of them empty where not needed.
std::tuple<Tensor, Tensor, Tensor> group_norm_bwd(const Tensor& grad_out, const Tensor& x,
                                                  int64_t num_groups, const OptionalTensor& weight,
                                                  const OptionalTensor& bias,
                                                  const Tensor& statistics, int64_t activation,
                                                  bool needs_grad_x, bool needs_grad_weight,
                                                  bool needs_grad_bias) {
  const Arguments a{"group_norm_bwd", x, num_groups, weight, bias, activation};
  GroupNormBackward p{};
  const Checked checked = check(a, p);
  check_like(a.op, "grad_out", grad_out, x);
  const int64_t groups = p.samples * p.groups;
  check_saved(a.op, "statistics", statistics, 2 * groups, x, "x", "float32 [", groups, ", 2]");

  Gradient grad_x = no_gradient(x);
  if (needs_grad_x) grad_x = {empty_in_order(x, p.channels_last), true};
  Gradient grad_weight = gradient_of(checked.weight, needs_grad_weight, x);
  Gradient grad_bias = gradient_of(checked.bias, needs_grad_bias, x);
  if (has_nothing(x, p)) {
    grad_weight.zero();
    grad_bias.zero();
    return {grad_x.tensor, grad_weight.tensor, grad_bias.tensor};
  }
  const Tensor x_read = in_order(x, p.channels_last, p.x_stride);
  const Tensor grad_out_read = in_order(grad_out, p.channels_last, p.grad_out_stride);
  p.x = x_read.const_data_ptr();
  p.grad_out = grad_out_read.const_data_ptr();
  p.statistics = static_cast<const float*>(statistics.const_data_ptr());
  p.grad_x = grad_x.data();
  p.grad_weight = grad_weight.data();
  p.grad_bias = grad_bias.data();

  OptionalTensor memory;
  const auto make_workspace = [&] {
    const int64_t sums = 2 * p.samples * p.channels;
    p.partials = scratch(memory, sums * p.chunks + sums + 2 * groups, x);
    p.sums = p.partials + sums * p.chunks;
    p.means = p.sums + sums;
  };
  launch(
      a.op, x,
      [&] {
        cpu::group_norm_backward_chunks(p);
        make_workspace();
        backward_on_cpu(p);
      },
      [&](int32_t device, void* stream) {
        gpu::group_norm_backward_chunks(p, device);
        make_workspace();
        return gpu::group_norm_backward(p, device, stream);
      });
  return {grad_x.tensor, grad_weight.tensor, grad_bias.tensor};
}

}  // namespace

void register_group_norm_ops(const Ops& ops) {
  ops.forward("group_norm",
              "Tensor x, int num_groups, Tensor? weight, Tensor? bias, float eps, int activation",
              "Tensor out", "Tensor statistics", TORCH_BOX(&group_norm<false>),
              TORCH_BOX(&group_norm<true>));
  ops.op(
      "group_norm_bwd(Tensor grad_out, Tensor x, int num_groups, Tensor? weight, Tensor? bias, "
      "Tensor statistics, int activation, bool needs_grad_x, bool needs_grad_weight, bool "
      "needs_grad_bias) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
      TORCH_BOX(&group_norm_bwd));
}

}  // namespace fuselage::binding
