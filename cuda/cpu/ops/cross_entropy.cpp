// Cross-entropy with z-loss over a vocabulary that may be sharded (docs/spec/language-model.md §5.2): maximum and sum
// of exponentials of a shard, their combination into losses, and the gradient of the logits.
#include "kernel.h"

namespace mimo::MIMO_ISA {
namespace {

// Columns whose maximum is taken before their exponentials are summed, so that memory is read once.
constexpr int64_t columns_per_block = 2048;
constexpr int64_t elements_per_run = 16384;

int64_t rows_per_run(int64_t width) { return elements_per_run / (width + 1) + 1; }

struct Statistics {
  float maximum;
  float sum_exp;
};

/// Maximum and Σ exp(l - maximum) in one pass: a block that raises the maximum rescales the sum so far. Without columns
/// (-infinity, 0), which the combination of shards ignores.
template <class T>
Statistics row_statistics(const T* logits, int64_t columns) {
  float maximum = -INFINITY;
  double sum = 0;
  for (int64_t begin = 0; begin < columns; begin += columns_per_block) {
    const int64_t end = begin + columns_per_block < columns ? begin + columns_per_block : columns;
    const float highest = max_over(end - begin, [block = logits + begin](int64_t v) { return load(block[v]); });
    if (highest > maximum) {
      sum *= static_cast<double>(exp_fast(maximum - highest));
      maximum = highest;
    }
    // If the maximum is -inf nothing is subtracted: -inf - -inf is NaN, and a NaN logit must still be seen.
    const float shift = maximum == -INFINITY ? 0.0f : maximum;
    float block = 0;
#pragma omp simd reduction(+ : block)
    for (int64_t v = begin; v < end; ++v) block += exp_fast(load(logits[v]) - shift);
    sum += static_cast<double>(block);
  }
  return {maximum, static_cast<float>(sum)};
}

float round_to_bf16(float value) {
  bf16 rounded;
  store(&rounded, value);
  return load(rounded);
}

template <class T, bool round>
void backward_row(const mimo_cross_entropy_backward_args& args, int64_t token) {
  const T* logits = static_cast<const T*>(args.logits) + token * args.vocabulary_rows;
  T* dlogits = static_cast<T*>(args.dlogits) + token * args.vocabulary_rows;
  const float dloss = args.dloss[token];
  if (dloss == 0) {  // a masked token, as most tokens of image batches are
    std::memset(static_cast<void*>(dlogits), 0, static_cast<size_t>(args.vocabulary_rows) * sizeof(T));
    return;
  }
  const float lse = args.lse[token];
  const float factor = 1.0f + 2.0f * args.z_loss * lse;
  const int64_t label = args.labels[token] - args.vocabulary_start;
  const bool owned = label >= 0 && label < args.vocabulary_live;
  // Read first: dlogits may alias logits.
  const float label_logit = owned ? load(logits[label]) : 0.0f;
#pragma omp simd
  for (int64_t v = 0; v < args.vocabulary_live; ++v) {
    const float gradient = dloss * (factor * exp_fast(load(logits[v]) - lse));
    store(&dlogits[v], round ? round_to_bf16(gradient) : gradient);
  }
  if (owned) {
    const float gradient = dloss * (factor * exp_fast(label_logit - lse) - 1.0f);
    store(&dlogits[label], round ? round_to_bf16(gradient) : gradient);
  }
  for (int64_t v = args.vocabulary_live; v < args.vocabulary_rows; ++v) store(&dlogits[v], 0.0f);
}

}  // namespace

void cross_entropy_statistics(mimo_stream& stream, const mimo_cross_entropy_statistics_args& args) {
  MIMO_REQUIRE(args.tokens >= 0, "cross_entropy_statistics");
  MIMO_REQUIRE(args.vocabulary_live >= 0 && args.vocabulary_live <= args.vocabulary_rows, "cross_entropy_statistics");
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const int64_t grain = rows_per_run(args.vocabulary_rows);
    parallel_range(stream.device->threads, args.tokens, grain, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const T* logits = static_cast<const T*>(args.logits) + token * args.vocabulary_rows;
        const Statistics row = row_statistics(logits, args.vocabulary_live);
        const int64_t label = args.labels[token] - args.vocabulary_start;
        const bool owned = label >= 0 && label < args.vocabulary_live;
        args.maximum[token] = row.maximum;
        args.sum_exp[token] = row.sum_exp;
        args.target_logit[token] = owned ? load(logits[label]) : 0.0f;
        args.found[token] = owned ? 1 : 0;
      }
    });
  });
}

void cross_entropy_loss(mimo_stream& stream, const mimo_cross_entropy_loss_args& args) {
  MIMO_REQUIRE(args.tokens >= 0 && args.shards > 0, "cross_entropy_loss");
  parallel_range(stream.device->threads, args.tokens, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      float maximum = -INFINITY;
      for (int64_t s = 0; s < args.shards; ++s) {
        const float m = args.maximum[s * args.tokens + token];
        maximum = m > maximum ? m : maximum;
      }
      double sum = 0;
      double target = static_cast<double>(maximum);
      for (int64_t s = 0; s < args.shards; ++s) {
        const int64_t at = s * args.tokens + token;
        sum += static_cast<double>(args.sum_exp[at]) * std::exp(static_cast<double>(args.maximum[at] - maximum));
        if (args.found[at] != 0) target = static_cast<double>(args.target_logit[at]);
      }
      const double lse = static_cast<double>(maximum) + std::log(sum);
      args.lse[token] = static_cast<float>(lse);
      args.loss[token] = static_cast<float>(lse - target + static_cast<double>(args.z_loss) * lse * lse);
    }
  });
}

void cross_entropy_backward(mimo_stream& stream, const mimo_cross_entropy_backward_args& args) {
  MIMO_REQUIRE(args.tokens >= 0, "cross_entropy_backward");
  MIMO_REQUIRE(args.vocabulary_live >= 0 && args.vocabulary_live <= args.vocabulary_rows, "cross_entropy_backward");
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const int64_t grain = rows_per_run(args.vocabulary_rows);
    parallel_range(stream.device->threads, args.tokens, grain, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        // With bf16 storage the result is rounded anyway.
        if (args.round_bf16 != 0 && std::is_same_v<T, float>) {
          backward_row<T, true>(args, token);
        } else {
          backward_row<T, false>(args, token);
        }
      }
    });
  });
}

}  // namespace mimo::MIMO_ISA
