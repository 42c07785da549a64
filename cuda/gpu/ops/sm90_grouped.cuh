// Persistent grouped GEMM on Hopper: one block an SM, in clusters of two, computes the 128 x 192 output tiles of all
// groups. One producer thread loads operands by TMA, 64 of k for each of five stages; two consumer warpgroups alternate
// over the tiles (ping-pong), so that one computes while the other runs its epilogue.
//
// The two blocks of a cluster share one operand by multicast: the right one, which is larger, for two tiles one below
// the other; or the left one, for two tiles side by side in a remaining row of tiles.
//
// A kernel passes a Problem with
//   static constexpr bool left_rows, right_rows    whether an operand is k-rows (MN-major)
//   static constexpr bool halves                   whether a tile with at most 64 valid rows takes half the wgmma
//   const int32_t* offsets                         first rows of the groups
//   int height(int count)                          rows of the product of a group of `count` rows
//   int units(int group)                           units_of(height), or 0 to skip the group
//   int steps(const Tile&)                         number of k-steps of 64, at least 1
//   int rows(const Tile&)                          valid rows of a tile, at least 1
//   void fetch(const Tile&, int step, int rank, char* left, char* right, uint64_t* barrier)
//                                                  starts the loads of cluster block `rank`: its half of the shared operand,
//                                                  multicast to both blocks, and all of its own other operand
//   static constexpr int staging_bytes             epilogue memory of a warp, a multiple of 1024
//   void store(const Tile&, const Sums&, char* staging)
//   void finish()                                  called after a thread's last store
#pragma once
#include "sm90.cuh"

namespace mimo::cuda::sm90 {

constexpr int tile_rows = 128, tile_columns = 192, depth = 64, stages = 5;
constexpr int column_tile_bytes = depth * tile_row_bytes;  // 64 columns of a k-rows operand
constexpr int left_bytes = tile_rows * depth * 2, right_bytes = tile_columns * depth * 2;
constexpr int stage_bytes = left_bytes + right_bytes;
constexpr int threads = 3 * 128, consumer_warps = 8;
/// Blocks of a cluster: each loads half of the shared operand and multicasts it to both.
constexpr int pair = 2;
/// setmaxnreg, of 64 Ki registers: 128 producer threads keep 40, 256 consumer threads get 232.
constexpr int producer_registers = 40, consumer_registers = 232;
/// Rasterisation: tile rows of a group that are walked together, enough that concurrent blocks share operands in L2.
constexpr int band = 16;
constexpr int most_groups = 2048;

using Sums = float[2][96];  // accumulators of rows 0 .. 63 and 64 .. 127

/// An output tile: rows from 128 `row` and columns from 192 `column` on of a group's product.
struct Tile {
  int group, row, column;
  int first, last;      // the group's rows are first .. last - 1
  bool shares_columns;  // whether the cluster's blocks share the right operand, else the left
};

/// Rows of tiles that clusters process in pairs. If at most half of the rows of a group's last row of tiles are valid,
/// it costs half the wgmma and would leave its partner waiting: it is left for clusters that share its rows.
__device__ __forceinline__ int row_pairs(int height) { return (height + tile_rows / 2 - 1) / tile_rows / 2; }
__device__ __forceinline__ int rows_left_over(int height) { return (height + tile_rows - 1) / tile_rows - 2 * row_pairs(height); }
/// Tile pairs of a group.
__device__ __forceinline__ int units_of(int height, int columns) {
  return row_pairs(height) * columns + rows_left_over(height) * ((columns + 1) / 2);
}

struct Shared {
  uint64_t full[stages], empty[stages];
  uint64_t multiplied[2];  // consumer warpgroup i has issued its tile's wgmma
  int32_t units[];  // prefix sums of the groups' units; the last is the total
};
template <class Problem>
int64_t shared_bytes(int64_t groups) {
  return 1024 + stages * stage_bytes + consumer_warps * Problem::staging_bytes + static_cast<int64_t>(sizeof(Shared)) +
         (groups + 1) * 4;
}

/// Tile scheduler: maps the number of a tile pair to this block's tile; numbers must not fall.
template <class Problem>
class Walk {
 public:
  __device__ Walk(const Problem& problem, const int32_t* units, int columns, int rank)
      : problem_(problem), units_(units), columns_(columns), rank_(rank) {}
  __device__ __forceinline__ Tile at(int number) {
    while (units_[group_ + 1] <= number) ++group_;
    const int first = problem_.offsets[group_], last = problem_.offsets[group_ + 1], height = problem_.height(last - first);
    const int local = number - units_[group_], paired = row_pairs(height), behind = local - paired * columns_;
    if (behind >= 0) {
      const int rows = rows_left_over(height);
      return {group_, pair * paired + behind % rows, behind / rows * pair + rank_, first, last, false};
    }
    return {group_, local / columns_ * pair + rank_, local % columns_, first, last, true};
  }

