// Bindings of the sampling family. The schemas are in torch_binding.cpp, the formulas in
// sample/sample.h.
#pragma once

#include <tuple>

#include "binding.h"

namespace fuselage::binding {

// (tokens, logprobs, filtered_logprobs), the latter two empty unless asked for. `offset`, unless it
// is none, grows by one.
std::tuple<Tensor, Tensor, Tensor> gumbel_sample(
    const Tensor& logits, const OptionalTensor& bias, const OptionalTensor& bitmask,
    const Tensor& seed, const OptionalTensor& offset, const OptionalTensor& temperature,
    double temperature_value, const OptionalTensor& top_k, std::optional<int64_t> top_k_value,
    const OptionalTensor& top_p, std::optional<double> top_p_value, const OptionalTensor& min_p,
    std::optional<double> min_p_value, int64_t num_samples, int64_t vocab_offset,
    bool return_logprobs);

std::tuple<Tensor, Tensor, Tensor> lm_head_sample(
    const Tensor& hidden, const Tensor& weight, const OptionalTensor& weight_scale,
    const OptionalTensor& bias, std::optional<double> logit_softcap, const Tensor& seed,
    const OptionalTensor& offset, const OptionalTensor& temperature, double temperature_value,
    const OptionalTensor& top_k, std::optional<int64_t> top_k_value, const OptionalTensor& top_p,
    std::optional<double> top_p_value, const OptionalTensor& min_p,
    std::optional<double> min_p_value, int64_t num_samples, int64_t vocab_offset,
    bool return_logprobs);

// (scores, tokens, tempered logits of the tokens, log_sum_exp), the latter empty unless asked for.
std::tuple<Tensor, Tensor, Tensor, Tensor> lm_head_sample_shard(
    const Tensor& hidden, const Tensor& weight, const OptionalTensor& weight_scale,
    const OptionalTensor& bias, std::optional<double> logit_softcap, const Tensor& seed,
    const OptionalTensor& offset, const OptionalTensor& temperature, double temperature_value,
    int64_t num_samples, int64_t vocab_offset, bool return_log_sum_exp);

}  // namespace fuselage::binding
