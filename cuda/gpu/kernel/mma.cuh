// Tensor cores through mma.sync (sm_80 and later): bf16 operands, fp32 accumulators, and swizzled tiles in shared
// memory that ldmatrix reads without bank conflicts.
//
// A tile is `rows` x 64 bf16 with rows of 128 bytes; the 16-byte chunk c of row r is stored at chunk c ^ (r mod 8).
#pragma once
#include "kernel.cuh"

namespace mimo::cuda {

constexpr int tile_width = 64;                // bf16 elements of a row
constexpr int tile_row_bytes = 2 * tile_width;

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Byte offset of chunk `chunk` of row `row` in a tile.
__device__ __forceinline__ int tile_offset(int row, int chunk) {
  return row * tile_row_bytes + ((chunk ^ (row & 7)) << 4);
}
/// Byte offset of an element of a tile; `column` in 0 .. 63.
__device__ __forceinline__ int tile_element(int row, int column) {
  return tile_offset(row, column >> 3) + ((column & 7) << 1);
}

/// ldmatrix.x4: four 8x8 matrices; lanes 8 j .. 8 j + 7 pass the row addresses of matrix j.
__device__ __forceinline__ void ldmatrix(uint32_t (&to)[4], const char* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&to)[4], const char* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

/// sum[16, 8] += a[16, 16] b[16, 8]. Lane l holds columns 2 (l % 4) + {0, 1} of rows l / 4 and l / 4 + 8.
__device__ __forceinline__ void mma(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// cp.async of 16 bytes to shared memory, or zeros if `live` is false; `from` must be a valid address in either case.
__device__ __forceinline__ void copy_async(char* to, const void* from, bool live) {
  const int bytes = live ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
               : "memory");
}
/// cp.async of 8 or 16 bytes to shared memory.
template <int Bytes>
__device__ __forceinline__ void copy_piece_async(char* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(Bytes) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// cp.async.wait_group: waits until at most `Pending` committed groups of this thread are in flight.
template <int Pending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Fragments of mma operands from tiles. "k-major": a tile's row is a row of the left (a column of the right) operand
// and k runs along the row. "k-rows" (MN-major): k runs down the tile's rows. `row`, `k` and `column` are multiples of
// 16 within the tile.

/// Left fragment a[16, 16]: tile rows row .. row + 15, columns k .. k + 15.
__device__ __forceinline__ void left_k_major(uint32_t (&a)[4], const char* tile, int row, int k) {
  const int lane = threadIdx.x & 31;
  ldmatrix(a, tile + tile_offset(row + (lane & 15), (k >> 3) + (lane >> 4)));
}
/// Left fragment of a k-rows tile: tile rows k .. k + 15, columns row .. row + 15.
__device__ __forceinline__ void left_k_rows(uint32_t (&a)[4], const char* tile, int row, int k) {
  const int lane = threadIdx.x & 31;
  ldmatrix_transposed(a, tile + tile_offset(k + ((lane >> 4) << 3) + (lane & 7), (row >> 3) + ((lane >> 3) & 1)));
}
/// Two right fragments b[16, 8], columns column .. column + 15, in b[0], b[1] and b[2], b[3].
__device__ __forceinline__ void right_k_major(uint32_t (&b)[4], const char* tile, int column, int k) {
  const int lane = threadIdx.x & 31;
  ldmatrix(b, tile + tile_offset(column + ((lane >> 4) << 3) + (lane & 7), (k >> 3) + ((lane >> 3) & 1)));
}
__device__ __forceinline__ void right_k_rows(uint32_t (&b)[4], const char* tile, int column, int k) {
  const int lane = threadIdx.x & 31;
  ldmatrix_transposed(b, tile + tile_offset(k + (((lane >> 3) & 1) << 3) + (lane & 7), (column >> 3) + (lane >> 4)));
}

}  // namespace mimo::cuda
