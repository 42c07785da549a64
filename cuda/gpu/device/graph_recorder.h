// Records runs of operations as CUDA graphs.
#pragma once
#include <cuda_runtime_api.h>

#include "operation_queue.h"

namespace mimo::cuda {

/// Captures the work queued on one stream. Recordings are cudaGraphExec_t.
class GraphRecorder final : public OperationRecorder {
 public:
  explicit GraphRecorder(cudaStream_t stream) : stream_(stream) {}
  /// Returns null if an operation cannot be captured, copies from the host or fails, or the driver lacks memory for the
  /// graph.
  void* record(void (*run)(void* queue), void* queue) override;
  void launch(void* recording) override;
  void drop(void* recording) override;

 private:
  cudaStream_t stream_;
};

}  // namespace mimo::cuda
