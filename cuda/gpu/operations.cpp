// Exports every operation of mimo.h.
#include "device.h"
#include "status.h"

#define MIMO_OPERATION(name)                                                            \
  namespace mimo::cuda {                                                                \
  void name(mimo_stream&, const mimo_##name##_args&);                                   \
  }                                                                                     \
  extern "C" int32_t mimo_##name(mimo_stream* stream, const mimo_##name##_args* args) { \
    return mimo::guard([&] {                                                            \
      stream->device->use();                                                            \
      mimo::cuda::name(*stream, *args);                                                 \
    });                                                                                 \
  }
#include "operations.def"
