// Operands are scaled back before they are multiplied: their factors are powers of two, which change no digit of a sum.
#include "e4m3_product.h"

#include <algorithm>

#include "e4m3.h"

namespace mimo::MIMO_ISA {
namespace {

constexpr int64_t float_bytes = static_cast<int64_t>(sizeof(float));

/// A row in runs of 128 columns.
template <class T>
void round_row(const T* from, int64_t width, float* to) {
  for (int64_t first = 0; first < width; first += e4m3_run) {
    const int64_t last = std::min(width, first + e4m3_run);
    float magnitude = 0;
    for (int64_t i = first; i < last; ++i) {
      const float x = std::fabs(load(from[i]));
      magnitude = x > magnitude ? x : magnitude;
    }
    const float power = e4m3_power(magnitude);
    for (int64_t i = first; i < last; ++i) to[i] = round_to_e4m3(load(from[i]) * power) / power;
  }
}

/// The numbers of a group's matrix [n, k].
void read_matrix(mimo_stream& stream, const E4m3Product& p, int64_t group, float* to) {
  const int64_t blocks_n = (p.n + e4m3_run - 1) / e4m3_run, blocks_k = (p.k + e4m3_run - 1) / e4m3_run;
  const uint8_t* const values = p.b + group * p.n * p.k;
  const float* const factors = p.factors + group * blocks_n * blocks_k;
  parallel_for(stream.device->threads, p.n, [&](int64_t row) {
    for (int64_t i = 0; i < p.k; ++i) {
      const int64_t block_n = row / e4m3_run, block_k = i / e4m3_run;
      const float factor = factors[p.transposed ? block_k * blocks_n + block_n : block_n * blocks_k + block_k];
      to[row * p.k + i] = e4m3_number(values[row * p.k + i]) * factor;
    }
  });
}

/// sums[n] of a row a[k] and b [n, k].
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

template <class T, class C>
void multiply_groups(mimo_stream& stream, const E4m3Product& p) {
  Workspace matrix(&stream, p.n * p.k * float_bytes);
  for (int64_t group = 0; group < p.groups; ++group) {
    const int64_t begin = p.offsets[group], rows = p.offsets[group + 1] - begin;
    if (rows == 0) continue;
    read_matrix(stream, p, group, matrix.as<float>());
    Workspace own(&stream, rows * (p.k + p.n) * float_bytes);
    parallel_for(stream.device->threads, rows, [&](int64_t row) {
      float* const a = own.as<float>() + row * (p.k + p.n);
      float* const sums = a + p.k;
      round_row(static_cast<const T*>(p.a) + (begin + row) * p.k, p.k, a);
      multiply_row(a, matrix.as<float>(), p.n, p.k, sums);
      C* const to = static_cast<C*>(p.c) + (begin + row) * p.n;
      for (int64_t j = 0; j < p.n; ++j) store(&to[j], sums[j]);
    });
  }
}

}  // namespace

void e4m3_grouped_product(mimo_stream& stream, const E4m3Product& product) {
  MIMO_REQUIRE(product.factors != nullptr && product.groups >= 1 && product.n >= 0 && product.k >= 1, "e4m3_grouped_product");
  with_dtype(product.a_dtype, [&](auto* t) {
    with_dtype(product.c_dtype, [&](auto* c) {
      multiply_groups<std::remove_pointer_t<decltype(t)>, std::remove_pointer_t<decltype(c)>>(stream, product);
    });
  });
}

}  // namespace mimo::MIMO_ISA
