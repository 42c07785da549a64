// Holds back a stream's operations until they are needed. A run of operations that occurred before with identical
// arguments, addresses included, is launched as one recording (on a GPU a CUDA graph). Equal training steps consist of
// such runs: the memory pool returns equal addresses, and what changes from step to step is read from memory.
#pragma once
#include <cstdint>
#include <limits>
#include <string>
#include <unordered_map>
#include <vector>

#include "memory_pool.h"
#include "mimo.h"

namespace mimo {

/// Records runs of operations and launches recordings.
class OperationRecorder {
 public:
  virtual ~OperationRecorder() = default;
  /// Calls `run(queue)` once, capturing the work instead of queueing it. Returns null if it cannot be recorded.
  virtual void* record(void (*run)(void* queue), void* queue) = 0;
  virtual void launch(void* recording) = 0;
  /// Launched work may still be running.
  virtual void drop(void* recording) = 0;
};

/// The operation queue of one stream; used by the thread that queues work on the stream.
class OperationQueue final : public MemoryPool::Holder {
 public:
  using Function = void (*)(mimo_stream&, const void* arguments);

  OperationQueue(mimo_stream& stream, MemoryPool& pool, OperationRecorder& recorder);
  ~OperationQueue();
  OperationQueue(const OperationQueue&) = delete;
  OperationQueue& operator=(const OperationQueue&) = delete;

  /// Adds an operation, a function of its arguments and device memory only. Copies `bytes` of arguments; padding among
  /// them must be deterministic. May throw the error of an earlier operation.
  void add(Function function, const void* arguments, int64_t bytes);
  /// Queues all pending operations. Throws an operation's error; the operations after it are dropped.
  void flush();
  /// Key of the pool's cache for workspaces. Not the stream's own cache: that contains blocks which were freed after a
  /// pending operation was added and which it still reads, and recordings reuse their blocks.
  const void* workspace_key() const { return this; }
  /// Drops all recordings.
  void forget();
  mimo_graph_statistics statistics() const { return statistics_; }

  int64_t before_trim() override;

 private:
  struct Operation {
    Function function;
    size_t arguments;  // offset in content_
  };
  /// A run of operations that has occurred before.
  struct Known {
    void* recording = nullptr;
    bool unfit = false;  // cannot be recorded
  };
  void run();
  void hand_over();
  void clear_pending();

  mimo_stream& stream_;
  MemoryPool& pool_;
  OperationRecorder& recorder_;
  std::vector<Operation> operations_;
  std::string content_;  // functions and arguments of operations_
  std::unordered_map<std::string, Known> known_;
  size_t known_bytes_ = 0;
  bool handing_over_ = false, recording_ = false, forget_after_ = false;
  /// Blocks freed from this count on may be in use by pending operations.
  int64_t held_since_ = std::numeric_limits<int64_t>::max();
  mimo_graph_statistics statistics_{};
};

}  // namespace mimo
