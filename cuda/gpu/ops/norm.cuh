// Work distribution of the norm kernels: a team of threads owns a row's group of columns (usually the whole row), each
// thread up to `packs` packs. Few threads with many packs: a reduction over a team costs the same however many values
// each thread brings, and norms are close to the SM's issue rate. A team is one or two warps if a row fits, else a
// block.
#pragma once
#include "early.cuh"
#include "mma.cuh"
#include "packed.cuh"

namespace mimo::cuda {

/// Packs values, rounded to their storage type.
template <class T, int Width>
__device__ __forceinline__ Packed<T, Width> packed(const float (&from)[Width]) {
  Packed<T, Width> to;
  write(reinterpret_cast<T*>(&to), from);
  return to;
}

/// a + b, rounded once.
template <class T, int Width>
__device__ __forceinline__ Packed<T, Width> packed_sum(const Packed<T, Width>& a, const Packed<T, Width>& b) {
  float both[Width];
#pragma unroll
  for (int i = 0; i < Width; ++i) both[i] = a.get(i) + b.get(i);
  return packed<T>(both);
}

/// `Warps` > 0: teams of that many warps share a block, blockDim = (32 Warps, teams). 0: a team is a whole block.
template <int Packs, int Warps>
struct Team {
  static constexpr int packs = Packs, warps = Warps;
  static constexpr bool is_block = Warps == 0;
  static constexpr int sum_floats = 32;  // shared memory for each summed value

  static __device__ __forceinline__ int threads() { return is_block ? static_cast<int>(blockDim.x) : 32 * Warps; }
  /// Index of the thread's p-th pack, which may lie past the row's end.
  static __device__ __forceinline__ int pack(int p) { return static_cast<int>(threadIdx.x) + p * threads(); }

  /// Calls body(p) with p known at compile time, so that arrays indexed by it stay in registers. There is no branch
  /// between packs, so their latencies overlap; packs past the row's end are processed as zeros.
  template <class Body>
  static __device__ __forceinline__ void for_packs(Body&& body) {
#pragma unroll
    for (int p = 0; p < Packs; ++p) body(p);
  }

  /// Barrier over the warps of the team.
  static __device__ __forceinline__ void meet() {
    if constexpr (Warps > 1) {
      asm volatile("bar.sync %0, %1;" ::"r"(static_cast<int>(threadIdx.y) + 1), "n"(32 * Warps) : "memory");
    }
  }

  /// Sums over the team and returns the sums to every thread. `shared` holds sum_floats * Count values and may be
  /// reused after the team's next sum.
  template <int Count>
  static __device__ __forceinline__ void sum(float (&value)[Count], float* shared) {
    if constexpr (is_block) {
      block_sum(value, shared);
    } else {
#pragma unroll
      for (int i = 0; i < Count; ++i) value[i] = warp_sum(value[i]);
    }
    if constexpr (Warps > 1) {
      float* const own = shared + threadIdx.y * (Warps * Count);
      if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int i = 0; i < Count; ++i) own[threadIdx.x / 32 * Count + i] = value[i];
      }
      meet();
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        value[i] = 0;
#pragma unroll
        for (int w = 0; w < Warps; ++w) value[i] += own[w * Count + i];
      }
    }
  }
};

constexpr int block_packs = 4;
/// Most threads of a whole-block team, forward and backward, limited by registers.
constexpr int most_forward_threads = 512;
template <int Width>
constexpr int most_backward_threads = Width == 8 ? 384 : 512;

/// Calls body(Team) with the team for rows of `row_packs` packs. bf16 has the sizes of common models. LargeTeam, or
/// void, is for rows that are too long for one warp but fit it.
template <class T, int Width, class LargeTeam, int MostThreads, class Body>
void with_team(int64_t row_packs, Body&& body) {
  if constexpr (Width > 1) {
    if constexpr (sizeof(T) == 2) {
      if (row_packs <= 32 * 2) return body(Team<2, 1>{});
    }
    if (row_packs <= 32 * 5) return body(Team<5, 1>{});
    if constexpr (sizeof(T) == 2 && !std::is_void_v<LargeTeam>) {
      if (row_packs <= 32 * LargeTeam::warps * LargeTeam::packs) return body(LargeTeam{});
    }
  }
  if (row_packs > int64_t{MostThreads} * block_packs) {
    fail(MIMO_ERROR_UNSUPPORTED, "A norm over this many columns does not fit a block of threads.");
  }
  body(Team<block_packs, 0>{});
}

/// Teams in a block, forward and backward: fastest on an H200.
template <class Team>
constexpr int forward_teams = Team::is_block ? 1 : Team::packs <= 2 ? 4 : 2;
template <class Team>
constexpr int backward_teams = Team::is_block ? 1 : Team::warps == 2 ? 6 : 8;
/// Upper bound of the threads in a block.
template <class Team>
constexpr int forward_threads = Team::is_block ? most_forward_threads : 32 * Team::warps * forward_teams<Team>;
template <class Team, int Width>
constexpr int backward_threads = Team::is_block ? most_backward_threads<Width> : 32 * Team::warps * backward_teams<Team>;

/// Block dimensions for `teams` teams.
template <class Team>
dim3 team_block(int64_t row_packs, int64_t teams) {
  if (!Team::is_block) return dim3(32 * Team::warps, static_cast<unsigned>(teams));
  return dim3(static_cast<unsigned>(round_up(ceil_div(row_packs, Team::packs), 32)), 1);
}

