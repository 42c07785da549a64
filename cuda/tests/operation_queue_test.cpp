// Held-back and recorded operations leave the same memory contents as direct execution.
#include "operation_queue.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <utility>

#include "check.h"

namespace {

/// y = a x + b on single numbers.
struct Step {
  const int64_t* x;
  int64_t* y;
  int64_t a, b;
};

using Recording = std::vector<Step>;

}  // namespace

struct mimo_stream {
  Recording* recording = nullptr;
  int64_t done_one_by_one = 0;
};

namespace {

void apply(const Step& step) { *step.y = step.a * *step.x + step.b; }

void queue_step(mimo_stream& stream, const void* arguments) {
  const Step& step = *static_cast<const Step*>(arguments);
  if (stream.recording != nullptr) {
    stream.recording->push_back(step);
    return;
  }
  apply(step);
  stream.done_one_by_one++;
}

/// Arguments of an operation with temporary memory.
struct Inner {
  mimo::MemoryPool* pool;
  const void* workspace_key;
  const int64_t* x;
  int64_t* y;
};

/// y = x through temporary memory, which it overwrites first.
void queue_inner(mimo_stream&, const void* arguments) {
  const Inner& inner = *static_cast<const Inner*>(arguments);
  auto* temporary = static_cast<int64_t*>(inner.pool->allocate(inner.workspace_key, 700, MIMO_TAG_WORKSPACE));
  *temporary = -1;
  *temporary = *inner.x;
  *inner.y = *temporary;
  inner.pool->free(inner.workspace_key, temporary);
}

void fail(mimo_stream&, const void*) { throw std::runtime_error("an operation failed"); }

class Recorder final : public mimo::OperationRecorder {
 public:
  explicit Recorder(mimo_stream& stream) : stream_(stream) {}
  void* record(void (*run)(void*), void* queue) override {
    auto* recording = new Recording;
    stream_.recording = recording;
    run(queue);
    stream_.recording = nullptr;
    if (!refuses) {
      alive++;
      return recording;
    }
    delete recording;
    return nullptr;
  }
  void launch(void* recording) override {
    for (const Step& step : *static_cast<Recording*>(recording)) apply(step);
  }
  void drop(void* recording) override {
    alive--;
    delete static_cast<Recording*>(recording);
  }
  int alive = 0;
  bool refuses = false;

 private:
  mimo_stream& stream_;
};

class Pool final : public mimo::MemoryPool {
 public:
  ~Pool() override { release_all(); }
  int64_t given_back = 0;

