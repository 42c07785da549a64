// Included by every CUDA kernel file: storage types, vectorised loads and stores, block sums, launches.
//
// How a sum is split depends on sizes alone, and partial sums are added in a fixed order without floating-point
// atomics: results do not depend on scheduling. A "pack" is the `Width` consecutive elements that a thread moves with
// one instruction: 16 bytes (vector_width elements) where alignment allows, else one element.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "device.h"
#include "error.h"

namespace mimo::cuda {

using bf16 = __nv_bfloat16;

template <class T>
constexpr int vector_width = 16 / static_cast<int>(sizeof(T));

constexpr unsigned all_lanes = 0xFFFFFFFFu;
constexpr float log2_e = 1.44269504088896341f;
constexpr float ln_2 = 0.693147180559945309f;

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int64_t round_up(int64_t a, int64_t unit) { return ceil_div(a, unit) * unit; }
__host__ __device__ constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
__host__ __device__ constexpr int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }

// ---- storage ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ float load(const float* from) { return *from; }
__device__ __forceinline__ float load(const bf16* from) { return __bfloat162float(*from); }
__device__ __forceinline__ void store(float* to, float value) { *to = value; }
__device__ __forceinline__ void store(bf16* to, float value) { *to = __float2bfloat16_rn(value); }

__device__ __forceinline__ float lower_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float upper_bf16(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }
/// Packs two values as bf16 into one word, `first` in the lower half.
__device__ __forceinline__ uint32_t pack_bf16(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

/// Reads Width elements as fp32; Width * sizeof(T) bytes must be aligned to 16, or to their own size below that.
template <int Width>
__device__ __forceinline__ void read(const float* from, float (&to)[Width]) {
  if constexpr (Width % 4 == 0) {
#pragma unroll
    for (int i = 0; i < Width; i += 4) {
      const float4 v = *reinterpret_cast<const float4*>(from + i);
      to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < Width; ++i) to[i] = from[i];
  }
}
template <int Width>
__device__ __forceinline__ void read(const bf16* from, float (&to)[Width]) {
  if constexpr (Width % 8 == 0) {
#pragma unroll
    for (int i = 0; i < Width; i += 8) {
      const uint4 v = *reinterpret_cast<const uint4*>(from + i);
      to[i] = lower_bf16(v.x), to[i + 1] = upper_bf16(v.x), to[i + 2] = lower_bf16(v.y), to[i + 3] = upper_bf16(v.y);
      to[i + 4] = lower_bf16(v.z), to[i + 5] = upper_bf16(v.z), to[i + 6] = lower_bf16(v.w);
      to[i + 7] = upper_bf16(v.w);
    }
  } else if constexpr (Width == 4) {
    const uint2 v = *reinterpret_cast<const uint2*>(from);
    to[0] = lower_bf16(v.x), to[1] = upper_bf16(v.x), to[2] = lower_bf16(v.y), to[3] = upper_bf16(v.y);
  } else {
#pragma unroll
    for (int i = 0; i < Width; ++i) to[i] = __bfloat162float(from[i]);
  }
}

template <int Width>
__device__ __forceinline__ void write(float* to, const float (&from)[Width]) {
  if constexpr (Width % 4 == 0) {
#pragma unroll
    for (int i = 0; i < Width; i += 4) {
      *reinterpret_cast<float4*>(to + i) = make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < Width; ++i) to[i] = from[i];
  }
}
template <int Width>
__device__ __forceinline__ void write(bf16* to, const float (&from)[Width]) {
  if constexpr (Width % 8 == 0) {
#pragma unroll
    for (int i = 0; i < Width; i += 8) {
      *reinterpret_cast<uint4*>(to + i) =
          make_uint4(pack_bf16(from[i], from[i + 1]), pack_bf16(from[i + 2], from[i + 3]),
                     pack_bf16(from[i + 4], from[i + 5]), pack_bf16(from[i + 6], from[i + 7]));
    }
  } else if constexpr (Width == 4) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pack_bf16(from[0], from[1]), pack_bf16(from[2], from[3]));
  } else {
#pragma unroll
    for (int i = 0; i < Width; ++i) to[i] = __float2bfloat16_rn(from[i]);
  }
}

/// The value after rounding to its storage type and back.
__device__ __forceinline__ float rounded(const float*, float value) { return value; }
__device__ __forceinline__ float rounded(const bf16*, float value) {
  return __bfloat162float(__float2bfloat16_rn(value));
}

// ---- arithmetic ------------------------------------------------------------------------------------------------

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// ---- sums over threads -----------------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(all_lanes, value, offset);
  return value;
}
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(all_lanes, value, offset));
  return value;
}

/// Sums each of `Count` values over a block of whole warps and returns the sums to every thread. `shared` holds 32 *
/// Count values and may be reused after the block's next barrier.
template <int Count, class T>
__device__ __forceinline__ void block_sum(T (&value)[Count], T* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
#pragma unroll
  for (int i = 0; i < Count; ++i) value[i] = warp_sum(value[i]);
  if (warps == 1) return;
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < Count; ++i) shared[i * 32 + warp] = value[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < Count; ++i) value[i] = warp_sum(lane < warps ? shared[i * 32 + lane] : T(0));
}

