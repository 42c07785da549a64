// Dense GEMM by packed panels, by register tiles or by OpenBLAS's single-threaded sgemm, parallelised over blocks of
// the result by our pool. bf16 operands are first widened to fp32 copies; a bf16 result is rounded once.
#include "gemm.h"

#include <climits>

#include "few_rows.h"
#include "kernel.h"
#include "tile_product.h"

namespace mimo::MIMO_ISA {
namespace {

/// `batch` matrices [rows, width]; row r of matrix i is at i * batch_stride + r * stride.
struct Matrices {
  int64_t rows, width, stride, batch_stride;

  /// Number of different matrices: one that is shared by the whole batch counts once.
  int64_t distinct(int64_t batch) const { return batch_stride == 0 && batch > 1 ? 1 : batch; }
};

/// Bytes of an fp32 copy; 0 for f32 storage.
int64_t copy_bytes(const Matrices& x, int64_t batch, int32_t dtype) {
  if (dtype == MIMO_DTYPE_F32) return 0;
  return x.distinct(batch) * x.rows * x.width * static_cast<int64_t>(sizeof(float));
}

/// Returns the operand in fp32: unchanged, or a contiguous copy in `buffer`, and updates the strides in `x`.
const float* widen(mimo_stream& stream, const void* from, int32_t dtype, int64_t batch, float* buffer, Matrices& x) {
  if (dtype == MIMO_DTYPE_F32) return static_cast<const float*>(from);
  parallel_range(stream.device->threads, x.distinct(batch) * x.rows, rows_per_partial, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const bf16* row = static_cast<const bf16*>(from) + r / x.rows * x.batch_stride + r % x.rows * x.stride;
      float* to = buffer + r * x.width;
#pragma omp simd
      for (int64_t i = 0; i < x.width; ++i) to[i] = load(row[i]);
    }
  });
  x.stride = x.width;
  x.batch_stride = x.batch_stride == 0 ? 0 : x.rows * x.width;
  return buffer;
}

constexpr int64_t unit = 16;  // OpenBLAS's register tile

struct Block {
  int64_t row, rows, column, columns;
};

/// Block `index` of `count` of an [m, n] result, split along its longer side.
Block block(int64_t m, int64_t n, int64_t count, int64_t index) {
  const bool by_rows = m >= n;
  const int64_t total = by_rows ? m : n;
  const int64_t units = (total + unit - 1) / unit;
  int64_t begin = units * index / count * unit, end = units * (index + 1) / count * unit;
  if (end > total) end = total;
  if (begin > end) begin = end;
  return by_rows ? Block{begin, end - begin, 0, n} : Block{0, m, begin, end - begin};
}

/// c = product + beta c + bias. The product is in a separate buffer (bf16 results) or already in c (then beta is 0).
template <class T, class W>
void finish_row(const float* product, const W* bias, float beta, int64_t n, T* c) {
  if (beta != 0) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) store(&c[i], product[i] + beta * load(c[i]) + (bias ? load(bias[i]) : 0.0f));
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) store(&c[i], product[i] + (bias ? load(bias[i]) : 0.0f));
  }
}

/// Product of few rows, a [m, k] and b [n, k] without packing; tasks are runs of b's rows.
template <class B>
void multiply_as_stored(mimo_stream& stream, const mimo_gemm_args& args, const float* a, int64_t a_stride) {
  const bool in_place = args.c_dtype == MIMO_DTYPE_F32 && args.bias == nullptr && args.beta == 0 && args.alpha == 1;
  Workspace aside(&stream, in_place ? 0 : args.m * args.n * static_cast<int64_t>(sizeof(float)));
  float* const sums = in_place ? static_cast<float*>(args.c) : aside.as<float>();
  const int64_t stride = in_place ? args.c_stride : args.n, grain = few_rows_grain(args.k, sizeof(B));
  parallel_range(stream.device->threads, args.n, grain, [&](int64_t begin, int64_t end) {
    multiply_few_rows(a, a_stride, args.m, static_cast<const B*>(args.b) + begin * args.b_stride, args.b_stride,
                      end - begin, args.k, sums + begin, stride);
    if (in_place) return;
    with_dtype(args.c_dtype, [&](auto* t) {
      using T = std::remove_pointer_t<decltype(t)>;
      const B* bias = args.bias == nullptr ? nullptr : static_cast<const B*>(args.bias) + begin;
      for (int64_t r = 0; r < args.m; ++r) {
        float* const row = sums + r * stride + begin;
        for (int64_t i = 0; i < end - begin; ++i) row[i] *= args.alpha;
        finish_row(row, bias, args.beta, end - begin, static_cast<T*>(args.c) + r * args.c_stride + begin);
      }
    });
  });
}

