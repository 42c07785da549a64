// Persistent grouped GEMM on Hopper with e4m3 operands, both k-major (docs/spec/moe-performance.md §1.7): c_g = a_g b_gᵀ. a has
// a scale factor for each row and 128 columns ("run"), b for each block of 128 x 128. wgmma accumulates over a run; the result
// is multiplied by both factors and added to the fp32 sums in registers.
//
// Persistent blocks, one an SM, in clusters of two, compute output tiles ("results") of 256 x 128. One producer thread
// schedules tiles and loads operands and their factors by TMA, one run of k for each stage. The tile's coordinates travel with
// its first stage, so that consumers need not search for them. The two consumer warpgroups alternate over the tile's 64-row
// slices, two each: while one scales its accumulators, the tensor cores work for the other. A slice is stored while the first
// wgmma of the warpgroup's next tile run.
//
// The two blocks of a cluster share one operand by multicast: the rows of a, for two tiles side by side; or, in the last column
// if their number is odd, the matrix b, for two tiles one below the other.
//
// A kernel passes a Problem derived from E4m3Problem with
//   static constexpr bool steps_vary                   whether the number of k-steps differs between groups
//   int first(int group), last(int group)              E4m3Result's `first` and `last`
//   int height(int first, int last)                    rows of the group's c
//   int units(int group)                               units_of(height), or 0 to skip the group
//   int steps(const E4m3Result&)                       number of k-steps of 128, at least 1
//   void copy_rows(to, result, int step, int row, full), copy_rows_to_pair(…)   loads 64 rows of a
//   int column(int step), matrix(result, int step)     coordinates of b's boxes
//   const float* factors_of_rows(result)               row factors of the first step, aligned to 16 bytes
//   int factors_skipped(result)                        how many of them precede the result's first row
//   int factor_of_block(result)                        index of the first step's block factor
//   void store(result, int row, const float (&sums)[64], char* staging)   stores a warp's 16 rows x 128 columns
//   void finish()                                      called after a thread's last store
#pragma once
#include "early.cuh"
#include "sm90_grouped.cuh"

namespace mimo::cuda::sm90 {

template <int stages_, int staging_bytes_>
struct E4m3Problem {
  static constexpr int rows_of_result = 256, columns_of_result = 128, run = 128;
  static constexpr int stages = stages_, staging_bytes = staging_bytes_;  // staging_bytes: epilogue memory of a warp
  static constexpr int slice = 64, slices = rows_of_result / slice;  // rows of a TMA box and of one wgmma
  static constexpr int box_bytes = slice * run, left_bytes = slices * box_bytes, right_bytes = 2 * box_bytes;
  static constexpr int stage_bytes = left_bytes + right_bytes;
  static constexpr int row_factor_bytes = (rows_of_result + 4) * 4, block_factor_bytes = 16;  // copies start on 16 bytes

  CUtensorMap a, b;            // boxes of 64 rows
  const float* row_factors;    // aligned to 16 bytes; row_factor_bytes past the last are readable
  const float* block_factors;  // aligned to 16 bytes; block_factor_bytes past the last are readable
  int64_t factor_stride;       // of row_factors, between runs; a multiple of 4
  int32_t run_stride;          // of block_factors, between runs
  int32_t n;                   // columns of c

