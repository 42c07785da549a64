// Gradients of matrices, sums in fp32 that the copy engine writes to memory or adds there. That is no sum whose order is left
// open: every element gets one addition, from the one block that has its result.
#pragma once
#include "sm90.cuh"

namespace mimo::cuda::sm90 {

/// Box that a warp stores at once: 32 columns of 16 rows.
constexpr int sums_box_rows = 16, sums_box_columns = 32;
constexpr int sums_box_bytes = sums_box_rows * sums_box_columns * 4;

/// Puts 16 sums of every thread, held as multiply_64x192 says, where the copy engine reads them, swizzled. Of 8 columns, a row has 32
/// bytes in the warp. Odd rows take another pair of eights than even ones, so that all the banks of shared memory have work.
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

/// Stores `count` boxes of a warp, box i at row_of(i) and column_of(i) of the group's matrix [n, k] and from sums_of(i). Staging
/// memory has room for `slots` boxes; `at_once` of them are staged together, or left out where live() of the first is false. Sums
/// already in memory are brought into the L2 cache a few boxes before they are added to. The staging memory must last until it has been
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
    // With other boxes on their way, the engine leaves out what lies outside the matrix, and boxes stay in step with their slots.
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
