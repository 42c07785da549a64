// The memory that images which are decoded at the same time take together.
#pragma once
#include <cstdint>

namespace mimo {

/// A share of the memory for decoding, which all threads of the process draw on in turn. An image that takes more than all of
/// it waits until no other is decoded, and is decoded alone: no image is refused for its size.
class DecodingMemory {
 public:
  /// Waits until `bytes` are free.
  explicit DecodingMemory(int64_t bytes);
  ~DecodingMemory();
  DecodingMemory(const DecodingMemory&) = delete;
  DecodingMemory& operator=(const DecodingMemory&) = delete;

 private:
  int64_t bytes_;
};

}  // namespace mimo
