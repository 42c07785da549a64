// Products of experts whose operands are rounded to e4m3 in blocks (docs/spec/moe-performance.md §1.7): plain code, to see what
// the rounding does.
#pragma once
#include "kernel.h"

namespace mimo::MIMO_ISA {

/// What grouped_gemm computes, of rounded operands.
void e4m3_grouped_gemm(mimo_stream& stream, const mimo_grouped_gemm_args& args);

}  // namespace mimo::MIMO_ISA
