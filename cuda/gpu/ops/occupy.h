// A kernel that keeps multiprocessors from others.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace mimo::cuda {

/// One block on each of `blocks` multiprocessors, with all `shared_bytes` of its shared memory, until *leave (pinned) is not 0
/// or a minute has passed.
void occupy(cudaStream_t stream, const int32_t* leave, int32_t blocks, int64_t shared_bytes);

}  // namespace mimo::cuda