/// Whether to multiply panel by panel. Not for operands that stay in the caches, which are faster read in place; nor
/// for a left operand read across rows this far apart, which maps to few sets of the L1 cache; nor for results of
/// several panels with large operands, where OpenBLAS, which packs both, is faster.
bool by_panels(const Product& p, int64_t rows, int64_t columns) {
  constexpr int64_t least_rows = 8, least_columns = 2 * panel_width, least_elements = 1 << 15, far_stride = 2048;
  constexpr double most_work = 5e9;  // multiplications
  const double work = static_cast<double>(rows) * static_cast<double>(columns) * static_cast<double>(p.k);
  return p.alpha == 1.0f && (p.beta == 0.0f || p.beta == 1.0f) && rows >= least_rows && columns >= least_columns &&
         columns * p.k >= least_elements && !(p.transpose_a && p.a_stride > far_stride) &&
         (p.k <= panel_depth || work <= most_work);
}

/// Computes the columns of a product that fill whole vectors, panel by panel; returns their number.
template <bool Transposed>
int64_t multiply_whole_vectors(const LeftRows<Transposed>& a, const Matrix<float>& b, int64_t rows, int64_t columns,
                               const Product& p, float* c) {
  const int64_t whole = columns / lanes * lanes;
  alignas(64) float panel[panel_depth * panel_width];
  multiply_panels(a, rows, b, p.k, 0, whole, p.beta == 0.0f, panel,
                  [&](int64_t row, int64_t j, int64_t) -> PanelSums { return {c + row * p.c_stride + j, p.c_stride}; });
  return whole;
}

/// Number of blocks of one product. OpenBLAS sums in a different order at tile edges and for small products, so the
/// split depends on sizes alone, which makes results independent of the number of threads. Each block packs the shorter
/// side's operand again (5 % for four blocks of 256 rows), hence either enough rows to hide that or only two blocks;
/// products smaller than one block's least work are not split.
int64_t shared_block_count(const mimo_gemm_args& args) {
  constexpr double least_work = 2e6;  // multiplications of a block: about 20 µs of one core
  constexpr int64_t most = 16, few = 2, long_block = 512;
  if (args.batch >= most) return 1;
  const double work = static_cast<double>(args.m) * static_cast<double>(args.n) * static_cast<double>(args.k);
  const int64_t longer = args.m >= args.n ? args.m : args.n;
  const int64_t wanted = longer / long_block > few ? longer / long_block : few;
  int64_t count = 1;
  while (2 * count <= most && 2 * count <= wanted && 2 * count * unit <= longer &&
         work >= least_work * 2 * static_cast<double>(count)) {
    count *= 2;
  }
  return count;
}

/// Number of blocks of each product of the batch. Sums by panels do not depend on the split, so a single
/// thread uses one block and packs each panel once.
int64_t block_count(const mimo_gemm_args& args, const Product& p, int32_t threads) {
  const int64_t count = shared_block_count(args);
  if (threads > 1 || !by_panels(p, args.m, args.n)) return count;
  for (int64_t i = 0; i < count; ++i) {
    const Block part = block(args.m, args.n, count, i);
    if (!by_panels(p, part.rows, part.columns)) return count;
  }
  return 1;
}

void require_matrices(const Matrices& x) {
  MIMO_REQUIRE(x.rows <= INT_MAX && x.width <= INT_MAX && x.stride <= INT_MAX, "gemm");
  MIMO_REQUIRE(x.rows <= 1 || x.stride >= x.width, "gemm");
}

}  // namespace

void product(const Product& p, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  // Multiplications up to which register tiles beat OpenBLAS, which packs operands even if they fit in L2.
  constexpr double most_of_tiles = 64e6;
  if (rows <= 0 || columns <= 0) return;
  const float* a = p.a + (p.transpose_a ? row : row * p.a_stride);
  const float* b = p.b + (p.transpose_b ? column * p.b_stride : column);
  float* c = p.c + row * p.c_stride + column;
  if (p.k == 0) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < columns; ++i) c[r * p.c_stride + i] = p.beta == 0 ? 0 : p.beta * c[r * p.c_stride + i];
    return;
  }
  const bool small = static_cast<double>(rows) * static_cast<double>(columns) * static_cast<double>(p.k) <= most_of_tiles;
  const Matrix<float> right{b, p.b_stride, p.transpose_b};
  if (by_panels(p, rows, columns)) {
    const int64_t whole = p.transpose_a
                              ? multiply_whole_vectors(LeftRows<true>{a, p.a_stride}, right, rows, columns, p, c)
                              : multiply_whole_vectors(LeftRows<false>{a, p.a_stride}, right, rows, columns, p, c);
    if (whole == columns) return;
    // Register tiles for any number of rows, so that sums do not depend on how a product is split.
    const Matrix<float> rest{p.transpose_b ? b + whole * p.b_stride : b + whole, p.b_stride, p.transpose_b};
    const TileResult result{c + whole, p.c_stride, p.alpha, p.beta};
    if (p.transpose_a) return tile_product(LeftRows<true>{a, p.a_stride}, rest, rows, columns - whole, p.k, result);
    return tile_product(LeftRows<false>{a, p.a_stride}, rest, rows, columns - whole, p.k, result);
  }
  if (small) {
    const TileResult result{c, p.c_stride, p.alpha, p.beta};
    if (p.transpose_a) return tile_product(LeftRows<true>{a, p.a_stride}, right, rows, columns, p.k, result);
    return tile_product(LeftRows<false>{a, p.a_stride}, right, rows, columns, p.k, result);
  }
  sgemm(p.transpose_a, p.transpose_b, rows, columns, p.k, p.alpha, a, p.a_stride, b, p.b_stride, p.beta, c, p.c_stride);
}

