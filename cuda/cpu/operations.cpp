// Exports every operation of mimo.h, dispatching to the AVX2 or the AVX-512 version by processor.
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
