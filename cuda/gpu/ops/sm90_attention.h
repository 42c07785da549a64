// Attention on Hopper through kernels of ours: bf16, heads of 80, no mask, no dropout, as many key heads as query heads.
#pragma once
#include "device.h"

namespace mimo::cuda {

namespace sm90 {

/// Whether the copy engine can read a tensor.
inline bool in_pieces_of_16(const void* pointer, int64_t stride) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride % 8 == 0;
}

/// Values of a call that both directions need.
template <class Args>
bool attention_fits(const mimo_stream& stream, const Args& args) {
#ifdef MIMO_HAS_SM90A
  return stream.device->compute_major == 9 && args.dtype == MIMO_DTYPE_BF16 && args.head_dim == 80 && args.dropout == 0 &&
         args.mask == MIMO_ATTENTION_FULL && args.query_heads == args.key_heads && args.query_heads < 65536 &&
         (args.tokens / 128 + args.sequences) * args.query_heads < INT32_MAX && args.tokens < int64_t{1} << 30 &&
         in_pieces_of_16(args.q, args.token_stride) && in_pieces_of_16(args.k, args.group_stride) &&
         in_pieces_of_16(args.v, 0) && in_pieces_of_16(args.o, 0);
#else
  (void)stream, (void)args;
  return false;
#endif
}

}  // namespace sm90

/// Sequences of under 128 tokens on average are left to cuDNN.
inline bool sm90_attention_forward_fits(const mimo_stream& stream, const mimo_attention_forward_args& args) {
  return sm90::attention_fits(stream, args) && args.tokens >= 128 * args.sequences;
}
/// Faster from this length on, where a block's first and last steps do not count.
constexpr int64_t sm90_long_sequence = 4096;
void sm90_bf16_attention_forward(mimo_stream& stream, const mimo_attention_forward_args& args);
/// Faster below.
void sm90_bf16_packed_attention_forward(mimo_stream& stream, const mimo_attention_forward_args& args);

inline bool sm90_attention_backward_fits(const mimo_stream& stream, const mimo_attention_backward_args& args) {
  return sm90::attention_fits(stream, args) && sm90::in_pieces_of_16(args.d_o, args.d_o_stride) &&
         sm90::in_pieces_of_16(args.dq, args.d_token_stride) && sm90::in_pieces_of_16(args.dk, 0) &&
         sm90::in_pieces_of_16(args.dv, 0);
}
void sm90_bf16_attention_backward(mimo_stream& stream, const mimo_attention_backward_args& args);
/// Faster where no sequence is longer than this: a block then has a whole one.
constexpr int64_t sm90_short_sequence = 384;
void sm90_bf16_short_attention_backward(mimo_stream& stream, const mimo_attention_backward_args& args);

}  // namespace mimo::cuda
