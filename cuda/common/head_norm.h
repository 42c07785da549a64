// The norm of heads as one RMSNorm a head: on processors, and on GPUs for widths that their kernel does not take.
#pragma once
#include <cstdint>
#include <type_traits>

#include "mimo.h"
#include "require.h"

namespace mimo {

template <class Args>
int64_t normalised_heads(const Args& args) {
  MIMO_REQUIRE(args.head_dim > 0 && args.width % args.head_dim == 0 && args.width >= 3 * args.head_dim, "head_norm");
  return args.width / args.head_dim - 1;
}

template <class T>
T* columns_from(T* rows, int64_t column, int32_t dtype) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return static_cast<Byte*>(rows) + column * (dtype == MIMO_DTYPE_F32 ? 4 : 2);
}

/// The value heads of rows as wide as `args`' from `from` to `to`.
template <class Args>
mimo_axpby_args value_heads(const Args& args, const void* from, void* to) {
  const int64_t column = args.width - args.head_dim;
  mimo_axpby_args copy{};
  copy.x = columns_from(from, column, args.dtype), copy.y = columns_from(to, column, args.dtype);
  copy.rows = args.rows, copy.width = args.head_dim, copy.x_stride = copy.y_stride = args.width, copy.alpha = 1;
  copy.x_dtype = copy.y_dtype = args.dtype;
  return copy;
}

template <class Norm, class Args>
Norm norm_of_head(const Args& args, int64_t head, bool key) {
  Norm norm{};
  norm.x = columns_from(args.x, head * args.head_dim, args.dtype);
  norm.weight = key ? args.key_weight : args.query_weight;
  norm.rstd = args.rstd + head * args.rows;
  norm.rows = args.rows, norm.width = norm.group_size = args.head_dim, norm.x_stride = args.width;
  norm.weight_offset = args.weight_offset, norm.dtype = args.dtype, norm.weight_dtype = args.weight_dtype;
  return norm;
}

template <class Norm, class Copy>
void head_norm_by_heads(const mimo_head_norm_forward_args& args, Norm&& norm, Copy&& copy) {
  const int64_t heads = normalised_heads(args);
  for (int64_t head = 0; head < heads; ++head) {
    auto one = norm_of_head<mimo_rms_norm_forward_args>(args, head, head + 1 == heads);
    one.y = columns_from(args.y, head * args.head_dim, args.dtype), one.y_stride = args.width, one.epsilon = args.epsilon;
    norm(one);
  }
  copy(value_heads(args, args.x, args.y));
}

template <class Norm, class Copy>
void head_norm_by_heads(const mimo_head_norm_backward_args& args, Norm&& norm, Copy&& copy) {
  const int64_t heads = normalised_heads(args);
  for (int64_t head = 0; head < heads; ++head) {
    const bool key = head + 1 == heads;
    auto one = norm_of_head<mimo_rms_norm_backward_args>(args, head, key);
    one.dy = columns_from(args.dy, head * args.head_dim, args.dtype), one.dy_stride = args.width;
    one.dx = columns_from(args.dx, head * args.head_dim, args.dtype), one.dx_stride = args.width;
    one.dweight = key ? args.dkey_weight : args.dquery_weight;
    norm(one);
  }
  copy(value_heads(args, args.dy, args.dx));
}

}  // namespace mimo
