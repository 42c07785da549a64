// Attention without tensor cores: fp32, dropout, and head dimensions that cuDNN does not support.
#pragma once
#include "device.h"

namespace mimo::cuda {

void attention_forward_plain(mimo_stream& stream, const mimo_attention_forward_args& args);
void attention_backward_plain(mimo_stream& stream, const mimo_attention_backward_args& args);

}  // namespace mimo::cuda
