// The products of experts on Hopper: one block a multiprocessor walks the 128 x 192 results of all groups, two blocks next
// to each other the same way. One thread copies operands, 64 deep, five steps ahead; two warpgroups take results in turn,
// so that one multiplies while the other stores.
//
// A pair of blocks reads one operand once (multicast): the right one, which is the larger, of two results one below the other, or
// the left one of two results side by side in rows that are left over.
//
// A kernel brings a Problem:
//   static constexpr bool left_rows, right_rows    whether an operand's rows run along k
//   static constexpr bool halves                   whether a result of which half is live costs half
//   const int32_t* offsets                         of the groups' rows
//   int height(int count)                          rows of the product of a group of `count` rows
//   int units(int group)                           units_of(height), or 0, which leaves the group out
//   int steps(const Tile&)                         of 64 along k, at least 1
//   int rows(const Tile&)                          live rows of a result, at least 1
//   void fetch(const Tile&, int step, int rank, char* left, char* right, uint64_t* barrier)
//                                                  starts the copies of this block of the pair: half `rank` of the operand that
//                                                  both share for both, the other one for itself
//   static constexpr int staging_bytes             shared memory of a warp for its results, a multiple of 1024
//   void store(const Tile&, const Sums&, char* staging)
//   void finish()                                  after a thread's last store
#pragma once
#include "sm90.cuh"

namespace mimo::cuda::sm90 {

constexpr int tile_rows = 128, tile_columns = 192, depth = 64, stages = 5;
constexpr int column_tile_bytes = depth * tile_row_bytes;  // of 64 columns of an operand whose rows run along k
constexpr int left_bytes = tile_rows * depth * 2, right_bytes = tile_columns * depth * 2;
constexpr int stage_bytes = left_bytes + right_bytes;
constexpr int threads = 3 * 128, consumer_warps = 8;
/// Blocks that take neighbouring results: each copies half of the operand that both share for both.
constexpr int pair = 2;
/// Of 64 Ki: 128 threads keep 40, 256 get 232.
constexpr int producer_registers = 40, consumer_registers = 232;
/// Results of one group below each other in the walk: enough that a block's neighbours share its operands.
constexpr int band = 16;
constexpr int most_groups = 2048;

using Sums = float[2][96];  // of rows 0 .. 63 and 64 .. 127

/// A result: rows 128 `row` .. and columns 192 `column` .. of a group's product.
struct Tile {
  int group, row, column;
  int first, last;      // the group's rows are first .. last - 1
  bool shares_columns;  // with the other block of the pair; else both share the rows
};

/// Rows of results that blocks take two at a time, sharing columns. The last result of a group may have half of its rows or less, and
/// then half of the products: such a row is left to pairs that share it.
__device__ __forceinline__ int row_pairs(int height) { return (height + tile_rows / 2 - 1) / tile_rows / 2; }
__device__ __forceinline__ int rows_left_over(int height) { return (height + tile_rows - 1) / tile_rows - 2 * row_pairs(height); }
/// Results of a group, as pairs of blocks count them.
__device__ __forceinline__ int units_of(int height, int columns) {
  return row_pairs(height) * columns + rows_left_over(height) * ((columns + 1) / 2);
}

struct Shared {
  uint64_t full[stages], empty[stages];
  uint64_t multiplied[2];  // a warpgroup's products of one result are queued
  int32_t units[];  // before each group, and of all
};
template <class Problem>
int64_t shared_bytes(int64_t groups) {
  return 1024 + stages * stage_bytes + consumer_warps * Problem::staging_bytes + static_cast<int64_t>(sizeof(Shared)) +
         (groups + 1) * 4;
}

/// Finds a block's results by the number of their pair; numbers must not fall.
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

/// The stage of a step, and the parity of its barriers.
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

/// A slot is written from both blocks of a pair, so both wait for it.
__device__ __forceinline__ void release(uint64_t* empty) {
  for (uint32_t rank = 0; rank < pair; ++rank) arrive_at(empty, rank);
}

/// sums[0 .. Halves) = the result's products over `steps` steps from `ring` on; gives the stages back, and its turn when the
/// last step's operands have come.
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

/// units[g] = the units of the groups before g, units[groups] of all. All threads call, and see them when it returns.
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

/// word[i] of lane q becomes word[q] of lane i, of four neighbouring lanes.
__device__ __forceinline__ void transpose_quad(uint32_t (&word)[4], int quarter) {
  const bool upper = quarter & 2, odd = quarter & 1;
  const uint32_t own0 = upper ? word[2] : word[0], own1 = upper ? word[3] : word[1];
  const uint32_t other0 = __shfl_xor_sync(all_lanes, upper ? word[0] : word[2], 2);
  const uint32_t other1 = __shfl_xor_sync(all_lanes, upper ? word[1] : word[3], 2);
  // Blocks 2 (q / 2) + {0, 1} of the lanes 0 or 1 and 2 or 3 of the quad.
  const uint32_t low0 = upper ? other0 : own0, low1 = upper ? other1 : own1;
  const uint32_t high0 = upper ? own0 : other0, high1 = upper ? own1 : other1;
  const uint32_t low = odd ? low1 : low0, high = odd ? high1 : high0;
  const uint32_t low_other = __shfl_xor_sync(all_lanes, odd ? low0 : low1, 1);
  const uint32_t high_other = __shfl_xor_sync(all_lanes, odd ? high0 : high1, 1);
  word[0] = odd ? low_other : low, word[1] = odd ? low : low_other;
  word[2] = odd ? high_other : high, word[3] = odd ? high : high_other;
}

/// The whole kernel. `columns`: results side by side in every group.
template <class Problem>
__device__ __forceinline__ void multiply_groups(const Problem& problem, int groups, int columns) {
  extern __shared__ char unaligned[];
  char* const stage_memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  char* const staging = stage_memory + stages * stage_bytes;
  Shared* const shared = reinterpret_cast<Shared*>(staging + consumer_warps * Problem::staging_bytes);

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) {
      initialise(&shared->full[stage], 1);
      initialise(&shared->empty[stage], 4 * pair);  // a lane of each of a warpgroup's warps
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
    uint32_t parity = 0;  // of the own results, the first is even
    for (int number = blockIdx.x / pair; number < shared->units[groups]; number += gridDim.x / pair, turn ^= 1) {
      const Tile tile = walk.at(number);
      // From one lane, so that the compiler sees that warps stay together: products would wait for each other else.
      const int steps = __shfl_sync(all_lanes, problem.steps(tile), 0);
      const int rows = __shfl_sync(all_lanes, problem.rows(tile), 0);
      if (turn != own) {
        ring.advance(steps);
        continue;
      }
      // Results are multiplied in order: a barrier tells apart only the phase under way and the one before, so no warpgroup
      // may wait for operands further ahead. The second warpgroup follows the first's result of the same count, the first
      // the second's before that.
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
  synchronise_pair();  // the other block may still write here
}

}  // namespace mimo::cuda::sm90
