// Bindings of the rope family. The schemas are in torch_binding.cpp, the formulas in rope/rotary.h.
#pragma once

#include <tuple>

#include "binding.h"

namespace fuselage::binding {

// q and k: [batch, tokens, dim], or four dimensions of which `heads_dim` (1 or 2) counts heads.
// Without k the second result is empty. Positions are those of position_ids, or count from offsets
// + offset, or where neither is given are the rows of cos and sin themselves.
std::tuple<Tensor, Tensor> apply_rotary(const Tensor& q, const OptionalTensor& k, const Tensor& cos,
                                        const Tensor& sin, const OptionalTensor& position_ids,
                                        const OptionalTensor& offsets,
                                        std::optional<int64_t> offset, bool interleaved,
                                        int64_t heads_dim, std::optional<int64_t> rotary_dim);
std::tuple<Tensor, Tensor> apply_rotary_bwd(const Tensor& grad_q, const OptionalTensor& grad_k,
                                            const Tensor& cos, const Tensor& sin,
                                            const OptionalTensor& position_ids,
                                            const OptionalTensor& offsets,
                                            std::optional<int64_t> offset, bool interleaved,
                                            int64_t heads_dim, std::optional<int64_t> rotary_dim);
void apply_rotary_(const Tensor& q, const OptionalTensor& k, const Tensor& cos, const Tensor& sin,
                   const OptionalTensor& position_ids, const OptionalTensor& offsets,
                   std::optional<int64_t> offset, bool interleaved, int64_t heads_dim,
                   std::optional<int64_t> rotary_dim);

std::tuple<Tensor, Tensor> qk_norm_rotary(
    const Tensor& q, const OptionalTensor& k, const OptionalTensor& q_weight,
    const OptionalTensor& k_weight, const Tensor& cos, const Tensor& sin,
    const OptionalTensor& position_ids, const OptionalTensor& offsets,
    std::optional<int64_t> offset, double eps, double weight_offset, bool cast_before_weight,
    bool interleaved, int64_t heads_dim, std::optional<int64_t> rotary_dim);
// (grad_q, grad_k, grad_q_weight, grad_k_weight), any of them empty where not needed.
std::tuple<Tensor, Tensor, Tensor, Tensor> qk_norm_rotary_bwd(
    const Tensor& grad_q_out, const OptionalTensor& grad_k_out, const Tensor& q,
    const OptionalTensor& k, const OptionalTensor& q_weight, const OptionalTensor& k_weight,
    const Tensor& cos, const Tensor& sin, const OptionalTensor& position_ids,
    const OptionalTensor& offsets, std::optional<int64_t> offset, double eps, double weight_offset,
    bool interleaved, int64_t heads_dim, std::optional<int64_t> rotary_dim, bool needs_grad_q,
    bool needs_grad_k, bool needs_grad_q_weight, bool needs_grad_k_weight);

}  // namespace fuselage::binding
