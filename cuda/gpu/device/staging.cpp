// Copies between the GPU and the host's pageable memory through pinned pieces.
#include "staging.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <thread>

#include "device.h"
#include "error.h"
#include "start_thread.h"

namespace mimo::cuda {
namespace {

/// Cores that the calling thread may run on.
int64_t usable_cores() {
  cpu_set_t cores;
  return sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

}  // namespace

Staging::~Staging() {
  for (const Piece& piece : pieces_) {
    cudaFreeHost(piece.memory);
    cudaEventDestroy(piece.free);
  }
}

void Staging::add_piece() {
  Piece piece;
  check(cudaMallocHost(reinterpret_cast<void**>(&piece.memory), piece_bytes), "cudaMallocHost");
  check(cudaEventCreateWithFlags(&piece.free, cudaEventDisableTiming), "cudaEventCreate");
  pieces_.insert(pieces_.begin() + static_cast<int64_t>(current_), piece);
}

/// Selects the piece of pinned memory to fill: the one used longest ago, or a new one while copies still use that.
void Staging::next_piece() {
  if (!pieces_.empty()) current_ = (current_ + 1) % pieces_.size();
  filled_ = 0;
  if (pieces_.empty() || (pieces_.size() < most_pieces && cudaEventQuery(pieces_[current_].free) == cudaErrorNotReady)) {
    add_piece();
  } else {
    check(cudaEventSynchronize(pieces_[current_].free), "waiting for a copy");
  }
}

template <class Body>
void Staging::in_lanes(int64_t bytes, Body&& body) {
  // A thread pays from a few pieces on, and half of the cores are left to the data's workers.
  const int64_t lanes = std::clamp(std::min(bytes / (4 * piece_bytes), usable_cores() / 2), int64_t{1}, most_lanes);
  while (static_cast<int64_t>(pieces_.size()) < 2 * lanes) add_piece();
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  std::vector<std::exception_ptr> errors(static_cast<size_t>(lanes));
  const auto run = [&](int64_t lane) {
    try {
      check(cudaSetDevice(device), "cudaSetDevice");
      body(&pieces_[static_cast<size_t>(2 * lane)], lane * piece_bytes, lanes * piece_bytes);
    } catch (...) {
      errors[static_cast<size_t>(lane)] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  for (int64_t lane = 1; lane < lanes; ++lane) {
    try {
      threads.push_back(start_thread([&run, lane] { run(lane); }));
    } catch (const Error&) {
      run(lane);
    }
  }
  run(0);
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

void Staging::to_device(cudaStream_t stream, void* destination, const void* source, int64_t bytes) {
  const auto send = [&](const Piece& piece, int64_t filled, int64_t done, int64_t count) {
    std::memcpy(piece.memory + filled, static_cast<const char*>(source) + done, static_cast<size_t>(count));
    check(cudaMemcpyAsync(static_cast<char*>(destination) + done, piece.memory + filled, static_cast<size_t>(count),
                          cudaMemcpyHostToDevice, stream),
          "a copy to the device");
    check(cudaEventRecord(piece.free, stream), "cudaEventRecord");
  };
  if (bytes > static_cast<int64_t>(most_pieces) * piece_bytes) {
    in_lanes(bytes, [&](const Piece* own, int64_t begin, int64_t step) {
      for (int64_t done = begin, i = 0; done < bytes; done += step, i ^= 1) {
        check(cudaEventSynchronize(own[i].free), "waiting for a copy");
        send(own[i], 0, done, std::min(bytes - done, piece_bytes));
      }
    });
    filled_ = piece_bytes;
    return;
  }
  for (int64_t done = 0; done < bytes;) {
    if (filled_ == piece_bytes) next_piece();
    const int64_t count = std::min(bytes - done, piece_bytes - filled_);
    send(pieces_[current_], filled_, done, count);
    filled_ += count;
    done += count;
  }
}

void Staging::to_host(cudaStream_t stream, void* destination, const void* source, int64_t bytes) {
  in_lanes(bytes, [&](const Piece* own, int64_t begin, int64_t step) {
    const auto count_at = [&](int64_t done) { return static_cast<size_t>(std::min(bytes - done, piece_bytes)); };
    // Earlier copies to the device that still use a piece precede this one in the stream.
    const auto fetch = [&](int64_t done, int64_t i) {
      check(cudaMemcpyAsync(own[i].memory, static_cast<const char*>(source) + done, count_at(done), cudaMemcpyDeviceToHost,
                            stream),
            "a copy to the host");
      check(cudaEventRecord(own[i].free, stream), "cudaEventRecord");
    };
    fetch(begin, 0);
    for (int64_t done = begin, i = 0; done < bytes; done += step, i ^= 1) {
      if (done + step < bytes) fetch(done + step, i ^ 1);
      check(cudaEventSynchronize(own[i].free), "a copy to the host");
      std::memcpy(static_cast<char*>(destination) + done, own[i].memory, count_at(done));
    }
  });
}

}  // namespace mimo::cuda
