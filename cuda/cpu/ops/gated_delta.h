// Shared by the gated delta rule's forward and backward (docs/spec/families.md §2.5): a chunk of one key head, and of one of the
// value heads that read it.
//
// A task is one sequence and one key head with its value heads. With b the cumulative sum of g in a chunk, Γ_ij = exp(b_i - b_j),
// A_ij = β_i (k_i·k_j) Γ_ij below the diagonal and S the state at the chunk's start:
//   (I + A) W = diag(β) (V - diag(e^b) K S),  O = diag(e^b) Q S + (Q Kᵀ ⊙ Γ) W,  S ← e^(b_C) S + Kᵀ diag(e^(b_C - b)) W.
#pragma once
#include "ssd.h"

namespace mimo::MIMO_ISA {

/// Tokens of a chunk, and the width of tiles of pairs of tokens.
constexpr int64_t delta_chunk = 64;
/// Rows of a triangular system that are solved one by one; the rows before them are one product.
constexpr int64_t delta_solve_rows = 16;

struct DeltaTask {
  int64_t sequence, first, last;  // tokens
  int64_t key_head, heads;        // value heads of the key head
};

template <class Args>
static inline DeltaTask delta_task(const Args& args, int64_t index) {
  const int64_t sequence = index / args.key_heads;
  return {sequence, args.cu_seqlens[sequence], args.cu_seqlens[sequence + 1], index % args.key_heads,
          args.value_heads / args.key_heads};
}

template <class Args>
static inline int64_t delta_longest(const Args& args) {
  int64_t longest = 0;
  for (int64_t s = 0; s < args.sequences; ++s) longest = std::max<int64_t>(longest, args.cu_seqlens[s + 1] - args.cu_seqlens[s]);
  return longest;
}

/// c [rows, columns] = alpha op(a) op(b) + beta c, with contiguous rows of `columns` in c.
struct DeltaFactor {
  const float* values;
  int64_t stride;
  bool transposed = false;
};
static inline void delta_product(DeltaFactor a, DeltaFactor b, int64_t rows, int64_t k, int64_t columns, float* c, int64_t c_stride,
                                 float alpha = 1, float beta = 0) {
  product(Product{a.values, b.values, c, k, a.stride, b.stride, c_stride, alpha, beta, a.transposed, b.transposed}, 0, rows, 0,
          columns);
}

/// x (Σ x² + 1e-6)^(-1/2) of every row, in place, and the factors.
static inline void delta_normalise(float* x, int64_t rows, int64_t width, float* factor) {
  for (int64_t r = 0; r < rows; ++r) {
    float* const row = x + r * width;
    const float f = factor[r] = 1.0f / std::sqrt(short_dot(row, row, width) + 1e-6f);
    short_loop(width, [=](int64_t i) { row[i] *= f; });
  }
}

/// Normalised keys and queries of a chunk and their products. Queries carry D_k^(-1/2).
struct DeltaKeys {
  float *q, *k, *q_factor, *k_factor, *kk, *qk;

  DeltaKeys(SsdScratch* scratch, int64_t dk)
      : q(scratch->take(delta_chunk * dk)),
        k(scratch->take(delta_chunk * dk)),
        q_factor(scratch->take(delta_chunk)),
        k_factor(scratch->take(delta_chunk)),
        kk(scratch->take(delta_chunk * delta_chunk)),
        qk(scratch->take(delta_chunk * delta_chunk)) {}

  template <class T, class Args>
  void load_keys(const Args& args, const DeltaTask& task, int64_t begin, int64_t count) {
    const int64_t dk = args.key_dim, at = begin * args.qkv_stride + task.key_head * dk;
    load_tile(static_cast<const T*>(args.k) + at, args.qkv_stride, count, dk, k);
    delta_normalise(k, count, dk, k_factor);
    delta_product({k, dk}, {k, dk, true}, count, dk, count, kk, delta_chunk);
  }

  template <class T, class Args>
  void load_queries(const Args& args, const DeltaTask& task, int64_t begin, int64_t count) {
    const int64_t dk = args.key_dim, at = begin * args.qkv_stride + task.key_head * dk;
    load_tile(static_cast<const T*>(args.q) + at, args.qkv_stride, count, dk, q);
    delta_normalise(q, count, dk, q_factor);
    const float scale = 1.0f / std::sqrt(static_cast<float>(dk));
    float* const all = q;
    short_loop(count * dk, [=](int64_t i) { all[i] *= scale; });
    delta_product({q, dk}, {k, dk, true}, count, dk, count, qk, delta_chunk);
  }
};

/// Values of one value head in a chunk.
struct DeltaHead {
  float *argument, *g, *beta;             // a + dt_bias, decay's logarithm, strength of writing
  double sum[delta_chunk];                // b: a strong decay's is large beside the differences that count
  float *from_start, *to_end;             // e^b, e^(b_C - b)
  float total;                            // e^(b_C)
  float *gamma, *a;                       // Γ with its diagonal, A; zero above
  float *error, *written;                 // V - diag(e^b) K S, W

