// Operations that other operations of the library call.
#pragma once
#include "device.h"

namespace mimo::cuda {

void axpby(mimo_stream& stream, const mimo_axpby_args& args);

}  // namespace mimo::cuda
