// How the norms share out their work: a block owns one group of columns (a whole row, mostly) for a run of rows, every
// thread up to two packs of it, kept in registers between the passes.
#pragma once
#include "kernel.cuh"

namespace mimo::cuda {

constexpr int packs_per_thread = 2;

/// Threads of a block for groups of `packs` packs.
inline unsigned norm_threads(int64_t packs) {
  const int64_t threads = round_up(ceil_div(packs, packs_per_thread), 32);
  if (threads > 1024) fail(MIMO_ERROR_UNSUPPORTED, "A norm over this many columns does not fit a block of threads.");
  return static_cast<unsigned>(threads);
}

/// Rows a block handles: enough to read the weights once for several rows, few enough to fill the device.
inline int64_t forward_rows_per_block(int64_t rows, int64_t groups) {
  return larger(1, smaller(8, rows * groups / 4096));
}
/// Also the rows of one partial sum of the weights' gradients.
inline int64_t backward_rows_per_block(int64_t rows) { return larger(16, ceil_div(rows, 1024)); }

/// Calls body(p, pack) for the thread's packs; p is a compile-time place in registers.
template <class Body>
__device__ __forceinline__ void for_own_packs(int64_t packs, Body&& body) {
#pragma unroll
  for (int p = 0; p < packs_per_thread; ++p) {
    const int64_t pack = threadIdx.x + p * static_cast<int64_t>(blockDim.x);
    if (pack < packs) body(p, pack);
  }
}

}  // namespace mimo::cuda
