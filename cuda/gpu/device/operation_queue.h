// Operations of a stream, held back until something needs them queued: a run of them that came before in just the same
// way, the same addresses included, is then handed over as one (on a GPU: a CUDA graph). Equal training steps consist of
// such runs, because the memory pool gives them equal addresses and what changes from step to step is read from memory.
#pragma once
#include <cstdint>
#include <limits>
#include <string>
#include <unordered_map>
#include <vector>

#include "memory_pool.h"
#include "mimo.h"

namespace mimo {

/// How a run of operations is kept, and handed over again.
class OperationRecorder {
 public:
  virtual ~OperationRecorder() = default;
  /// Calls `run(queue)` once, and records the work instead of queueing it. Null when it cannot be recorded.
  virtual void* record(void (*run)(void* queue), void* queue) = 0;
  virtual void launch(void* recording) = 0;
  /// Launched work may be under way.
  virtual void drop(void* recording) = 0;
};

/// The queue of one stream, for the thread that queues work on it.
class OperationQueue final : public MemoryPool::Holder {
 public:
  using Function = void (*)(mimo_stream&, const void* arguments);

  OperationQueue(mimo_stream& stream, MemoryPool& pool, OperationRecorder& recorder);
  ~OperationQueue();
  OperationQueue(const OperationQueue&) = delete;
  OperationQueue& operator=(const OperationQueue&) = delete;

  /// Adds an operation: a function of its arguments and of device memory alone. `bytes` of arguments are copied;
  /// padding among them must not vary. May throw the error of an earlier operation.
  void add(Function function, const void* arguments, int64_t bytes);
  /// Queues all added operations. Throws an operation's error; the operations behind it are lost.
  void flush();
  /// The cache of the pool that operations take temporary memory from. It is not the stream's: that one holds blocks
  /// that were freed since an operation was added and that the operation still reads, and recordings use their blocks
  /// again and again.
  const void* workspace_key() const { return this; }
  /// Drops all recordings.
  void forget();
  mimo_graph_statistics statistics() const { return statistics_; }

  int64_t before_trim() override;

 private:
  struct Operation {
    Function function;
    size_t arguments;  // where they begin in content_
  };
  /// A run of operations that was seen before.
  struct Known {
    void* recording = nullptr;
    bool unfit = false;  // could not be recorded
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
  /// Blocks freed from this count on may be used by pending operations.
  int64_t held_since_ = std::numeric_limits<int64_t>::max();
  mimo_graph_statistics statistics_{};
};

}  // namespace mimo
