// Attention in bf16 through cuDNN's graphs.
#pragma once
#include <cstdint>
#include <memory>

#include "device.h"

namespace mimo::cuda {

class Cudnn {
 public:
  Cudnn();
  ~Cudnn();

  /// Whether it computes this: bf16 without dropout, head sizes in steps of 8 up to 128.
  template <class Args>
  static bool takes(const Args& args) {
    return args.dtype == MIMO_DTYPE_BF16 && args.dropout == 0 && args.head_dim % 8 == 0 && args.head_dim <= 128;
  }
  void attention_forward(mimo_stream& stream, const mimo_attention_forward_args& args);
  void attention_backward(mimo_stream& stream, const mimo_attention_backward_args& args);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace mimo::cuda