 protected:
  void* system_allocate(int64_t bytes) override { return std::malloc(static_cast<size_t>(bytes)); }
  void system_free(void* address, int64_t) override {
    given_back++;
    std::free(address);
  }
};

struct Machine {
  Pool pool;
  mimo_stream stream;
  Recorder recorder{stream};
  mimo::OperationQueue queue{stream, pool, recorder};
  void add(const Step& step) { queue.add(queue_step, &step, sizeof(step)); }
};

/// From the second occurrence on, equal runs are launched as recordings; a run with another argument or address is not.
void repeats() {
  Machine machine;
  int64_t memory[4] = {1, 0, 0, 0};
  for (int round = 0; round < 5; ++round) {
    memory[0] = round;
    machine.add({memory, memory + 1, 2, 1});
    machine.add({memory + 1, memory + 2, 3, 0});
    machine.queue.flush();
    CHECK(memory[2] == 3 * (2 * round + 1));
  }
  CHECK(machine.queue.statistics().graphs == 1);
  CHECK(machine.queue.statistics().launches == 4);
  CHECK(machine.queue.statistics().operations_in_graphs == 8);
  CHECK(machine.stream.done_one_by_one == 2);
  machine.add({memory, memory + 1, 2, 1});
  machine.add({memory + 1, memory + 3, 3, 0});
  machine.queue.flush();
  CHECK(machine.queue.statistics().launches == 4);
  CHECK(memory[3] == memory[2]);
  // A single operation is not recorded.
  for (int round = 0; round < 3; ++round) {
    machine.add({memory, memory + 1, 1, 0});
    machine.queue.flush();
  }
  CHECK(machine.queue.statistics().launches == 4);
  machine.queue.forget();
  CHECK(machine.recorder.alive == 0);
}

/// A long run is flushed without being asked for.
void long_runs() {
  Machine machine;
  int64_t x = 0;
  for (int i = 0; i < 1000; ++i) machine.add({&x, &x, 1, 1});
  CHECK(x > 900);
  machine.queue.flush();
  CHECK(x == 1000);
  CHECK(machine.queue.statistics().operations_in_graphs + machine.queue.statistics().operations_alone == 1000);
}

void unfit() {
  Machine machine;
  machine.recorder.refuses = true;
  int64_t x = 0;
  for (int round = 1; round <= 4; ++round) {
    machine.add({&x, &x, 1, 1});
    machine.add({&x, &x, 1, 1});
    machine.queue.flush();
    CHECK(x == 2 * round);
  }
  CHECK(machine.queue.statistics().graphs == 0);
}

/// Operations before a failed one take effect, those after it are lost, and the queue keeps working.
void failures_pass() {
  Machine machine;
  int64_t x = 0;
  machine.add({&x, &x, 1, 1});
  machine.queue.add(fail, nullptr, 0);
  machine.add({&x, &x, 1, 100});
  bool thrown = false;
  try {
    machine.queue.flush();
  } catch (const std::runtime_error&) {
    thrown = true;
  }
  CHECK(thrown && x == 1);
  machine.add({&x, &x, 1, 10});
  machine.queue.flush();
  CHECK(x == 11);
}

/// Trimming keeps blocks that were freed while pending operations may use them; all others go, and all recordings with
/// them.
void trims() {
  Machine machine;
  Pool& pool = machine.pool;
  void* early = pool.allocate(&machine, 1000, MIMO_TAG_DATA);
  auto* late = static_cast<int64_t*>(pool.allocate(&machine, 2000, MIMO_TAG_DATA));
  int64_t x = 5, y = 0;
  for (int round = 0; round < 3; ++round) {
    machine.add({&x, &y, 1, 0});
    machine.add({&y, &y, 2, 0});
    machine.queue.flush();
  }
  CHECK(machine.recorder.alive == 1);
  pool.free(&machine, early);
  machine.add({&x, late, 1, 0});
  machine.add({late, &y, 1, 0});
  pool.free(&machine, late);
  pool.trim();
  CHECK(pool.given_back == 1);
  CHECK(machine.recorder.alive == 0);
  machine.queue.flush();
  CHECK(y == 5);
  pool.trim();
  CHECK(pool.given_back == 2);
}

/// Temporary memory must not reuse blocks freed since an operation that reads them was added.
void temporary_memory() {
  Machine machine;
  Pool& pool = machine.pool;
  auto* x = static_cast<int64_t*>(pool.allocate(&machine, 700, MIMO_TAG_DATA));
  *x = 42;
  int64_t y = 0;
  const Inner inner{&pool, machine.queue.workspace_key(), x, &y};
  machine.queue.add(queue_inner, &inner, sizeof(inner));
  pool.free(&machine, x);
  machine.queue.flush();
  CHECK(y == 42);
}

/// Allocation returns the lowest free block of a size, in whatever order blocks were freed.
void addresses() {
  Machine machine;
  Pool& pool = machine.pool;
  std::vector<void*> first;
  for (int i = 0; i < 8; ++i) first.push_back(pool.allocate(&machine, 500, MIMO_TAG_DATA));
  std::mt19937 random(7);
  std::vector<void*> expected;
  for (int round = 0; round < 20; ++round) {
    std::shuffle(first.begin(), first.end(), random);
    for (void* block : first) pool.free(&machine, block);
    first.clear();
    for (int i = 0; i < 8; ++i) first.push_back(pool.allocate(&machine, 500, MIMO_TAG_DATA));
    if (round == 0) expected = first;
    CHECK(first == expected);
  }
  for (void* block : first) pool.free(&machine, block);
}

/// Random runs of few kinds, some longer than 64, against the same steps executed directly.
void random_runs() {
  Machine machine;
  std::mt19937 random(11);
  int64_t held[8] = {1, 2, 3, 4, 5, 6, 7, 8}, plain[8];
  std::memcpy(plain, held, sizeof(held));
  for (int round = 0; round < 3000; ++round) {
    std::mt19937 kind(random() % 12);
    const int count = static_cast<int>(kind() % 100);
    for (int i = 0; i < count; ++i) {
      const auto from = kind() % 8, to = kind() % 8;
      const auto b = static_cast<int64_t>(kind() % 5);
      machine.add({held + from, held + to, 1, b});
      apply({plain + from, plain + to, 1, b});
    }
    if (random() % 3 != 0) machine.queue.flush();
    if (random() % 200 == 0) machine.pool.trim();
  }
  machine.queue.flush();
  CHECK(std::memcmp(held, plain, sizeof(held)) == 0);
  CHECK(machine.queue.statistics().launches > 100);
}

}  // namespace

int main() {
  repeats();
  long_runs();
  unfit();
  failures_pass();
  trims();
  temporary_memory();
  addresses();
  random_runs();
  return failures == 0 ? 0 : 1;
}
