// Internal variant of grouped_bias for the expert MLP.
#pragma once
#include "device.h"

namespace mimo::cuda {

/// y [rows, width] = sums + factor * bias_g, rounded once to args.dtype; the fp32 `sums` replace args.y as input.
void grouped_bias_of_sums(mimo_stream& stream, const mimo_grouped_bias_forward_args& args, const float* sums);

}  // namespace mimo::cuda
