// How the norms share out their work: a block owns one group of columns (a whole row, mostly) for a run of rows, every
// thread up to two packs of it, kept in registers between the passes.
#pragma once
#include "mma.cuh"
#include "packed.cuh"

namespace mimo::cuda {

constexpr int packs_per_thread = 2;
constexpr int most_norm_threads = 1024;

/// Threads of a block for groups of `packs` packs.
inline unsigned norm_threads(int64_t packs) {
  const int64_t threads = round_up(ceil_div(packs, packs_per_thread), 32);
  if (threads > most_norm_threads) fail(MIMO_ERROR_UNSUPPORTED, "A norm over this many columns does not fit a block of threads.");
  return static_cast<unsigned>(threads);
}

/// Forward, a block takes every gridDim.x-th row, and asks for the next before it adds up its own. With up to 64 registers a
/// thread, 1024 threads of a multiprocessor run at once; 768 ask for enough where a row has two tensors.
inline dim3 forward_grid(const mimo_stream& stream, int64_t rows, int64_t groups, unsigned threads, int tensors) {
  const unsigned at_once = tensors == 1 ? 1024 : 768;
  const int64_t blocks = stream.device->multiprocessors * larger(1, at_once / threads);
  return grid_of(smaller(ceil_div(blocks, groups), rows), groups);
}

/// Calls body(p, pack) for the thread's packs; p is a compile-time place in registers.
template <class Body>
__device__ __forceinline__ void for_own_packs(int64_t packs, Body&& body) {
#pragma unroll
  for (int p = 0; p < packs_per_thread; ++p) {
    const int64_t pack = threadIdx.x + p * static_cast<int64_t>(blockDim.x);
    if (pack < packs) body(p, pack);
  }
}

/// Rows whose copies to shared memory are under way or whose values are in use.
constexpr int rows_ahead = 4;
constexpr int copied_tensors = 3;  // x, dy, dresidual
inline int64_t ahead_bytes(unsigned threads) {
  return int64_t{16} * rows_ahead * copied_tensors * packs_per_thread * threads;
}

/// A thread's packs of the coming rows. Each thread reads what it copied itself, so that no barrier is needed.
template <class T, int Width>
struct RowsAhead {
  static constexpr bool possible = Width * sizeof(T) == 16;
  char* memory;

  __device__ __forceinline__ char* place(int64_t row, int tensor, int p) const {
    const int slot = (static_cast<int>(row % rows_ahead) * copied_tensors + tensor) * packs_per_thread + p;
    return memory + (static_cast<int64_t>(slot) * blockDim.x + threadIdx.x) * 16;
  }
  __device__ __forceinline__ void copy(const void* from, int64_t row, int tensor, int p) const {
    if (from != nullptr) copy_async(place(row, tensor, p), from, true);
  }
  __device__ __forceinline__ const T* get(int64_t row, int tensor, int p) const {
    return reinterpret_cast<const T*>(place(row, tensor, p));
  }
};

/// first[c] += Σ_p first_partial[p][c] and the same of the second, in the order of p; a null pointer leaves one out.
void add_partials_of_two(mimo_stream& stream, const float* first_partial, float* first, const float* second_partial,
                         float* second, int64_t partials, int64_t width);

}  // namespace mimo::cuda
