// apply_rotary on the GPU (formula: rope/rotary.h).
//
// A thread has the same two vectors of up to four heads of a token, of q and k alike, and the cos
// and sin of their columns, which it loads once. All loads are issued before the first use. The
// threads of a token are neighbours, so cos and sin come from the L2 cache once a block.
//
// With kAligned every half of a head starts and ends on the boundary of a vector; without, halves
// may start anywhere, and have any size (common/vector.h).
#include "rope/rotary.h"

#include "rope/rotary_device.h"

namespace fuselage {
namespace {

// Block: (threads of a token, tokens). Grid: (tokens / tokens a block, blocks of a token).
template <typename T, int N, int kHeads, Pairs kPairs, bool kAligned>
__global__ void __launch_bounds__(kRotaryThreads, kAligned ? 3 : 1)
    rotary_kernel(const Rotary p, const HeadLayout layout, const int groups, const Divisor items,
                  const Divisor tokens) {
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
  ItemLoading<T, N, kAligned> loading[kHeads];
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
    load_rotation<T, kAligned>(p.table, p.shape, known_row(p.table, at), item, item.column,
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
    store_item<kAligned>(first, second, exists(i) ? head_at(head, true) : nullptr, item, exists(i),
                         layout.width);
  }
}

}  // namespace

// ---- launchers ----

namespace gpu {

const char* rotary(const Rotary& call, int device, void* stream) {
  const Rotary p = by_position(call, &RotarySide::x, &RotarySide::out);
  // Halves of an even size that is no multiple of four, as those of a head of 100, have vectors of
  // two.
  const bool whole = is_aligned(p, kRotaryVector);
  const bool pairs_of_two = !whole && !p.shape.interleaved && is_aligned(p, kRotaryVector / 2);
  const int vector = pairs_of_two ? kRotaryVector / 2 : kRotaryVector;
  const bool aligned = whole || pairs_of_two;
  const bool with_rest = !p.in_place && p.shape.dim > p.shape.rotary_dim;
  const RotaryPolicy policy = rotary_policy(device_info(device), p.shape, p.q.heads + p.k.heads,
                                            vector, with_rest, aligned);
  const int64_t tokens = p.shape.batch * p.shape.tokens;
  if (policy.blocks_per_token > kMostBlocksAlongY)
    return "all heads of a token have too many elements for one launch";
  const dim3 grid(ceil_div(tokens, policy.tokens_per_block), policy.blocks_per_token);
  const dim3 block(policy.threads_per_token, policy.tokens_per_block);
  return dispatch_heads(p.shape, aligned, [&](auto tag, auto pairs, auto is_aligned) {
    using T = typename decltype(tag)::type;
    const auto run = [&](auto kernel) {
      return gpu_launch(kernel, grid, block, 0, 1, static_cast<gpuStream>(stream), p, policy.layout,
                        policy.groups,
                        Divisor(policy.layout.rotated_items + policy.layout.rest_items),
                        Divisor(p.shape.tokens));
    };
    const auto run_vectors = [&](auto size) {
      if constexpr (is_aligned) {
        switch (policy.heads_per_thread) {
          case 1: return run(&rotary_kernel<T, size, 1, pairs, true>);
          case 4: return run(&rotary_kernel<T, size, 4, pairs, true>);
        }
      }
      return run(&rotary_kernel<T, size, 2, pairs, is_aligned>);
    };
    if constexpr (pairs == Pairs::halves) {
      if (pairs_of_two) return run_vectors(std::integral_constant<int, kRotaryVector / 2>{});
    }
    return run_vectors(std::integral_constant<int, kRotaryVector>{});
  });
}

}  // namespace gpu
}  // namespace fuselage
