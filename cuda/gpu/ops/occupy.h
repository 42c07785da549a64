// A kernel that keeps SMs busy.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace mimo::cuda {

/// Runs one block on each of `blocks` SMs, with all `shared_bytes` of its shared memory, until *leave (pinned) is not 0
/// or a minute has passed.
void occupy(cudaStream_t stream, const int32_t* leave, int32_t blocks, int64_t shared_bytes);

}  // namespace mimo::cuda
