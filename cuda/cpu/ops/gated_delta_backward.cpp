// The gated delta rule in chunks, backward (docs/spec/families.md §2.5): a forward sweep that keeps the states between chunks, then
// the chunks from the last to the first with the gradient of the state as carry.
#include "gated_delta.h"

namespace mimo::MIMO_ISA {
namespace {

/// A head's sums over one sequence.
struct DeltaSums {
  double dt_bias, a_log;
};

struct BackwardTiles {
  DeltaKeys keys;
  DeltaHead head;
  float *dq, *dk;                    // [C, D_k], summed over the value heads
  float *dstates;                    // [heads, D_k, D_v]
  float *d_o, *dwritten, *value;     // [C, D_v]
  float *pair, *mixed, *key;         // [C, C], [C, C], [C, D_k]
  float* dbeta;                      // [C]
  // Gradients of the cumulative sum. A pair's term counts once for, once against; in double the two cancel.
  double dsum[delta_chunk];
  float *states;                     // [chunks, heads, D_k, D_v]

  template <class Args>
  BackwardTiles(SsdScratch* scratch, const Args& args, int64_t chunks)
      : keys(scratch, args.key_dim),
        head(scratch, args.value_dim),
        dq(scratch->take(delta_chunk * args.key_dim)),
        dk(scratch->take(delta_chunk * args.key_dim)),
        dstates(scratch->take(args.value_heads / args.key_heads * args.key_dim * args.value_dim)),
        d_o(scratch->take(delta_chunk * args.value_dim)),
        dwritten(scratch->take(delta_chunk * args.value_dim)),
        value(scratch->take(delta_chunk * args.value_dim)),
        pair(scratch->take(delta_chunk * delta_chunk)),
        mixed(scratch->take(delta_chunk * delta_chunk)),
        key(scratch->take(delta_chunk * args.key_dim)),
        dbeta(scratch->take(delta_chunk)),
        states(scratch->take(chunks * args.value_heads / args.key_heads * args.key_dim * args.value_dim)) {}
};

template <class T>
struct Backward {
  const mimo_gated_delta_backward_args& args;
  const DeltaTask& task;
  BackwardTiles& t;
  DeltaSums* sums;
  const int64_t dk = args.key_dim, dv = args.value_dim, state_floats = task.heads * dk * dv;

  void run() {
    const int64_t chunks = (task.last - task.first + delta_chunk - 1) / delta_chunk;
    keep_states(chunks);
    std::memset(t.dstates, 0, static_cast<size_t>(state_floats) * sizeof(float));
    for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
      const int64_t begin = task.first + chunk * delta_chunk, count = smaller(delta_chunk, task.last - begin);
      t.keys.load_keys<T>(args, task, begin, count);
      t.keys.load_queries<T>(args, task, begin, count);
      std::memset(t.dq, 0, static_cast<size_t>(count * dk) * sizeof(float));
      std::memset(t.dk, 0, static_cast<size_t>(count * dk) * sizeof(float));
      for (int64_t index = 0; index < task.heads; ++index) head_chunk(index, begin, count, t.states + chunk * state_floats);
      store_keys(t.dq, t.keys.q, t.keys.q_factor, 1.0f / std::sqrt(static_cast<float>(dk)), begin, count, static_cast<T*>(args.dq));
      store_keys(t.dk, t.keys.k, t.keys.k_factor, 1.0f, begin, count, static_cast<T*>(args.dk));
    }
  }

  /// The states at the start of every chunk.
  void keep_states(int64_t chunks) {
    if (chunks == 0) return;
    std::memset(t.states, 0, static_cast<size_t>(state_floats) * sizeof(float));
    for (int64_t chunk = 0; chunk + 1 < chunks; ++chunk) {
      float* const from = t.states + chunk * state_floats;
      const int64_t begin = task.first + chunk * delta_chunk;
      t.keys.load_keys<T>(args, task, begin, delta_chunk);
      std::memcpy(from + state_floats, from, static_cast<size_t>(state_floats) * sizeof(float));
      for (int64_t index = 0; index < task.heads; ++index) {
        t.head.write<T>(args, t.keys, task.key_head * task.heads + index, begin, delta_chunk, from + index * dk * dv);
        t.head.advance(t.keys, delta_chunk, dk, dv, from + state_floats + index * dk * dv, t.value);
      }
    }
  }