 private:
  const Problem& problem_;
  const int32_t* units_;
  int columns_, rank_, group_ = 0;
};

/// Pipeline state: stage index and mbarrier parity of a k-step.
struct Ring {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int steps = 1) {
    slot += steps;
    if (slot >= stages) {
      parity ^= (slot / stages) & 1;
      slot %= stages;
    }
  }
};

/// A stage is written by both blocks of the cluster, so it is released to both.
__device__ __forceinline__ void release(uint64_t* empty) {
  for (uint32_t rank = 0; rank < pair; ++rank) arrive_at(empty, rank);
}

/// sums[0 .. Halves) = the tile's products over `steps` k-steps from `ring` on. Releases the stages, and passes the
/// turn to the other warpgroup once the operands of the last step have arrived.
template <class Problem, int Halves>
__device__ __forceinline__ void multiply_steps(Sums& sums, int steps, Ring& ring, char* stage_memory, Shared* shared,
                                               int own) {
  constexpr uint64_t left_step = operand_step<Problem::left_rows>, right_step = operand_step<Problem::right_rows>;
  const bool releases = threadIdx.x % 32 == 0;
  int previous = 0;
  for (int step = 0; step < steps; ++step) {
    const char* left = stage_memory + ring.slot * stage_bytes;
    const uint64_t left_operand = operand(left, Problem::left_rows, column_tile_bytes);
    const uint64_t right_operand = operand(left + left_bytes, Problem::right_rows, column_tile_bytes);
    wait(&shared->full[ring.slot], ring.parity);
    begin_products();
#pragma unroll
    for (int k = 0; k < depth / 16; ++k) {
#pragma unroll
      for (int half = 0; half < Halves; ++half) {
        multiply_64x192<Problem::left_rows, Problem::right_rows>(
            sums[half], left_operand + half * (left_bytes / 2 >> 4) + k * left_step, right_operand + k * right_step,
            step > 0 || k > 0);
      }
    }
    commit_products();
    if (step > 0) {
      wait_products<1>();
      if (releases) release(&shared->empty[previous]);
    }
    previous = ring.slot;
    ring.advance();
  }
  if (releases) arrive(&shared->multiplied[own]);
  wait_products<0>();
  if (releases) release(&shared->empty[previous]);
}

/// units[g] = units of the groups before g, units[groups] = the total. All threads must call it; synchronises them.
template <class Problem>
__device__ __forceinline__ void find_units(const Problem& problem, int groups, int32_t* units) {
  for (int group = threadIdx.x; group < groups; group += threads) units[group + 1] = problem.units(group);
  __syncthreads();
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    int before = 0;
    for (int first = 0; first < groups; first += 32) {
      int sum = first + lane < groups ? units[first + lane + 1] : 0;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(all_lanes, sum, offset);
        if (lane >= offset) sum += other;
      }
      if (first + lane < groups) units[first + lane + 1] = before + sum;
      before += __shfl_sync(all_lanes, sum, 31);
    }
    if (lane == 0) units[0] = 0;
  }
  __syncthreads();
}

