// Decode attention: one new token of each sequence against its cached keys and values (docs/spec/language-model.md §3).
// Split-KV (Dao et al., Flash-Decoding): a task is a run of keys for all query heads of one key head, and partial
// results are combined at the end. A few long sequences thus occupy all threads.
#include "attention.h"

namespace mimo::MIMO_ISA {
namespace {

/// Keys of a task. The split depends on lengths alone, never on the number of threads.
constexpr int64_t keys_per_run = 256;

/// Partial result of a run of keys for one query head: Σ 2^(s - maximum) and Σ 2^(s - maximum) v.
struct Part {
  float maximum;  // base 2
  float sum;
};

struct Plan {
  int64_t runs, queries_per_key;  // runs: of the longest sequence
  Part* parts;                    // [S, query_heads, runs]
  float* sums;                    // [S, query_heads, runs, value_dim]
};

/// First key that the new token sees.
int64_t first_seen(const mimo_attention_step_args& args, int64_t sequence) {
  const int64_t before = args.lengths[sequence] + 1 - window_of(args);
  return before > 0 ? before : 0;
}

int64_t runs_of(const mimo_attention_step_args& args, int64_t sequence) {
  return (args.lengths[sequence] - first_seen(args, sequence) + keys_per_run) / keys_per_run;
}

template <class T>
void attend(mimo_stream& stream, const mimo_attention_step_args& args, const Plan& plan, int64_t sequence, int64_t group,
            int64_t run) {
  const int64_t d = args.head_dim, e = args.value_dim, apart = args.value_stride, queries = plan.queries_per_key;
  const int64_t length = args.lengths[sequence] + 1, first = first_seen(args, sequence) + run * keys_per_run;
  const int64_t count = length - first < keys_per_run ? length - first : keys_per_run;
  const int64_t row = group * args.rows + args.first_rows[sequence], token = sequence * args.token_stride;
  T* const keys = static_cast<T*>(args.keys) + row * d;
  T* const values = static_cast<T*>(args.values) + row * apart;
  if (first + count == length) {
    const int64_t from = token + group * args.group_stride;
    std::memcpy(keys + (length - 1) * d, static_cast<const T*>(args.k) + from, static_cast<size_t>(d) * sizeof(T));
    std::memcpy(values + (length - 1) * apart, static_cast<const T*>(args.v) + from, static_cast<size_t>(e) * sizeof(T));
  }
  Workspace workspace(&stream, (queries * (d + keys_per_run) + (d > e ? d : e)) * static_cast<int64_t>(sizeof(float)));
  float* const q = workspace.as<float>();
  float* const scores = q + queries * d;
  float* const wide = scores + queries * keys_per_run;
  gather(static_cast<const T*>(args.q) + token + group * args.group_stride, d, queries, d, args.softmax_scale * log2_e, q);
  for (int64_t j = 0; j < count; ++j) {
    gather(keys + (first + j) * d, d, 1, d, 1.0f, wide);
    for (int64_t r = 0; r < queries; ++r) {
      const float* own = q + r * d;
      float score = 0;
#pragma omp simd reduction(+ : score)
      for (int64_t i = 0; i < d; ++i) score += own[i] * wide[i];
      scores[r * keys_per_run + j] = score;
    }
  }
  const int64_t at = (sequence * args.query_heads + group * queries) * plan.runs + run;
  for (int64_t r = 0; r < queries; ++r) {
    float* const own = scores + r * keys_per_run;
    float maximum = -INFINITY, sum = 0;
#pragma omp simd reduction(max : maximum)
    for (int64_t j = 0; j < count; ++j) maximum = own[j] > maximum ? own[j] : maximum;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < count; ++j) {
      const float p = exp2_fast(own[j] - maximum);
      own[j] = p;
      sum += p;
    }
    plan.parts[at + r * plan.runs] = Part{maximum, sum};
    std::memset(plan.sums + (at + r * plan.runs) * e, 0, static_cast<size_t>(e) * sizeof(float));
  }
  for (int64_t j = 0; j < count; ++j) {
    gather(values + (first + j) * apart, apart, 1, e, 1.0f, wide);
    for (int64_t r = 0; r < queries; ++r) {
      const float p = scores[r * keys_per_run + j];
      float* const o = plan.sums + (at + r * plan.runs) * e;
#pragma omp simd
      for (int64_t i = 0; i < e; ++i) o[i] += p * wide[i];
    }
  }
}

/// Combines the partial results of one query head.
template <class T>
void join(const mimo_attention_step_args& args, const Plan& plan, int64_t sequence, int64_t head) {
  const int64_t e = args.value_dim, runs = runs_of(args, sequence);
  const int64_t at = (sequence * args.query_heads + head) * plan.runs;
  float maximum = -INFINITY, sum = 0;
  for (int64_t run = 0; run < runs; ++run) {
    const float own = plan.parts[at + run].maximum;
    maximum = own > maximum || own != own ? own : maximum;  // NaN stays NaN
  }
  float* const total = plan.sums + at * e;
  for (int64_t run = 0; run < runs; ++run) {
    const float weight = exp2_fast(plan.parts[at + run].maximum - maximum);
    const float* own = total + run * e;
    sum += weight * plan.parts[at + run].sum;
#pragma omp simd
    for (int64_t i = 0; i < e; ++i) total[i] = (run == 0 ? 0.0f : total[i]) + weight * own[i];
  }
  T* const o = static_cast<T*>(args.o) + (sequence * args.query_heads + head) * e;
  scatter(total, 1, e, 1.0f / sum, o, e);
  if (args.sinks == nullptr) return;
  // Rounded as by attention_sinks_forward, so that a step gives what a whole sequence gives.
  const float sink = load(static_cast<const T*>(args.sinks)[head]);
  const float kept = 1.0f / (1.0f + std::exp(sink - (maximum * ln_2 + std::log(sum))));
#pragma omp simd
  for (int64_t i = 0; i < e; ++i) store(&o[i], kept * load(o[i]));
}

}  // namespace

