// Implementations of the chunk scan (SSD) by architecture and storage type.
#pragma once
#include "device.h"

namespace mimo::cuda {

/// Any storage type and size, without tensor cores.
void ssd_forward_plain(mimo_stream& stream, const mimo_ssd_forward_args& args);
void ssd_backward_plain(mimo_stream& stream, const mimo_ssd_backward_args& args);

/// Backward of a gate with mask factors on z: writes dz, dy of `dy_dtype` [T, H P], and dz_factors.
void ssd_masked_gate(mimo_stream& stream, const mimo_ssd_backward_args& args, void* dy, int32_t dy_dtype);

/// Backward of the gate in bf16 on any GPU, with or without factors: writes dz and dy.
void sm80_bf16_ssd_gate(mimo_stream& stream, const mimo_ssd_backward_args& args, void* dy);

/// bf16, head dimension 64, state dimension 64 or 128, chunk_size >= 64, 16-byte aligned rows; sm_80 and later. Heads of 72
/// to 128, a multiple of 8, run as twice as many heads of 64.
void sm80_bf16_ssd_forward(mimo_stream& stream, const mimo_ssd_forward_args& args);
void sm80_bf16_ssd_backward(mimo_stream& stream, const mimo_ssd_backward_args& args);
void sm80_bf16_ssd_wide_heads_forward(mimo_stream& stream, const mimo_ssd_forward_args& args);
void sm80_bf16_ssd_wide_heads_backward(mimo_stream& stream, const mimo_ssd_backward_args& args);

/// The same on Hopper, for both kinds of heads, up to 65535 sequences and 2^30 tokens.
void sm90_bf16_ssd_forward(mimo_stream& stream, const mimo_ssd_forward_args& args);
void sm90_bf16_ssd_backward(mimo_stream& stream, const mimo_ssd_backward_args& args);

}  // namespace mimo::cuda