/// 4 x 4 transpose over a quad: word[i] of lane q becomes word[q] of lane i.
__device__ __forceinline__ void transpose_quad(uint32_t (&word)[4], int quarter) {
  const bool upper = quarter & 2, odd = quarter & 1;
  const uint32_t own0 = upper ? word[2] : word[0], own1 = upper ? word[3] : word[1];
  const uint32_t other0 = __shfl_xor_sync(all_lanes, upper ? word[0] : word[2], 2);
  const uint32_t other1 = __shfl_xor_sync(all_lanes, upper ? word[1] : word[3], 2);
  // 2 x 2 blocks 2 (q / 2) + {0, 1} of lanes 0 or 1, and of lanes 2 or 3, of the quad.
  const uint32_t low0 = upper ? other0 : own0, low1 = upper ? other1 : own1;
  const uint32_t high0 = upper ? own0 : other0, high1 = upper ? own1 : other1;
  const uint32_t low = odd ? low1 : low0, high = odd ? high1 : high0;
  const uint32_t low_other = __shfl_xor_sync(all_lanes, odd ? low0 : low1, 1);
  const uint32_t high_other = __shfl_xor_sync(all_lanes, odd ? high0 : high1, 1);
  word[0] = odd ? low_other : low, word[1] = odd ? low : low_other;
  word[2] = odd ? high_other : high, word[3] = odd ? high : high_other;
}

/// The kernel body. `columns`: tiles side by side in each group.
template <class Problem>
__device__ __forceinline__ void multiply_groups(const Problem& problem, int groups, int columns) {
  extern __shared__ char unaligned[];
  char* const stage_memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  char* const staging = stage_memory + stages * stage_bytes;
  Shared* const shared = reinterpret_cast<Shared*>(staging + consumer_warps * Problem::staging_bytes);

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) {
      initialise(&shared->full[stage], 1);
      initialise(&shared->empty[stage], 4 * pair);  // one lane of each consumer warp arrives
    }
    for (uint64_t& barrier : shared->multiplied) initialise(&barrier, 4);
    publish_barriers();
  }
  find_units(problem, groups, shared->units);
  synchronise_pair();
  const int rank = blockIdx.x % pair, warpgroup = threadIdx.x / 128;
  Walk<Problem> walk(problem, shared->units, columns, rank);
  Ring ring;
  if (warpgroup == 0) {
    shrink_registers<producer_registers>();
    if (threadIdx.x == 0) {
      for (int number = blockIdx.x / pair; number < shared->units[groups]; number += gridDim.x / pair) {
        const Tile tile = walk.at(number);
        const int steps = problem.steps(tile);
        for (int step = 0; step < steps; ++step) {
          wait(&shared->empty[ring.slot], ring.parity ^ 1);
          arrive_expecting(&shared->full[ring.slot], stage_bytes);
          char* const left = stage_memory + ring.slot * stage_bytes;
          problem.fetch(tile, step, rank, left, left + left_bytes, &shared->full[ring.slot]);
          ring.advance();
        }
      }
    }
  } else {
    grow_registers<consumer_registers>();
    const int own = warpgroup - 1;
    int turn = 0;
    uint32_t parity = 0;  // of this warpgroup's tiles; the first is even
    for (int number = blockIdx.x / pair; number < shared->units[groups]; number += gridDim.x / pair, turn ^= 1) {
      const Tile tile = walk.at(number);
      // Broadcast from one lane so that the compiler knows the branches are warp-uniform: otherwise it serialises the
      // wgmma.
      const int steps = __shfl_sync(all_lanes, problem.steps(tile), 0);
      const int rows = __shfl_sync(all_lanes, problem.rows(tile), 0);
      if (turn != own) {
        ring.advance(steps);
        continue;
      }
      // The warpgroups issue their tiles in order: an mbarrier only tells the current phase from the previous one, so
      // no warpgroup may wait for operands further ahead. Warpgroup 1 waits for warpgroup 0's tile of the same index,
      // warpgroup 0 for warpgroup 1's previous tile.
      wait(&shared->multiplied[own ^ 1], own == 0 ? parity ^ 1 : parity);
      parity ^= 1;
      Sums sums;
      if (!Problem::halves || rows > tile_rows / 2) {
        multiply_steps<Problem, 2>(sums, steps, ring, stage_memory, shared, own);
      } else {
        multiply_steps<Problem, 1>(sums, steps, ring, stage_memory, shared, own);
      }
      problem.store(tile, sums, staging + (threadIdx.x / 32 - 4) * Problem::staging_bytes);
    }
    problem.finish();
  }
  __syncwarp();
  synchronise_pair();  // the other block may still multicast into this block's memory
}

}  // namespace mimo::cuda::sm90
