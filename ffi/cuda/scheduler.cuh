// Which output tile each persistent cluster computes next.
#pragma once

#include "ptx.cuh"

namespace jax_fp8gemm {

// Walks the tiles of one dense (m, n) output. A cluster of kClusterM x kClusterN CTAs takes
// kClusterM x kClusterN neighbouring tiles, one "unit", at a time; units are numbered so that
// `raster` of them along m are followed by the next ones along n: the units in flight at one time
// then cover a near-square part of the output, which is what keeps both operands in the L2. Tiles
// past the edge of the output are computed and clipped by the store.
template <typename Config>
struct DenseScheduler {
  const int &m, &n,
      &raster;  // kernel parameters: read again where needed rather than kept in registers
  int unit, block_m_idx, block_n_idx;

  __device__ __forceinline__ DenseScheduler(const int& m, const int& n, const int& raster)
      : m(m), n(n), raster(raster), unit(int(blockIdx.x / Config::kClusterSize) - num_clusters()) {}

  // Moves to this CTA's next tile; false when there is none. All CTAs of a cluster get the same
  // number of tiles.
  __device__ __forceinline__ bool next_block() {
    unit += num_clusters();
    return locate(unit);
  }

  // The column block of the tile after this one; -1 if this is the last.
  __device__ __forceinline__ int peek_block_n() const {
    DenseScheduler next = *this;
    return next.next_block() ? next.block_n_idx : -1;
  }

 private:
  __device__ __forceinline__ static int num_clusters() { return gridDim.x / Config::kClusterSize; }

  __device__ __forceinline__ bool locate(int unit) {
    const int num_units_m = ceil_div(m, Config::kBlockM * Config::kClusterM);
    const int num_units_n = ceil_div(n, Config::kBlockN * Config::kClusterN);
    if (unit >= num_units_m * num_units_n) return false;
    const int band = unit / (raster * num_units_n);
    const int in_band = unit - band * raster * num_units_n;
    const int rows = min(raster, num_units_m - band * raster);
    const int n_idx = in_band / rows;
    const int m_idx = band * raster + in_band - n_idx * rows;
    const int rank = Config::kClusterSize > 1 ? cluster_rank() : 0;
    block_m_idx = m_idx * Config::kClusterM + (Config::kClusterM > 1 ? rank : 0);
    block_n_idx = n_idx * Config::kClusterN + (Config::kClusterN > 1 ? rank : 0);
    return true;
  }
};

}  // namespace jax_fp8gemm
