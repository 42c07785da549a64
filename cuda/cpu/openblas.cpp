#include "openblas.h"

#include <cstdlib>
#include <string>

#include "processor.h"

// OpenBLAS's C interface, declared here because the scipy wheel and Debian differ in symbol prefix and header location.
#ifndef MIMO_OPENBLAS_PREFIX
#define MIMO_OPENBLAS_PREFIX
#endif
#define MIMO_PASTE(prefix, name) prefix##name
#define MIMO_PASTE_EXPANDED(prefix, name) MIMO_PASTE(prefix, name)
#define MIMO_OPENBLAS(name) MIMO_PASTE_EXPANDED(MIMO_OPENBLAS_PREFIX, name)
extern "C" {
void MIMO_OPENBLAS(cblas_sgemm)(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha,
                                const float* a, int lda, const float* b, int ldb, float beta, float* c, int ldc);
char* MIMO_OPENBLAS(openblas_get_config)(void);
char* MIMO_OPENBLAS(openblas_get_corename)(void);
}

namespace mimo {
namespace {

// Runs before OpenBLAS's constructor. Releases older than the processor do not know it and fall back to AVX2 kernels
// (0.3.21 on Zen 5: 78 GFLOP/s a core instead of 204); every processor with these feature bits runs the SkylakeX
// kernels. OPENBLAS_CORETYPE is often set machine-wide for other programs, so only our own variable overrides this
// choice; src/native/library.ts refuses values that OpenBLAS would ignore.
//
// OpenBLAS runs on the calling thread: our pool splits the work. Otherwise it starts a thread for every core when it is loaded,
// and each of these threads spins for 30 ms before it sleeps.
__attribute__((constructor(101))) void configure() {
  const char* wanted = std::getenv("MIMO_OPENBLAS_CORETYPE");
  if (wanted == nullptr || *wanted == '\0') wanted = processor_has_avx512() ? "SkylakeX" : "Haswell";
  setenv("OPENBLAS_CORETYPE", wanted, 1);
  setenv("OPENBLAS_NUM_THREADS", "1", 1);
}

}  // namespace

const char* openblas_version() {
  static const std::string line =
      std::string(MIMO_OPENBLAS(openblas_get_config)()) + " kernels " + MIMO_OPENBLAS(openblas_get_corename)();
  return line.c_str();
}

void sgemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
           int64_t a_stride, const float* b, int64_t b_stride, float beta, float* c, int64_t c_stride) {
  constexpr int row_major = 101, plain = 111, transposed = 112;
  MIMO_OPENBLAS(cblas_sgemm)
  (row_major, transpose_a ? transposed : plain, transpose_b ? transposed : plain, static_cast<int>(m),
   static_cast<int>(n), static_cast<int>(k), alpha, a, static_cast<int>(a_stride), b, static_cast<int>(b_stride), beta,
   c, static_cast<int>(c_stride));
}

}  // namespace mimo