/// Number of valid rows of an operation: *row_count (device memory) if given, else `rows`.
__device__ __forceinline__ int64_t live_rows(int64_t rows, const int32_t* row_count) {
  if (row_count == nullptr) return rows;
  const int64_t count = *row_count;
  return count < rows ? count : rows;
}

/// Index of the packed sequence that contains `token`; empty sequences are skipped.
__device__ __forceinline__ int64_t sequence_of(const int32_t* cu_seqlens, int64_t sequences, int64_t token) {
  int64_t low = 0, high = sequences;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (cu_seqlens[middle + 1] <= token) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

/// Splits packed sequences into pieces of at most `size` tokens that cross no sequence boundary. The first piece of
/// sequence q has number cu_seqlens[q] / size + q, so neither the host nor another kernel needs to know the lengths. Of
/// the piece_count numbers some have an empty piece.
struct Piece {
  int64_t sequence;
  int64_t index;   // within its sequence
  int64_t begin;   // first token
  int64_t count;   // 0: empty piece
  int64_t first;   // first token of the sequence
  int64_t last;    // one past its last token
};
__host__ __device__ constexpr int64_t piece_count(int64_t tokens, int64_t sequences, int64_t size) {
  return tokens / size + sequences;
}
__device__ __forceinline__ int64_t first_piece(const int32_t* cu_seqlens, int64_t sequence, int64_t size) {
  return cu_seqlens[sequence] / size + sequence;
}
__device__ __forceinline__ Piece piece_at(const int32_t* cu_seqlens, int64_t sequences, int64_t size, int64_t number) {
  int64_t low = 0, high = sequences - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (first_piece(cu_seqlens, middle, size) <= number) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  Piece piece;
  piece.sequence = low;
  piece.first = cu_seqlens[low];
  piece.last = cu_seqlens[low + 1];
  piece.index = number - first_piece(cu_seqlens, low, size);
  piece.begin = piece.first + piece.index * size;
  const bool empty = piece.index < 0 || piece.begin >= piece.last;
  piece.count = empty ? 0 : smaller(size, piece.last - piece.begin);
  return piece;
}

// ---- launches --------------------------------------------------------------------------------------------------

/// Launches a kernel; an empty grid is skipped. Opts in to dynamic shared memory beyond 48 KiB.
template <class... Parameters, class... Arguments>
void launch(mimo_stream& stream, void (*kernel)(Parameters...), dim3 grid, dim3 block, int64_t shared_bytes,
            Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  if (shared_bytes > 48 * 1024) {
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared_bytes)),
          "asking for shared memory");
  }
  kernel<<<grid, block, static_cast<size_t>(shared_bytes), stream.handle()>>>(static_cast<Parameters>(arguments)...);
  check(cudaGetLastError(), "launching a kernel");
}

inline dim3 grid_of(int64_t x, int64_t y = 1, int64_t z = 1) {
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z));
}

/// Grid for kernels that iterate over rows x packs with for_each_pack.
struct Cover {
  dim3 grid, block;
};
inline Cover cover(int64_t rows, int64_t packs) {
  constexpr unsigned threads = 256;
  unsigned x = 1;
  while (x < threads && x < packs) x *= 2;
  const unsigned y = threads / x;
  const int64_t most_rows = 65535;
  return {grid_of(ceil_div(packs, x), smaller(ceil_div(rows, y), most_rows)), dim3(x, y)};
}
template <class Body>
__device__ __forceinline__ void for_each_pack(int64_t rows, int64_t packs, Body&& body) {
  const int64_t pack = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (pack >= packs) return;
  for (int64_t row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y; row < rows;
       row += static_cast<int64_t>(gridDim.y) * blockDim.y) {
    body(row, pack);
  }
}

/// Whether rows of `width` elements of T from `pointer` on, `stride` elements apart, are aligned for packs of `pack`
/// elements.
template <class T>
bool packs_fit(const void* pointer, int64_t width, int64_t stride, int pack) {
  const int64_t bytes = smaller(16, pack * static_cast<int64_t>(sizeof(T)));
  return pointer == nullptr || (reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0 &&
                                width % pack == 0 && stride * static_cast<int64_t>(sizeof(T)) % bytes == 0);
}

/// Calls `body` with a null pointer that carries the storage type: float* or bf16*.
template <class Body>
void with_dtype(int32_t dtype, Body&& body) {
  if (dtype == MIMO_DTYPE_F32) {
    body(static_cast<float*>(nullptr));
  } else if (dtype == MIMO_DTYPE_BF16) {
    body(static_cast<bf16*>(nullptr));
  } else {
    fail(MIMO_ERROR_ARGUMENT, "An operation takes f32 or bf16 storage only.");
  }
}

/// Calls `body` with std::integral_constant<int, Wide> if `wide`, else with width 1.
template <int Wide, class Body>
void with_width(bool wide, Body&& body) {
  if (wide) {
    body(std::integral_constant<int, Wide>{});
  } else {
    body(std::integral_constant<int, 1>{});
  }
}

/// total[c] += Σ_p partial[p][c], in the order of p.
void add_partials(mimo_stream& stream, const float* partial, int64_t partials, int64_t width, float* total);

}  // namespace mimo::cuda
