// Grouped GEMM on Hopper: c_g[m_g, n] = a_g[m_g, k] b_g with matrices b_g stored as [n, k] (forward) or [k, n] (input
// gradient); TMA, wgmma and the persistent loop of sm90_grouped.cuh.
#include "grouped_gemm.h"
#include "sm90_grouped.cuh"

namespace mimo::cuda {
namespace {

using namespace sm90;

template <class C, bool right_rows_>
struct Forward {
  static constexpr bool left_rows = false, right_rows = right_rows_, halves = true;
  static constexpr int staging_bytes = 0;
  /// Box of one block's half of a stage of b: 32 rows x 64 columns of [k, n], or 96 rows of [n, k].
  static constexpr int b_box_rows = (right_rows ? depth : tile_columns) / pair;
  CUtensorMap a, b;
  C* c;
  const int32_t* offsets;
  int32_t n, k;

  __device__ __forceinline__ int height(int count) const { return count; }
  __device__ __forceinline__ int units(int group) const {
    return units_of(offsets[group + 1] - offsets[group], (n + tile_columns - 1) / tile_columns);
  }
  __device__ __forceinline__ int steps(const Tile&) const { return (k + depth - 1) / depth; }
  __device__ __forceinline__ int rows(const Tile& tile) const {
    return min(tile_rows, tile.last - tile.first - tile.row * tile_rows);
  }
  __device__ __forceinline__ void fetch(const Tile& tile, int step, int rank, char* left, char* right,
                                        uint64_t* barrier) const {
    const int first = tile.first, last = tile.last, row = tile.row * tile_rows, column = tile.column * tile_columns;
    if (tile.shares_columns) {
#pragma unroll
      for (int i = 0; i < pair; ++i) {
        copy_ragged_box(left + i * (left_bytes / pair), a, step * depth, row + i * (tile_rows / pair), first, last, barrier);
      }
      if constexpr (right_rows) {
#pragma unroll
        for (int j = 0; j < tile_columns / 64; ++j) {
          copy_box_to_pair(right + j * column_tile_bytes + rank * (column_tile_bytes / pair), b, column + j * 64,
                           step * depth + rank * b_box_rows, tile.group, barrier);
        }
      } else {
        copy_box_to_pair(right + rank * (right_bytes / pair), b, step * depth, column + rank * b_box_rows, tile.group, barrier);
      }
    } else {
      copy_ragged_box_to_pair(left + rank * (left_bytes / pair), a, step * depth, row + rank * (tile_rows / pair), first, last, barrier);
      constexpr int boxes = right_rows ? pair * tile_columns / 64 : pair;
#pragma unroll
      for (int j = 0; j < boxes; ++j) {
        if constexpr (right_rows) {
          copy_box(right + j * (column_tile_bytes / pair), b, column + j / pair * 64, step * depth + j % pair * b_box_rows, tile.group,
                   barrier);
        } else {
          copy_box(right + j * (right_bytes / pair), b, step * depth, column + j * b_box_rows, tile.group, barrier);
        }
      }
    }
  }
  __device__ __forceinline__ void store(const Tile& tile, const Sums& sums, char*) const {
    const int live = rows(tile), lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, quarter = lane % 4;
    const int first = warp * 16 + lane / 4, column = tile.column * tile_columns;
    C* const to = c + (static_cast<int64_t>(tile.first) + tile.row * tile_rows) * n + column;
#pragma unroll
    for (int part = 0; part < 4; ++part) {  // half of the tile's rows; row or row + 8 of the fragment
      const int row = first + part / 2 * 64 + part % 2 * 8;
#pragma unroll
      for (int j = 0; j < tile_columns / 8; j += 4) {
        float pair[4][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          pair[i][0] = sums[part / 2][(j + i) * 4 + part % 2 * 2];
          pair[i][1] = sums[part / 2][(j + i) * 4 + part % 2 * 2 + 1];
        }
        if constexpr (std::is_same_v<C, float>) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int at = (j + i) * 8 + quarter * 2;
            if (row < live && column + at < n) {
              *reinterpret_cast<float2*>(to + static_cast<int64_t>(row) * n + at) = make_float2(pair[i][0], pair[i][1]);
            }
          }
        } else {
          // Four lanes hold two columns each of 4 x 8 columns; after the transpose each lane has 8 adjacent columns, 16
          // bytes.
          uint32_t word[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) word[i] = pack_bf16(pair[i][0], pair[i][1]);
          transpose_quad(word, quarter);
          const int at = j * 8 + quarter * 8;
          if (row < live && column + at < n) {
            *reinterpret_cast<uint4*>(to + static_cast<int64_t>(row) * n + at) =
                make_uint4(word[0], word[1], word[2], word[3]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void finish() const {}
};

template <class Problem>
__global__ void MIMO_BLOCK_PAIRS __launch_bounds__(threads, 1)
    kernel(const __grid_constant__ Problem problem, int groups, int columns) {
#ifdef MIMO_ON_SM90A
  multiply_groups(problem, groups, columns);
#endif
}

template <class C, bool right_rows>
void run(mimo_stream& stream, const mimo_grouped_gemm_args& args) {
  const auto narrow = [](int64_t value) { return static_cast<int32_t>(value); };
  using Problem = Forward<C, right_rows>;
  const Problem problem{
      ragged_map(args.a, args.k, tile_rows / pair),
      right_rows ? matrices_map(args.b, args.groups, args.k, args.n, Problem::b_box_rows)
                 : matrices_map(args.b, args.groups, args.n, args.k, Problem::b_box_rows),
      static_cast<C*>(args.c), args.offsets, narrow(args.n), narrow(args.k)};
  launch(stream, kernel<Forward<C, right_rows>>, grid_of(stream.device->multiprocessors / pair * pair), dim3(threads),
         shared_bytes<Forward<C, right_rows>>(args.groups), problem, narrow(args.groups), narrow(ceil_div(args.n, tile_columns)));
}

}  // namespace

bool sm90_grouped_gemm_fits(const mimo_stream& stream, int64_t rows, int64_t groups, int64_t n, int64_t k) {
#ifdef MIMO_HAS_SM90A
  const int64_t most = INT32_MAX / 2;
  return stream.device->compute_major == 9 && groups <= most_groups && rows <= most && n <= most && k <= most &&
         (rows / tile_rows + groups) * ceil_div(larger(n, k), 64) <= most;
#else
  (void)stream, (void)rows, (void)groups, (void)n, (void)k;
  return false;
#endif
}

void sm90_bf16_grouped_gemm(mimo_stream& stream, const mimo_grouped_gemm_args& args) {
  if (args.rows == 0 || args.n == 0) return;
  with_dtype(args.c_dtype, [&](auto* t) {
    using C = std::remove_pointer_t<decltype(t)>;
    args.transpose_b ? run<C, false>(stream, args) : run<C, true>(stream, args);
  });
}

}  // namespace mimo::cuda
