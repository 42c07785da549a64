// Caching allocator behind mimo_memory_*: blocks are rounded to size classes, cached when freed, and counted by tag. A
// block freed on a stream is reused by the same stream only, whose order makes host synchronisation unnecessary. The
// derived class provides the memory.
#pragma once
#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "mimo.h"

namespace mimo {

class MemoryPool {
 public:
  virtual ~MemoryPool() = default;

  /// Returns a block of at least `bytes` for work queued on `stream`.
  void* allocate(const void* stream, int64_t bytes, int32_t tag);
  /// Returns a block to the cache of `stream`. Throws for an address that is not from this pool.
  void free(const void* stream, void* address);
  void statistics(mimo_memory_statistics* out) const;
  void reset_peak();
  /// Returns cached blocks to the system.
  void trim();
  void set_limit(int64_t bytes);

  /// A queue of work not yet launched, which may use blocks after they were freed here.
  class Holder {
   public:
    /// Called before cached blocks are returned to the system. Blocks freed from the returned count of frees() on are
    /// kept.
    virtual int64_t before_trim() = 0;

   protected:
    ~Holder() = default;
  };
  void add(Holder* holder);
  void remove(Holder* holder);
  /// Number of blocks freed so far.
  int64_t frees() const;

 protected:
  /// Returns null if the system has no memory left.
  virtual void* system_allocate(int64_t bytes) = 0;
  virtual void system_free(void* address, int64_t bytes) = 0;
  /// Only the first `live` of a block's `bytes` may be accessed from now on: lets a sanitizer see accesses that caching
  /// and rounding would hide.
  virtual void mark_live(void* /*address*/, int64_t /*live*/, int64_t /*bytes*/) {}
  /// Derived destructors must call this while their system_free still exists.
  void release_all();

 private:
  struct Block {
    int64_t bytes;      // size of the block
    int64_t requested;  // requested size, which statistics count
    int32_t tag;
  };
  static int64_t block_bytes(int64_t requested);
  void trim_locked();

  mutable std::mutex mutex_;
  std::unordered_map<void*, Block> live_;
  // For each stream, free blocks by size and address, with frees() at their release. The lowest address is taken, in
  // whatever order blocks were freed, so that equal steps get equal addresses.
  std::map<const void*, std::map<int64_t, std::map<void*, int64_t>>> cache_;
  std::vector<Holder*> holders_;
  int64_t frees_ = 0;
  mimo_memory_statistics statistics_{};
  int64_t limit_ = 0;
};

}  // namespace mimo