  DeltaHead(SsdScratch* scratch, int64_t dv)
      : argument(scratch->take(delta_chunk)),
        g(scratch->take(delta_chunk)),
        beta(scratch->take(delta_chunk)),
        from_start(scratch->take(delta_chunk)),
        to_end(scratch->take(delta_chunk)),
        total(1),
        gamma(scratch->take(delta_chunk * delta_chunk)),
        a(scratch->take(delta_chunk * delta_chunk)),
        error(scratch->take(delta_chunk * dv)),
        written(scratch->take(delta_chunk * dv)) {}

  /// Everything up to W for value head `head`, from the state at the chunk's start.
  template <class T, class Args>
  void write(const Args& args, const DeltaKeys& keys, int64_t head, int64_t begin, int64_t count, const float* state) {
    const int64_t dk = args.key_dim, dv = args.value_dim, ba = begin * args.ba_stride + head;
    const float rate = -std::exp(args.a_log[head]);
    double running = 0;
    for (int64_t i = 0; i < count; ++i) {
      argument[i] = load(static_cast<const T*>(args.a)[ba + i * args.ba_stride]) + args.dt_bias[head];
      beta[i] = sigmoid(load(static_cast<const T*>(args.b)[ba + i * args.ba_stride]));
      g[i] = rate * softplus(argument[i]);
      sum[i] = running += g[i];
    }
    for (int64_t i = 0; i < count; ++i) {
      from_start[i] = exp_fast(static_cast<float>(sum[i]));
      to_end[i] = exp_fast(static_cast<float>(running - sum[i]));
      float* const decays = gamma + i * delta_chunk;
      float* const products = a + i * delta_chunk;
      const float strength = beta[i];
      const double own = sum[i];
      const double* const sums = sum;
      const float* const pairs = keys.kk + i * delta_chunk;
      short_loop(i + 1, [=](int64_t j) { decays[j] = exp_fast(static_cast<float>(own - sums[j])); });
      short_loop(i, [=](int64_t j) { products[j] = strength * pairs[j] * decays[j]; });
      for (int64_t j = i + 1; j < count; ++j) decays[j] = 0;
      for (int64_t j = i; j < count; ++j) products[j] = 0;
    }
    total = exp_fast(static_cast<float>(running));
    load_tile(static_cast<const T*>(args.v) + begin * args.qkv_stride + head * dv, args.qkv_stride, count, dv, error);
    delta_product({keys.k, dk}, {state, dv}, count, dk, dv, written, dv);
    for (int64_t i = 0; i < count; ++i) {
      float* const e = error + i * dv;
      float* const w = written + i * dv;
      const float decay = from_start[i], strength = beta[i];
      short_loop(dv, [=](int64_t c) {
        e[c] -= decay * w[c];
        w[c] = strength * e[c];
      });
    }
    solve(count, dv, written);
  }

  /// x ← (I + A)^(-1) x.
  void solve(int64_t count, int64_t dv, float* x) const {
    for (int64_t row = 0; row < count; row += delta_solve_rows) {
      const int64_t end = smaller(row + delta_solve_rows, count);
      if (row > 0) delta_product({a + row * delta_chunk, delta_chunk}, {x, dv}, end - row, row, dv, x + row * dv, dv, -1, 1);
      for (int64_t i = row + 1; i < end; ++i) {
        for (int64_t j = row; j < i; ++j) subtract(a[i * delta_chunk + j], x + j * dv, dv, x + i * dv);
      }
    }
  }

  /// x ← (I + A)^(-T) x.
  void solve_transposed(int64_t count, int64_t dv, float* x) const {
    for (int64_t row = (count - 1) / delta_solve_rows * delta_solve_rows; row >= 0; row -= delta_solve_rows) {
      const int64_t end = smaller(row + delta_solve_rows, count);
      if (end < count) {
        delta_product({a + end * delta_chunk + row, delta_chunk, true}, {x + end * dv, dv}, end - row, count - end, dv, x + row * dv,
                      dv, -1, 1);
      }
      for (int64_t i = end - 2; i >= row; --i) {
        for (int64_t j = i + 1; j < end; ++j) subtract(a[j * delta_chunk + i], x + j * dv, dv, x + i * dv);
      }
    }
  }

  /// The state at the chunk's end; `scaled` is a tile [C, D_v].
  void advance(const DeltaKeys& keys, int64_t count, int64_t dk, int64_t dv, float* state, float* scaled) const {
    scale_rows(written, to_end, count, dv, scaled, dv);
    delta_product({keys.k, dk, true}, {scaled, dv}, dk, count, dv, state, dv, 1, total);
  }

 private:
  static void subtract(float factor, const float* from, int64_t width, float* to) {
    short_loop(width, [=](int64_t c) { to[c] -= factor * from[c]; });
  }
};

}  // namespace mimo::MIMO_ISA