void attention_step(mimo_stream& stream, const mimo_attention_step_args& args) {
  MIMO_REQUIRE(args.key_heads > 0 && args.query_heads % args.key_heads == 0, "attention_step");
  MIMO_REQUIRE(args.head_dim > 0 && args.value_dim > 0 && args.value_stride >= args.value_dim && args.sequences >= 0 && args.max_length >= 0 && args.window >= 0, "attention_step");
  for (int64_t s = 0; s < args.sequences; ++s) {
    MIMO_REQUIRE(args.lengths[s] >= 0 && args.lengths[s] <= args.max_length, "attention_step");
    MIMO_REQUIRE(args.first_rows[s] >= 0 && args.first_rows[s] + args.lengths[s] < args.rows, "attention_step");
  }
  Plan plan{};
  plan.runs = (args.max_length + keys_per_run) / keys_per_run;
  plan.queries_per_key = args.query_heads / args.key_heads;
  const int64_t heads = args.sequences * args.query_heads;
  Workspace parts(&stream, heads * plan.runs * static_cast<int64_t>(sizeof(Part)));
  Workspace sums(&stream, heads * plan.runs * args.value_dim * static_cast<int64_t>(sizeof(float)));
  plan.parts = parts.as<Part>();
  plan.sums = sums.as<float>();
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    ThreadPool& threads = stream.device->threads;
    parallel_for(threads, args.sequences * args.key_heads * plan.runs, [&](int64_t i) {
      const int64_t run = i % plan.runs, head = i / plan.runs;
      const int64_t sequence = head / args.key_heads;
      if (run < runs_of(args, sequence)) attend<T>(stream, args, plan, sequence, head % args.key_heads, run);
    });
    for (int64_t i = 0; i < heads; ++i) join<T>(args, plan, i / args.query_heads, i % args.query_heads);
  });
}

}  // namespace mimo::MIMO_ISA
