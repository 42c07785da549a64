// GEMM of operands that are in memory rather than in the caches, as weights and activations are. OpenBLAS waits for
// memory while it packs; here the right operand is packed panel by panel, and each panel is prefetched while the
// previous one is multiplied, as are the next part of the left operand and the next tile of results. A tile of sums
// stays in registers.
#pragma once
#include "transpose.h"
#include "vectors.h"

namespace mimo::MIMO_ISA {

/// Rows of a register tile of 1, 2 or 3 vectors: enough sums to hide the latency of an addition, few enough for the
/// registers.
#if defined(__AVX512F__)
constexpr int64_t tile_rows_of(int64_t) { return 8; }
#else
constexpr int64_t tile_rows_of(int64_t vectors) { return vectors == 3 ? 4 : (vectors == 2 ? 6 : 8); }
#endif
constexpr int64_t tile_vectors = 3, panel_width = lanes * tile_vectors;
/// Maximum depth of a panel, and the depth if k needs several panels: less, so that the left operand fits in the L1
/// cache beside it.
constexpr int64_t panel_depth = 256, shared_panel_depth = lanes == 16 ? 192 : panel_depth;
/// Steps of k between two prefetches: a cache line of fp32.
constexpr int64_t prefetch_steps = 16;

/// Vectors of the next panel if `left` remain: three, but 2 + 2 rather than 3 + 1.
static inline int64_t panel_vectors(int64_t left) { return left <= 3 ? left : (left == 4 ? 2 : 3); }

/// Depth of the panels: all of k if it fits, otherwise about equal parts, so that the last is not shorter.
static inline int64_t depth_of_panels(int64_t k) {
  if (k <= panel_depth) return k;
  const int64_t panels = (k + shared_panel_depth - 1) / shared_panel_depth;
  return ((k + panels - 1) / panels + prefetch_steps - 1) / prefetch_steps * prefetch_steps;
}

/// Right operand: [k, n] with `stride` between rows, or [n, k] if transposed.
template <class T>
struct Matrix {
  const T* values;
  int64_t stride;
  bool transposed;

  const T* at(int64_t row, int64_t column) const {
    return values + (transposed ? column * stride + row : row * stride + column);
  }
};

/// Left operand [rows, k]: element (r, i) at r * stride + i, or at i * stride + r if transposed.
template <bool Transposed>
struct LeftRows {
  const float* values;
  int64_t stride;

  float at(int64_t row, int64_t k) const { return Transposed ? values[k * stride + row] : values[row * stride + k]; }
  LeftRows from(int64_t row) const { return {values + (Transposed ? row : row * stride), stride}; }
  LeftRows from_step(int64_t k) const { return {values + (Transposed ? k * stride : k), stride}; }
};

/// Cache lines that a tile prefetches to L2 every prefetch_steps steps of k, each `step` bytes after the previous.
/// Their number is constant within a tile, because mispredicted branches would delay the sums.
class Prefetches {
 public:
  void add(const void* first, int64_t step) {
    lines_[count_++] = {static_cast<const char*>(first), step};
  }

  void fetch() {
    for (int64_t i = 0; i < count_; ++i) {
      __builtin_prefetch(lines_[i].at, 0, 2);
      lines_[i].at += lines_[i].step;
    }
  }

