// Biases of experts (docs/spec/moe-performance.md §1.6): y = x + factor_row * bias_group, and its gradients. A group's
// rows are summed in pieces counted from its first row, and the pieces are added in order.
#include "grouped_bias.h"

#include "column_sums.cuh"

namespace mimo::cuda {
namespace {

constexpr int64_t rows_per_piece = 128;

/// Row ranges of the groups, read on the device; without offsets all rows are one group.
struct Groups {
  const int32_t* offsets;
  int64_t groups, rows;

  __device__ int64_t live() const { return live_rows(rows, offsets == nullptr ? nullptr : offsets + groups); }
  __device__ int64_t of(int64_t row) const { return offsets == nullptr ? 0 : sequence_of(offsets, groups, row); }
  __device__ Piece piece(int64_t number) const {
    if (offsets != nullptr) return piece_at(offsets, groups, rows_per_piece, number);
    const int64_t begin = number * rows_per_piece;
    return {0, number, begin, begin < rows ? smaller(rows_per_piece, rows - begin) : 0, 0, rows};
  }
  __device__ int64_t first(int64_t group) const { return offsets == nullptr ? 0 : first_piece(offsets, group, rows_per_piece); }
  __device__ int64_t count(int64_t group) const {
    return offsets == nullptr ? rows : static_cast<int64_t>(offsets[group + 1]) - offsets[group];
  }
  __host__ int64_t pieces() const { return piece_count(rows, groups, rows_per_piece); }
};

/// y = from + factor * bias of the row's group.
template <class S, class T, int Width>
__global__ void add_bias_kernel(const S* from, const T* bias, const float* factor, Groups groups, T* y, int64_t packs) {
  for_each_pack(groups.live(), packs, [&](int64_t row, int64_t pack) {
    const float weight = factor != nullptr ? factor[row] : 1.0f;
    const int64_t at = (row * packs + pack) * Width;
    float value[Width], own[Width];
    read(from + at, value);
    read(bias + (groups.of(row) * packs + pack) * Width, own);
#pragma unroll
    for (int i = 0; i < Width; ++i) value[i] += weight * own[i];
    write(y + at, value);
  });
}

/// partial[piece][c] = Σ over the piece's rows of factor * dy. Threads: 32 packs of columns x 8 rows.
template <class T, int Width>
__global__ void bias_gradient_kernel(const T* dy, const float* factor, Groups groups, int64_t width, float* partial) {
  const Piece piece = groups.piece(blockIdx.y);
  if (piece.count == 0) return;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x) * Width;
  float sum[Width] = {};
  if (column < width) {
    for (int64_t row = piece.begin + threadIdx.y; row < piece.begin + piece.count; row += row_lanes) {
      const float weight = factor != nullptr ? factor[row] : 1.0f;
      float value[Width];
      read(dy + row * width + column, value);
#pragma unroll
      for (int i = 0; i < Width; ++i) sum[i] += weight * value[i];
    }
  }
  write_column_sums(sum, width, partial);
}

/// dbias of a group += its pieces, in order.
__global__ void add_pieces_kernel(const float* partial, Groups groups, int64_t width, float* dbias) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, group = blockIdx.y;
  if (column >= width) return;
  const int64_t count = (groups.count(group) + rows_per_piece - 1) / rows_per_piece;
  if (count <= 0) return;
  const float* from = partial + groups.first(group) * width + column;
  float sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += from[i * width];
  dbias[group * width + column] += sum;
}

/// dfactor of a row = dy · bias of its group; one warp a row.
template <class T, int Width>
__global__ void factor_gradient_kernel(const T* dy, const T* bias, Groups groups, int64_t packs, float* dfactor,
                                       bool accumulate) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= groups.live()) return;
  const T* from = dy + row * packs * Width;
  const T* own = bias + groups.of(row) * packs * Width;
  float sum = 0;
  for (int64_t pack = threadIdx.x; pack < packs; pack += 32) {
    float value[Width], other[Width];
    read(from + pack * Width, value);
    read(own + pack * Width, other);
#pragma unroll
    for (int i = 0; i < Width; ++i) sum += value[i] * other[i];
  }
  sum = warp_sum(sum);
  if (threadIdx.x == 0) dfactor[row] = accumulate ? dfactor[row] + sum : sum;
}

template <class Args>
Groups groups_of(const Args& args) {
  MIMO_REQUIRE(args.groups >= 1 && args.rows >= 0 && args.width >= 0, "grouped_bias");
  MIMO_REQUIRE(args.offsets != nullptr || args.groups == 1, "grouped_bias");
  return {args.offsets, args.groups, args.rows};
}

template <class T, class S>
void add_bias(mimo_stream& stream, const mimo_grouped_bias_forward_args& args, const S* from) {
  const Groups groups = groups_of(args);
  if (args.rows == 0 || args.width == 0) return;
  constexpr int wide = vector_width<T>;
  const auto fits = [&](auto* pointer) {
    return packs_fit<std::remove_cv_t<std::remove_pointer_t<decltype(pointer)>>>(pointer, args.width, args.width, wide);
  };
  const T* bias = static_cast<const T*>(args.bias);
  T* y = static_cast<T*>(args.y);
  with_width<wide>(fits(bias) && fits(y) && fits(from), [&](auto w) {
    const int64_t packs = args.width / w;
    const Cover covered = cover(args.rows, packs);
    launch(stream, add_bias_kernel<S, T, w>, covered.grid, covered.block, 0, from, bias, args.factor, groups, y, packs);
  });
}

}  // namespace

void grouped_bias_of_sums(mimo_stream& stream, const mimo_grouped_bias_forward_args& args, const float* sums) {
  with_dtype(args.dtype, [&](auto* t) { add_bias<std::remove_pointer_t<decltype(t)>>(stream, args, sums); });
}

void grouped_bias_forward(mimo_stream& stream, const mimo_grouped_bias_forward_args& args) {
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    add_bias<T>(stream, args, static_cast<const T*>(args.y));
  });
}

void grouped_bias_backward(mimo_stream& stream, const mimo_grouped_bias_backward_args& args) {
  const Groups groups = groups_of(args);
  if (args.rows == 0 || args.width == 0) return;
  MIMO_REQUIRE(groups.pieces() <= 65535 && args.groups <= 65535, "grouped_bias_backward");
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    constexpr int wide = vector_width<T>;
    const bool fits = packs_fit<T>(args.dy, args.width, args.width, wide) &&
                      packs_fit<T>(args.bias, args.width, args.width, wide);
    const T* dy = static_cast<const T*>(args.dy);
    with_width<wide>(fits, [&](auto w) {
      if (args.dbias != nullptr) {
        Workspace partial(&stream, groups.pieces() * args.width * static_cast<int64_t>(sizeof(float)));
        launch(stream, bias_gradient_kernel<T, w>, grid_of(ceil_div(args.width, 32 * w), groups.pieces()),
               dim3(32, row_lanes), 0, dy, args.factor, groups, args.width, partial.as<float>());
        launch(stream, add_pieces_kernel, grid_of(ceil_div(args.width, 128), args.groups), dim3(128), 0,
               partial.as<float>(), groups, args.width, args.dbias);
      }
      if (args.dfactor != nullptr) {
        launch(stream, factor_gradient_kernel<T, w>, grid_of(ceil_div(args.rows, 8)), dim3(32, 8), 0, dy,
               static_cast<const T*>(args.bias), groups, args.width / w, args.dfactor, args.accumulate_dfactor != 0);
      }
    });
  });
}

}  // namespace mimo::cuda
