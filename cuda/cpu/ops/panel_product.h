// Products with matrices that lie in memory, not in a core's caches, as weights do. OpenBLAS waits for the matrix while it
// copies it, a third of its time where rows are few; here it is copied panel by panel, each fetched from memory while the
// one before is multiplied, and a tile of tile_rows x panel_width sums stays in registers.
#pragma once
#include "transpose.h"
#include "vectors.h"

namespace mimo::MIMO_ISA {

#if defined(__AVX512F__)
constexpr int64_t tile_rows = 8;
#else
constexpr int64_t tile_rows = 4;
#endif
constexpr int64_t tile_vectors = 3, panel_width = lanes * tile_vectors, panel_depth = 256;
/// Rows of a panel multiplied between two prefetches: a cache line of fp32.
constexpr int64_t prefetch_rows = 16;

/// A right operand: [k, n] with `stride` between rows, or [n, k] when transposed.
template <class T>
struct Matrix {
  const T* values;
  int64_t stride;
  bool transposed;

  const T* at(int64_t row, int64_t column) const {
    return values + (transposed ? column * stride + row : row * stride + column);
  }
};

/// The left operand [rows, k]: element (r, i) at r * stride + i, or at i * stride + r when transposed.
template <bool Transposed>
struct LeftRows {
  const float* values;
  int64_t stride;

