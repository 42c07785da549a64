// Chunk-scan (SSD) backward of a task (docs/spec/language-model.md §2.4): a forward pass over its sequence recomputes
// the state at the start of each chunk, then a backward pass carries the gradient of the state. Symbols as in the
// specification: w is the gradient of Δ x, c_i and b_j the terms of dC and dB that pass through states, E = dG ∘ G.
#pragma once
#include <initializer_list>

#include "ssd.h"

namespace mimo::MIMO_ISA {

/// Scratch memory of a task: a chunk's matrices, and the gradient of the states.
struct SsdBackwardTiles {
  float *b, *c, *db, *dc;                  // [Q, N]
  float *bt, *ct, *dbt, *dct, *through;    // [N, Q]
  float *g, *decay, *mixed, *dscore, *dg;  // [Q, row_width]
  float *x, *dy;                           // heads x [Q, P]
  float *w, *scaled;                       // [Q, P]
  float *xt, *scaled_t;                    // [P, Q]
  float* dstate;                           // heads x [N, P]: gradient of the state after the chunk
  float *c_dot, *b_dot, *x_dot, *da, *column_sum;  // [row_width]
  SsdDecays decays;

  SsdBackwardTiles(SsdScratch* s, const SsdPlan& plan) : decays(s, plan) {
    for (float** tile : {&b, &c, &db, &dc, &bt, &ct, &dbt, &dct, &through}) {
      *tile = s->take(plan.chunk * plan.state_dim);
    }
    for (float** tile : {&g, &decay, &mixed, &dscore, &dg}) *tile = s->take(plan.chunk * plan.row_width);
    for (float** tile : {&w, &scaled, &xt, &scaled_t}) *tile = s->take(plan.chunk * plan.head_dim);
    for (float** tile : {&x, &dy}) *tile = s->take(ssd_most_heads(plan) * plan.chunk * plan.head_dim);
    dstate = s->take(ssd_most_heads(plan) * plan.head_dim * plan.state_dim);
    for (float** vector : {&c_dot, &b_dot, &x_dot, &da, &column_sum}) *vector = s->take(plan.row_width);
  }
};

/// Sums over one sequence's tokens for one head.
struct SsdHeadSums {
  double d, a_log, dt_bias;
};

/// Destination of dB and dC if several tasks share a group: fp32 sums over this task's heads.
struct SsdGroupPartials {
  float *db, *dc;  // [T, G N] of each block, or null
};

/// Computes the gradients of a task's inputs, and its part of the sums that tasks share.
template <class T>
struct SsdTaskBackward {
  const mimo_ssd_backward_args& args;
  const SsdPlan& plan;
  const SsdTask& task;
  SsdBackwardTiles& tiles;
  float* states;      // [chunks - 1, heads, N, P]: the state at the start of every chunk but the first
  SsdHeadSums* sums;  // of the task's sequence, all heads

  int64_t n() const { return plan.state_dim; }
  int64_t p() const { return plan.head_dim; }
  float decay_rate(int64_t head) const { return -std::exp(args.a_log[head]); }
  float* state(int64_t chunk, int64_t index) const {
    return states + ((chunk - 1) * task.heads + index) * p() * n();
  }
  void compute_decays(int64_t head, int64_t begin, int64_t count) const {
    tiles.decays.compute(static_cast<const T*>(args.dt) + begin * args.dt_stride + head, args.dt_stride, count,
                         args.dt_bias[head], args.dt_minimum, decay_rate(head));
  }
  void load_group(const void* from, int64_t begin, int64_t count, float* tile) const {
    load_tile(static_cast<const T*>(from) + begin * args.xbc_stride + task.group * n(), args.xbc_stride, count, n(),
              tile);
  }
  float* x(int64_t index) const { return tiles.x + index * plan.chunk * p(); }
  float* dy(int64_t index) const { return tiles.dy + index * plan.chunk * p(); }

  /// Loads x of all heads row by row: a row of the head block is long enough for hardware prefetching.
  void load_x(int64_t begin, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      const T* row = static_cast<const T*>(args.x) + (begin + i) * args.xbc_stride + task.head * p();
      if (i + 1 < count) prefetch(row + args.xbc_stride, task.heads * p());
      for (int64_t index = 0; index < task.heads; ++index) load_tile(row + index * p(), 0, 1, p(), x(index) + i * p());
    }
  }

