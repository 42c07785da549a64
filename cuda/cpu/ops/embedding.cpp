// Embedding lookup in a table or a vocabulary shard of it, and the gradient of the table (docs/spec/language-model.md
// §5.1).
#include "kernel.h"

namespace mimo::MIMO_ISA {
namespace {

// Backward is split by columns: each task adds all tokens' gradients of its columns in token order. That needs neither
// atomics nor sorting, and stays balanced if most tokens share one id.
constexpr int64_t columns_per_task = 64;

template <class T>
void scale_row(const T* from, float scale, T* to, int64_t width) {
  if (scale == 1.0f) {
    std::memcpy(to, from, static_cast<size_t>(width) * sizeof(T));
    return;
  }
#pragma omp simd
  for (int64_t c = 0; c < width; ++c) store(&to[c], scale * load(from[c]));
}

}  // namespace

void embedding_forward(mimo_stream& stream, const mimo_embedding_forward_args& args) {
  MIMO_REQUIRE(args.tokens >= 0 && args.width > 0 && args.vocabulary_rows >= 0, "embedding_forward");
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const T* table = static_cast<const T*>(args.table);
    T* y = static_cast<T*>(args.y);
    const size_t row_bytes = static_cast<size_t>(args.width) * sizeof(T);
    parallel_range(stream.device->threads, args.tokens, 16384 / args.width + 1, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const int64_t row = args.ids[token] - args.vocabulary_start;
        if (row >= 0 && row < args.vocabulary_rows) {
          scale_row(table + row * args.width, args.scale, y + token * args.width, args.width);
        } else {
          std::memset(static_cast<void*>(y + token * args.width), 0, row_bytes);
        }
      }
    });
  });
}

void embedding_backward(mimo_stream& stream, const mimo_embedding_backward_args& args) {
  MIMO_REQUIRE(args.tokens >= 0 && args.width > 0 && args.vocabulary_rows >= 0, "embedding_backward");
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const T* dy = static_cast<const T*>(args.dy);
    parallel_range(stream.device->threads, args.width, columns_per_task, [&](int64_t begin, int64_t end) {
      for (int64_t token = 0; token < args.tokens; ++token) {
        const int64_t row = args.ids[token] - args.vocabulary_start;
        if (row < 0 || row >= args.vocabulary_rows || args.ids[token] == args.padding_id) continue;
        const T* from = dy + token * args.width;
        float* to = args.dtable + row * args.width;
#pragma omp simd
        for (int64_t c = begin; c < end; ++c) to[c] += args.scale * load(from[c]);
      }
    });
  });
}

}  // namespace mimo::MIMO_ISA