  float at(int64_t row, int64_t k) const { return Transposed ? values[k * stride + row] : values[row * stride + k]; }
  LeftRows from(int64_t row) const { return {values + (Transposed ? row : row * stride), stride}; }
  LeftRows from_step(int64_t k) const { return {values + (Transposed ? k * stride : k), stride}; }
};

/// Part of the next panel that one tile fetches while it multiplies: `count` runs, each `lines` cache lines, for every
/// prefetch_rows rows.
struct Prefetch {
  const char* first = nullptr;
  int64_t bytes_per_row = 0, run_bytes = 0, count = 0, lines = 0;
};

/// The share of tile `tile` of `tiles` in the panel that begins at `next`.
template <class T>
Prefetch share_of(const Matrix<T>& b, const T* next, int64_t columns, int64_t tile, int64_t tiles) {
  const int64_t element = sizeof(T), stride = b.stride * element;
  const int64_t runs = b.transposed ? columns : prefetch_rows;
  const int64_t each = (runs + tiles - 1) / tiles, begin = tile * each;
  if (begin >= runs) return {};
  const int64_t count = begin + each < runs ? each : runs - begin;
  const char* first = reinterpret_cast<const char*>(next) + begin * stride;
  return b.transposed ? Prefetch{first, element, stride, count, 1}
                      : Prefetch{first, stride, stride, count, columns * element / 64 + 1};
}

/// c[0 .. M, 0 .. panel_width] = (previous c, or 0 when `first`) + a[0 .. M, 0 .. depth] panel.
template <int64_t M, bool Transposed>
void multiply_tile(const LeftRows<Transposed>& a, const float* panel, int64_t depth, float* c, int64_t c_stride,
                   bool first, const Prefetch& prefetch) {
  Vector sums[M][tile_vectors];
#pragma GCC unroll 8
  for (int64_t r = 0; r < M; ++r) {
#pragma GCC unroll 3
    for (int64_t v = 0; v < tile_vectors; ++v) {
      sums[r][v] = first ? Vector{} : *reinterpret_cast<const Vector*>(c + r * c_stride + v * lanes);
    }
  }
  for (int64_t begin = 0; begin < depth; begin += prefetch_rows) {
    const char* run = prefetch.first + begin * prefetch.bytes_per_row;
    for (int64_t i = 0; i < prefetch.count; ++i, run += prefetch.run_bytes) {
      for (int64_t line = 0; line < prefetch.lines; ++line) __builtin_prefetch(run + line * 64, 0, 2);
    }
    const int64_t end = begin + prefetch_rows < depth ? begin + prefetch_rows : depth;
    for (int64_t k = begin; k < end; ++k) {
      Vector b[tile_vectors];
#pragma GCC unroll 3
      for (int64_t v = 0; v < tile_vectors; ++v) {
        b[v] = *reinterpret_cast<const Vector*>(panel + k * panel_width + v * lanes);
      }
#pragma GCC unroll 8
      for (int64_t r = 0; r < M; ++r) {
        const float factor = a.at(r, k);
#pragma GCC unroll 3
        for (int64_t v = 0; v < tile_vectors; ++v) sums[r][v] += factor * b[v];
      }
    }
  }
#pragma GCC unroll 8
  for (int64_t r = 0; r < M; ++r) {
#pragma GCC unroll 3
    for (int64_t v = 0; v < tile_vectors; ++v) {
      *reinterpret_cast<Vector*>(c + r * c_stride + v * lanes) = sums[r][v];
    }
  }
}

/// multiply_tile over all rows: tiles of M rows, then of half as many for the rest. `share(tile)` says what each tile
/// prefetches.
template <int64_t M, bool Transposed, class Share>
void multiply_rows(LeftRows<Transposed> a, const float* panel, int64_t depth, float* c, int64_t c_stride, bool first,
                   int64_t rows, int64_t tile, Share&& share) {
  for (; rows >= M; rows -= M, a = a.from(M), c += M * c_stride) {
    multiply_tile<M>(a, panel, depth, c, c_stride, first, share(tile++));
  }
  if constexpr (M > 1) {
    if (rows > 0) multiply_rows<M / 2>(a, panel, depth, c, c_stride, first, rows, tile, share);
  }
}

/// panel[k][j] = b[row + k][column + j] for `depth` rows of `width` columns; 0 from `columns` on.
template <class T>
void pack_panel(const Matrix<T>& b, int64_t row, int64_t depth, int64_t column, int64_t columns, float* panel,
                int64_t width = panel_width) {
  if (!b.transposed) {
    for (int64_t k = 0; k < depth; ++k) {
      const T* from = b.at(row + k, column);
      float* to = panel + k * width;
#pragma omp simd
      for (int64_t j = 0; j < columns; ++j) to[j] = load(from[j]);
      for (int64_t j = columns; j < width; ++j) to[j] = 0.0f;
    }
    return;
  }
  const int64_t whole = columns / 8 * 8;
  for (int64_t j = 0; j < whole; j += 8) {
    const T* from = b.at(row, column + j);
    int64_t k = 0;
    for (; k + 8 <= depth; k += 8) transpose_8x8(from + k, b.stride, panel + k * width + j, width);
    for (; k < depth; ++k)
      for (int64_t i = 0; i < 8; ++i) panel[k * width + j + i] = load(from[i * b.stride + k]);
  }
  for (int64_t j = whole; j < width; ++j) {
    for (int64_t k = 0; k < depth; ++k) {
      panel[k * width + j] = j < columns ? load(*b.at(row + k, column + j)) : 0.0f;
    }
  }
}

/// Where the [rows, panel_width] sums of a panel go; all its columns are written, those past the matrix too.
struct PanelSums {
  float* c;
  int64_t stride;
};

/// a[rows, k] b for columns [column, column + columns) of b, panel by panel: place(j) says where the sums of the panel at
/// column + j go, or, unless `fresh`, what they are added to. `panel` has room for panel_depth rows.
template <bool Transposed, class T, class Place>
void multiply_panels(const LeftRows<Transposed>& a, int64_t rows, const Matrix<T>& b, int64_t k, int64_t column,
                     int64_t columns, bool fresh, float* panel, Place&& place) {
  const int64_t tiles = (rows + tile_rows - 1) / tile_rows;
  const auto width_at = [&](int64_t j) { return columns - j < panel_width ? columns - j : panel_width; };
  for (int64_t row = 0; row < k; row += panel_depth) {
    const int64_t depth = k - row < panel_depth ? k - row : panel_depth;
    for (int64_t j = 0; j < columns; j += panel_width) {
      pack_panel(b, row, depth, column + j, width_at(j), panel);
      const bool last_column = j + panel_width >= columns;
      const int64_t next_row = last_column ? row + panel_depth : row, next_j = last_column ? 0 : j + panel_width;
      const auto share = [&](int64_t tile) -> Prefetch {
        if (next_row >= k) return {};
        return share_of(b, b.at(next_row, column + next_j), width_at(next_j), tile, tiles);
      };
      const PanelSums sums = place(j);
      multiply_rows<tile_rows>(a.from_step(row), panel, depth, sums.c, sums.stride, fresh && row == 0, rows, 0, share);
    }
  }
}

}  // namespace mimo::MIMO_ISA
