// GEMM followed by tanh-GELU, or preceded by its gradient; the activation is a separate pass.
#include "gelu_gemm.h"

#include "kernel.h"

namespace mimo::MIMO_ISA {

void gemm(mimo_stream& stream, const mimo_gemm_args& args);
void activation_forward(mimo_stream& stream, const mimo_activation_forward_args& args);
void activation_backward(mimo_stream& stream, const mimo_activation_backward_args& args);

void gelu_gemm_forward(mimo_stream& stream, const mimo_gelu_gemm_forward_args& args) {
  gemm(stream, product_of(args));
  activation_forward(stream, activation_of(args));
}

void gelu_gemm_backward(mimo_stream& stream, const mimo_gelu_gemm_backward_args& args) {
  gemm(stream, product_of(args));
  activation_backward(stream, activation_of(args));
}

}  // namespace mimo::MIMO_ISA
