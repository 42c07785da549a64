// Kernels behind the state space scan, by hardware and storage type.
#pragma once
#include "device.h"

namespace mimo::cuda {

/// Any storage type and sizes, without tensor cores.
void ssd_forward_plain(mimo_stream& stream, const mimo_ssd_forward_args& args);
void ssd_backward_plain(mimo_stream& stream, const mimo_ssd_backward_args& args);

/// The first part of backward where z has factors: through the gate, to dz, to dy of `dy_dtype` [T, H P], and to dz_factors.
void ssd_masked_gate(mimo_stream& stream, const mimo_ssd_backward_args& args, void* dy, int32_t dy_dtype);

/// The first part of backward in bf16, of any GPU: through the gate, with factors or without, to dz and to dy.
void sm80_bf16_ssd_gate(mimo_stream& stream, const mimo_ssd_backward_args& args, void* dy);

/// bf16, heads of 64, states of 64 or 128, chunks of at least 64; rows in whole 16-byte pieces; sm_80 and later.
void sm80_bf16_ssd_forward(mimo_stream& stream, const mimo_ssd_forward_args& args);
void sm80_bf16_ssd_backward(mimo_stream& stream, const mimo_ssd_backward_args& args);

/// The same sizes on Hopper, up to 65535 sequences and 2^30 tokens.
void sm90_bf16_ssd_forward(mimo_stream& stream, const mimo_ssd_forward_args& args);
void sm90_bf16_ssd_backward(mimo_stream& stream, const mimo_ssd_backward_args& args);

}  // namespace mimo::cuda
