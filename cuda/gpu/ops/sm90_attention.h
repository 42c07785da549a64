// Attention kernels for Hopper: bf16, no dropout, no window; head dimension 80 without mask and with as many key heads as
// query heads, and, forward alone, head dimension 128.
#pragma once
#include "device.h"

namespace mimo::cuda {

namespace sm90 {

/// Whether TMA can read a tensor: pointer aligned to 16 bytes, strides multiples of 8 elements.
inline bool in_pieces_of_16(const void* pointer, int64_t stride) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride % 8 == 0;
}

/// Conditions on a call that forward and backward share.
template <class Args>
bool heads_fit(const mimo_stream& stream, const Args& args, int64_t head_dim) {
#ifdef MIMO_HAS_SM90A
  return stream.device->compute_major == 9 && args.dtype == MIMO_DTYPE_BF16 && args.head_dim == head_dim &&
         args.value_dim == head_dim && args.dropout == 0 && args.query_heads < 65536 &&
         (args.tokens / 128 + args.sequences) * args.query_heads < INT32_MAX && args.tokens < int64_t{1} << 30 &&
         in_pieces_of_16(args.q, args.token_stride) && in_pieces_of_16(args.k, args.group_stride) &&
         in_pieces_of_16(args.v, 0) && in_pieces_of_16(args.o, 0);
#else
  (void)stream, (void)args, (void)head_dim;
  return false;
#endif
}
template <class Args>
bool attention_fits(const mimo_stream& stream, const Args& args) {
  return heads_fit(stream, args, 80) && args.mask == MIMO_ATTENTION_FULL && args.query_heads == args.key_heads;
}

constexpr int grouped_head_dim = 128;

}  // namespace sm90

inline bool sm90_grouped_query_attention_fits(const mimo_stream& stream, const mimo_attention_forward_args& args) {
  return sm90::heads_fit(stream, args, sm90::grouped_head_dim) && (args.window == 0 || args.window >= args.max_seqlen) &&
         args.tokens >= 128 * args.sequences;
}
void sm90_bf16_grouped_query_attention_forward(mimo_stream& stream, const mimo_attention_forward_args& args);

/// Sequences of fewer than 128 tokens on average are left to cuDNN.
inline bool sm90_attention_forward_fits(const mimo_stream& stream, const mimo_attention_forward_args& args) {
  return sm90::attention_fits(stream, args) && args.tokens >= 128 * args.sequences;
}
/// Sequences from this length on are faster with one output tile a block: its prologue and epilogue are negligible.
constexpr int64_t sm90_long_sequence = 4096;
void sm90_bf16_attention_forward(mimo_stream& stream, const mimo_attention_forward_args& args);
/// The persistent kernel, faster for shorter sequences.
void sm90_bf16_packed_attention_forward(mimo_stream& stream, const mimo_attention_forward_args& args);

inline bool sm90_attention_backward_fits(const mimo_stream& stream, const mimo_attention_backward_args& args) {
  return sm90::attention_fits(stream, args) && sm90::in_pieces_of_16(args.d_o, args.d_o_stride) &&
         sm90::in_pieces_of_16(args.dq, args.d_token_stride) && sm90::in_pieces_of_16(args.dk, 0) &&
         sm90::in_pieces_of_16(args.dv, 0);
}
void sm90_bf16_attention_backward(mimo_stream& stream, const mimo_attention_backward_args& args);
/// Up to this length of the longest sequence, a kernel whose blocks take whole sequences is faster.
constexpr int64_t sm90_short_sequence = 384;
void sm90_bf16_short_attention_backward(mimo_stream& stream, const mimo_attention_backward_args& args);

}  // namespace mimo::cuda
