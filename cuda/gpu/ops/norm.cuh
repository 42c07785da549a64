// How the norms share out their work: a team of threads owns a row's group of columns (the whole row, mostly), every thread
// of it up to `packs` packs. Few threads with many packs: a sum over a team costs the same however many numbers each thread
// brings, and norms are close to the rate at which a multiprocessor starts instructions. A team is a warp or two where a row
// fits, else a block.
#pragma once
#include "early.cuh"
#include "mma.cuh"
#include "packed.cuh"

namespace mimo::cuda {

/// The elements rounded to their storage type.
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

/// Teams of `Warps` warps share a block, whose blockDim is (32 Warps, teams); 0: a team is a block, of as many as it needs.
template <int Packs, int Warps>
struct Team {
  static constexpr int packs = Packs, warps = Warps;
  static constexpr bool is_block = Warps == 0;
  static constexpr int sum_floats = 32;  // of shared memory, for each value that is summed

  static __device__ __forceinline__ int threads() { return is_block ? static_cast<int>(blockDim.x) : 32 * Warps; }
  /// Number of the thread's p-th pack; past the row's last one, the thread has none.
  static __device__ __forceinline__ int pack(int p) { return static_cast<int>(threadIdx.x) + p * threads(); }

  /// Calls body(p); p is a compile-time place in registers. No branch stands between the packs, so that their work
  /// overlaps: packs that the row has not are worked on as zeros.
  template <class Body>
  static __device__ __forceinline__ void for_packs(Body&& body) {
#pragma unroll
    for (int p = 0; p < Packs; ++p) body(p);
  }

  /// Waits for the team's other warps.
  static __device__ __forceinline__ void meet() {
    if constexpr (Warps > 1) {
      asm volatile("bar.sync %0, %1;" ::"r"(static_cast<int>(threadIdx.y) + 1), "n"(32 * Warps) : "memory");
    }
  }

  /// Sums over the team, given to every thread. `shared` holds sum_floats * Count values, and is free again after the team's
  /// next sum.
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
/// Threads that a team of a whole block has at most, forward and backward: so many that their registers suffice.
constexpr int most_forward_threads = 512;
template <int Width>
constexpr int most_backward_threads = Width == 8 ? 384 : 512;

/// Calls body(Team) with the team for rows of `row_packs` packs. bf16 has the sizes that models have; LargeTeam is the one for
/// rows that it has places for and one warp has not, or void.
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

/// Teams of a block, forward and backward: the numbers that ran fastest on an H200.
template <class Team>
constexpr int forward_teams = Team::is_block ? 1 : Team::packs <= 2 ? 4 : 2;
template <class Team>
constexpr int backward_teams = Team::is_block ? 1 : Team::warps == 2 ? 6 : 8;
/// Threads of a kernel's blocks at most.
template <class Team>
constexpr int forward_threads = Team::is_block ? most_forward_threads : 32 * Team::warps * forward_teams<Team>;
template <class Team, int Width>
constexpr int backward_threads = Team::is_block ? most_backward_threads<Width> : 32 * Team::warps * backward_teams<Team>;

/// The block of a kernel with these teams.
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

/// Zeros when not `live`.
template <int Width, class T>
__device__ __forceinline__ Packed<T, Width> read_if(bool live, const T* from) {
  Packed<T, Width> value = {};
  if (live) value = read_packed<Width>(from);
  return value;
}

constexpr int copied_tensors = 3;  // x, dy, dresidual

/// A thread's packs of the coming rows of its team: those whose copies to shared memory are under way, and the row in
/// use. Each thread reads only its own copies, so that no barrier is needed.
template <class Team, class T, int Width>
struct RowsAhead {
  using Owner = Team;
  static constexpr bool possible = Width * sizeof(T) == 16;
  static constexpr bool always = possible && !Team::is_block;  // the memory of one small team is always there
  static constexpr int rows = Team::warps == 2 ? 2 : 3;
  static constexpr int64_t bytes_per_thread = int64_t{16} * rows * copied_tensors * Team::packs;
  char* memory;

  /// `slot`: of the row, 0 .. rows - 1.
  __device__ __forceinline__ char* place(int slot, int tensor, int p) const {
    const int thread = threadIdx.y * Team::threads() + threadIdx.x;
    const int at = (slot * copied_tensors + tensor) * Team::packs + p;
    return memory + (at * static_cast<int>(blockDim.x * blockDim.y) + thread) * 16;
  }
  /// Zeros when not `live`.
  __device__ __forceinline__ void copy(const T* from, bool live, int slot, int tensor, int p) const {
    copy_async(place(slot, tensor, p), from, live);
  }
  __device__ __forceinline__ const T* get(int slot, int tensor, int p) const {
    return reinterpret_cast<const T*>(place(slot, tensor, p));
  }
};

/// How a backward pass cuts its rows: by sizes, and teams by the shared memory of the kind of GPU. Every block has its own
/// partial sums of the weights' gradients, which are written and read again: as many blocks as an H200 has multiprocessors, or
/// twice as many of small ones.
struct BackwardShare {
  dim3 block;
  int64_t rows_per_block, partials;
  int64_t shared_bytes;  // 0: no rows ahead
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

/// Calls `run` with whether rows come ahead, a constant: always, never, or where there is room for them.
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

/// Writes the sums over a block's teams of every thread's `own` columns, added in the order of the teams, to
/// partial[i][column]; a null pointer leaves one out. `shared` holds Count rows of `columns` for each team.
template <class Team, int Width, int Count>
__device__ __forceinline__ void write_partials(const float (&own)[Count][Team::packs][Width], int64_t columns, float* shared,
                                               float* const (&partial)[Count]) {
  const int count = static_cast<int>(columns), teams = static_cast<int>(blockDim.y);
  if (teams > 1) __syncthreads();  // the earlier content of the memory has been read
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

/// first[c] += Σ_p first_partial[p][c] and the same of the second, in the order of p; a null pointer leaves one out.
/// Starts while the kernel that writes the partial sums ends.
void add_partials_of_two(mimo_stream& stream, const float* first_partial, float* first, const float* second_partial,
                         float* second, int64_t partials, int64_t width);

}  // namespace mimo::cuda
