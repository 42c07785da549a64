#include "graph_recorder.h"

#include "error.h"

namespace mimo::cuda {

void* GraphRecorder::record(void (*run)(void* queue), void* queue) {
  // Relaxed mode: other threads query events meanwhile, and workspace may come from cudaMalloc.
  check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed), "beginning a graph");
  bool whole = true;
  try {
    run(queue);
  } catch (...) {
    whole = false;  // the operations are run directly next, and their error is thrown then
  }
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t made = nullptr;
  whole = cudaStreamEndCapture(stream_, &graph) == cudaSuccess && whole;
  if (whole && cudaGraphInstantiate(&made, graph, 0) != cudaSuccess) made = nullptr;
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaGetLastError();  // a failure here has no other consequence
  return made;
}

void GraphRecorder::launch(void* recording) {
  check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(recording), stream_), "launching a graph");
}

void GraphRecorder::drop(void* recording) {
  cudaStreamSynchronize(stream_);
  cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(recording));
}

}  // namespace mimo::cuda
