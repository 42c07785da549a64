// Kernels behind grouped_mlp_forward and grouped_mlp_backward.
#pragma once
#include "device.h"

namespace mimo::cuda {

/// bf16 layers whose products are in e4m3, sm_90: sizes in steps of 16, blocks in steps of 8, all pointers on 16 bytes.
bool sm90_e4m3_grouped_mlp_fits(const mimo_stream& stream, const mimo_grouped_mlp_forward_args& args);
bool sm90_e4m3_grouped_mlp_fits(const mimo_stream& stream, const mimo_grouped_mlp_backward_args& args);
/// z (unless null) and y.
void sm90_e4m3_grouped_mlp_forward(mimo_stream& stream, const mimo_grouped_mlp_forward_args& args);
/// dz, hs and dx (unless null) and drow_probability without its part of b2 (unless null).
void sm90_e4m3_grouped_mlp_backward(mimo_stream& stream, const mimo_grouped_mlp_backward_args& args);

}  // namespace mimo::cuda
