// Heads of latent attention (docs/spec/families.md §2.4): per head [q, k, v] of a query, a content key, a value and the
// rotated key that all heads share.
#include "kernel.cuh"

namespace mimo::cuda {
namespace {

template <class T>
__global__ void join_kernel(mimo_latent_heads_forward_args args) {
  const int64_t content = args.content_dim, query = content + args.position_dim, whole = 2 * query + args.value_dim;
  for_each_pack(args.tokens, args.heads * whole, [&](int64_t token, int64_t index) {
    const int64_t head = token * args.heads + index / whole, column = index % whole, of_key = column - query;
    const T* const kv = static_cast<const T*>(args.kv) + head * (content + args.value_dim);
    T* const y = static_cast<T*>(args.y) + token * args.heads * whole + index;
    if (of_key < 0) {
      *y = static_cast<const T*>(args.q)[head * query + column];
    } else if (of_key < content) {
      *y = kv[of_key];
    } else if (of_key < query) {
      *y = static_cast<const T*>(args.position)[token * args.position_stride + of_key - content];
    } else {
      *y = kv[content + of_key - query];
    }
  });
}

/// A thread copies an element of dq or dkv, or sums one of dposition.
template <class T>
__global__ void split_kernel(mimo_latent_heads_backward_args args) {
  const int64_t content = args.content_dim, query = content + args.position_dim, whole = 2 * query + args.value_dim;
  const int64_t apart = query + content + args.value_dim, of_heads = args.heads * apart;
  for_each_pack(args.tokens, of_heads + args.position_dim, [&](int64_t token, int64_t index) {
    const T* const dy = static_cast<const T*>(args.dy) + token * args.heads * whole;
    if (index >= of_heads) {
      float sum = 0;
      for (int64_t head = 0; head < args.heads; ++head) sum += load(dy + head * whole + query + content + index - of_heads);
      store(static_cast<T*>(args.dposition) + token * args.position_stride + index - of_heads, sum);
      return;
    }
    const int64_t head = index / apart, column = index % apart, row = token * args.heads + head;
    const int64_t from = column < query + content ? column : column + args.position_dim;
    T* const to = column < query ? static_cast<T*>(args.dq) + row * query + column
                                 : static_cast<T*>(args.dkv) + row * (content + args.value_dim) + column - query;
    *to = dy[head * whole + from];
  });
}

template <class Args>
void require_latent_heads(const Args& args) {
  MIMO_REQUIRE(args.tokens >= 0 && args.heads > 0 && args.content_dim > 0 && args.position_dim > 0, "latent_heads");
  MIMO_REQUIRE(args.value_dim > 0 && args.position_stride >= args.position_dim, "latent_heads");
}

}  // namespace

void latent_heads_forward(mimo_stream& stream, const mimo_latent_heads_forward_args& args) {
  require_latent_heads(args);
  if (args.tokens == 0) return;
  with_dtype(args.dtype, [&](auto* t) {
    const int64_t of_head = 2 * (args.content_dim + args.position_dim) + args.value_dim;
    const auto [grid, block] = cover(args.tokens, args.heads * of_head);
    launch(stream, join_kernel<std::remove_pointer_t<decltype(t)>>, grid, block, 0, args);
  });
}

void latent_heads_backward(mimo_stream& stream, const mimo_latent_heads_backward_args& args) {
  require_latent_heads(args);
  if (args.tokens == 0) return;
  with_dtype(args.dtype, [&](auto* t) {
    const int64_t of_head = 2 * args.content_dim + args.position_dim + args.value_dim;
    const auto [grid, block] = cover(args.tokens, args.heads * of_head + args.position_dim);
    launch(stream, split_kernel<std::remove_pointer_t<decltype(t)>>, grid, block, 0, args);
  });
}

}  // namespace mimo::cuda
