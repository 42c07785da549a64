// Chunk-scan (SSD) forward (docs/spec/language-model.md §2.3), with two products for each head and chunk:
//
//   Y = [exp(cs) C | (C Bᵀ) ∘ L ∘ Δ] [Hᵀ ; X]      from the state and within the chunk
//   Hᵀ = exp(cs_Q) Hᵀ + Bᵀ (exp(cs_Q - cs) Δ X)    the state for the next chunk
//
// Hᵀ and X are adjacent in scratch memory, so that Y is one product over N + Q columns.
#include "ssd.h"

namespace mimo::MIMO_ISA {
namespace {

struct Tiles {
  float *b, *c;      // [Q, N]
  float* bt;         // [N, Q]
  float* g;          // [Q, row_width]
  float* left;       // [Q, N + row_width]
  float* right;      // heads x [N + Q, P]
  float* scaled;     // [Q, P]
  float* y;          // [Q, heads P]
  SsdDecays decays;

  Tiles(SsdScratch* scratch, const SsdPlan& plan)
      : b(scratch->take(plan.chunk * plan.state_dim)),
        c(scratch->take(plan.chunk * plan.state_dim)),
        bt(scratch->take(plan.chunk * plan.state_dim)),
        g(scratch->take(plan.chunk * plan.row_width)),
        left(scratch->take(plan.chunk * (plan.state_dim + plan.row_width))),
        right(scratch->take(ssd_most_heads(plan) * (plan.state_dim + plan.chunk) * plan.head_dim)),
        scaled(scratch->take(plan.chunk * plan.head_dim)),
        y(scratch->take(plan.chunk * ssd_most_heads(plan) * plan.head_dim)),
        decays(scratch, plan) {}
};

/// left[i][N + j] = g_ij exp(cs_i - cs_j) Δ_j for j <= i, zeros up to the end of the row's block.
void mix(const Tiles& tiles, const SsdPlan& plan, int64_t count) {
  const int64_t stride = plan.state_dim + plan.row_width;
  ssd_decay_vectors(tiles.decays, count, [&](int64_t i, int64_t j, Vector l) {
    const Vector mixed = load_vector(tiles.g + i * plan.row_width + j) * l * load_vector(tiles.decays.step + j);
    store_vector(tiles.left + i * stride + plan.state_dim + j, l != 0.0f ? mixed : Vector{});
  });
}

template <class T>
struct Forward {
  const mimo_ssd_forward_args& args;
  const SsdPlan& plan;
  const SsdTask& task;
  Tiles& tiles;

  int64_t n() const { return plan.state_dim; }
  int64_t p() const { return plan.head_dim; }
  float* state(int64_t index) const { return tiles.right + index * (n() + plan.chunk) * p(); }
  float* x_tile(int64_t index) const { return state(index) + n() * p(); }

  /// Loads x of all heads row by row: a row of the head block is long enough for hardware prefetching.
  void load_x(int64_t begin, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      const T* row = static_cast<const T*>(args.x) + (begin + i) * args.xbc_stride + task.head * p();
      if (i + 1 < count) prefetch(row + args.xbc_stride, task.heads * p());
      for (int64_t index = 0; index < task.heads; ++index) load_tile(row + index * p(), 0, 1, p(), x_tile(index) + i * p());
    }
  }

  void head_chunk(int64_t index, int64_t begin, int64_t count) const {
    const int64_t head = task.head + index, left_stride = n() + plan.row_width;
    const bool has_state = begin > task.first, has_next = begin + count < task.last || args.final_state != nullptr;
    SsdDecays& decays = tiles.decays;
    decays.compute(static_cast<const T*>(args.dt) + begin * args.dt_stride + head, args.dt_stride, count,
                   args.dt_bias[head], args.dt_minimum, -std::exp(args.a_log[head]));
    mix(tiles, plan, count);
    if (has_state) scale_rows(tiles.c, decays.from_start, count, n(), tiles.left, left_stride);
    const int64_t skipped = has_state ? 0 : n(), y_stride = task.heads * p();
    for (int64_t row = 0; row < count; row += ssd_row_block) {
      const int64_t end = smaller(row + ssd_row_block, count);
      const Product y{tiles.left + skipped,
                      state(index) + skipped * p(),
                      tiles.y + index * p(),
                      n() - skipped + end,
                      left_stride,
                      p(),
                      y_stride,
                      1.0f,
                      0.0f,
                      false,
                      false};
      product(y, row, end - row, 0, p());
    }
    const float* x = x_tile(index);
    const float d = args.d[head];
    for (int64_t i = 0; i < count; ++i) {
      float* y = tiles.y + i * y_stride + index * p();
      const float* from = x + i * p();
      short_loop(p(), [=](int64_t k) { y[k] += d * from[k]; });
    }
    if (!has_next) return;
    scale_rows(x, decays.into_state, count, p(), tiles.scaled, p());
    const Product next{tiles.b, tiles.scaled, state(index), count, n(), p(), p(), 1.0f, has_state ? decays.total : 0.0f,
                       true,    false};
    product(next, 0, n(), 0, p());
  }