  static __device__ __forceinline__ int results_below(int height) { return (height + rows_of_result - 1) / rows_of_result; }
  __device__ __forceinline__ int columns() const { return (n + columns_of_result - 1) / columns_of_result; }
  /// Tile pairs of a group: neighbouring columns of each row of tiles, then pairs of rows in an odd last column.
  __device__ __forceinline__ int units_of(int height) const {
    const int high = results_below(height), wide = columns();
    return high * (wide / 2) + (wide % 2 != 0 ? (high + 1) / 2 : 0);
  }
};

struct alignas(16) E4m3Result {
  int group, row, column;  // row: its first, within the group's c
  int first, last;   // as defined by the Problem
  bool shares_rows;  // whether the cluster's blocks share rows of a, else the matrix b
  int slices;        // how many slices it has: those of a tile, or of a part of it, that have valid rows
};

/// Tile scheduler: maps the number of a tile pair to this block's tile; numbers must not fall. If the pairs of the last wave occupy
/// at most half of the clusters, they are cut into two or four parts of fewer rows, which have numbers of their own.
template <class Problem>
class E4m3Walk {
 public:
  __device__ E4m3Walk(const Problem& problem, const int32_t* units, int groups, int rank)
      : problem_(problem), units_(units), rank_(rank), wide_(problem.columns()) {
    const int total = units[groups], clusters = gridDim.x / pair, rest = total % clusters;
    if (4 * rest <= clusters) {
      parts_ = 4;
    } else if (2 * rest <= clusters) {
      parts_ = 2;
    }
    whole_ = total - rest, count_ = whole_ + rest * parts_;
  }
  __device__ __forceinline__ int count() const { return count_; }
  __device__ __forceinline__ E4m3Result at(int number) {
    int part = 0, slices = Problem::slices;
    if (number >= whole_) {
      const int cut = number - whole_;
      part = cut % parts_, slices /= parts_, number = whole_ + cut / parts_;
    }
    while (units_[group_ + 1] <= number) ++group_;
    const int local = number - units_[group_], pairs = wide_ / 2;
    const int rows = Problem::results_below(problem_.height(problem_.first(group_), problem_.last(group_)));
    const int skipped = part * slices;
    if (local >= rows * pairs) return result(((local - rows * pairs) * 2 + rank_) * Problem::slices + skipped, slices, wide_ - 1, false);
    const int top = local / (band * pairs) * band, high = min(band, rows - top), in_band = local - top * pairs;
    return result((top + in_band % high) * Problem::slices + skipped, slices, in_band / high * 2 + rank_, true);
  }

 private:
  __device__ __forceinline__ E4m3Result result(int slice, int slices, int column, bool shares_rows) const {
    const int first = problem_.first(group_), last = problem_.last(group_), row = slice * Problem::slice;
    const int live = problem_.height(first, last) - row;
    return {group_, row, column, first, last, shares_rows, max(0, min(slices, (live + Problem::slice - 1) / Problem::slice))};
  }

  const Problem& problem_;
  const int32_t* units_;
  int rank_, wide_, group_ = 0;
  int whole_, parts_ = 1, count_;  // pairs that are not cut, parts of the others, and all numbers
};

template <class Problem>
struct E4m3Shared {
  struct alignas(128) Factors {
    float of_rows[Problem::rows_of_result + 4], of_block[4];
    E4m3Result result;  // valid in the first stage of a result
  };
  Factors factors[Problem::stages];
  uint64_t full[Problem::stages], empty[Problem::stages];
  int32_t units[];  // prefix sums of the groups' units; the last is the total
};
template <class Problem>
int64_t e4m3_shared_bytes(int64_t groups) {
  return 1024 + Problem::stages * Problem::stage_bytes + consumer_warps * Problem::staging_bytes +
         static_cast<int64_t>(sizeof(E4m3Shared<Problem>)) + (groups + 1) * 4;
}

/// Pipeline state: stage index and mbarrier parity of a k-step.
template <int stages>
struct E4m3Ring {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == stages) slot = 0, parity ^= 1;
  }
};

/// sum[64, 128] (+)= left[64, 32] right[128, 32]ᵀ in e4m3; accumulator layout of multiply_64x192.
__device__ __forceinline__ void multiply_64x128_e4m3(float (&sum)[64], uint64_t left, uint64_t right, bool add) {
#ifdef MIMO_ON_SM90A
#define MIMO_4(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define MIMO_16(i) MIMO_4(i), MIMO_4(i + 4), MIMO_4(i + 8), MIMO_4(i + 12)
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1;\n}"
      : MIMO_16(0), MIMO_16(16), MIMO_16(32), MIMO_16(48)
      : "l"(left), "l"(right), "r"(static_cast<int>(add)));
#undef MIMO_16
#undef MIMO_4
#endif
}