  void head_chunk(int64_t index, int64_t begin, int64_t count, const float* states) {
    const int64_t head = task.key_head * task.heads + index;
    const float* const state = states + index * dk * dv;
    float* const dstate = t.dstates + index * dk * dv;
    DeltaHead& own = t.head;
    own.write<T>(args, t.keys, head, begin, count, state);
    load_tile(static_cast<const T*>(args.d_o) + (begin * args.value_heads + head) * dv, args.value_heads * dv, count, dv, t.d_o);
    std::memset(t.dsum, 0, sizeof t.dsum);

    // W: from O through Q Kᵀ ⊙ Γ, and from the state at the end.
    times(t.keys.qk, own.gamma, count, t.mixed);
    delta_product({t.mixed, delta_chunk, true}, {t.d_o, dv}, count, count, dv, t.dwritten, dv);
    delta_product({t.keys.k, dk}, {dstate, dv}, count, dk, dv, t.value, dv);
    double at_end = own.total * short_dot(dstate, state, dk * dv);
    for (int64_t i = 0; i < count; ++i) {
      const float share = own.to_end[i] * short_dot(t.value + i * dv, own.written + i * dv, dv);
      at_end += share;
      t.dsum[i] -= share;
      add(own.to_end[i], t.value + i * dv, dv, t.dwritten + i * dv);
    }
    t.dsum[count - 1] += at_end;
    delta_product({own.written, dv}, {dstate, dv, true}, count, dv, dk, t.key, dk);
    for (int64_t i = 0; i < count; ++i) add(own.to_end[i], t.key + i * dk, dk, t.dk + i * dk);

    // Q Kᵀ ⊙ Γ.
    delta_product({t.d_o, dv}, {own.written, dv, true}, count, dv, count, t.pair, delta_chunk);
    times(t.pair, own.gamma, count, t.pair);
    delta_product({t.pair, delta_chunk}, {t.keys.k, dk}, count, count, dk, t.dq, dk, 1, 1);
    delta_product({t.pair, delta_chunk, true}, {t.keys.q, dk}, count, count, dk, t.dk, dk, 1, 1);
    times(t.pair, t.keys.qk, count, t.pair);
    for (int64_t i = 0; i < count; ++i) differ(i, count, 1.0f);

    // The triangular system: its right side and A.
    own.solve_transposed(count, dv, t.dwritten);
    delta_product({t.dwritten, dv}, {own.written, dv, true}, count, dv, count, t.pair, delta_chunk, -1);
    for (int64_t i = 0; i < count; ++i) {
      t.dbeta[i] = short_dot(t.dwritten + i * dv, own.error + i * dv, dv);
      for (int64_t j = i; j < count; ++j) t.pair[i * delta_chunk + j] = 0;
    }
    times(t.pair, own.gamma, count, t.pair);
    scale_pairs(own.beta, count);
    delta_product({t.mixed, delta_chunk}, {t.keys.k, dk}, count, count, dk, t.dk, dk, 1, 1);
    delta_product({t.mixed, delta_chunk, true}, {t.keys.k, dk}, count, count, dk, t.dk, dk, 1, 1);
    times(t.pair, t.keys.kk, count, t.pair);
    for (int64_t i = 0; i < count; ++i) {
      t.dbeta[i] += differ(i, count, own.beta[i]);
    }

    // The gradients of V and of e^b K S follow from dwritten, that of e^b Q S from dO.
    scale_rows(t.dwritten, own.beta, count, dv, t.dwritten, dv);
    for (int64_t i = 0; i < count; ++i) {
      T* const to = static_cast<T*>(args.dv) + (begin + i) * args.dqkv_stride + head * dv;
      const float* const from = t.dwritten + i * dv;
      short_loop(dv, [=](int64_t c) { store(&to[c], from[c]); });
    }
    through_state(t.d_o, state, own.from_start, t.keys.q, 1.0f, count, t.dq);
    through_state(t.dwritten, state, own.from_start, t.keys.k, -1.0f, count, t.dk);
    scale_rows(t.d_o, own.from_start, count, dv, t.d_o, dv);
    scale_rows(t.dwritten, own.from_start, count, dv, t.dwritten, dv);
    delta_product({t.keys.q, dk, true}, {t.d_o, dv}, dk, count, dv, dstate, dv, 1, own.total);
    delta_product({t.keys.k, dk, true}, {t.dwritten, dv}, dk, count, dv, dstate, dv, -1, 1);
    store_decays(head, begin, count);
  }

  /// Gradients through ± e^b x S: of x, and of b.
  void through_state(const float* dy, const float* state, const float* decay, const float* x, float sign, int64_t count, float* dx) {
    delta_product({dy, dv}, {state, dv, true}, count, dv, dk, t.key, dk, sign);
    for (int64_t i = 0; i < count; ++i) {
      t.dsum[i] += decay[i] * short_dot(t.key + i * dk, x + i * dk, dk);
      add(decay[i], t.key + i * dk, dk, dx + i * dk);
    }
  }

