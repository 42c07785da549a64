// Attention in bf16 through cuDNN's graphs.
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

  /// Whether it computes this: bf16 without dropout, head sizes in steps of 8 up to 128.
  template <class Args>
  static bool takes(const Args& args) {
    return args.dtype == MIMO_DTYPE_BF16 && args.dropout == 0 && args.head_dim % 8 == 0 && args.head_dim <= 128;
  }
  void attention_forward(mimo_stream& stream, const mimo_attention_forward_args& args);
  void attention_backward(mimo_stream& stream, const mimo_attention_backward_args& args);

  /// Times the plans of all attentions so far that have no choice; returns how many there was no memory for.
  int32_t time_algorithms(mimo_stream& stream);
  /// Plans are looked up again.
  void forget_plans();

 private:
  std::unique_ptr<CudnnGraphs> graphs_;
};

}  // namespace mimo::cuda
