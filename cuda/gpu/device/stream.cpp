// Streams of the CUDA library.
#include "device.h"

#include <algorithm>

#include "error.h"
#include "graph_recorder.h"
#include "memory_pool.h"
#include "operation_queue.h"
#include "staging.h"
#include "status.h"

using mimo::guard;
using mimo::cuda::check;

mimo_stream::mimo_stream(mimo_device* on, int32_t priority) : device(on), staging(new mimo::cuda::Staging()) {
  int lowest = 0, highest = 0;
  check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "reading stream priorities");
  check(cudaStreamCreateWithPriority(&handle_, cudaStreamNonBlocking, std::clamp(priority, highest, lowest)),
        "creating a stream");
}

mimo_stream::~mimo_stream() {
  delete queue_;
  delete recorder_;
  delete staging;
  cudaStreamDestroy(handle_);
}

void mimo_stream::flush() {
  if (queue_ != nullptr) queue_->flush();
}

void mimo_stream::run(void (*function)(mimo_stream&, const void*), const void* arguments, int64_t bytes) {
  queue_ != nullptr ? queue_->add(function, arguments, bytes) : function(*this, arguments);
}

void mimo_stream::set_graphs(bool wanted) {
  flush();
  delete queue_;
  delete recorder_;
  queue_ = nullptr;
  recorder_ = nullptr;
  if (!wanted) return;
  recorder_ = new mimo::cuda::GraphRecorder(handle_);
  queue_ = new mimo::OperationQueue(*this, *device->memory, *recorder_);
}

mimo_graph_statistics mimo_stream::graph_statistics() const {
  return queue_ != nullptr ? queue_->statistics() : mimo_graph_statistics{};
}

const void* mimo_stream::workspace_key() const {
  return queue_ != nullptr ? queue_->workspace_key() : this;
}

extern "C" {

int32_t mimo_stream_create(mimo_device* device, int32_t priority, mimo_stream** stream) {
  return guard([&] {
    device->use();
    *stream = new mimo_stream(device, priority);
  });
}

int32_t mimo_stream_destroy(mimo_stream* stream) {
  return guard([&] {
    stream->device->use();
    // Another stream may be allocated at this address and would get the blocks cached for it.
    check(cudaStreamSynchronize(stream->handle()), "finishing a stream");
    delete stream;
  });
}

int32_t mimo_stream_synchronize(mimo_stream* stream) {
  return guard([&] {
    stream->device->use();
    check(cudaStreamSynchronize(stream->handle()), "work of a stream");
  });
}

int32_t mimo_stream_set_graphs(mimo_stream* stream, int32_t wanted) {
  return guard([&] {
    stream->device->use();
    stream->set_graphs(wanted != 0);
  });
}

int32_t mimo_stream_graph_statistics(mimo_stream* stream, mimo_graph_statistics* statistics) {
  return guard([&] { *statistics = stream->graph_statistics(); });
}

}  // extern "C"
