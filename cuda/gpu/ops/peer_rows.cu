// Kernels that copy rows between GPUs through peer memory (peer_rows.h).
#include "kernel.cuh"
#include "peer_rows_kernels.h"
#include "row_range.h"

namespace mimo::cuda {
namespace {

constexpr int copy_threads = 512;
/// SMs that a collective may take from computation.
constexpr int copy_blocks = 32;
/// Bytes of a range that a block copies at a time.
constexpr int64_t piece_bytes = 32 << 10;
constexpr int words_at_once = 4;

__device__ __forceinline__ void store_released(uint32_t* to, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_acquired(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__global__ void tell_kernel(PeerTable peers, int moment, uint32_t number) {
  const int member = static_cast<int>(threadIdx.x);
  if (member >= peers.size || member == peers.rank) return;
  // Makes the writes of earlier kernels visible to the peers before the counter.
  __threadfence_system();
  store_released(peers.counters[member] + moment * most_peers + peers.rank, number);
}

__global__ void wait_kernel(PeerTable peers, int moment, uint32_t number) {
  const int member = static_cast<int>(threadIdx.x);
  if (member >= peers.size || member == peers.rank) return;
  const uint32_t* const told = peers.counters[peers.rank] + moment * most_peers + member;
  for (int looks = 0; static_cast<int32_t>(load_acquired(told) - number) < 0; ++looks) {
    // The abort flag is in host memory, which is slow to read: it is polled rarely.
    if (looks % 1024 == 1023 && *static_cast<const volatile int32_t*>(peers.ended) != 0) return;
    __nanosleep(64);
  }
}

/// before[i]: pieces of the ranges before range i. Each member starts with the ranges of the next rank, so that members
/// do not all access the same peer.
__device__ int count_pieces(const mimo_row_exchange& rows, const RowRange* ranges, const PeerTable& peers, int32_t* before) {
  const int entries = static_cast<int>(peers.size * rows.ranges), lane = static_cast<int>(threadIdx.x);
  if (lane < 32) {
    int total = 0;
    for (int first = 0; first < entries; first += 32) {
      const int entry = first + lane;
      int pieces = 0;
      if (entry < entries) {
        const int64_t turned = (entry + (peers.rank + 1) * rows.ranges) % entries;
        pieces = static_cast<int>(ceil_div(ranges[turned].rows * rows.row_bytes, piece_bytes));
      }
      int inclusive = pieces;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(all_lanes, inclusive, offset);
        if (lane >= offset) inclusive += other;
      }
      if (entry < entries) before[entry] = total + inclusive - pieces;
      total += __shfl_sync(all_lanes, inclusive, 31);
    }
    if (lane == 0) before[entries] = total;
  }
  __syncthreads();
  return before[entries];
}

/// Loads bypass L1, which is not coherent with other GPUs' writes.
__device__ __forceinline__ uint4 fetch(const uint4* from) { return __ldcg(from); }
__device__ __forceinline__ uint32_t fetch(const uint32_t* from) { return __ldcg(from); }
__device__ __forceinline__ uint16_t fetch(const uint16_t* from) { return __ldcg(from); }

template <class Word>
__device__ __forceinline__ void copy_words(char* to, const char* from, int64_t bytes, int thread, int threads) {
  Word* const into = reinterpret_cast<Word*>(to);
  const Word* const out_of = reinterpret_cast<const Word*>(from);
  const int count = static_cast<int>(bytes / static_cast<int64_t>(sizeof(Word)));
  for (int first = thread; first < count; first += threads * words_at_once) {
    Word value[words_at_once];
#pragma unroll
    for (int i = 0; i < words_at_once; ++i) {
      if (first + i * threads < count) value[i] = fetch(out_of + first + i * threads);
    }
#pragma unroll
    for (int i = 0; i < words_at_once; ++i) {
      if (first + i * threads < count) into[first + i * threads] = value[i];
    }
  }
}

/// Bytes [begin, begin + bytes) of a range, of the rows or of the tensor beside them, and the peer's window.
struct Place {
  char* window;
  char* tensor;
};

template <class Word, class BesideWord>
__global__ void __launch_bounds__(copy_threads)
    copy_kernel(PeerTable peers, mimo_row_exchange rows, int64_t beside_begin) {
  extern __shared__ int32_t before[];
  const bool pull = rows.stage == MIMO_ROW_STAGE_SENDER;
  const RowRange* const ranges = reinterpret_cast<const RowRange*>(pull ? rows.receive_ranges : rows.send_ranges);
  char* const tensor = pull ? static_cast<char*>(rows.y) : const_cast<char*>(static_cast<const char*>(rows.x));
  const int entries = static_cast<int>(peers.size * rows.ranges), turn = static_cast<int>((peers.rank + 1) * rows.ranges);
  const int pieces = count_pieces(rows, ranges, peers, before);
  const auto copy = [&](auto word, const Place& place, int64_t bytes, int thread, int threads) {
    using W = decltype(word);
    copy_words<W>(pull ? place.tensor : place.window, pull ? place.window : place.tensor, bytes, thread, threads);
  };
  for (int piece = static_cast<int>(blockIdx.x); piece < pieces; piece += static_cast<int>(gridDim.x)) {
    int low = 0, high = entries - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (before[middle] <= piece) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const int entry = (low + turn) % entries;
    const RowRange range = ranges[entry];
    const int64_t begin = (piece - before[low]) * piece_bytes;
    const Place place{peers.windows[entry / rows.ranges] + range.there * rows.row_bytes + begin,
                      tensor + range.here * rows.row_bytes + begin};
    copy(Word{}, place, smaller(piece_bytes, range.rows * rows.row_bytes - begin), static_cast<int>(threadIdx.x), copy_threads);
  }
  if (rows.beside_x == nullptr) return;
  // Short ranges, if there are many, take a warp each; long ones a block each.
  char* const beside =
      pull ? static_cast<char*>(rows.beside_y) : const_cast<char*>(static_cast<const char*>(rows.beside_x));
  const int team = entries < 4 * static_cast<int>(gridDim.x) ? copy_threads : 32;
  const int teams = static_cast<int>(gridDim.x) * copy_threads / team;
  for (int i = static_cast<int>(blockIdx.x * copy_threads + threadIdx.x) / team; i < entries; i += teams) {
    const int entry = (i + turn) % entries;
    const RowRange range = ranges[entry];
    const Place place{peers.windows[entry / rows.ranges] + beside_begin + range.there * rows.beside_row_bytes,
                      beside + range.here * rows.beside_row_bytes};
    copy(BesideWord{}, place, range.rows * rows.beside_row_bytes, static_cast<int>(threadIdx.x) % team, team);
  }
}

/// Size of the widest word with which rows of `row_bytes` at these addresses can be copied.
int64_t word_of(int64_t row_bytes, const void* x, const void* y) {
  const auto fits = [&](int64_t bytes) {
    return row_bytes % bytes == 0 && reinterpret_cast<uintptr_t>(x) % static_cast<uintptr_t>(bytes) == 0 &&
           reinterpret_cast<uintptr_t>(y) % static_cast<uintptr_t>(bytes) == 0;
  };
  for (const int64_t bytes : {16, 4, 2}) {
    if (fits(bytes)) return bytes;
  }
  mimo::fail(MIMO_ERROR_ARGUMENT, "mimo_group_exchange_rows needs rows of even numbers of bytes.");
}

/// Calls body with a value of the word type of `bytes` bytes.
template <class Body>
void with_word(int64_t bytes, Body&& body) {
  if (bytes == 16) {
    body(uint4{});
  } else if (bytes == 4) {
    body(uint32_t{});
  } else {
    body(uint16_t{});
  }
}

}  // namespace

void tell_peers(const PeerTable& peers, Moment moment, uint32_t number, cudaStream_t stream) {
  tell_kernel<<<1, most_peers, 0, stream>>>(peers, static_cast<int>(moment), number);
  check(cudaGetLastError(), "launching a kernel");
}

void wait_for_peers(const PeerTable& peers, Moment moment, uint32_t number, cudaStream_t stream) {
  wait_kernel<<<1, most_peers, 0, stream>>>(peers, static_cast<int>(moment), number);
  check(cudaGetLastError(), "launching a kernel");
}

void copy_peer_rows(const PeerTable& peers, const mimo_row_exchange& rows, cudaStream_t stream) {
  const int64_t shared = (peers.size * rows.ranges + 1) * static_cast<int64_t>(sizeof(int32_t));
  MIMO_REQUIRE(shared <= 48 * 1024, "mimo_group_exchange_rows");
  const int64_t beside_begin = beside_offset(rows.stage_rows, rows.row_bytes);
  const int64_t beside_word = rows.beside_x == nullptr ? 4 : word_of(rows.beside_row_bytes, rows.beside_x, rows.beside_y);
  with_word(word_of(rows.row_bytes, rows.x, rows.y), [&](auto word) {
    with_word(beside_word, [&](auto beside) {
      copy_kernel<decltype(word), decltype(beside)>
          <<<copy_blocks, copy_threads, static_cast<size_t>(shared), stream>>>(peers, rows, beside_begin);
      check(cudaGetLastError(), "launching a kernel");
    });
  });
}

}  // namespace mimo::cuda
