// GEMM of operands that fit in the caches: register tiles of sums; the right operand is read in place, or packed panel
// by panel if transposed. OpenBLAS packs both operands of all but the smallest products, takes a lock for the buffer,
// and has small-matrix kernels for AVX-512 only.
#pragma once
#include "panel_product.h"

namespace mimo::MIMO_ISA {

/// Depth of k summed in registers before the sums are added to c: that many rows of a panel fit in the L1 cache.
constexpr int64_t tile_depth = 128;

/// Destination of a product: c = alpha sums + beta c.
struct TileResult {
  float* c;
  int64_t stride;
  float alpha, beta;
};

/// A register tile of M rows x V vectors of columns.
template <int64_t M, int64_t V, bool Transposed>
void sum_tile(const LeftRows<Transposed>& a, const float* b, int64_t b_stride, int64_t depth, const TileResult& result) {
  Vector sums[M][V] = {};
  for (int64_t k = 0; k < depth; ++k) {
    Vector right[V];
#pragma GCC unroll 3
    for (int64_t v = 0; v < V; ++v) right[v] = *reinterpret_cast<const Vector*>(b + k * b_stride + v * lanes);
#pragma GCC unroll 8
    for (int64_t r = 0; r < M; ++r) {
      const float factor = a.at(r, k);
#pragma GCC unroll 3
      for (int64_t v = 0; v < V; ++v) sums[r][v] += factor * right[v];
    }
  }
#pragma GCC unroll 8
  for (int64_t r = 0; r < M; ++r) {
#pragma GCC unroll 3
    for (int64_t v = 0; v < V; ++v) {
      Vector* const to = reinterpret_cast<Vector*>(result.c + r * result.stride + v * lanes);
      const Vector scaled = result.alpha * sums[r][v];
      *to = result.beta == 0 ? scaled : scaled + result.beta * *to;
    }
  }
}

/// sum_tile over all rows: tiles of M rows, then smaller tiles for the remainder.
template <int64_t M, int64_t V, bool Transposed>
void sum_rows(LeftRows<Transposed> a, const float* b, int64_t b_stride, int64_t depth, TileResult result, int64_t rows) {
  for (; rows >= M; rows -= M, a = a.from(M), result.c += M * result.stride) {
    sum_tile<M, V>(a, b, b_stride, depth, result);
  }
  if constexpr (M > 1) {
    constexpr int64_t fewer = M > 4 ? 4 : M / 2;
    if (rows > 0) sum_rows<fewer, V>(a, b, b_stride, depth, result, rows);
  }
}

template <bool Transposed>
void sum_panel(const LeftRows<Transposed>& a, const float* b, int64_t b_stride, int64_t depth, const TileResult& result,
               int64_t rows, int64_t vectors) {
  switch (vectors) {
    case 1: return sum_rows<tile_rows_of(1), 1>(a, b, b_stride, depth, result, rows);
    case 2: return sum_rows<tile_rows_of(2), 2>(a, b, b_stride, depth, result, rows);
    default: return sum_rows<tile_rows_of(3), 3>(a, b, b_stride, depth, result, rows);
  }
}

/// c [rows, columns] = alpha a b + beta c; pointers are to the first elements. A sum over k is computed in order,
/// tile_depth at a time.
template <bool Transposed>
void tile_product(LeftRows<Transposed> a, const Matrix<float>& b, int64_t rows, int64_t columns, int64_t k,
                  const TileResult& c) {
  // Number of rows and distance between them from which packing a panel pays.
  constexpr int64_t many_rows = 128, far_stride = 256, rows_aside = 64;
  alignas(64) float panel[tile_depth * panel_width];
  alignas(64) float aside[rows_aside * panel_width];
  for (int64_t first = 0; first < k; first += tile_depth) {
    const int64_t depth = k - first < tile_depth ? k - first : tile_depth;
    const LeftRows<Transposed> left = a.from_step(first);
    const float beta = first == 0 ? c.beta : 1.0f;
    for (int64_t j = 0; j < columns;) {
      const int64_t vectors = panel_vectors((columns - j + lanes - 1) / lanes), width = vectors * lanes;
      const int64_t live = columns - j < width ? columns - j : width;
      const bool copied = b.transposed || live < width || (rows >= many_rows && b.stride >= far_stride);
      if (copied) pack_panel(b, first, depth, j, live, panel, width);
      const float* const right = copied ? panel : b.at(first, j);
      const int64_t stride = copied ? width : b.stride;
      if (live == width) {
        sum_panel(left, right, stride, depth, TileResult{c.c + j, c.stride, c.alpha, beta}, rows, vectors);
      } else {
        for (int64_t r = 0; r < rows; r += rows_aside) {
          const int64_t some = rows - r < rows_aside ? rows - r : rows_aside;
          sum_panel(left.from(r), right, stride, depth, TileResult{aside, width, c.alpha, 0}, some, vectors);
          for (int64_t i = 0; i < some; ++i) {
            float* const to = c.c + (r + i) * c.stride + j;
            const float* const sums = aside + i * width;
#pragma omp simd
            for (int64_t q = 0; q < live; ++q) to[q] = beta == 0 ? sums[q] : sums[q] + beta * to[q];
          }
        }
      }
      j += width;
    }
  }
}

}  // namespace mimo::MIMO_ISA
