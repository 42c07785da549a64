// Copies between the GPU and the host's pageable memory.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

namespace mimo::cuda {

/// Pinned host memory through which a stream's copies to and from pageable memory go, so that they run at bus speed and
/// copies to the device do not wait for the stream. Threads share a large copy: a core alone copies several times slower
/// than the bus.
class Staging {
 public:
  ~Staging();
  /// Returns as soon as `source` may change: bytes not yet copied are staged here. Waits for the stream's earlier work
  /// only when more than most_pieces are in flight.
  void to_device(cudaStream_t stream, void* destination, const void* source, int64_t bytes);
  /// Returns when the copy is complete.
  void to_host(cudaStream_t stream, void* destination, const void* source, int64_t bytes);

 private:
  struct Piece {
    char* memory = nullptr;
    cudaEvent_t free = nullptr;  // recorded after the last copy that used the piece
  };
  static constexpr int64_t piece_bytes = 8 << 20;
  static constexpr size_t most_pieces = 16;
  static constexpr int64_t most_lanes = most_pieces / 2;
  void add_piece();
  void next_piece();
  /// Divides the pieces of a copy among lanes in turn: body(pinned, begin, step) copies those that begin at the bytes begin,
  /// begin + step, … through the lane's two pieces of pinned memory. The lanes of a large copy run on threads of their own.
  template <class Body>
  void in_lanes(int64_t bytes, Body&& body);
  std::vector<Piece> pieces_;
  size_t current_ = 0;
  int64_t filled_ = piece_bytes;  // bytes used of the current piece
};

}  // namespace mimo::cuda
