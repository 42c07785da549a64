// Caching allocator behind mimo_memory_*: blocks are rounded to size classes, kept when freed, and counted by tag. One
// stream orders every use of a block (a block freed on a stream is reused by that stream), so no host synchronisation
// is needed; the derived class provides the memory.
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

  /// Returns a block of at least `bytes`, reusable by work queued on `stream`.
  void* allocate(const void* stream, int64_t bytes, int32_t tag);
  /// Gives a block back to the cache of `stream`. Throws for an address this pool did not hand out.
  void free(const void* stream, void* address);
  void statistics(mimo_memory_statistics* out) const;
  void reset_peak();
  /// Returns cached blocks to the system.
  void trim();
  void set_limit(int64_t bytes);

  /// A queue of work that the device does not have yet, and that may use blocks after they were freed here.
  class Holder {
   public:
    /// Cached blocks are about to go back to the system. Those freed from the returned count of frees() on stay.
    virtual int64_t before_trim() = 0;

   protected:
    ~Holder() = default;
  };
  void add(Holder* holder);
  void remove(Holder* holder);
  /// Blocks freed so far.
  int64_t frees() const;

 protected:
  /// Null when the system has no memory left.
  virtual void* system_allocate(int64_t bytes) = 0;
  virtual void system_free(void* address, int64_t bytes) = 0;
  /// The first `live` of a block's `bytes` may be touched from now on: lets a sanitizer see accesses that caching
  /// and rounding would hide from it.
  virtual void mark_live(void* /*address*/, int64_t /*live*/, int64_t /*bytes*/) {}
  /// Derived destructors call this while system_free is still theirs.
  void release_all();

 private:
  struct Block {
    int64_t bytes;      // of the block
    int64_t requested;  // the requested size, which statistics count
    int32_t tag;
  };
  static int64_t block_bytes(int64_t requested);
  void trim_locked();

  mutable std::mutex mutex_;
  std::unordered_map<void*, Block> live_;
  // Per stream: free blocks by size and address, with the frees() before theirs. The lowest free block is taken, in
  // whatever order blocks became free, so that equal steps get equal addresses.
  std::map<const void*, std::map<int64_t, std::map<void*, int64_t>>> cache_;
  std::vector<Holder*> holders_;
  int64_t frees_ = 0;
  mimo_memory_statistics statistics_{};
  int64_t limit_ = 0;
};

}  // namespace mimo
