// Biases of experts (docs/spec/moe-performance.md §1.6): y = x + factor_row * bias_group, and its gradients.
#include "kernel.h"

namespace mimo::MIMO_ISA {
namespace {

/// Groups of rows of an operation; without offsets all rows are one group.
template <class Args>
struct Groups {
  const Args& args;

  int64_t begin(int64_t group) const { return args.offsets == nullptr ? 0 : args.offsets[group]; }
  int64_t end(int64_t group) const { return args.offsets == nullptr ? args.rows : args.offsets[group + 1]; }

  void require_legal() const {
    MIMO_REQUIRE(args.groups >= 1 && args.rows >= 0 && args.width >= 0, "grouped_bias");
    MIMO_REQUIRE(args.offsets != nullptr || args.groups == 1, "grouped_bias");
    MIMO_REQUIRE(end(args.groups - 1) <= args.rows, "grouped_bias");
  }

  /// Calls body(row, group) for each row of each group, in runs on the pool's threads.
  template <class Body>
  void each_row(mimo_stream& stream, Body&& body) const {
    const int64_t first = begin(0), last = end(args.groups - 1);
    parallel_range(stream.device->threads, last - first, rows_per_partial, [&](int64_t from, int64_t to) {
      int64_t group = 0;
      for (int64_t row = first + from; row < first + to; ++row) {
        while (row >= end(group)) ++group;
        body(row, group);
      }
    });
  }
};

constexpr int64_t columns_per_task = 256;

/// dbias += Σ factor * dy over a group's rows, for up to columns_per_task columns.
template <class T>
void add_bias_gradient(const T* dy, const float* factor, int64_t begin, int64_t end, int64_t width, int64_t columns,
                       float* dbias) {
  for (int64_t run = begin; run < end; run += rows_per_partial) {
    const int64_t last = run + rows_per_partial < end ? run + rows_per_partial : end;
    float sum[columns_per_task] = {};
    for (int64_t row = run; row < last; ++row) {
      const float weight = factor == nullptr ? 1.0f : factor[row];
      const T* from = dy + row * width;
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) sum[i] += weight * load(from[i]);
    }
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) dbias[i] += sum[i];
  }
}

}  // namespace

void grouped_bias_forward(mimo_stream& stream, const mimo_grouped_bias_forward_args& args) {
  const Groups<mimo_grouped_bias_forward_args> groups{args};
  groups.require_legal();
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    groups.each_row(stream, [&](int64_t row, int64_t group) {
      const T* bias = static_cast<const T*>(args.bias) + group * args.width;
      const float factor = args.factor == nullptr ? 1.0f : args.factor[row];
      T* y = static_cast<T*>(args.y) + row * args.width;
#pragma omp simd
      for (int64_t i = 0; i < args.width; ++i) store(&y[i], load(y[i]) + factor * load(bias[i]));
    });
  });
}

void grouped_bias_backward(mimo_stream& stream, const mimo_grouped_bias_backward_args& args) {
  const Groups<mimo_grouped_bias_backward_args> groups{args};
  groups.require_legal();
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const T* dy = static_cast<const T*>(args.dy);
    if (args.dbias != nullptr) {
      const int64_t tasks = (args.width + columns_per_task - 1) / columns_per_task;
      parallel_for(stream.device->threads, args.groups * tasks, [&](int64_t task) {
        const int64_t group = task / tasks, column = task % tasks * columns_per_task;
        const int64_t columns = args.width - column < columns_per_task ? args.width - column : columns_per_task;
        add_bias_gradient(dy + column, args.factor, groups.begin(group), groups.end(group), args.width, columns,
                          args.dbias + group * args.width + column);
      });
    }
    if (args.dfactor == nullptr) return;
    groups.each_row(stream, [&](int64_t row, int64_t group) {
      const T* from = dy + row * args.width;
      const T* bias = static_cast<const T*>(args.bias) + group * args.width;
      const float sum = sum_over(args.width, [=](int64_t i) { return load(from[i]) * load(bias[i]); });
      args.dfactor[row] = args.accumulate_dfactor != 0 ? args.dfactor[row] + sum : sum;
    });
  });
}

}  // namespace mimo::MIMO_ISA
