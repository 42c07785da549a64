// Kernels behind grouped_mlp_forward and grouped_mlp_backward.
#pragma once
#include "device.h"

namespace mimo::cuda {

/// Whether the e4m3 kernels apply: bf16, sm_90, sizes in multiples of 16, blocks in multiples of 8, pointers aligned to
/// 16 bytes.
bool sm90_e4m3_grouped_mlp_fits(const mimo_stream& stream, const mimo_grouped_mlp_forward_args& args);
bool sm90_e4m3_grouped_mlp_fits(const mimo_stream& stream, const mimo_grouped_mlp_backward_args& args);
/// Computes z (unless null) and y.
void sm90_e4m3_grouped_mlp_forward(mimo_stream& stream, const mimo_grouped_mlp_forward_args& args);
/// Computes dz, hs and dx, and drow_probability without the b2 term; each unless null.
void sm90_e4m3_grouped_mlp_backward(mimo_stream& stream, const mimo_grouped_mlp_backward_args& args);

}  // namespace mimo::cuda
