// Attention in bf16 through cuDNN graphs.
#pragma once
#include <cstdint>
#include <memory>

#include "device.h"

namespace mimo::cuda {

class Algorithms;
class CudnnGraphs;

class Cudnn {
 public:
  explicit Cudnn(Algorithms& algorithms);
  ~Cudnn();

  /// Whether cuDNN supports the call: bf16, no dropout, as wide values as keys, a multiple of 8 up to 128; or the widths
  /// of DeepSeek's latent attention, from Hopper on.
  template <class Args>
  static bool takes(const mimo_stream& stream, const Args& args) {
    const bool wide = args.head_dim == 192 && args.value_dim == 128 && stream.device->compute_major >= 9;
    const bool equal = args.head_dim == args.value_dim && args.head_dim % 8 == 0 && args.head_dim <= 128;
    return args.dtype == MIMO_DTYPE_BF16 && args.dropout == 0 && args.window == 0 && (equal || wide);
  }
  void attention_forward(mimo_stream& stream, const mimo_attention_forward_args& args);
  void attention_backward(mimo_stream& stream, const mimo_attention_backward_args& args);

  /// Times all attentions so far that have no choice; returns how many could not be timed for lack of memory.
  int32_t time_algorithms(mimo_stream& stream);
  /// Makes the next call look its plan up again.
  void forget_plans();

 private:
  std::unique_ptr<CudnnGraphs> graphs_;
};

}  // namespace mimo::cuda
