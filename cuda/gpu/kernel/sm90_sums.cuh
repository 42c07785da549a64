// Epilogue of weight gradients on Hopper: fp32 accumulators go through shared memory and are stored or reduce-added by
// TMA. Results are deterministic: each element has a single addition, by the one block that owns its output tile.
#pragma once
#include "sm90.cuh"

namespace mimo::cuda::sm90 {

/// Box that a warp stores with one TMA instruction: 16 rows of 32 columns.
constexpr int sums_box_rows = 16, sums_box_columns = 32;
constexpr int sums_box_bytes = sums_box_rows * sums_box_columns * 4;

/// Writes 16 accumulators of every thread (layout of multiply_64x192) to shared memory in TMA's 128-byte swizzle. A
/// warp writes 32 bytes of each row for every 8 columns; odd rows write their groups of 8 columns in another order than
/// even rows to avoid bank conflicts.
__device__ __forceinline__ void stage_sums(char* staging, const float* sums) {
  const int row = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
  const bool odd = row & 1;
  char* const own = staging + row * tile_row_bytes + quarter % 2 * 8;
#pragma unroll
  for (int i = 0; i < sums_box_columns / 8; ++i) {
    const float *const even_sum = sums + i * 4, *const odd_sum = sums + (i ^ 2) * 4;
    const int chunk = 2 * (odd ? i ^ 2 : i) + quarter / 2;
    char* const to = own + ((chunk ^ row) << 4);
    *reinterpret_cast<float2*>(to) = make_float2(odd ? odd_sum[0] : even_sum[0], odd ? odd_sum[1] : even_sum[1]);
    *reinterpret_cast<float2*>(to + 8 * tile_row_bytes) =
        make_float2(odd ? odd_sum[2] : even_sum[2], odd ? odd_sum[3] : even_sum[3]);
  }
}

/// Stores `count` boxes of a warp: box i at row_of(i), column_of(i) of the group's matrix [n, k], from the accumulators
/// sums_of(i). The staging memory holds `slots` boxes; `at_once` boxes are staged together, and skipped if live() is
/// false for the first. With `accumulate`, the destination is prefetched into L2 a few boxes ahead. The caller must
/// keep the staging memory until TMA has read it (wait_boxes_read).
/// read.
template <bool accumulate, int count, int slots, int at_once, class Row, class Column, class SumsOf, class Live>
__device__ __forceinline__ void store_sums(const CUtensorMap& map, int group, char* staging, Row row_of, Column column_of,
                                           SumsOf sums_of, Live live) {
  constexpr int ahead = 4;
  const int lane = threadIdx.x % 32;
  const auto prefetch = [&](int box) {
    if (accumulate && lane == 0 && box < count) prefetch_box(map, column_of(box), row_of(box), group);
  };
#pragma unroll
  for (int box = 0; box < ahead; ++box) prefetch(box);
#pragma unroll
  for (int first = 0; first < count; first += at_once) {
    // Only where no other box is in flight: else TMA clips boxes outside the matrix, and boxes stay in step with their
    // slots.
    if (at_once == slots && !live(first)) continue;
    if (lane == 0) wait_boxes_read<slots - at_once>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < at_once; ++i) stage_sums(staging + (first + i) % slots * sums_box_bytes, sums_of(first + i));
    publish_stores();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < at_once; ++i) prefetch(first + i + ahead);
    if (lane != 0) continue;
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const char* const box = staging + (first + i) % slots * sums_box_bytes;
      if constexpr (accumulate) {
        add_box(box, map, column_of(first + i), row_of(first + i), group);
      } else {
        write_box(box, map, column_of(first + i), row_of(first + i), group);
      }
    }
  }
}

}  // namespace mimo::cuda::sm90
