// Exports every operation of mimo.h: each is compiled for AVX2 and for AVX-512, and the processor decides.
#include "device.h"
#include "processor.h"
#include "status.h"

#define MIMO_OPERATION(name)                                                     \
  namespace mimo {                                                               \
  namespace avx2 {                                                               \
  __attribute__((weak)) void name(mimo_stream&, const mimo_##name##_args&);      \
  }                                                                              \
  namespace avx512 {                                                             \
  __attribute__((weak)) void name(mimo_stream&, const mimo_##name##_args&);      \
  }                                                                              \
  }                                                                              \
  extern "C" int32_t mimo_##name(mimo_stream* stream, const mimo_##name##_args* args) { \
    return mimo::guard([&] {                                                     \
      static const bool wide = mimo::processor_has_avx512();                     \
      wide ? mimo::avx512::name(*stream, *args) : mimo::avx2::name(*stream, *args); \
    });                                                                          \
  }
#include "operations.def"