void gemm(mimo_stream& stream, const mimo_gemm_args& args) {
  MIMO_REQUIRE(args.m >= 0 && args.n >= 0 && args.k >= 0 && args.batch >= 0, "gemm");
  if (args.m == 0 || args.n == 0 || args.batch == 0) return;
  const bool c_is_f32 = args.c_dtype == MIMO_DTYPE_F32;
  Matrices a{args.transpose_a ? args.k : args.m, args.transpose_a ? args.m : args.k, args.a_stride,
             args.a_batch_stride};
  Matrices b{args.transpose_b ? args.n : args.k, args.transpose_b ? args.k : args.n, args.b_stride,
             args.b_batch_stride};
  const Matrices c{args.m, args.n, args.c_stride, args.c_batch_stride};
  require_matrices(a);
  require_matrices(b);
  require_matrices(c);
  MIMO_REQUIRE(args.batch == 1 || args.c_batch_stride != 0, "gemm");

  Workspace a_copy(&stream, copy_bytes(a, args.batch, args.a_dtype));
  const float* const a_f32 = widen(stream, args.a, args.a_dtype, args.batch, a_copy.as<float>(), a);
  if (args.m <= few_rows && args.batch == 1 && args.transpose_a == 0 && args.transpose_b != 0 && args.k > 0) {
    with_dtype(args.b_dtype, [&](auto* w) {
      multiply_as_stored<std::remove_pointer_t<decltype(w)>>(stream, args, a_f32, a.stride);
    });
    return;
  }
  Workspace b_copy(&stream, copy_bytes(b, args.batch, args.b_dtype));
  Workspace c_copy(&stream, copy_bytes(c, args.batch, args.c_dtype));
  const float* const b_f32 = widen(stream, args.b, args.b_dtype, args.batch, b_copy.as<float>(), b);
  float* const c_f32 = c_is_f32 ? static_cast<float*>(args.c) : c_copy.as<float>();
  const int64_t c_stride = c_is_f32 ? args.c_stride : args.n;
  const int64_t c_batch_stride = c_is_f32 ? args.c_batch_stride : args.m * args.n;
  const float beta = c_is_f32 ? args.beta : 0.0f;

  ThreadPool& threads = stream.device->threads;
  // OpenBLAS rejects a leading dimension below the width even for a single row.
  const auto leading = [](const Matrices& x) { return x.stride < x.width ? x.width : x.stride; };
  const auto product_at = [&](int64_t index) {
    return Product{a_f32 + index * a.batch_stride, b_f32 + index * b.batch_stride, c_f32 + index * c_batch_stride,
                   args.k, leading(a), leading(b), c_stride < args.n ? args.n : c_stride, args.alpha, beta,
                   args.transpose_a != 0, args.transpose_b != 0};
  };
  const int64_t blocks = block_count(args, product_at(0), threads.size());
  parallel_for(threads, args.batch * blocks, [&](int64_t i) {
    const Block part = block(args.m, args.n, blocks, i % blocks);
    product(product_at(i / blocks), part.row, part.rows, part.column, part.columns);
  });
  if (c_is_f32 && args.bias == nullptr) return;
  with_dtype(args.b_dtype, [&](auto* w) {
    with_dtype(args.c_dtype, [&](auto* t) {
      using W = std::remove_pointer_t<decltype(w)>;
      using T = std::remove_pointer_t<decltype(t)>;
      const W* bias = static_cast<const W*>(args.bias);
      parallel_range(threads, args.batch * args.m, rows_per_partial, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          const int64_t index = r / args.m, row = r % args.m;
          T* out = static_cast<T*>(args.c) + index * args.c_batch_stride + row * args.c_stride;
          finish_row(c_f32 + index * c_batch_stride + row * c_stride, bias, c_is_f32 ? 0.0f : args.beta, args.n, out);
        }
      });
    });
  });
}

}  // namespace mimo::MIMO_ISA