/// Producer loop: loads operands and factors of all k-steps of this block's results. Runs in one thread.
template <class Problem>
__device__ __forceinline__ void copy_e4m3_operands(const Problem& problem, E4m3Walk<Problem> walk, int rank,
                                                   char* stage_memory, E4m3Shared<Problem>* shared) {
  constexpr int box = Problem::box_bytes, slice = Problem::slice;
  E4m3Ring<Problem::stages> ring;
  for (int number = blockIdx.x / pair; number < walk.count(); number += gridDim.x / pair) {
    const E4m3Result at = walk.at(number);
    const int row = at.row, column = at.column * Problem::columns_of_result;
    const bool has_rows = at.slices > 0;
    const int factor_bytes = (has_rows ? Problem::row_factor_bytes : 0) + Problem::block_factor_bytes;
    const uint32_t bytes = static_cast<uint32_t>(at.slices * box + Problem::right_bytes + factor_bytes);
    const float* of_rows = problem.factors_of_rows(at);
    int of_block = problem.factor_of_block(at);
    const int steps = problem.steps(at);
    for (int step = 0; step < steps; ++step) {
      uint64_t* const full = &shared->full[ring.slot];
      char* const left = stage_memory + ring.slot * Problem::stage_bytes;
      char* const right = left + Problem::left_bytes;
      typename E4m3Shared<Problem>::Factors& factors = shared->factors[ring.slot];
      const int x = problem.column(step), matrix = problem.matrix(at, step);
      wait(&shared->empty[ring.slot], ring.parity ^ 1);
      if (step == 0) factors.result = at;
      arrive_expecting(full, bytes);
      if (at.shares_rows) {
#pragma unroll 1
        for (int i = rank; i < at.slices; i += pair) problem.copy_rows_to_pair(left + i * box, at, step, row + i * slice, full);
        for (int i = 0; i < 2; ++i) copy_box(right + i * box, problem.b, x, column + i * slice, matrix, full);
      } else {
#pragma unroll 1
        for (int i = 0; i < at.slices; ++i) problem.copy_rows(left + i * box, at, step, row + i * slice, full);
        copy_box_to_pair(right + rank * box, problem.b, x, column + rank * slice, matrix, full);
      }
      if (has_rows) copy_bytes(factors.of_rows, of_rows, Problem::row_factor_bytes, full);
      copy_bytes(factors.of_block, problem.block_factors + (of_block & ~3), Problem::block_factor_bytes, full);
      of_rows += problem.factor_stride, of_block += problem.run_stride;
      ring.advance();
    }
  }
}

/// Consumer warpgroup: computes slices `half` and `half` + 2 of this block's results.
template <class Problem>
class E4m3Half {
 public:
  __device__ E4m3Half(const Problem& problem, int half, int results, const char* stage_memory, char* staging,
                      E4m3Shared<Problem>* shared)
      : problem_(problem), results_(results), half_(half),
        warp_row_(half * Problem::slice + threadIdx.x / 32 % 4 * 16),
        left_(operand(stage_memory + half * Problem::box_bytes, false, 0)),
        right_(operand(stage_memory + Problem::left_bytes, false, 0)), staging_(staging), shared_(shared) {}

  __device__ __forceinline__ void run() {
    const int stride = gridDim.x / pair;
    float sums[2][64];
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[0][i] = sums[1][i] = 0;
    E4m3Result finished{};  // without slices: nothing is stored for it
    for (int number = blockIdx.x / pair; number < results_; number += stride) {
      wait(&shared_->full[ring_.slot], ring_.parity);
      const E4m3Result at = shared_->factors[ring_.slot].result;
      // Broadcast from one lane so that the compiler knows the branches are warp-uniform: otherwise it serialises the wgmma.
      const int slices = __shfl_sync(all_lanes, (at.slices - half_ + 1) / 2, 0);
      steps_ = problem_.steps(at);
      if constexpr (Problem::steps_vary) steps_ = __shfl_sync(all_lanes, steps_, 0);
      of_block_ = problem_.factor_of_block(at);
      own_factor_ = problem_.factors_skipped(at) + warp_row_ + threadIdx.x % 32 / 4;
      if (slices == 2) {
        multiply<2>(finished, sums);
      } else if (slices == 1) {
        multiply<1>(finished, sums);
      } else {
        multiply<0>(finished, sums);
      }
      finished = at;
    }
    store<0>(finished, sums), store<1>(finished, sums);
    problem_.finish();
  }