  /// o = y silu(z) for all heads of the task, z with its mask factors.
  void gate(int64_t begin, int64_t count) const {
    const int64_t width = task.heads * p(), column = task.head * p(), stride = args.heads * p();
    for (int64_t i = 0; i < count; ++i) {
      const T* z = static_cast<const T*>(args.z) + (begin + i) * args.z_stride + column;
      const float* factors = args.z_factors == nullptr ? nullptr : args.z_factors + column;
      T* o = static_cast<T*>(args.o) + (begin + i) * stride + column;
      const float* y = tiles.y + i * width;
      if (i + 1 < count) prefetch(z + args.z_stride, width);
      if (args.y != nullptr) {
        T* kept = static_cast<T*>(args.y) + (begin + i) * stride + column;
#pragma omp simd
        for (int64_t k = 0; k < width; ++k) store(&kept[k], y[k]);
      }
      with_factors(factors, [=](auto factor) {
#pragma omp simd
        for (int64_t k = 0; k < width; ++k) {
          const float gate = factor(k) * load(z[k]);
          store(&o[k], y[k] * gate * sigmoid(gate));
        }
      });
    }
  }

  void run() const {
    for (int64_t begin = task.first; begin < task.last; begin += plan.chunk) {
      const int64_t count = smaller(plan.chunk, task.last - begin);
      const int64_t offset = begin * args.xbc_stride + task.group * n();
      load_tile(static_cast<const T*>(args.b) + offset, args.xbc_stride, count, n(), tiles.b);
      load_tile(static_cast<const T*>(args.c) + offset, args.xbc_stride, count, n(), tiles.c);
      transpose(tiles.b, n(), count, n(), tiles.bt);
      ssd_scores(tiles.bt, tiles.c, count, plan, tiles.g);
      load_x(begin, count);
      for (int64_t index = 0; index < task.heads; ++index) head_chunk(index, begin, count);
      gate(begin, count);
    }
    if (args.final_state != nullptr) keep_states();
  }

  /// Writes the states after the last token, [P, N] of each head; zeros for an empty sequence.
  void keep_states() const {
    for (int64_t index = 0; index < task.heads; ++index) {
      float* to = args.final_state + (task.sequence * args.heads + task.head + index) * p() * n();
      if (task.first < task.last) transpose(state(index), p(), n(), p(), to);
      else std::memset(to, 0, static_cast<size_t>(p() * n()) * sizeof(float));
    }
  }
};

}  // namespace

void ssd_forward(mimo_stream& stream, const mimo_ssd_forward_args& args) {
  MIMO_REQUIRE(args.groups > 0 && args.heads % args.groups == 0, "ssd_forward");
  MIMO_REQUIRE(args.chunk_size > 0 && args.head_dim > 0 && args.state_dim > 0, "ssd_forward");
  if (args.tokens == 0 || args.heads == 0) {
    const int64_t states = args.sequences * args.heads * args.head_dim * args.state_dim;
    if (args.final_state != nullptr) std::memset(args.final_state, 0, static_cast<size_t>(states) * sizeof(float));
    return;
  }
  const SsdPlan plan = ssd_plan(args);
  SsdScratch counted{nullptr};
  Tiles{&counted, plan};
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    ssd_run_tasks(stream, plan.tasks, counted.used, [&](int64_t index, float* memory) {
      SsdScratch scratch{memory};
      Tiles tiles(&scratch, plan);
      const SsdTask task = ssd_task(args, plan, index);
      Forward<T>{args, plan, task, tiles}.run();
    });
  });
}

}  // namespace mimo::MIMO_ISA