  /// db of row i from its terms x_ij = dP_ij P_ij / factor; returns Σ_j x_ij.
  float differ(int64_t i, int64_t count, float factor) {
    const float* const row = t.pair + i * delta_chunk;
    double* const sums_of_columns = t.dsum;
    const double exact = factor;
    double total = 0;
    for (int64_t j = 0; j <= i; ++j) total += row[j];
    short_loop(count, [=](int64_t j) { sums_of_columns[j] -= exact * row[j]; });
    t.dsum[i] += exact * total;
    return static_cast<float>(total);
  }

  /// mixed_ij = factor_i pair_ij.
  void scale_pairs(const float* factor, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      float* const to = t.mixed + i * delta_chunk;
      const float* const from = t.pair + i * delta_chunk;
      const float f = factor[i];
      short_loop(count, [=](int64_t j) { to[j] = f * from[j]; });
    }
  }

  /// to = x y of tiles of pairs.
  static void times(const float* x, const float* y, int64_t count, float* to) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = i * delta_chunk;
      short_loop(count, [=](int64_t j) { to[row + j] = x[row + j] * y[row + j]; });
    }
  }

  static void add(float factor, const float* from, int64_t width, float* to) {
    short_loop(width, [=](int64_t c) { to[c] += factor * from[c]; });
  }

  /// Gradients of b, a, dt_bias and A_log from those of β and of the cumulative sum.
  void store_decays(int64_t head, int64_t begin, int64_t count) {
    const float rate = -std::exp(args.a_log[head]);
    DeltaSums& sum = sums[head];
    double running = 0;
    for (int64_t i = count - 1; i >= 0; --i) {
      const DeltaHead& own = t.head;
      const int64_t at = (begin + i) * args.dba_stride + head;
      running += t.dsum[i];
      const float da = static_cast<float>(running) * rate * sigmoid(own.argument[i]);
      store(static_cast<T*>(args.da) + at, da);
      store(static_cast<T*>(args.db) + at, t.dbeta[i] * own.beta[i] * (1.0f - own.beta[i]));
      sum.dt_bias += da;
      sum.a_log += running * own.g[i];
    }
  }

  /// Through the normalisation: x̂ = x f, dx = f (dx̂ − x̂ (x̂·dx̂)), where x̂ and dx̂ are of `scale` x̂.
  void store_keys(const float* dx, const float* x, const float* factor, float scale, int64_t begin, int64_t count, T* out) {
    for (int64_t i = 0; i < count; ++i) {
      const float *const gradient = dx + i * dk, *const unit = x + i * dk;
      const float along = short_dot(gradient, unit, dk) / scale, f = factor[i];
      T* const to = out + (begin + i) * args.dqkv_stride + task.key_head * dk;
      short_loop(dk, [=](int64_t c) { store(&to[c], f * (scale * gradient[c] - unit[c] * along)); });
    }
  }
};

}  // namespace

void gated_delta_backward(mimo_stream& stream, const mimo_gated_delta_backward_args& args) {
  MIMO_REQUIRE(args.key_heads > 0 && args.value_heads % args.key_heads == 0, "gated_delta_backward");
  MIMO_REQUIRE(args.key_dim > 0 && args.value_dim > 0, "gated_delta_backward");
  if (args.tokens == 0) return;
  const int64_t chunks = (delta_longest(args) + delta_chunk - 1) / delta_chunk;
  SsdScratch counted{nullptr};
  BackwardTiles{&counted, args, chunks};
  const int64_t sum_bytes = args.sequences * args.value_heads * static_cast<int64_t>(sizeof(DeltaSums));
  Workspace sum_space(&stream, sum_bytes);
  DeltaSums* const sums = sum_space.as<DeltaSums>();
  std::memset(sum_space.as<char>(), 0, static_cast<size_t>(sum_bytes));
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    ssd_run_tasks(stream, args.sequences * args.key_heads, counted.used, [&](int64_t index, float* memory) {
      SsdScratch scratch{memory};
      BackwardTiles tiles(&scratch, args, chunks);
      const DeltaTask task = delta_task(args, index);
      Backward<T>{args, task, tiles, sums + task.sequence * args.value_heads}.run();
    });
  });
  for (int64_t head = 0; head < args.value_heads; ++head) {
    DeltaSums sum{0, 0};
    for (int64_t s = 0; s < args.sequences; ++s) {
      sum.dt_bias += sums[s * args.value_heads + head].dt_bias;
      sum.a_log += sums[s * args.value_heads + head].a_log;
    }
    if (args.ddt_bias != nullptr) args.ddt_bias[head] += static_cast<float>(sum.dt_bias);
    if (args.da_log != nullptr) args.da_log[head] += static_cast<float>(sum.a_log);
  }
}

}  // namespace mimo::MIMO_ISA
