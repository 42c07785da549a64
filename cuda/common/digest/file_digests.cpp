// SHA-256 of consecutive ranges of a file that is being written (mimo/digests.h). Each thread hashes two ranges
// interleaved, each with a buffer that stays in the core's cache, as far as both have bytes.
#include "mimo/digests.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "sha256.h"
#include "start_thread.h"
#include "status.h"

namespace mimo {
namespace {

constexpr size_t buffer_bytes = size_t{64} << 10;
constexpr size_t sum_size = 32;

struct Range {
  int64_t position;
  int64_t bytes;
  std::array<uint8_t, sum_size> sum;
};

/// A range that is being hashed.
struct Lane {
  Range* range = nullptr;
  Sha256State state;
  int64_t limit = 0;  // bytes of the range written to the file so far
  int64_t read = 0;   // bytes of the range read so far
  size_t begin = 0;   // first byte of the buffer not hashed yet
  size_t end = 0;
  std::vector<uint8_t> buffer = std::vector<uint8_t>(buffer_bytes);

  size_t blocks() const { return range == nullptr ? 0 : (end - begin) / sha256_block; }
  bool has_all() const { return read == range->bytes; }
};

}  // namespace
}  // namespace mimo

struct mimo_digests {
 public:
  mimo_digests(int file, int64_t position, int threads) : file_(file), next_(position), written_(position) {
    try {
      for (int i = 0; i < threads; i++) threads_.push_back(mimo::start_thread([this] { work(); }));
    } catch (...) {
      // A std::thread destroyed without join would terminate the process.
      end();
      throw;
    }
  }

  ~mimo_digests() { end(); }

  void range(int64_t bytes) {
    const std::lock_guard lock(mutex_);
    ranges_.push_back({next_, bytes, {}});
    next_ += bytes;
    news_.notify_one();
  }

  void written(int64_t position) {
    const std::lock_guard lock(mutex_);
    MIMO_REQUIRE(position >= written_, "mimo_digests_written");
    written_ = position;
    news_.notify_all();
  }

  void wait(uint8_t* sums, int64_t sum_bytes) {
    std::unique_lock lock(mutex_);
    MIMO_REQUIRE(sum_bytes == static_cast<int64_t>(mimo::sum_size * ranges_.size()), "mimo_digests_wait");
    MIMO_REQUIRE(written_ >= next_, "mimo_digests_wait");
    finished_.wait(lock, [this] { return done_ == ranges_.size() || failure_ != nullptr; });
    if (failure_ != nullptr) throw mimo::Error(MIMO_ERROR_DATA, failure_);
    for (const mimo::Range& range : ranges_) {
      std::memcpy(sums, range.sum.data(), mimo::sum_size);
      sums += mimo::sum_size;
    }
  }

 private:
  using Lanes = std::array<mimo::Lane, 2>;

  void end() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    news_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void work() {
    Lanes lanes;
    while (prepare(lanes)) {
      for (mimo::Lane& lane : lanes) {
        if (lane.range != nullptr && lane.blocks() == 0 && !fill(lane)) return;
      }
      hash(lanes);
      for (mimo::Lane& lane : lanes) {
        if (lane.range != nullptr && lane.has_all() && lane.blocks() == 0) finish(lane);
      }
    }
  }

  /// Takes ranges whose first bytes have arrived and waits until a lane can continue; false if no work is left.
  bool prepare(Lanes& lanes) {
    std::unique_lock lock(mutex_);
    for (;;) {
      if (over_ || failure_ != nullptr) return false;
      bool ready = false;
      for (mimo::Lane& lane : lanes) {
        if (lane.range == nullptr && taken_ < ranges_.size()) {
          mimo::Range& range = ranges_[taken_];
          if (written_ > range.position || written_ >= range.position + range.bytes) {
            taken_++;
            lane.range = &range;
            lane.state = mimo::sha256_begin();
            lane.read = 0;
            lane.begin = lane.end = 0;
          }
        }
        if (lane.range == nullptr) continue;
        lane.limit = std::min(written_ - lane.range->position, lane.range->bytes);
        ready |= lane.blocks() > 0 || lane.limit > lane.read || lane.has_all();
      }
      if (ready) return true;
      news_.wait(lock);
    }
  }

