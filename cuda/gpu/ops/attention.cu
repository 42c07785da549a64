// Attention dispatch: bf16 goes to our Hopper kernels where they apply, else to cuDNN; everything else to kernels
// without tensor cores.
#include "attention.cuh"
#include "attention_plain.h"
#include "cudnn_attention.h"
#include "sm90_attention.h"

namespace mimo::cuda {

void attention_forward(mimo_stream& stream, const mimo_attention_forward_args& args) {
  require_attention(args);
  if (args.tokens == 0) return;
  if (sm90_attention_forward_fits(stream, args)) {
    (args.max_seqlen < sm90_long_sequence ? sm90_bf16_packed_attention_forward : sm90_bf16_attention_forward)(stream, args);
  } else if (sm90_grouped_query_attention_fits(stream, args)) {
    sm90_bf16_grouped_query_attention_forward(stream, args);
  } else if (Cudnn::takes(stream, args)) {
    stream.device->cudnn().attention_forward(stream, args);
  } else {
    attention_forward_plain(stream, args);
  }
}

void attention_backward(mimo_stream& stream, const mimo_attention_backward_args& args) {
  require_attention(args);
  if (args.tokens == 0) return;
  if (sm90_attention_backward_fits(stream, args)) {
    (args.max_seqlen <= sm90_short_sequence ? sm90_bf16_short_attention_backward : sm90_bf16_attention_backward)(stream, args);
  } else if (Cudnn::takes_gradient(stream, args)) {
    stream.device->cudnn().attention_backward(stream, args);
  } else {
    attention_backward_plain(stream, args);
  }
}

}  // namespace mimo::cuda