 private:
  struct Line {
    const char* at;
    int64_t step;
  };
  // At most the lines of share_right for a single tile, of share_left, and of a tile's results.
  static constexpr int64_t lines_of_row = (panel_width * 4 + 126) / 64;
  Line lines_[prefetch_steps * lines_of_row + 8 + tile_vectors];
  int64_t count_ = 0;
};

/// Adds tile `tile`'s share of `tiles` in prefetching the panel of b at `next`.
template <class T>
void share_right(const Matrix<T>& b, const T* next, int64_t columns, int64_t tile, int64_t tiles, Prefetches& lines) {
  const int64_t element = sizeof(T), runs = b.transposed ? columns : prefetch_steps;
  const int64_t each = (runs + tiles - 1) / tiles, first = tile * each;
  const int64_t last = first + each < runs ? first + each : runs;
  for (int64_t run = first; run < last; ++run) {
    const T* const row = next + run * b.stride;
    if (b.transposed) {
      lines.add(row, prefetch_steps * element);
      continue;
    }
    for (int64_t byte = 0; byte < columns * element + 63; byte += 64) {
      lines.add(reinterpret_cast<const char*>(row) + byte, prefetch_steps * b.stride * element);
    }
  }
}

/// Adds the prefetches of the left operand that panel `panel` of `panels` makes for the tile at `row`; the operand's
/// next part begins at `next`. A cache line holds 16 values, along k or, if transposed, along rows. Two neighbouring
/// tiles of eight rows share a transposed line, so each prefetches half of the steps.
template <bool Transposed>
void share_left(const LeftRows<Transposed>& next, int64_t row, int64_t panel, int64_t panels, Prefetches& lines) {
  constexpr int64_t unit = 8, element = sizeof(float);
  for (int64_t i = panel; i < unit; i += panels) {
    if (Transposed) {
      const int64_t step = row / unit % 2 * unit + i;
      lines.add(next.values + row / 16 * 16 + step * next.stride, prefetch_steps * next.stride * element);
    } else {
      lines.add(next.values + (row + i) * next.stride, prefetch_steps * element);
    }
  }
}

/// c[0 .. M, 0 .. V vectors] = (previous c, or 0 if `first`) + a[0 .. M, 0 .. depth] panel.
template <int64_t M, int64_t V, bool Transposed>
void multiply_tile(const LeftRows<Transposed>& a, const float* panel, int64_t depth, float* c, int64_t c_stride,
                   bool first, Prefetches& lines) {
  Vector sums[M][V] = {};
  for (int64_t begin = 0; begin < depth; begin += prefetch_steps) {
    lines.fetch();
    const int64_t end = begin + prefetch_steps < depth ? begin + prefetch_steps : depth;
    for (int64_t k = begin; k < end; ++k) {
      Vector b[V];
#pragma GCC unroll 3
      for (int64_t v = 0; v < V; ++v) b[v] = *reinterpret_cast<const Vector*>(panel + (k * V + v) * lanes);
#pragma GCC unroll 8
      for (int64_t r = 0; r < M; ++r) {
        const float factor = a.at(r, k);
#pragma GCC unroll 3
        for (int64_t v = 0; v < V; ++v) sums[r][v] += factor * b[v];
      }
    }
  }
#pragma GCC unroll 8
  for (int64_t r = 0; r < M; ++r) {
#pragma GCC unroll 3
    for (int64_t v = 0; v < V; ++v) {
      Vector* const to = reinterpret_cast<Vector*>(c + r * c_stride + v * lanes);
      *to = first ? sums[r][v] : *to + sums[r][v];
    }
  }
}

/// multiply_tile over all rows: tiles of M rows, then smaller tiles for the remainder. `shares(row, lines)` adds the
/// prefetches of the tile at `row`. Each tile also prefetches the results of the next tile, the last one those at
/// `after`.
template <int64_t M, int64_t V, bool Transposed, class Share>
void multiply_rows(const LeftRows<Transposed>& a, const float* panel, int64_t depth, float* c, int64_t c_stride, bool first,
                   int64_t row, int64_t rows, const float* after, Share&& shares) {
  for (; row + M <= rows; row += M) {
    float* const to = c + row * c_stride;
    Prefetches fetched;
    shares(row, fetched);
    const float* const results = row + M < rows ? to + M * c_stride : after;
    for (int64_t i = 0; i < V * lanes; i += 16) fetched.add(results + i, c_stride * static_cast<int64_t>(sizeof(float)));
    multiply_tile<M, V>(a.from(row), panel, depth, to, c_stride, first, fetched);
  }
  if constexpr (M > 1) {
    constexpr int64_t fewer = M > 4 ? 4 : M / 2;
    if (row < rows) multiply_rows<fewer, V>(a, panel, depth, c, c_stride, first, row, rows, after, shares);
  }
}

/// Packs panel[k][j] = b[row + k][column + j] for `depth` rows of `width` columns; zeros from `columns` on.
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

/// Destination of a panel's sums: all its columns, also those past the matrix.
struct PanelSums {
  float* c;
  int64_t stride;
};

/// A part of a product that multiply_panels computes: `rows` rows of a for `depth` steps of k.
struct PanelPart {
  int64_t row, rows, step, depth;
};

/// a[rows, k] b for columns [column, column + columns) of b, panel by panel. place(row, j, width) returns the
/// destination, from that row on, of the sums of the panel of `width` columns at column + j, and whether they are added
/// to its values (not `fresh`). A sum is computed in the order of k, in whichever panel its column lies. `panel` holds
/// panel_depth rows of panel_width.
template <bool Transposed, class T, class Place>
void multiply_panels(const LeftRows<Transposed>& a, int64_t rows, const Matrix<T>& b, int64_t k, int64_t column,
                     int64_t columns, bool fresh, float* panel, Place&& place) {
  // Rows of the left operand that stay in the L2 cache for a panel's depth.
  constexpr int64_t most_rows = 512;
  const int64_t depth = depth_of_panels(k);
  const auto part_at = [&](int64_t row, int64_t step) -> PanelPart {
    return {row, rows - row < most_rows ? rows - row : most_rows, step, k - step < depth ? k - step : depth};
  };
  const auto after = [&](const PanelPart& part) -> PanelPart {
    return part.step + depth < k ? part_at(part.row, part.step + depth) : part_at(part.row + most_rows, 0);
  };
  const auto width_at = [&](int64_t j) { return panel_vectors((columns - j + lanes - 1) / lanes) * lanes; };
  const auto live_at = [&](int64_t j) { return columns - j < width_at(j) ? columns - j : width_at(j); };
  const int64_t panels = (columns + panel_width - 1) / panel_width;
  for (PanelPart part = part_at(0, 0); part.row < rows; part = after(part)) {
    const PanelPart next = after(part);
    const LeftRows<Transposed> left = a.from(part.row).from_step(part.step);
    const LeftRows<Transposed> next_left = a.from(next.row).from_step(next.step);
    for (int64_t j = 0, index = 0; j < columns; j += width_at(j), ++index) {
      const int64_t width = width_at(j);
      pack_panel(b, part.step, part.depth, column + j, live_at(j), panel, width);
      const bool is_last = j + width >= columns;
      const PanelPart& coming = is_last ? next : part;
      const int64_t next_j = is_last ? 0 : j + width;
      const PanelSums sums = place(part.row, j, width);
      const bool first = fresh && part.step == 0, is_end = coming.row >= rows;
      const float* const after_sums = is_end ? sums.c : place(coming.row, next_j, width_at(next_j)).c;
      const auto multiply = [&](auto vectors) {
        constexpr int64_t v = decltype(vectors)::value, m = tile_rows_of(v);
        const int64_t tiles = (part.rows + m - 1) / m;
        const auto shares = [&](int64_t row, Prefetches& fetched) {
          if (!is_end) share_right(b, b.at(coming.step, column + next_j), live_at(next_j), row / m, tiles, fetched);
          if (next.row < rows && row < next.rows) share_left(next_left, row, index, panels, fetched);
        };
        multiply_rows<m, v>(left, panel, part.depth, sums.c, sums.stride, first, 0, part.rows, after_sums, shares);
      };
      if (width == lanes) multiply(std::integral_constant<int64_t, 1>{});
      else if (width == 2 * lanes) multiply(std::integral_constant<int64_t, 2>{});
      else multiply(std::integral_constant<int64_t, 3>{});
    }
  }
}

}  // namespace mimo::MIMO_ISA
