// Chunk scan (SSD) without tensor cores: fp32 tiles in shared memory, one thread an output element. For fp32 checks and
// for sizes that the tensor-core kernels do not support.
#pragma once
#include "ssd.cuh"

namespace mimo::cuda {

constexpr int ssd_threads = 256;

/// An fp32 tile in shared memory with rows padded against bank conflicts.
struct SsdTile {
  float* data;
  int stride;
  __device__ float& at(int row, int column) const { return data[row * stride + column]; }
};

/// Floats that a tile occupies.
__host__ __device__ constexpr int64_t tile_floats(int64_t rows, int64_t width) { return rows * (width + 1); }

/// Allocates tiles from dynamic shared memory.
struct SsdShared {
  float* next;
  __device__ SsdTile tile(int rows, int width) {
    SsdTile made{next, width + 1};
    next += tile_floats(rows, width);
    return made;
  }
};

/// tile[r][i] = factor(r) x[r * stride + i].
template <class T, class Factor>
__device__ __forceinline__ void load_tile(const T* x, int64_t stride, int rows, int width, const SsdTile& tile,
                                          Factor&& factor) {
  for (int index = threadIdx.x; index < rows * width; index += ssd_threads) {
    const int r = index / width, i = index % width;
    tile.at(r, i) = factor(r) * load(x + r * stride + i);
  }
}
template <class T>
__device__ __forceinline__ void load_tile(const T* x, int64_t stride, int rows, int width, const SsdTile& tile) {
  load_tile(x, stride, rows, width, tile, [](int) { return 1.0f; });
}

/// Calls body(row, column) for every element, distributed over the block.
template <class Body>
__device__ __forceinline__ void for_each_element(int rows, int width, Body&& body) {
  for (int index = threadIdx.x; index < rows * width; index += ssd_threads) body(index / width, index % width);
}

/// Calls body(row, Σ_i value(row, i)) for every row; one warp a row.
template <class Value, class Body>
__device__ __forceinline__ void for_each_row_sum(int rows, int width, Value&& value, Body&& body) {
  for (int row = threadIdx.x / 32; row < rows; row += ssd_threads / 32) {
    float sum = 0;
    for (int i = threadIdx.x % 32; i < width; i += 32) sum += value(row, i);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) body(row, sum);
  }
}

/// The longest chunk whose tiles fit in a block's shared memory: `per_token` floats a token, `per_pair` a pair of
/// tokens, and `fixed`.
inline int64_t ssd_plain_chunk(const mimo_device& device, int64_t chunk_size, int64_t per_token, int64_t per_pair,
                               int64_t fixed) {
  int64_t chunk = smaller(chunk_size, 32);
  const auto bytes = [&] { return 4 * (chunk * per_token + chunk * (chunk + 1) * per_pair + fixed); };
  while (chunk > 1 && bytes() > device.shared_bytes_per_block) chunk /= 2;
  if (bytes() > device.shared_bytes_per_block) {
    fail(MIMO_ERROR_UNSUPPORTED, "The state of a head does not fit this GPU's shared memory.");
  }
  return chunk;
}

/// to[piece][head][p][n] = Σ_t weight_t a_t[p] b_t[n] with weight = exp(cs_Q - cs) Δ if of_end, else exp(cs).
void ssd_chunk_states_plain(mimo_stream& stream, const void* a, int64_t a_stride, int32_t a_dtype, const void* b,
                            int64_t b_stride, int32_t b_dtype, const SsdDecays& decays, bool of_end,
                            const int32_t* cu_seqlens, int64_t sequences, int64_t tokens, int64_t heads,
                            int64_t head_dim, int64_t groups, int64_t state_dim, int64_t chunk, float* to);

}  // namespace mimo::cuda
