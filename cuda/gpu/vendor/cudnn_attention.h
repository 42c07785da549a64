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

  /// Whether cuDNN supports the call: bf16, no dropout, as wide values as keys, a multiple of 8 up to 128 (on Hopper, 256);
  /// or the widths of DeepSeek's latent attention, from Hopper on.
  template <class Args>
  static bool takes(const mimo_stream& stream, const Args& args) {
    const int32_t major = stream.device->compute_major;
    const bool latent = args.head_dim == 192 && args.value_dim == 128 && major >= 9;
    const int64_t widest = major == 9 ? 256 : 128;
    const bool equal = args.head_dim == args.value_dim && args.head_dim % 8 == 0 && args.head_dim <= widest;
    return args.dtype == MIMO_DTYPE_BF16 && args.dropout == 0 && (equal || latent);
  }
  /// `takes` for a gradient, which of wide heads in packed sequences needs memory that grows with their longest.
  static bool takes_gradient(const mimo_stream& stream, const mimo_attention_backward_args& args);
  void attention_forward(mimo_stream& stream, const mimo_attention_forward_args& args);
  void attention_backward(mimo_stream& stream, const mimo_attention_backward_args& args);

  /// Times all attentions so far that have no choice; returns how many could not be timed for lack of memory.
  int32_t time_algorithms(mimo_stream& stream);
  /// Makes the next call look its plan up again.
  void forget_plans();

 private:
  /// of_padded [sequences + 1]: cumulative lengths of sequences that `args` has padded; null: they are as `args` says.
  void backward(mimo_stream& stream, const mimo_attention_backward_args& args, const int32_t* of_padded, int64_t sequences);

  std::unique_ptr<CudnnGraphs> graphs_;
};

}  // namespace mimo::cuda