  /// Reads more bytes of the range after the incomplete block in the buffer; false if the file cannot be read.
  bool fill(mimo::Lane& lane) {
    const size_t kept = lane.end - lane.begin;
    std::memmove(lane.buffer.data(), lane.buffer.data() + lane.begin, kept);
    lane.begin = 0;
    lane.end = kept;
    int64_t wanted = std::min<int64_t>(lane.limit - lane.read, static_cast<int64_t>(mimo::buffer_bytes - kept));
    while (wanted > 0) {
      const ssize_t count =
          pread(file_, lane.buffer.data() + lane.end, static_cast<size_t>(wanted), lane.range->position + lane.read);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) {
        const std::lock_guard lock(mutex_);
        failure_ = "What was written cannot be read back.";
        finished_.notify_all();
        return false;
      }
      lane.end += static_cast<size_t>(count);
      lane.read += count;
      wanted -= count;
    }
    return true;
  }

  static void hash(Lanes& lanes) {
    mimo::Sha256State* states[2];
    const uint8_t* data[2];
    int streams = 0;
    size_t blocks = SIZE_MAX;
    for (mimo::Lane& lane : lanes) {
      if (lane.blocks() == 0) continue;
      states[streams] = &lane.state;
      data[streams++] = lane.buffer.data() + lane.begin;
      blocks = std::min(blocks, lane.blocks());
    }
    if (streams == 0) return;
    for (mimo::Lane& lane : lanes) {
      if (lane.blocks() > 0) lane.begin += blocks * mimo::sha256_block;
    }
    mimo::sha256_update(states, data, streams, blocks);
  }

  void finish(mimo::Lane& lane) {
    mimo::sha256_end(lane.state, lane.buffer.data() + lane.begin, lane.end - lane.begin,
                     static_cast<uint64_t>(lane.range->bytes), lane.range->sum.data());
    lane.range = nullptr;
    const std::lock_guard lock(mutex_);
    if (++done_ == ranges_.size()) finished_.notify_all();
  }

  const int file_;
  std::mutex mutex_;
  std::condition_variable news_, finished_;
  std::deque<mimo::Range> ranges_;  // a deque keeps its elements in place
  int64_t next_;                    // start of the next range
  int64_t written_;
  size_t taken_ = 0;
  size_t done_ = 0;
  const char* failure_ = nullptr;
  bool over_ = false;
  std::vector<std::thread> threads_;
};

extern "C" int32_t mimo_digests_open(int32_t file, int64_t position, int32_t threads, mimo_digests** digests) {
  return mimo::guard([&] {
    MIMO_REQUIRE(file >= 0 && position >= 0 && threads > 0, "mimo_digests_open");
    *digests = new mimo_digests(file, position, threads);
  });
}

extern "C" int32_t mimo_digests_range(mimo_digests* digests, int64_t bytes) {
  return mimo::guard([&] {
    MIMO_REQUIRE(bytes >= 0, "mimo_digests_range");
    digests->range(bytes);
  });
}

extern "C" int32_t mimo_digests_written(mimo_digests* digests, int64_t position) {
  return mimo::guard([&] { digests->written(position); });
}

extern "C" int32_t mimo_digests_wait(mimo_digests* digests, void* host_sums, int64_t sum_bytes) {
  return mimo::guard([&] { digests->wait(static_cast<uint8_t*>(host_sums), sum_bytes); });
}

extern "C" int32_t mimo_digests_close(mimo_digests* digests) {
  return mimo::guard([&] { delete digests; });
}