/// Keeps the compiler from unpacking values before a loop, where they would take twice the registers.
template <class Packed, int Count>
__device__ __forceinline__ void stay_packed(Packed (&value)[Count]) {
#pragma unroll
  for (int p = 0; p < Count; ++p) {
#pragma unroll
    for (auto& word : value[p].word) {
      if constexpr (sizeof(word) == 4) asm volatile("" : "+r"(word));
    }
  }
}

/// Loads a pack, or returns zeros if not `live`.
template <int Width, class T>
__device__ __forceinline__ Packed<T, Width> read_if(bool live, const T* from) {
  Packed<T, Width> value = {};
  if (live) value = read_packed<Width>(from);
  return value;
}

constexpr int copied_tensors = 3;  // x, dy, dresidual

/// cp.async prefetch of a thread's packs of its team's next rows: a ring of rows in shared memory, the current one
/// included. Each thread reads only its own copies, so no barrier is needed.
template <class Team, class T, int Width>
struct RowsAhead {
  using Owner = Team;
  static constexpr bool possible = Width * sizeof(T) == 16;
  static constexpr bool always = possible && !Team::is_block;  // a small team's memory always fits
  static constexpr int rows = Team::warps == 2 ? 2 : 3;
  static constexpr int64_t bytes_per_thread = int64_t{16} * rows * copied_tensors * Team::packs;
  char* memory;

  /// `slot`: index of the row in the ring, 0 .. rows - 1.
  __device__ __forceinline__ char* place(int slot, int tensor, int p) const {
    const int thread = threadIdx.y * Team::threads() + threadIdx.x;
    const int at = (slot * copied_tensors + tensor) * Team::packs + p;
    return memory + (at * static_cast<int>(blockDim.x * blockDim.y) + thread) * 16;
  }
  /// Copies zeros if not `live`.
  __device__ __forceinline__ void copy(const T* from, bool live, int slot, int tensor, int p) const {
    copy_async(place(slot, tensor, p), from, live);
  }
  __device__ __forceinline__ const T* get(int slot, int tensor, int p) const {
    return reinterpret_cast<const T*>(place(slot, tensor, p));
  }
};

/// How backward splits the rows: depends on sizes and, for the number of teams, on the GPU's shared memory. Every block
/// writes and reads back its own partial sums of the weights' gradients, so there are only as many blocks as an H200
/// has SMs, or twice as many small ones.
struct BackwardShare {
  dim3 block;
  int64_t rows_per_block, partials;
  int64_t shared_bytes;  // 0: no prefetch of rows
};
template <class Ahead>
BackwardShare backward_share(const mimo_stream& stream, int64_t row_packs, int64_t rows, int64_t groups) {
  using Team = typename Ahead::Owner;
  constexpr int64_t blocks = Team::is_block || Team::packs <= 2 ? 264 : 132;
  const int64_t per_team = Ahead::bytes_per_thread * team_block<Team>(row_packs, 1).x;
  const int64_t most_teams = Ahead::possible ? stream.device->shared_bytes_per_block / per_team : 0;
  const int64_t teams = larger(1, smaller(most_teams, backward_teams<Team>));
  BackwardShare share;
  share.block = team_block<Team>(row_packs, teams);
  share.rows_per_block = larger(teams, ceil_div(rows, larger(1, blocks / groups)));
  share.partials = ceil_div(rows, share.rows_per_block);
  share.shared_bytes = teams <= most_teams ? teams * per_team : 0;
  return share;
}

/// Calls `run` with a constant that says whether rows are prefetched: always, never, or if their memory fits.
template <class Ahead, class F>
void with_rows_ahead(const BackwardShare& share, F&& run) {
  if constexpr (Ahead::always) {
    run(std::true_type{});
  } else if constexpr (Ahead::possible) {
    share.shared_bytes > 0 ? run(std::true_type{}) : run(std::false_type{});
  } else {
    run(std::false_type{});
  }
}

/// Adds each thread's `own` columns over the block's teams, in the order of the teams, and writes the sums to
/// partial[i][column]; null pointers are skipped. `shared` holds Count rows of `columns` for each team.
template <class Team, int Width, int Count>
__device__ __forceinline__ void write_partials(const float (&own)[Count][Team::packs][Width], int64_t columns, float* shared,
                                               float* const (&partial)[Count]) {
  const int count = static_cast<int>(columns), teams = static_cast<int>(blockDim.y);
  if (teams > 1) __syncthreads();  // the previous content of `shared` has been read
  Team::for_packs([&](int p) {
    const int column = Team::pack(p) * Width;
    if (column >= count) return;
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      float* const to = teams == 1 ? partial[i] : shared + (threadIdx.y * Count + i) * count;
      if (partial[i] != nullptr) write(to + column, own[i][p]);
    }
  });
  if (teams == 1) return;
  __syncthreads();
  for (int c = threadIdx.y * blockDim.x + threadIdx.x; c < Count * count; c += blockDim.x * blockDim.y) {
    float* const to = Count == 1 || c < count ? partial[0] : partial[Count - 1];
    if (to == nullptr) continue;
    float sum = 0;
#pragma unroll 8
    for (int team = 0; team < teams; ++team) sum += shared[team * Count * count + c];
    to[Count == 1 || c < count ? c : c - count] = sum;
  }
}

/// first[c] += Σ_p first_partial[p][c], and the same for second, in the order of p; null pointers are skipped. Launched
/// early (programmatic dependent launch).
void add_partials_of_two(mimo_stream& stream, const float* first_partial, float* first, const float* second_partial,
                         float* second, int64_t partials, int64_t width);

}  // namespace mimo::cuda
