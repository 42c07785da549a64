// Grouped product of e4m3 operands. Operands are dequantised before they are multiplied: factors are powers of two, so
// sums are the same as with factors applied afterwards.
#include "e4m3_product.h"

#include <algorithm>

#include "e4m3.h"

namespace mimo::MIMO_ISA {
namespace {

constexpr int64_t float_bytes = static_cast<int64_t>(sizeof(float));

/// Dequantises a group's matrix to [n, k].
void read_matrix(mimo_stream& stream, const E4m3Numbers& numbers, const E4m3Product& p, int64_t group, float* to) {
  const int64_t blocks_n = (p.n + e4m3_run - 1) / e4m3_run, blocks_k = (p.k + e4m3_run - 1) / e4m3_run;
  const uint8_t* const values = p.b + group * p.n * p.k;
  const float* const factors = p.b_factors + group * blocks_n * blocks_k;
  parallel_for(stream.device->threads, p.n, [&](int64_t row) {
    for (int64_t i = 0; i < p.k; ++i) {
      const int64_t block_n = row / e4m3_run, block_k = i / e4m3_run;
      const float factor = factors[p.transposed ? block_k * blocks_n + block_n : block_n * blocks_k + block_k];
      to[row * p.k + i] = numbers.of_byte[values[row * p.k + i]] * factor;
    }
  });
}

/// sums[n] = b a for a row a[k] and b [n, k].
void multiply_row(const float* a, const float* b, int64_t n, int64_t k, float* sums) {
  for (int64_t j = 0; j < n; ++j) {
    float sum = 0;
    for (int64_t i = 0; i < k; i += e4m3_run) {
      const float *x = a + i, *y = b + j * k + i;
      sum += sum_over(std::min(e4m3_run, k - i), [=](int64_t at) { return x[at] * y[at]; });
    }
    sums[j] = sum;
  }
}

template <class C>
void multiply_groups(mimo_stream& stream, const E4m3Product& p, const E4m3Rows& a) {
  const E4m3Numbers numbers;
  Workspace matrix(&stream, p.n * p.k * float_bytes);
  for (int64_t group = 0; group < p.groups; ++group) {
    const int64_t begin = p.offsets[group], rows = p.offsets[group + 1] - begin;
    if (rows == 0) continue;
    read_matrix(stream, numbers, p, group, matrix.as<float>());
    Workspace own(&stream, rows * (p.k + p.n) * float_bytes);
    parallel_for(stream.device->threads, rows, [&](int64_t row) {
      float* const of_row = own.as<float>() + row * (p.k + p.n);
      float* const sums = of_row + p.k;
      read_e4m3_row(numbers, a, begin + row, p.k, of_row);
      multiply_row(of_row, matrix.as<float>(), p.n, p.k, sums);
      C* const to = static_cast<C*>(p.c) + (begin + row) * p.n;
      for (int64_t j = 0; j < p.n; ++j) store(&to[j], sums[j]);
    });
  }
}

}  // namespace

void e4m3_grouped_product(mimo_stream& stream, const E4m3Product& p) {
  MIMO_REQUIRE(p.b_factors != nullptr && p.groups >= 1 && p.n >= 0 && p.k >= 1, "e4m3_grouped_product");
  MIMO_REQUIRE((p.a_e4m3 == nullptr) == (p.a_factors == nullptr), "e4m3_grouped_product");
  const bool rounds = p.a_e4m3 == nullptr;
  const int64_t live = p.offsets[p.groups], stride = e4m3_factor_stride(rounds ? live : p.rows);
  Workspace factors(&stream, rounds ? e4m3_runs(p.k) * stride * float_bytes : 0);
  Workspace values(&stream, rounds ? live * p.k : 0);
  // A given quantised operand is only read; E4m3Rows is not const because it serves both directions.
  const E4m3Rows a = rounds ? E4m3Rows{values.as<uint8_t>(), factors.as<float>(), stride}
                            : E4m3Rows{const_cast<uint8_t*>(p.a_e4m3), const_cast<float*>(p.a_factors), stride};
  if (rounds) round_rows_to_e4m3(stream, p.a, p.a_dtype, live, p.k, a);
  with_dtype(p.c_dtype, [&](auto* c) { multiply_groups<std::remove_pointer_t<decltype(c)>>(stream, p, a); });
}

}  // namespace mimo::MIMO_ISA
