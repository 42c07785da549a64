// The only interface to OpenBLAS. It runs on the calling thread: our pool splits the work, so that no second thread
// pool competes for the cores.
#pragma once
#include <cstdint>

namespace mimo {

const char* openblas_version();

/// c = alpha op(a) op(b) + beta c, row major, fp32, on this thread.
void sgemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
           int64_t a_stride, const float* b, int64_t b_stride, float beta, float* c, int64_t c_stride);

}  // namespace mimo
