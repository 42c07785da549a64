// How the CUDA library copies from and to the host's pageable memory.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

namespace mimo::cuda {

/// Pinned host memory through which a stream's copies from and to pageable memory pass, so that they run at the bus's
/// rate, and those to the device without waiting for the stream.
class Staging {
 public:
  ~Staging();
  /// Returns when `source` may change: bytes that still have to be copied lie here. Waits for the stream's earlier work
  /// only where more than most_pieces are on their way.
  void to_device(cudaStream_t stream, void* destination, const void* source, int64_t bytes);
  /// Returns when the copy is complete.
  void to_host(cudaStream_t stream, void* destination, const void* source, int64_t bytes);

 private:
  struct Piece {
    char* memory = nullptr;
    cudaEvent_t free = nullptr;  // the last copy through it is done
  };
  static constexpr int64_t piece_bytes = 8 << 20;
  static constexpr size_t most_pieces = 16;
  void add_piece();
  void next_piece();
  std::vector<Piece> pieces_;
  size_t current_ = 0;
  int64_t filled_ = piece_bytes;  // bytes of the current piece
};

}  // namespace mimo::cuda