 private:
  __device__ __forceinline__ void release_stage() const {
    if (threadIdx.x % 32 == 0) release(&shared_->empty[ring_.slot]);
  }
  /// Computes all k-steps of a result with `Slices` slices in this warpgroup; stores the `finished` result while the first
  /// wgmma run.
  template <int Slices>
  __device__ __forceinline__ void multiply(const E4m3Result& finished, float (&sums)[2][64]) {
    multiply_step<Slices, true>(finished, sums);
    for (int step = steps_; step > 1; --step) multiply_step<Slices, false>(finished, sums);
  }
  template <int Slices, bool first>
  __device__ __forceinline__ void multiply_step(const E4m3Result& finished, float (&sums)[2][64]) {
    wait(&shared_->full[ring_.slot], ring_.parity);
    const uint64_t stage = static_cast<uint32_t>(ring_.slot) * (Problem::stage_bytes >> 4);
    const typename E4m3Shared<Problem>::Factors& factors = shared_->factors[ring_.slot];
    const float block = factors.of_block[of_block_ & 3];
    of_block_ += problem_.run_stride;
    float factor[2][2];
#pragma unroll
    for (int i = 0; i < Slices; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) factor[i][j] = factors.of_rows[own_factor_ + i * 2 * Problem::slice + j * 8] * block;
    }
    if constexpr (Slices == 0) {
      release_stage();
      if constexpr (first) store<0>(finished, sums), store<1>(finished, sums);
    } else {
      float products[64];
      queue(products, left_ + stage, right_ + stage);
      if constexpr (first) store<0>(finished, sums);
      if constexpr (first && Slices == 1) store<1>(finished, sums);
      wait_products<0>();
      if constexpr (Slices == 1) release_stage();
      add(sums[0], products, factor[0][0], factor[0][1]);
      if constexpr (Slices == 2) {
        queue(products, left_ + stage + 2 * (Problem::box_bytes >> 4), right_ + stage);
        if constexpr (first) store<1>(finished, sums);
        wait_products<0>();
        release_stage();
        add(sums[1], products, factor[1][0], factor[1][1]);
      }
    }
    ring_.advance();
  }
  __device__ __forceinline__ void queue(float (&products)[64], uint64_t left, uint64_t right) const {
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply_64x128_e4m3(products, left + 2 * k, right + 2 * k, k > 0);
    commit_products();
  }
  __device__ __forceinline__ void add(float (&sums)[64], float (&products)[64], float upper, float lower) const {
    // Keeps the compiler from reading the accumulators before the wait.
#pragma unroll
    for (float& product : products) asm volatile("" : "+f"(product)::"memory");
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[i] = fmaf(products[i], i % 4 < 2 ? upper : lower, sums[i]);
  }

  /// Stores a slice of a result and clears its sums.
  template <int slice>
  __device__ __forceinline__ void store(const E4m3Result& result, float (&sums)[2][64]) const {
    // Rows of a slice that the result does not have may be another's. A select: a branch would serialise the wgmma.
    const int row = half_ + 2 * slice < result.slices ? result.row + slice * 2 * Problem::slice + warp_row_ : out_of_range;
    problem_.store(result, row, sums[slice], staging_);
#pragma unroll
    for (float& sum : sums[slice]) sum = 0;
  }

  static constexpr int out_of_range = 1 << 26;
  const Problem& problem_;
  const int results_, half_, warp_row_;  // warp_row_: the warp's first row within a result
  const uint64_t left_, right_;
  char* const staging_;
  E4m3Shared<Problem>* const shared_;
  E4m3Ring<Problem::stages> ring_;
  int of_block_ = 0, own_factor_ = 0;  // block-factor index of the next step; index of this thread's first row factor in a stage
  int steps_ = 0;                      // k-steps of the result
};

/// The kernel body.
template <class Problem>
__device__ __forceinline__ void multiply_e4m3_groups(const Problem& problem, int groups) {
  extern __shared__ char unaligned[];
  char* const stage_memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  char* const staging = stage_memory + Problem::stages * Problem::stage_bytes;
  E4m3Shared<Problem>* const shared = reinterpret_cast<E4m3Shared<Problem>*>(staging + consumer_warps * Problem::staging_bytes);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Problem::stages; ++stage) {
      initialise(&shared->full[stage], 1);
      initialise(&shared->empty[stage], consumer_warps * pair);
    }
    publish_barriers();
  }
  previous_is_done();
  let_next_start();
  find_units(problem, groups, shared->units);
  synchronise_pair();
  const int rank = blockIdx.x % pair, warpgroup = __shfl_sync(all_lanes, threadIdx.x / 128, 0);
  const E4m3Walk<Problem> walk(problem, shared->units, groups, rank);
  if (warpgroup == 0) {
    shrink_registers<producer_registers>();
    if (threadIdx.x == 0) copy_e4m3_operands(problem, walk, rank, stage_memory, shared);
  } else {
    grow_registers<consumer_registers>();
    char* const own_staging = staging + (threadIdx.x / 32 - 4) * Problem::staging_bytes;
    const int results = __shfl_sync(all_lanes, walk.count(), 0);
    E4m3Half<Problem>(problem, warpgroup - 1, results, stage_memory, own_staging, shared).run();
  }
  __syncwarp();
  synchronise_pair();  // the other block may still multicast into this block's memory
}

}  // namespace mimo::cuda::sm90