  /// H_{c+1} = exp(cs_Q) H_c + Bᵀ (exp(cs_Q - cs) Δ X), transposed, for every chunk but the last.
  void recompute_states() const {
    int64_t chunk = 1;
    for (int64_t begin = task.first; begin + plan.chunk < task.last; begin += plan.chunk, ++chunk) {
      load_group(args.b, begin, plan.chunk, tiles.b);
      load_x(begin, plan.chunk);
      for (int64_t index = 0; index < task.heads; ++index) {
        compute_decays(task.head + index, begin, plan.chunk);
        scale_rows(x(index), tiles.decays.into_state, plan.chunk, p(), tiles.scaled, p());
        float* next = state(chunk, index);
        if (chunk > 1) {
          const float* previous = state(chunk - 1, index);
          const float total = tiles.decays.total;
#pragma omp simd
          for (int64_t i = 0; i < p() * n(); ++i) next[i] = total * previous[i];
        }
        const Product step{tiles.b, tiles.scaled, next, plan.chunk, n(), p(), p(), 1.0f, chunk > 1 ? 1.0f : 0.0f,
                           true,    false};
        product(step, 0, n(), 0, p());
      }
    }
  }

  /// Backward of the gate for all heads: writes dz, fills the tiles of dy, adds to dD.
  void gate(int64_t begin, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = begin + i;
      if (i + 1 < count) {
        const int64_t width = task.heads * p(), column = task.head * p();
        const int64_t next = (row + 1) * args.heads * p() + column;
        prefetch(static_cast<const T*>(args.d_o) + next, width);
        prefetch(static_cast<const T*>(args.y) + next, width);
        prefetch(static_cast<const T*>(args.z) + (row + 1) * args.z_stride + column, width);
      }
      for (int64_t index = 0; index < task.heads; ++index) {
        const int64_t column = (task.head + index) * p(), at = row * args.heads * p() + column;
        const T *d_o = static_cast<const T*>(args.d_o) + at, *y = static_cast<const T*>(args.y) + at;
        const T* z = static_cast<const T*>(args.z) + row * args.z_stride + column;
        T* dz = static_cast<T*>(args.dz) + row * args.dz_stride + column;
        const float* factors = args.z_factors == nullptr ? nullptr : args.z_factors + column;
        float* to = dy(index) + i * p();
        with_factors(factors, [=, width = p()](auto factor) {
          short_loop(width, [=](int64_t k) {
            const float m = factor(k), gate = m * load(z[k]), s = sigmoid(gate), gradient = load(d_o[k]);
            to[k] = gradient * gate * s;
            store(&dz[k], m * (gradient * load(y[k]) * s * (1.0f + gate * (1.0f - s))));
          });
        });
      }
    }
    for (int64_t index = 0; index < task.heads; ++index) {
      sums[task.head + index].d += short_dot(dy(index), x(index), count * p());
    }
  }

  /// decay = L and mixed = G ∘ L up to the end of the row's block, zero above the diagonal; dscore = dY Xᵀ.
  void score_tiles(int64_t index, int64_t count) const {
    ssd_decay_vectors(tiles.decays, count, [&](int64_t i, int64_t j, Vector l) {
      const int64_t at = i * plan.row_width + j;
      store_vector(tiles.decay + at, l);
      store_vector(tiles.mixed + at, l != 0.0f ? l * load_vector(tiles.g + at) : Vector{});
    });
    transpose(x(index), p(), count, p(), tiles.xt);
    const Product dscore{dy(index), tiles.xt, tiles.dscore, p(), p(), count, plan.row_width, 1.0f, 0.0f, false, false};
    for (int64_t row = 0; row < count; row += ssd_row_block) {
      const int64_t end = smaller(row + ssd_row_block, count);
      product(dscore, row, end - row, 0, end);
    }
  }

  /// w = exp(cs_Q - cs_j) dS B_j + Σ_{i>=j} mixed_ij dy_i; b_dot = b_j · B_j; dB += b_j; x_dot = w · x; writes dx.
  void input_gradient(int64_t index, int64_t begin, int64_t count, bool has_next) const {
    const SsdDecays& decays = tiles.decays;
    const int64_t head = task.head + index;
    float* dstate = tiles.dstate + index * p() * n();
    if (has_next) {
      const Product after{tiles.b, dstate, tiles.w, n(), n(), p(), p(), 1.0f, 0.0f, false, false};
      product(after, 0, count, 0, p());
      row_dots(tiles.w, x(index), count, p(), tiles.b_dot);
      for (int64_t j = 0; j < count; ++j) tiles.b_dot[j] *= decays.into_state[j];
      scale_rows(tiles.w, decays.to_end, count, p(), tiles.w, p());
      scale_columns(tiles.xt, decays.into_state, p(), count, tiles.scaled_t);
      const Product dbt{dstate, tiles.scaled_t, tiles.dbt, p(), p(), count, count, 1.0f, 1.0f, false, false};
      product(dbt, 0, n(), 0, count);
    }
    for (int64_t row = 0; row < count; row += ssd_row_block) {
      const int64_t end = smaller(row + ssd_row_block, count);
      const Product within{tiles.mixed + row * plan.row_width,
                           dy(index) + row * p(),
                           tiles.w,
                           count - row,
                           plan.row_width,
                           p(),
                           p(),
                           1.0f,
                           has_next ? 1.0f : 0.0f,
                           true,
                           false};
      product(within, row, end - row, 0, p());
    }
    row_dots(tiles.w, x(index), count, p(), tiles.x_dot);
    const float d = args.d[head];
    for (int64_t j = 0; j < count; ++j) {
      T* dx = static_cast<T*>(args.dx) + (begin + j) * args.dxbc_stride + head * p();
      const float *w = tiles.w + j * p(), *gradient = dy(index) + j * p();
      const float step = decays.step[j];
      short_loop(p(), [=](int64_t k) { store(&dx[k], step * w[k] + d * gradient[k]); });
    }
  }

  /// c_dot = c_i · C_i, dC += c_i; carries the gradient of the state to the start of the chunk. Returns exp(cs_Q) ⟨dS,
  /// H⟩, which is added to the gradient of every decay of the chunk.
  float state_gradient(int64_t index, int64_t chunk, int64_t count, bool has_next) const {
    float *dstate = tiles.dstate + index * p() * n(), *before = state(chunk, index);
    const float total = tiles.decays.total;
    const float carried = has_next ? total * short_dot(dstate, before, p() * n()) : 0.0f;
    scale_rows(dy(index), tiles.decays.from_start, count, p(), tiles.scaled, p());
    transpose(tiles.scaled, p(), count, p(), tiles.scaled_t);
    const Product through{before, tiles.scaled_t, tiles.through, p(), p(), count, count, 1.0f, 0.0f, false, false};
    product(through, 0, n(), 0, count);
    for (int64_t i = 0; i < count; ++i) tiles.c_dot[i] = 0;
    for (int64_t k = 0; k < n(); ++k) {
      const float *row = tiles.through + k * count, *c = tiles.ct + k * count;
      float *dc = tiles.dct + k * count, *sum = tiles.c_dot;
      short_loop(count, [=](int64_t i) {
        dc[i] += row[i];
        sum[i] += row[i] * c[i];
      });
    }
    const Product next{tiles.ct, tiles.scaled, dstate, count, count, p(), p(), 1.0f, has_next ? total : 0.0f,
                       false,    false};
    product(next, 0, n(), 0, p());
    return carried;
  }

  /// dg += L ∘ dscore ∘ Δ, da_k = Σ_{i>=k} Σ_{j<k} E_ij. Rows are visited last to first; column_sum_j holds Σ_{i>=k}
  /// E_ij.
  void score_gradient(int64_t count) const {
    float* column_sum = tiles.column_sum;
    const float* step = tiles.decays.step;
    for (int64_t j = 0; j < plan.row_width; ++j) column_sum[j] = 0;
    const Vector numbers = lane_numbers();
    Vector sums[4] = {};  // of four rows, which share a lane reduction
    for (int64_t i = count - 1; i >= 0; --i) {
      const int64_t offset = i * plan.row_width, width = round_up(i + 1, ssd_vector);
      const float *g = tiles.g + offset, *decay = tiles.decay + offset, *dscore = tiles.dscore + offset;
      float* dg = tiles.dg + offset;
      short_loop(width, [=](int64_t j) {
        const float gradient = dscore[j] * step[j] * decay[j];
        dg[j] += gradient;
        column_sum[j] += gradient * g[j];
      });
      Vector& sum = sums[i % 4];
      int64_t j = 0;
      for (sum = Vector{}; j + lanes <= i; j += lanes) sum += load_vector(column_sum + j);
      sum += numbers < static_cast<float>(i - j) ? load_vector(column_sum + j) : Vector{};
      if (i % 4 == 0) _mm_storeu_ps(tiles.da + i, four_sums(sums));
    }
  }

  /// Adds the terms that pass through states to da, then computes dΔ and the gradients of dt.
  void step_gradient(int64_t head, int64_t begin, int64_t count, bool has_state, bool has_next, float carried) const {
    if (has_state) {
      float later = carried;
      for (int64_t i = count - 1; i >= 0; --i) tiles.da[i] += later += tiles.c_dot[i];
    }
    if (has_next) {
      float earlier = 0;
      for (int64_t i = 0; i < count; ++i) {
        tiles.da[i] += earlier;
        earlier += tiles.b_dot[i];
      }
    }
    const float a = decay_rate(head);
    const SsdDecays& decays = tiles.decays;
    float da_sum = 0, bias_sum = 0;
    T* ddt = static_cast<T*>(args.ddt) + begin * args.ddt_stride + head;
    float* const slope = tiles.column_sum;
    // Where Δ is clamped to its minimum the gradient is 0.
    short_loop(round_up(count, ssd_vector), [=, &decays, minimum = args.dt_minimum](int64_t i) {
      slope[i] = decays.step[i] <= minimum ? 0.0f : sigmoid(decays.argument[i]);
    });
    for (int64_t i = 0; i < count; ++i) {
      const float gradient = (tiles.x_dot[i] + a * tiles.da[i]) * slope[i];
      da_sum += tiles.da[i] * decays.step[i];
      bias_sum += gradient;
      store(&ddt[i * args.ddt_stride], gradient);
    }
    sums[head].a_log += static_cast<double>(da_sum) * a;
    sums[head].dt_bias += bias_sum;
  }

  /// dC += dG B and dB += dGᵀ C, then written to the outputs or to the task's partial sums.
  void group_gradient(int64_t begin, int64_t count, const SsdGroupPartials& partials) const {
    transpose(tiles.dbt, count, n(), count, tiles.db);
    transpose(tiles.dct, count, n(), count, tiles.dc);
    for (int64_t row = 0; row < count; row += ssd_row_block) {
      const int64_t end = smaller(row + ssd_row_block, count), offset = row * plan.row_width;
      const Product dc{tiles.dg, tiles.b, tiles.dc, end, plan.row_width, n(), n(), 1.0f, 1.0f, false, false};
      product(dc, row, end - row, 0, n());
      const Product db{tiles.dg + offset, tiles.c + row * n(), tiles.db, count - row, plan.row_width, n(), n(), 1.0f,
                       1.0f,              true,                false};
      product(db, row, end - row, 0, n());
    }
    const int64_t column = task.group * n();
    for (int64_t i = 0; i < count; ++i) {
      const float *db = tiles.db + i * n(), *dc = tiles.dc + i * n();
      if (partials.db != nullptr) {
        const int64_t at = (begin + i) * args.groups * n() + column;
        std::memcpy(partials.db + at, db, static_cast<size_t>(n()) * sizeof(float));
        std::memcpy(partials.dc + at, dc, static_cast<size_t>(n()) * sizeof(float));
        continue;
      }
      T* to_b = static_cast<T*>(args.db) + (begin + i) * args.dxbc_stride + column;
      T* to_c = static_cast<T*>(args.dc) + (begin + i) * args.dxbc_stride + column;
#pragma omp simd
      for (int64_t k = 0; k < n(); ++k) store(&to_b[k], db[k]);
#pragma omp simd
      for (int64_t k = 0; k < n(); ++k) store(&to_c[k], dc[k]);
    }
  }

  void run(const SsdGroupPartials& partials) const {
    for (int64_t head = task.head; head < task.head + task.heads; ++head) sums[head] = SsdHeadSums{0, 0, 0};
    if (task.first == task.last) return;
    recompute_states();
    for (int64_t chunk = (task.last - task.first - 1) / plan.chunk; chunk >= 0; --chunk) {
      const int64_t begin = task.first + chunk * plan.chunk, count = smaller(plan.chunk, task.last - begin);
      const bool has_state = chunk > 0, has_next = begin + count < task.last;
      load_group(args.b, begin, count, tiles.b);
      load_group(args.c, begin, count, tiles.c);
      transpose(tiles.b, n(), count, n(), tiles.bt);
      transpose(tiles.c, n(), count, n(), tiles.ct);
      ssd_scores(tiles.bt, tiles.c, count, plan, tiles.g);
      std::memset(tiles.dbt, 0, static_cast<size_t>(count * n()) * sizeof(float));
      std::memset(tiles.dct, 0, static_cast<size_t>(count * n()) * sizeof(float));
      std::memset(tiles.dg, 0, static_cast<size_t>(count * plan.row_width) * sizeof(float));
      load_x(begin, count);
      gate(begin, count);
      for (int64_t index = 0; index < task.heads; ++index) {
        const int64_t head = task.head + index;
        compute_decays(head, begin, count);
        score_tiles(index, count);
        input_gradient(index, begin, count, has_next);
        const float carried = has_state ? state_gradient(index, chunk, count, has_next) : 0.0f;
        score_gradient(count);
        step_gradient(head, begin, count, has_state, has_next, carried);
      }
      group_gradient(begin, count, partials);
    }
  }
};

}  // namespace mimo::MIMO_ISA
