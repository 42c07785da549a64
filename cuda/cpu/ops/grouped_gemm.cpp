// Grouped GEMM of experts, each group of rows times its own matrix (docs/spec/moe-performance.md §1.1, §1.3). A task is
// a block of one expert's result; threads claim tasks dynamically, which balances experts of different loads. Blocks
// depend on sizes alone, and no sum is split over threads.
#include "e4m3_product.h"
#include "few_rows.h"
#include "gemm.h"
#include "panel_product.h"

namespace mimo::MIMO_ISA {
namespace {

constexpr int64_t float_bytes = static_cast<int64_t>(sizeof(float));

int64_t blocks_of(int64_t size, int64_t block) { return (size + block - 1) / block; }

/// Rows [begin, end) of a contiguous [.., width] operand in fp32: unchanged, or a copy in `buffer` at the same offsets.
const float* rows_as_f32(mimo_stream& stream, const void* x, int32_t dtype, int64_t begin, int64_t end, int64_t width,
                         float* buffer) {
  if (dtype == MIMO_DTYPE_F32) return static_cast<const float*>(x);
  MIMO_REQUIRE(dtype == MIMO_DTYPE_BF16, "grouped_gemm");
  const bf16* source = static_cast<const bf16*>(x);
  parallel_range(stream.device->threads, (end - begin) * width, 65536, [&](int64_t first, int64_t last) {
#pragma omp simd
    for (int64_t i = begin * width + first; i < begin * width + last; ++i) buffer[i] = load(source[i]);
  });
  return buffer;
}

/// Runs task(index, scratch) for every index; each thread reuses its own `scratch_floats` floats.
template <class Task>
void claim_tasks(mimo_stream& stream, int64_t tasks, int64_t scratch_floats, Task&& task) {
  ThreadPool& pool = stream.device->threads;
  const int64_t claimants = pool.size() < tasks ? pool.size() : tasks;
  Workspace workspace(&stream, claimants * scratch_floats * float_bytes);
  int64_t next = 0;
  parallel_for(pool, claimants, [&](int64_t claimant) {
    float* scratch = workspace.as<float>() + claimant * scratch_floats;
    while (true) {
      const int64_t index = __atomic_fetch_add(&next, int64_t{1}, __ATOMIC_RELAXED);
      if (index >= tasks) return;
      task(index, scratch);
    }
  });
}

/// The group of a task: the last group whose first task is at or before it.
int64_t group_of(const int64_t* first_task, int64_t groups, int64_t task) {
  int64_t low = 0, high = groups - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (first_task[middle] <= task) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

constexpr int64_t rows_per_block = 256, columns_per_block = 192;
static_assert(columns_per_block % panel_width == 0 && panel_depth * panel_width % 16 == 0);
/// A packed panel, and the sums of a block that cannot be written in place.
constexpr int64_t block_scratch = panel_depth * panel_width + rows_per_block * columns_per_block;

struct Block {
  int64_t group, row, rows, column, columns;
};

/// Summed in scratch and then copied: the columns of a panel that extends past the last column, because a panel writes
/// all its columns; and all bf16 results, because sums stay fp32 until they are complete.
template <class B, class C>
void multiply_block(const mimo_grouped_gemm_args& args, const float* a, const Block& block, float* scratch) {
  const Matrix<B> b{static_cast<const B*>(args.b) + block.group * args.n * args.k,
                    args.transpose_b ? args.k : args.n, args.transpose_b != 0};
  C* c = static_cast<C*>(args.c) + block.row * args.n + block.column;
  float* aside = scratch + panel_depth * panel_width;
  if (b.transposed && block.rows <= few_rows) {
    multiply_few_rows(a + block.row * args.k, args.k, block.rows, b.at(0, block.column), b.stride, block.columns, args.k,
                      aside, columns_per_block);
    for (int64_t r = 0; r < block.rows; ++r) {
#pragma omp simd
      for (int64_t i = 0; i < block.columns; ++i) store(&c[r * args.n + i], aside[r * columns_per_block + i]);
    }
    return;
  }
  if constexpr (std::is_same_v<B, float> && std::is_same_v<C, float>) {
    // A matrix of this size stays in the L2 cache: no prefetch.
    constexpr int64_t cached_elements = 1 << 15;
    if (args.n * args.k <= cached_elements) {
      const Product p{a + block.row * args.k, b.values, c - block.column, args.k, args.k, b.stride, args.n, 1.0f, 0.0f,
                      false,                  b.transposed};
      return product(p, 0, block.rows, block.column, block.columns);
    }
  }
  int64_t begin = block.columns;  // first of the columns summed in scratch
  const LeftRows<false> left{a + block.row * args.k, args.k};
  multiply_panels(left, block.rows, b, args.k, block.column, block.columns, true, scratch,
                  [&](int64_t row, int64_t j, int64_t width) -> PanelSums {
                    if (std::is_same_v<C, float> && j + width <= block.columns) {
                      return {reinterpret_cast<float*>(c) + row * args.n + j, args.n};
                    }
                    if (j < begin) begin = j;
                    return {aside + row * columns_per_block + j, columns_per_block};
                  });
  for (int64_t r = 0; begin < block.columns && r < block.rows; ++r) {
#pragma omp simd
    for (int64_t i = begin; i < block.columns; ++i) store(&c[r * args.n + i], aside[r * columns_per_block + i]);
  }
}

}  // namespace

void grouped_gemm(mimo_stream& stream, const mimo_grouped_gemm_args& args) {
  MIMO_REQUIRE(args.groups >= 1 && args.n >= 0 && args.k >= 1, "grouped_gemm");
  MIMO_REQUIRE(args.recipe == MIMO_MLP_RECIPE_PLAIN || args.recipe == MIMO_MLP_RECIPE_E4M3_BLOCKWISE, "grouped_gemm");
  if (args.recipe == MIMO_MLP_RECIPE_E4M3_BLOCKWISE) {
    MIMO_REQUIRE(args.b_dtype == MIMO_DTYPE_U8 && (args.offsets != nullptr || args.groups == 1), "grouped_gemm");
    const int32_t all[2] = {0, static_cast<int32_t>(args.rows)};
    return e4m3_grouped_product(
        stream, {args.a, nullptr, nullptr, static_cast<const uint8_t*>(args.b), args.b_factors, args.transpose_b == 0, args.c,
                 args.offsets == nullptr ? all : args.offsets, args.rows, args.groups, args.n, args.k, args.a_dtype, args.c_dtype});
  }
  const int32_t* offsets = args.offsets;
  MIMO_REQUIRE(offsets[args.groups] <= args.rows, "grouped_gemm");
  Workspace a_copy(&stream, args.a_dtype == MIMO_DTYPE_F32 ? 0 : offsets[args.groups] * args.k * float_bytes);
  const float* a =
      rows_as_f32(stream, args.a, args.a_dtype, offsets[0], offsets[args.groups], args.k, a_copy.as<float>());

  Workspace tasks_of_groups(&stream, (args.groups + 1) * static_cast<int64_t>(sizeof(int64_t)));
  int64_t* first_task = tasks_of_groups.as<int64_t>();
  const int64_t column_blocks = blocks_of(args.n, columns_per_block);
  first_task[0] = 0;
  for (int64_t g = 0; g < args.groups; ++g) {
    first_task[g + 1] = first_task[g] + blocks_of(offsets[g + 1] - offsets[g], rows_per_block) * column_blocks;
  }
  const auto run = [&](auto multiply) {
    claim_tasks(stream, first_task[args.groups], block_scratch, [&](int64_t task, float* scratch) {
      Block block{};
      block.group = group_of(first_task, args.groups, task);
      const int64_t index = task - first_task[block.group], end = offsets[block.group + 1];
      block.row = offsets[block.group] + index / column_blocks * rows_per_block;
      block.rows = end - block.row < rows_per_block ? end - block.row : rows_per_block;
      block.column = index % column_blocks * columns_per_block;
      block.columns = args.n - block.column < columns_per_block ? args.n - block.column : columns_per_block;
      multiply(block, scratch);
    });
  };
  with_dtype(args.b_dtype, [&](auto* b) {
    with_dtype(args.c_dtype, [&](auto* c) {
      using B = std::remove_pointer_t<decltype(b)>;
      using C = std::remove_pointer_t<decltype(c)>;
      run([&](const Block& block, float* scratch) { multiply_block<B, C>(args, a, block, scratch); });
    });
  });
}

constexpr int64_t gradient_rows = 256, gradient_columns = 512;

void grouped_gemm_weight_gradient(mimo_stream& stream, const mimo_grouped_gemm_weight_gradient_args& args) {
  MIMO_REQUIRE(args.groups >= 1 && args.n >= 0 && args.k >= 0, "grouped_gemm_weight_gradient");
  const int32_t* offsets = args.offsets;
  const int64_t begin = offsets[0], end = offsets[args.groups];
  MIMO_REQUIRE(end <= args.rows, "grouped_gemm_weight_gradient");
  MIMO_REQUIRE(args.recipe == MIMO_MLP_RECIPE_PLAIN || args.recipe == MIMO_MLP_RECIPE_E4M3_BLOCKWISE, "grouped_gemm_weight_gradient");
  if (args.recipe == MIMO_MLP_RECIPE_E4M3_BLOCKWISE) return e4m3_grouped_weight_gradient(stream, args);
  MIMO_REQUIRE(args.dy_factors == nullptr && args.x_factors == nullptr, "grouped_gemm_weight_gradient");
  Workspace dy_copy(&stream, args.dy_dtype == MIMO_DTYPE_F32 ? 0 : end * args.n * float_bytes);
  Workspace x_copy(&stream, args.x_dtype == MIMO_DTYPE_F32 ? 0 : end * args.k * float_bytes);
  const float* dy = rows_as_f32(stream, args.dy, args.dy_dtype, begin, end, args.n, dy_copy.as<float>());
  const float* x = rows_as_f32(stream, args.x, args.x_dtype, begin, end, args.k, x_copy.as<float>());
  const int64_t row_blocks = blocks_of(args.n, gradient_rows), column_blocks = blocks_of(args.k, gradient_columns);
  const int64_t blocks = row_blocks * column_blocks;
  claim_tasks(stream, args.groups * blocks, 0, [&](int64_t task, float*) {
    const int64_t group = task / blocks, row = task % blocks / column_blocks * gradient_rows;
    const int64_t column = task % blocks % column_blocks * gradient_columns;
    const int64_t rows = args.n - row < gradient_rows ? args.n - row : gradient_rows;
    const int64_t columns = args.k - column < gradient_columns ? args.k - column : gradient_columns;
    Product p{};
    p.k = offsets[group + 1] - offsets[group];
    if (p.k == 0 && args.accumulate != 0) return;
    p.alpha = 1.0f;
    p.beta = args.accumulate != 0 ? 1.0f : 0.0f;
    p.a = dy + offsets[group] * args.n;
    p.b = x + offsets[group] * args.k;
    p.c = args.dw + group * args.n * args.k;
    p.a_stride = args.n;
    p.b_stride = p.c_stride = args.k;
    p.transpose_a = true;
    product(p, row, rows, column, columns);
  });
}

}  // namespace mimo::MIMO_ISA
