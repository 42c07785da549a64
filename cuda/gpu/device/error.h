// CUDA's errors as mimo's.
#pragma once
#include <cuda_runtime_api.h>

#include "require.h"

namespace mimo::cuda {

/// Throws for a failed CUDA call; `what` names the call.
void check(cudaError_t result, const char* what);

}  // namespace mimo::cuda
