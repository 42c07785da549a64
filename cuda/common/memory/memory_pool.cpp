#include "memory_pool.h"

#include <algorithm>
#include <string>

#include "status.h"

namespace mimo {
namespace {

const char* const tag_names[MIMO_TAG_COUNT] = {"parameters", "gradients", "optimizer",    "activations",
                                               "workspace",  "data",      "communication"};

}  // namespace

// Few size classes make reuse likely: 64-byte steps up to 1 KiB, then eighths of a power of two (at most 12.5 % waste).
int64_t MemoryPool::block_bytes(int64_t requested) {
  if (requested <= 1024) return std::max<int64_t>(64, (requested + 63) / 64 * 64);
  int64_t power = 1024;
  while (power * 2 <= requested) power *= 2;
  const int64_t step = power / 8;
  return (requested + step - 1) / step * step;
}

void* MemoryPool::allocate(const void* stream, int64_t bytes, int32_t tag) {
  MIMO_REQUIRE(bytes >= 0, "mimo_memory_allocate");
  MIMO_REQUIRE(tag >= 0 && tag < MIMO_TAG_COUNT, "mimo_memory_allocate");
  const int64_t size = block_bytes(bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  if (limit_ > 0 && statistics_.live_bytes + bytes > limit_) {
    throw Error(MIMO_ERROR_OUT_OF_MEMORY, "Out of device memory: " + std::to_string(bytes) + " bytes for " +
                                              tag_names[tag] + " on top of " + std::to_string(statistics_.live_bytes) +
                                              " live pass the limit of " + std::to_string(limit_) + " bytes.");
  }
  void* address = nullptr;
  std::map<void*, int64_t>& blocks = cache_[stream][size];
  if (!blocks.empty()) {
    address = blocks.begin()->first;
    blocks.erase(blocks.begin());
  } else {
    address = system_allocate(size);
    if (address == nullptr) {
      trim_locked();
      address = system_allocate(size);
    }
    if (address == nullptr) {
      throw Error(MIMO_ERROR_OUT_OF_MEMORY, "Out of device memory: no room for " + std::to_string(bytes) +
                                                " bytes of " + tag_names[tag] + " with " +
                                                std::to_string(statistics_.live_bytes) + " bytes live.");
    }
    statistics_.reserved_bytes += size;
    statistics_.system_allocations += 1;
  }
  mark_live(address, bytes, size);
  live_[address] = Block{size, bytes, tag};
  statistics_.live_bytes += bytes;
  statistics_.live_blocks += 1;
  statistics_.live_bytes_by_tag[tag] += bytes;
  statistics_.peak_bytes = std::max(statistics_.peak_bytes, statistics_.live_bytes);
  statistics_.peak_bytes_by_tag[tag] = std::max(statistics_.peak_bytes_by_tag[tag], statistics_.live_bytes_by_tag[tag]);
  return address;
}

void MemoryPool::free(const void* stream, void* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = live_.find(address);
  if (found == live_.end()) {
    throw Error(MIMO_ERROR_ARGUMENT, "mimo_memory_free was given an address that is not live.");
  }
  const Block block = found->second;
  live_.erase(found);
  mark_live(address, 0, block.bytes);
  cache_[stream][block.bytes].emplace(address, frees_++);
  statistics_.live_bytes -= block.requested;
  statistics_.live_blocks -= 1;
  statistics_.live_bytes_by_tag[block.tag] -= block.requested;
}

void MemoryPool::statistics(mimo_memory_statistics* out) const {
  std::lock_guard<std::mutex> lock(mutex_);
  *out = statistics_;
}

void MemoryPool::reset_peak() {
  std::lock_guard<std::mutex> lock(mutex_);
  statistics_.peak_bytes = statistics_.live_bytes;
  for (int tag = 0; tag < MIMO_TAG_COUNT; ++tag)
    statistics_.peak_bytes_by_tag[tag] = statistics_.live_bytes_by_tag[tag];
}

void MemoryPool::trim() {
  std::lock_guard<std::mutex> lock(mutex_);
  trim_locked();
}

void MemoryPool::trim_locked() {
  int64_t stay = frees_;
  for (Holder* holder : holders_) stay = std::min(stay, holder->before_trim());
  for (auto& [stream, sizes] : cache_) {
    for (auto& [bytes, blocks] : sizes) {
      for (auto block = blocks.begin(); block != blocks.end();) {
        if (block->second >= stay) {
          ++block;
          continue;
        }
        system_free(block->first, bytes);
        statistics_.reserved_bytes -= bytes;
        block = blocks.erase(block);
      }
    }
  }
}

void MemoryPool::set_limit(int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  limit_ = bytes;
}

void MemoryPool::add(Holder* holder) {
  std::lock_guard<std::mutex> lock(mutex_);
  holders_.push_back(holder);
}

void MemoryPool::remove(Holder* holder) {
  std::lock_guard<std::mutex> lock(mutex_);
  holders_.erase(std::remove(holders_.begin(), holders_.end(), holder), holders_.end());
}

int64_t MemoryPool::frees() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return frees_;
}

void MemoryPool::release_all() {
  std::lock_guard<std::mutex> lock(mutex_);
  trim_locked();
  for (auto& [address, block] : live_) system_free(address, block.bytes);
  live_.clear();
}

}  // namespace mimo
