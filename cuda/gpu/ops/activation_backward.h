// The activation's gradient and value in one pass over x.
#pragma once
#include "operations.h"

namespace mimo::cuda {

/// activation_backward, and y [rows, width] = p act(x) with the bits of activation_forward. y: or null; of args.dtype.
void activation_backward_and_forward(mimo_stream& stream, const mimo_activation_backward_args& args, void* y);

}  // namespace mimo::cuda
