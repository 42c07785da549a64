// Heads of latent attention (docs/spec/families.md §2.4): per head [q, k, v] of a query, a content key, a value and the
// rotated key that all heads share.
#include "kernel.h"

namespace mimo::MIMO_ISA {
namespace {

/// Columns of a head in each tensor.
struct Widths {
  int64_t query, content_value, whole;
};

template <class Args>
Widths widths_of(const Args& args) {
  MIMO_REQUIRE(args.tokens >= 0 && args.heads > 0 && args.content_dim > 0 && args.position_dim > 0, "latent_heads");
  MIMO_REQUIRE(args.value_dim > 0 && args.position_stride >= args.position_dim, "latent_heads");
  const int64_t query = args.content_dim + args.position_dim;
  return {query, args.content_dim + args.value_dim, 2 * query + args.value_dim};
}

template <class T>
void copy(const T* from, int64_t width, T* to) {
  std::memcpy(to, from, static_cast<size_t>(width) * sizeof(T));
}

}  // namespace

void latent_heads_forward(mimo_stream& stream, const mimo_latent_heads_forward_args& args) {
  const Widths width = widths_of(args);
  const int64_t content = args.content_dim, position = args.position_dim, value = args.value_dim;
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    parallel_range(stream.device->threads, args.tokens, rows_per_partial, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const T* const shared = static_cast<const T*>(args.position) + token * args.position_stride;
        for (int64_t head = 0; head < args.heads; ++head) {
          const int64_t at = token * args.heads + head;
          const T* const kv = static_cast<const T*>(args.kv) + at * width.content_value;
          T* const y = static_cast<T*>(args.y) + at * width.whole;
          copy(static_cast<const T*>(args.q) + at * width.query, width.query, y);
          copy(kv, content, y + width.query);
          copy(shared, position, y + width.query + content);
          copy(kv + content, value, y + 2 * width.query);
        }
      }
    });
  });
}

void latent_heads_backward(mimo_stream& stream, const mimo_latent_heads_backward_args& args) {
  const Widths width = widths_of(args);
  const int64_t content = args.content_dim, position = args.position_dim, value = args.value_dim;
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    parallel_range(stream.device->threads, args.tokens, rows_per_partial, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const T* const dy = static_cast<const T*>(args.dy) + token * args.heads * width.whole;
        for (int64_t head = 0; head < args.heads; ++head) {
          const int64_t at = token * args.heads + head;
          const T* const own = dy + head * width.whole;
          T* const dkv = static_cast<T*>(args.dkv) + at * width.content_value;
          copy(own, width.query, static_cast<T*>(args.dq) + at * width.query);
          copy(own + width.query, content, dkv);
          copy(own + 2 * width.query, value, dkv + content);
        }
        T* const dposition = static_cast<T*>(args.dposition) + token * args.position_stride;
        for (int64_t i = 0; i < position; ++i) {
          float sum = 0;
          for (int64_t head = 0; head < args.heads; ++head) sum += load(dy[head * width.whole + width.query + content + i]);
          store(&dposition[i], sum);
        }
      }
    });
  });
}

}  // namespace mimo::MIMO_ISA
