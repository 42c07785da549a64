// KL divergence of the student's distribution over the vocabulary from the teacher's, on vocabulary shards
// (docs/spec/elastic.md §11).
#include "kernel.h"

namespace mimo::MIMO_ISA {
namespace {

/// Indices of a token's statistics.
enum Statistic : int64_t { student_max, student_sum, teacher_max, teacher_sum, teacher_dot, statistic_count };

constexpr int64_t tokens_at_once = 4;

}  // namespace

void kl_statistics(mimo_stream& stream, const mimo_kl_statistics_args& args) {
  MIMO_REQUIRE(args.tokens >= 0 && args.vocabulary_live >= 0 && args.vocabulary_live <= args.vocabulary_rows,
               "kl_statistics");
  const int64_t live = args.vocabulary_live;
  const float factor = args.inverse_temperature;
  with_dtype(args.student_dtype, [&](auto* a) {
    using S = std::remove_pointer_t<decltype(a)>;
    with_dtype(args.teacher_dtype, [&](auto* b) {
      using T = std::remove_pointer_t<decltype(b)>;
      parallel_range(stream.device->threads, args.tokens, tokens_at_once, [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
          const S* const student = static_cast<const S*>(args.student) + token * args.vocabulary_rows;
          const T* const teacher = static_cast<const T*>(args.teacher) + token * args.vocabulary_rows;
          const float top = max_over(live, [=](int64_t v) { return factor * load(student[v]); });
          const float peak = max_over(live, [=](int64_t v) { return factor * load(teacher[v]); });
          const float sum = sum_over(live, [=](int64_t v) { return exp_fast(factor * load(student[v]) - top); });
          const Sums of_teacher = sums_over(live, [=](int64_t v, float& weight, float& dot) {
            const float t = factor * load(teacher[v]);
            weight = exp_fast(t - peak);
            dot = weight * (t - factor * load(student[v]));
          });
          float* const to = args.statistics + token;
          to[student_max * args.tokens] = top;
          to[student_sum * args.tokens] = sum;
          to[teacher_max * args.tokens] = peak;
          to[teacher_sum * args.tokens] = of_teacher.first;
          to[teacher_dot * args.tokens] = of_teacher.second;
        }
      });
    });
  });
}

void kl_loss(mimo_stream& stream, const mimo_kl_loss_args& args) {
  MIMO_REQUIRE(args.tokens >= 0 && args.shards >= 1, "kl_loss");
  const int64_t tokens = args.tokens;
  parallel_range(stream.device->threads, tokens, 256, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const auto at = [&](int64_t shard, int64_t statistic) {
        return args.statistics[(shard * statistic_count + statistic) * tokens + token];
      };
      float top = -INFINITY, peak = -INFINITY;
      for (int64_t i = 0; i < args.shards; ++i) {
        top = std::fmax(top, at(i, student_max));
        peak = std::fmax(peak, at(i, teacher_max));
      }
      double sum = 0, weight = 0, dot = 0;
      for (int64_t i = 0; i < args.shards; ++i) {
        // A shard of padding only has no maximum.
        if (at(i, student_sum) == 0.0f && at(i, teacher_sum) == 0.0f) continue;
        const double own = std::exp(static_cast<double>(at(i, teacher_max) - peak));
        sum += std::exp(static_cast<double>(at(i, student_max) - top)) * static_cast<double>(at(i, student_sum));
        weight += own * static_cast<double>(at(i, teacher_sum));
        dot += own * static_cast<double>(at(i, teacher_dot));
      }
      const double student = static_cast<double>(top) + std::log(sum), teacher = static_cast<double>(peak) + std::log(weight);
      args.student_lse[token] = static_cast<float>(student);
      args.teacher_lse[token] = static_cast<float>(teacher);
      args.loss[token] = static_cast<float>(dot / weight - teacher + student);
    }
  });
}

void kl_backward(mimo_stream& stream, const mimo_kl_backward_args& args) {
  MIMO_REQUIRE(args.tokens >= 0 && args.vocabulary_live >= 0 && args.vocabulary_live <= args.vocabulary_rows, "kl_backward");
  const float factor = args.inverse_temperature;
  with_dtype(args.student_dtype, [&](auto* a) {
    using S = std::remove_pointer_t<decltype(a)>;
    with_dtype(args.teacher_dtype, [&](auto* b) {
      using T = std::remove_pointer_t<decltype(b)>;
      parallel_range(stream.device->threads, args.tokens, tokens_at_once, [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
          const int64_t row = token * args.vocabulary_rows;
          const S* const student = static_cast<const S*>(args.student) + row;
          const T* const teacher = static_cast<const T*>(args.teacher) + row;
          S* const to = static_cast<S*>(args.dlogits) + row;
          const float student_lse = args.student_lse[token], teacher_lse = args.teacher_lse[token];
          const float weight = args.dloss[token] * factor;
#pragma omp simd
          for (int64_t v = 0; v < args.vocabulary_live; ++v) {
            const float difference =
                exp_fast(factor * load(student[v]) - student_lse) - exp_fast(factor * load(teacher[v]) - teacher_lse);
            store(&to[v], weight * difference);
          }
          for (int64_t v = args.vocabulary_live; v < args.vocabulary_rows; ++v) store(&to[v], 0.0f);
        }
      });
    });
  });
}

}  // namespace mimo::MIMO_ISA
