// The operations of the expert MLP, on rows sorted by expert.
#pragma once
#include "kernel.h"

namespace mimo::MIMO_ISA {

void e4m3_rows(mimo_stream& stream, const mimo_e4m3_rows_args& args);
void grouped_gemm(mimo_stream& stream, const mimo_grouped_gemm_args& args);
void grouped_bias_forward(mimo_stream& stream, const mimo_grouped_bias_forward_args& args);
void grouped_bias_backward(mimo_stream& stream, const mimo_grouped_bias_backward_args& args);

}  // namespace mimo::MIMO_ISA
