// Operations that other operations of the library call.
#pragma once
#include "device.h"

namespace mimo::cuda {

void activation_forward(mimo_stream& stream, const mimo_activation_forward_args& args);
void activation_backward(mimo_stream& stream, const mimo_activation_backward_args& args);
void axpby(mimo_stream& stream, const mimo_axpby_args& args);
void gemm(mimo_stream& stream, const mimo_gemm_args& args);
void grouped_bias_forward(mimo_stream& stream, const mimo_grouped_bias_forward_args& args);
void grouped_bias_backward(mimo_stream& stream, const mimo_grouped_bias_backward_args& args);
void grouped_gemm(mimo_stream& stream, const mimo_grouped_gemm_args& args);
void philox_fill(mimo_stream& stream, const mimo_philox_fill_args& args);
void rms_norm_forward(mimo_stream& stream, const mimo_rms_norm_forward_args& args);
void rms_norm_backward(mimo_stream& stream, const mimo_rms_norm_backward_args& args);

}  // namespace mimo::cuda
