// apply_rotary on the GPU (formula: rope/rotary.h).
//
// A thread has the same two vectors of up to four heads of a token, of q and k alike, and the cos
// and sin of their columns, which it loads once. All loads are issued before the first use. The
// threads of a token are neighbours, so cos and sin come from the L2 cache once a block.
//
// Every half of a head starts and ends on the boundary of a vector; or of a word, as those of heads
// of 100 do; or they start anywhere, and have any size (common/vector.h): kStarts.
#include "rope/rotary.h"

#include "rope/rotary_device.h"

namespace fuselage {
namespace {

// Block: (threads of a token, tokens). Grid: (tokens / tokens a block, blocks of a token).
template <typename T, int N, int kHeads, Pairs kPairs, Starts kStarts>
__global__ void __launch_bounds__(kRotaryThreads, kStarts != Starts::anywhere ? 3 : 1)
    rotary_kernel(const Rotary p, const HeadLayout layout, const int groups, const Divisor items,
                  const Divisor tokens) {
  constexpr bool kAligned = kStarts != Starts::anywhere;
  const bool interleaved = is_interleaved<kPairs>(p.shape);
  const int slot = blockIdx.y * blockDim.x + threadIdx.x;
  const int group = static_cast<int>(quotient(slot, items));
  const Item item = item_of(layout, p.shape, slot - group * static_cast<int>(items.value), N);
  const int64_t index = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const bool inside = index < p.shape.batch * p.shape.tokens && group < groups;
  if (kAligned && !inside) return;
  const Token at = token_of(tokens, inside ? index : 0);
  const int q_heads = static_cast<int>(p.q.heads), heads = q_heads + static_cast<int>(p.k.heads);

  // Neighbouring groups have neighbouring heads.
  const auto head_of_turn = [&](int i) { return i * groups + group; };
  const auto head_at = [&](int head, bool out) {
    const bool is_q = head < q_heads;
    const Heads& side = out ? (is_q ? p.q.out : p.k.out) : (is_q ? p.q.x : p.k.x);
    return head_of<T>(side, at, is_q ? head : head - q_heads);
  };
  const auto exists = [&](int i) { return inside && head_of_turn(i) < heads; };
  ItemLoading<T, N, kStarts> loading[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if constexpr (kAligned) {
      loading[i].start_inside(head_at(min(head_of_turn(i), heads - 1), false), item);
    } else {
      loading[i].start(exists(i) ? head_at(head_of_turn(i), false) : nullptr, item, exists(i));
    }
  }
  Rotation<N> rotation;
  if (inside && item.rotated) {
    load_rotation<T, kStarts>(p.table, p.shape, known_row(p.table, at), item, item.column,
                              interleaved, p.inverse, rotation);
  }
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int head = head_of_turn(i);
    if (kAligned && !exists(i)) return;
    Vector<T, N> first, second;
    loading[i].finish(exists(i) ? head_at(head, false) : nullptr, item, exists(i), first, second);
    if (item.rotated) {  // the others keep their bits
      float x1[N], x2[N];
      first.to_floats(x1);
      second.to_floats(x2);
      rotate(rotation, interleaved, x1, x2);
      first = Vector<T, N>::from_floats(x1);
      second = Vector<T, N>::from_floats(x2);
    }
    store_item<kStarts>(first, second, exists(i) ? head_at(head, true) : nullptr, item, exists(i),
                        layout.width);
  }
}

}  // namespace

// ---- launchers ----

namespace gpu {

const char* rotary(const Rotary& call, int device, void* stream) {
  const Rotary p = by_position(call, &RotarySide::x, &RotarySide::out);
  const Starts starts = starts_of(p, kRotaryVector, kRotaryVector);
  const bool with_rest = !p.in_place && p.shape.dim > p.shape.rotary_dim;
  const RotaryPolicy policy = rotary_policy(device_info(device), p.shape, p.q.heads + p.k.heads,
                                            with_rest, starts != Starts::anywhere);
  const int64_t tokens = p.shape.batch * p.shape.tokens;
  if (policy.blocks_per_token > kMostBlocksAlongY)
    return "all heads of a token have too many elements for one launch";
  const dim3 grid(ceil_div(tokens, policy.tokens_per_block), policy.blocks_per_token);
  const dim3 block(policy.threads_per_token, policy.tokens_per_block);
  return dispatch_heads(p.shape, starts, [&](auto tag, auto pairs, auto starts) {
    using T = typename decltype(tag)::type;
    constexpr int N = kRotaryVector;
    const auto run = [&](auto kernel) {
      return gpu_launch(kernel, grid, block, 0, 1, static_cast<gpuStream>(stream), p, policy.layout,
                        policy.groups,
                        Divisor(policy.layout.rotated_items + policy.layout.rest_items),
                        Divisor(p.shape.tokens));
    };
    if constexpr (starts != Starts::anywhere) {
      switch (policy.heads_per_thread) {
        case 1: return run(&rotary_kernel<T, N, 1, pairs, starts>);
        case 4: return run(&rotary_kernel<T, N, 4, pairs, starts>);
      }
    }
    return run(&rotary_kernel<T, N, 2, pairs, starts>);
  });
}

}  // namespace gpu
}  // namespace fuselage
