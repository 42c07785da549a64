// Kernels behind the state space scan, by hardware and storage type.
#pragma once
#include "device.h"

namespace mimo::cuda {

/// Any storage type and sizes, without tensor cores.
void ssd_forward_plain(mimo_stream& stream, const mimo_ssd_forward_args& args);
void ssd_backward_plain(mimo_stream& stream, const mimo_ssd_backward_args& args);

}  // namespace mimo::cuda
