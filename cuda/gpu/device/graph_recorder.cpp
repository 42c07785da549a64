#include "graph_recorder.h"

#include <vector>

#include "error.h"

namespace mimo::cuda {
namespace {

/// Whether a graph copies from the host's memory. It would read that memory at every launch, when a library's temporary
/// array no longer exists.
bool reads_host(cudaGraph_t graph) {
  size_t count = 0;
  if (cudaGraphGetNodes(graph, nullptr, &count) != cudaSuccess) return true;
  std::vector<cudaGraphNode_t> nodes(count);
  if (cudaGraphGetNodes(graph, nodes.data(), &count) != cudaSuccess) return true;
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    if (cudaGraphNodeGetType(node, &type) != cudaSuccess) return true;
    if (type != cudaGraphNodeTypeMemcpy) continue;
    cudaMemcpy3DParms copy{};
    if (cudaGraphMemcpyNodeGetParams(node, &copy) != cudaSuccess) return true;
    cudaPointerAttributes source{};
    if (cudaPointerGetAttributes(&source, copy.srcPtr.ptr) != cudaSuccess) return true;
    if (source.type != cudaMemoryTypeDevice) return true;
  }
  return false;
}

}  // namespace

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
  if (whole && !reads_host(graph) && cudaGraphInstantiate(&made, graph, 0) != cudaSuccess) made = nullptr;
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
