// Gradient and recomputed value of the activation in one pass over x.
#pragma once
#include "operations.h"

namespace mimo::cuda {

/// activation_backward, and y [rows, width] = p act(x) of args.dtype, bitwise equal to activation_forward; y may be
/// null.
void activation_backward_and_forward(mimo_stream& stream, const mimo_activation_backward_args& args, void* y);

}  // namespace mimo::cuda
