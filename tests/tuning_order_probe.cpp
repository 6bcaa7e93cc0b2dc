// Sets every parameter of a tuning to every value and looks at what policies make of it. Plain C++,
// built and run by test_tuning.py. A line for each value:
//   <parameter>|<value>|<is the built-in one>|<policies that differ>|<orders that differ>|<first>
// An order is what decides how a sum is added up: it may not differ.
#include <cstdio>
#include <string>
#include <vector>

#include "gate/activation_policy.h"
#include "norm/ada_norm_policy.h"
#include "norm/poly_norm_policy.h"
#include "norm/rms_norm_policy.h"
#include "rope/rotary_policy.h"
#include "sample/sample_policy.h"

namespace {

using namespace fuselage;
using Numbers = std::vector<int64_t>;

// Of one case: what the policy says, and what of it decides about sums.
struct Outcome {
  std::string name;
  Numbers policy, order;
};

const int64_t kDims[] = {8, 64, 200, 256, 512, 1024, 1536, 2048, 4096, 8192, 16384, 65536, 262144};
const int64_t kRows[] = {1, 16, 154, 1024, 4096, 9984, 16384, 32760, 131072};

Numbers all_of(const RowPolicy& row) {
  return {row.vectors,        row.rows_per_thread, row.threads_per_row,
          row.rows_per_block, row.cluster,         row.streamed};
}

Numbers all_of(const HeadLayout& layout) {
  return {layout.rotated_half, layout.rest_half, layout.rotated_items, layout.rest_items,
          layout.width};
}

Numbers operator+(Numbers a, const Numbers& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

void norms(const DeviceInfo& device, int64_t rows, int64_t dim, std::vector<Outcome>& out) {
  for (const bool aligned : {true, false}) {
    for (const RowPolicy& row :
         {row_forward_policy(device, {rows, dim, 2, aligned, false, true, 0}),  // rms_norm
          row_forward_policy(device, {rows, dim, 2, aligned, true, false, 0}),  // layer_norm
          rms_norm_add_rms_norm_policy(device, aligned, rows, dim, DType::bfloat16)}) {
      // The tree of norm/row_reduce.h is one whatever vectors and rows a thread has.
      Numbers order{row.cluster, row.streamed};
      if (row.streamed) order.push_back(row.threads_per_row);
      out.push_back({"norm forward", all_of(row), order});
    }
    RmsNormBackward p{};
    p.rows = rows, p.dim = dim, p.x_dtype = p.out_dtype = DType::bfloat16;
    RowBackwardShape shape = rms_norm_backward_shape(p);
    shape.aligned = aligned;
    const RowBackwardPolicy rms = row_backward_policy(device, shape);
    const Numbers all = all_of(rms.row) + Numbers{rms.bulk, rms.stages, rms.blocks_per_group};
    out.push_back({"rms_norm backward", all, all});
  }
  RmsNormAddRmsNormBackward both{};
  both.rows = rows, both.dim = dim, both.dtype = DType::bfloat16;
  const RowBackwardPolicy both_policy =
      row_backward_policy(device, rms_norm_add_rms_norm_backward_shape(both));
  const Numbers of_both =
      all_of(both_policy.row) + Numbers{both_policy.bulk, both_policy.blocks_per_group};
  out.push_back({"rms_norm_add_rms_norm backward", of_both, of_both});
  AdaNormBackward p{};
  p.rows = rows, p.group_rows = rows, p.dim = dim, p.dtype = DType::bfloat16, p.partial_rows = 2;
  const RowBackwardPolicy ada = row_backward_policy(device, ada_norm_backward_shape(p));
  const Numbers all = all_of(ada.row) + Numbers{ada.blocks_per_group, ada.column_blocks};
  out.push_back({"ada_norm backward", all, all});
  PolyNormForward poly{};
  poly.rows = rows, poly.dim = dim, poly.dtype = DType::bfloat16;
  const PolyNormForwardPolicy poly_policy = poly_norm_forward_policy(device, poly);
  const Numbers forward = all_of(poly_policy.row) + Numbers{poly_policy.groups};
  out.push_back({"poly_norm forward", forward, forward});
  PolyNormBackward poly_backward{};
  poly_backward.rows = rows, poly_backward.dim = dim, poly_backward.dtype = DType::bfloat16;
  const PolyNormBackwardPolicy backward = poly_norm_backward_policy(device, poly_backward);
  const Numbers its = all_of(backward.row) + Numbers{backward.groups};
  out.push_back({"poly_norm backward", its, its});
}

Numbers all_of(const ActivationPolicy& p) {
  const ActivationTile& tile = p.tile;
  return {
      p.vectors,           p.threads_x,     p.threads_y,  tile.row_step,          tile.column_step,
      tile.rows_per_block, p.column_blocks, p.row_blocks, tile.columns_per_block, tile.layer};
}

void activations(const DeviceInfo& device, int64_t rows, int64_t dim, std::vector<Outcome>& out) {
  out.push_back({"activation", all_of(activation_policy(device, 8, 2, 1, rows, dim)), {}});
  const Numbers sums = all_of(activation_sum_policy(device, 8, 4, rows, dim));
  out.push_back({"activation with sums", sums, sums});
}

void heads(const DeviceInfo& device, int64_t tokens, int64_t dim, std::vector<Outcome>& out) {
  struct Heads {
    int64_t q, k;
  };
  // The last has more elements than a grid has room for with the fewest threads.
  for (const auto& [q, k] :
       {Heads{1, 0}, Heads{8, 2}, Heads{32, 8}, Heads{32, 32}, Heads{64, 8}, Heads{1 << 17, 0}}) {
    const RotaryShape shape{1, tokens, dim, dim, false, DType::bfloat16};
    const RotaryPolicy rotary = rotary_policy(device, shape, q + k, false, true);
    const Numbers threads{rotary.heads_per_thread, rotary.groups, rotary.threads_per_token,
                          rotary.tokens_per_block, rotary.blocks_per_token};
    const bool fits = rotary.blocks_per_token <= kMostBlocksAlongY;
    out.push_back({"rotary", all_of(rotary.layout) + threads, {fits}});
    if (dim > qk_norm_max_dim(shape)) continue;
    const auto row_of = [](const QkNormPolicy& row) {
      return all_of(row.layout) + Numbers{row.vector, row.threads_per_row, row.rows_per_block};
    };
    const QkNormForwardPolicy forward = qk_norm_forward_policy(device, shape, q, k);
    const Numbers row = row_of(forward.row) + Numbers{forward.heads_per_turn};
    out.push_back({"qk_norm_rotary", row + Numbers{forward.unit}, row});
    const QkNormBackwardPolicy backward = qk_norm_backward_policy(device, shape, q, k);
    const Numbers all = row_of(backward.row) + Numbers{backward.heads_per_turn, backward.q_unit,
                                                       backward.k_unit, backward.blocks};
    out.push_back({"qk_norm_rotary backward", all, all});
  }
}

std::vector<Outcome> outcomes(const DeviceInfo& device) {
  std::vector<Outcome> out;
  for (const int64_t rows : kRows) {
    for (const int64_t dim : kDims) {
      const size_t first = out.size();
      norms(device, rows, dim, out);
      activations(device, rows, dim, out);
      heads(device, rows, dim, out);
      const SamplePolicy sample = sample_policy(device, rows, dim);
      out.push_back({"sampling", {sample.part, sample.parts}, {}});  // a maximum has no order
      for (size_t i = first; i < out.size(); ++i)
        out[i].name += " of [" + std::to_string(rows) + ", " + std::to_string(dim) + "]";
    }
  }
  return out;
}

}  // namespace

int main() {
  DeviceInfo device = nvidia_device(9, 0, 132, 227 * 1024);
  const std::vector<Outcome> built_in = outcomes(device);
  for (const Tunable& tunable : kTunables) {
    for (const int value : tunable.values) {
      if (value == 0) continue;
      device.tuning = Tuning{};
      device.tuning.*tunable.value = value;
      const std::vector<Outcome> tuned = outcomes(device);
      int policies = 0, orders = 0;
      std::string first;
      for (size_t i = 0; i < tuned.size(); ++i) {
        policies += tuned[i].policy != built_in[i].policy;
        if (tuned[i].order == built_in[i].order) continue;
        if (orders++ == 0) first = tuned[i].name;
      }
      std::printf("%s|%d|%d|%d|%d|%s\n", tunable.name, value, value == Tuning{}.*tunable.value,
                  policies, orders, first.c_str());
    }
  }
}
