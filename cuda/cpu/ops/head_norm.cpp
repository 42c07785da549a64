// RMSNorm of the query and key heads of a fused projection (docs/spec/families.md 2.3).
#include "head_norm.h"

#include "kernel.h"

namespace mimo::MIMO_ISA {

void axpby(mimo_stream& stream, const mimo_axpby_args& args);
void rms_norm_forward(mimo_stream& stream, const mimo_rms_norm_forward_args& args);
void rms_norm_backward(mimo_stream& stream, const mimo_rms_norm_backward_args& args);

void head_norm_forward(mimo_stream& stream, const mimo_head_norm_forward_args& args) {
  head_norm_by_heads(args, [&](const auto& head) { rms_norm_forward(stream, head); }, [&](const auto& values) { axpby(stream, values); });
}

void head_norm_backward(mimo_stream& stream, const mimo_head_norm_backward_args& args) {
  head_norm_by_heads(args, [&](const auto& head) { rms_norm_backward(stream, head); }, [&](const auto& values) { axpby(stream, values); });
}

}  // namespace mimo::MIMO_ISA
