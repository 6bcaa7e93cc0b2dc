// The producer of sample/lm_head_sm90.cu: one thread that keeps TMA busy. It fills the ring of
// stages with tiles of the weight and of hidden. Of hidden, each block of a cluster copies its part
// to all of them.
#pragma once

#include <cuda.h>

#include "sample/lm_head_sm90_layout.h"

namespace fuselage {
namespace gpu {
namespace {

struct TensorMaps {
  const CUtensorMap& weight_more;  // the rows of larger tiles
  const CUtensorMap& weight_less;  // one unit fewer
  const CUtensorMap& hidden;       // a block's part of a stage
};

template <typename Traits>
__device__ __forceinline__ void copy_weight(const HeadDraw& p, const Block<Traits>& block,
                                            const TensorMaps& maps, const Tile& tile, int max_units,
                                            int step, int stage) {
  mbarrier_arrive_expect_tx(
      block.full + 8 * stage,
      tile.units * (kUnitRows * Traits::kWeightRowBytes) + Traits::kHiddenRows * kRowBytes);
  if (tile.units != 0) {
    tma_load_2d(block.stages + stage * Traits::kStageBytes,
                tile.units == max_units ? maps.weight_more : maps.weight_less,
                step * Traits::kDepth, tile.row, block.full + 8 * stage, kL2EvictFirst);
  }
}

template <typename Traits>
__device__ __forceinline__ void copy_hidden(const Block<Traits>& block, const TensorMaps& maps,
                                            int first_column, int rank, int step, int stage) {
  constexpr int kHiddenRows = Traits::kHiddenRows, kCluster = Traits::kCluster;
  const uint32_t hidden = block.stages + stage * Traits::kStageBytes + Traits::kWeightBytes;
  const int column = Traits::kFloat8 ? 0 : step * Traits::kDepth;
  const int row = Traits::kFloat8 ? step * kHiddenRows : first_column;
  if (kCluster > 1) {
    constexpr int kPart = kHiddenRows / kCluster;
    tma_load_2d_multicast((1u << kCluster) - 1, hidden + rank * kPart * kRowBytes, maps.hidden,
                          column, row + rank * kPart, block.full + 8 * stage, kL2EvictLast);
  } else {
    tma_load_2d(hidden, maps.hidden, column, row, block.full + 8 * stage, kL2EvictLast);
  }
}

template <typename Traits>
__device__ __forceinline__ void produce(const HeadDraw& p, const Block<Traits>& block,
                                        const TensorMaps& maps, const Share& share, int rank) {
  const int max_units = (p.units + p.tiles - 1) / p.tiles;  // the same in all blocks of a cluster
  // Stages whose weights are copied early: the previous kernel writes hidden's tiles, but no
  // weights.
  int early = 0;
  if (Traits::kFloat8) {
    const Tile tile = tile_of(p, share.first_tile);
    for (; early < Traits::kStages && early < p.steps; ++early)
      copy_weight(p, block, maps, tile, max_units, early, early);
    grid_dependency_wait();
  }
  int stage = 0;
  uint32_t phase = 0;
  for (int number = share.first_tile; number < p.tiles; number += share.tile_step) {
    const Tile tile = tile_of(p, number);
    for (int step = 0; step < p.steps; ++step) {
      mbarrier_wait_parity(block.empty + 8 * stage, phase ^ 1);
      if (!Traits::kFloat8 || early == 0) {
        copy_weight(p, block, maps, tile, max_units, step, stage);
      } else {
        --early;
      }
      copy_hidden(block, maps, share.first_column, rank, step, stage);
      if (++stage == Traits::kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
  }
}

}  // namespace
}  // namespace gpu
}  // namespace fuselage
