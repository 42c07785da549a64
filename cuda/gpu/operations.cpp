// Exports every operation of mimo.h.
#include "device.h"
#include "status.h"

#define MIMO_OPERATION(name)                                                               \
  namespace mimo::cuda {                                                                   \
  void name(mimo_stream&, const mimo_##name##_args&);                                      \
  static void run_##name(mimo_stream& stream, const void* args) {                          \
    name(stream, *static_cast<const mimo_##name##_args*>(args));                           \
  }                                                                                        \
  }                                                                                        \
  extern "C" int32_t mimo_##name(mimo_stream* stream, const mimo_##name##_args* args) {    \
    return mimo::guard([&] {                                                               \
      stream->device->use();                                                               \
      stream->run(mimo::cuda::run_##name, args, static_cast<int64_t>(sizeof(*args)));      \
    });                                                                                    \
  }
#include "operations.def"
