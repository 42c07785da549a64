// The function of grouped_bias that the layer of experts uses.
#pragma once
#include "device.h"

namespace mimo::cuda {

/// y [rows, width] = sums + factor * bias_g, rounded once to args.dtype; sums are fp32 and take the place of args.y's values.
void grouped_bias_of_sums(mimo_stream& stream, const mimo_grouped_bias_forward_args& args, const float* sums);

}  // namespace mimo::cuda
