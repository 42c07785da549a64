// CUDA errors as mimo::Error.
#pragma once
#include <cuda_runtime_api.h>

#include "require.h"

namespace mimo::cuda {

/// Throws if a CUDA call failed; `what` names the call.
void check(cudaError_t result, const char* what);

}  // namespace mimo::cuda
