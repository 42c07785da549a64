// MoE permute: copies of tokens in expert order, and unpermute: their weighted sum in token order
// (docs/spec/language-model.md §4.5). Each is the other's backward. With a width of 0 only the probabilities move.
#include "e4m3.h"
#include "kernel.h"

namespace mimo::MIMO_ISA {
namespace {

/// Columns summed at a time: the fp32 sums stay in the L1 cache while more than four rows are added.
constexpr int64_t columns_per_sum = 4096;

/// sum[i] = previous + Σ of N rows; previous is sum[i], or 0 in the first pass.
template <int N, class T>
void add_rows(const T* const* rows, int64_t begin, int64_t count, bool first, float* sum) {
  const T* row[N];
  for (int n = 0; n < N; ++n) row[n] = rows[n] + begin;
  if (first) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      float total = load(row[0][i]);
      for (int n = 1; n < N; ++n) total += load(row[n][i]);
      sum[i] = total;
    }
    return;
  }
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    float total = sum[i];
    for (int n = 0; n < N; ++n) total += load(row[n][i]);
    sum[i] = total;
  }
}

/// y = Σ of a token's rows; `rows` has room for K pointers.
template <class T>
void unpermute_token(const mimo_moe_unpermute_args& args, int64_t token, const T** rows) {
  int64_t kept = 0;
  for (int64_t slot = token * args.topk; slot < (token + 1) * args.topk; ++slot) {
    const int64_t row = args.row_of_slot[slot];
    if (row >= 0) rows[kept++] = static_cast<const T*>(args.rows) + row * args.width;
  }
  T* y = static_cast<T*>(args.y) + token * args.width;
  float sum[columns_per_sum];
  for (int64_t begin = 0; begin < args.width; begin += columns_per_sum) {
    const int64_t count = args.width - begin < columns_per_sum ? args.width - begin : columns_per_sum;
    if (kept == 0) std::memset(sum, 0, static_cast<size_t>(count) * sizeof(float));
    for (int64_t done = 0; done < kept;) {
      const int64_t left = kept - done;
      if (left >= 4) {
        add_rows<4>(rows + done, begin, count, done == 0, sum);
        done += 4;
      } else if (left >= 2) {
        add_rows<2>(rows + done, begin, count, done == 0, sum);
        done += 2;
      } else {
        add_rows<1>(rows + done, begin, count, done == 0, sum);
        done += 1;
      }
    }
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) store(&y[begin + i], sum[i]);
  }
}

}  // namespace

void moe_permute(mimo_stream& stream, const mimo_moe_permute_args& args) {
  MIMO_REQUIRE((args.probabilities == nullptr) == (args.row_probability == nullptr), "moe_permute");
  MIMO_REQUIRE((args.e4m3 == nullptr) == (args.e4m3_factors == nullptr), "moe_permute");
  MIMO_REQUIRE(args.rows != nullptr || args.e4m3 != nullptr || args.width == 0, "moe_permute");
  const E4m3Rows in_e4m3{static_cast<uint8_t*>(args.e4m3), args.e4m3_factors, e4m3_factor_stride(args.tokens * args.topk)};
  const int64_t rows = live_rows(args.tokens * args.topk, args.row_count);
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const T* x = static_cast<const T*>(args.x);
    T* to = static_cast<T*>(args.rows);
    parallel_range(stream.device->threads, rows, rows_per_partial, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int32_t slot = args.slot_of_row[row];
        const T* from = x + slot / args.topk * args.width;
        if (args.width > 0 && args.rows) std::memcpy(to + row * args.width, from, static_cast<size_t>(args.width) * sizeof(T));
        if (args.e4m3) round_row_to_e4m3(from, args.width, in_e4m3, row);
        if (args.probabilities) args.row_probability[row] = args.probabilities[slot];
      }
    });
  });
}

void moe_unpermute(mimo_stream& stream, const mimo_moe_unpermute_args& args) {
  MIMO_REQUIRE((args.probabilities == nullptr) == (args.row_probability == nullptr), "moe_unpermute");
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const int64_t runs = (args.tokens + rows_per_partial - 1) / rows_per_partial;
    Workspace workspace(&stream, runs * args.topk * static_cast<int64_t>(sizeof(T*)));
    parallel_range(stream.device->threads, args.tokens, rows_per_partial, [&](int64_t begin, int64_t end) {
      const T** rows = workspace.as<const T*>() + begin / rows_per_partial * args.topk;
      for (int64_t token = begin; token < end; ++token) unpermute_token(args, token, rows);
      if (args.probabilities == nullptr) return;
      for (int64_t slot = begin * args.topk; slot < end * args.topk; ++slot) {
        const int32_t row = args.row_of_slot[slot];
        args.probabilities[slot] = row < 0 ? 0.0f : args.row_probability[row];
      }
    });
  });
}

}  // namespace mimo::MIMO_ISA
