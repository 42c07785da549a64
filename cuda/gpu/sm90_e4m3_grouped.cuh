// Products of the rows of groups with their group's matrix on Hopper, both operands in e4m3 (docs/spec/moe-performance.md
// §1.7): c_g = a_g b_gᵀ. Rows have a factor for every run of 128 columns, matrices a factor for every block of 128 x 128.
// Tensor cores add the products of a run; such a sum is multiplied by both factors and added to fp32 sums in registers.
//
// One block a multiprocessor walks results of 256 x 128, two blocks next to each other the same way. One thread finds the
// results and copies operands and their factors, a run deep, four steps ahead. It leaves a result's place beside the result's
// first operands, so that the other threads need not wait for memory to find it. Two warpgroups take the 64-row slices of a
// result in turn, two slices each: while one adds the products of a slice, the tensor cores work for the other. A slice is
// stored while the first products of the next result's slice are under way.
//
// A pair of blocks reads one operand once (multicast): the rows of two results side by side or, in the last of an odd number
// of columns, the matrix of two results one below the other.
#pragma once
#include "early.cuh"
#include "sm90_grouped.cuh"

namespace mimo::cuda::sm90 {

struct E4m3Products {
  static constexpr int rows_of_result = 256, columns_of_result = 128, run = 128, stages = 4;
  static constexpr int slice = 64, slices = rows_of_result / slice;  // rows of a box of the copy engine and of one product
  static constexpr int box_bytes = slice * run, left_bytes = slices * box_bytes, right_bytes = 2 * box_bytes;
  static constexpr int stage_bytes = left_bytes + right_bytes;
  static constexpr int row_factor_bytes = (rows_of_result + 4) * 4, block_factor_bytes = 16;  // copies begin on 16 bytes
  static constexpr int staging_bytes = 16 * tile_row_bytes;  // of a warp: 16 rows of 64 columns in bf16

  CUtensorMap a, b;            // boxes of 64 rows
  const float* row_factors;    // on 16 bytes, row_factor_bytes behind the last may be read
  const float* block_factors;  // on 16 bytes
  int64_t factor_stride;       // of row_factors, from one run to the next, a multiple of 4
  int32_t group_stride, column_stride, run_stride;  // of block_factors
  const int32_t* offsets;
  const bf16* bias;           // [groups, n], or null
  const float* bias_factors;  // of every row, or null = 1
  bf16* c;
  int32_t n, k;

  __device__ __forceinline__ int rows(int group) const { return offsets[group + 1] - offsets[group]; }
  __device__ __forceinline__ int row_results(int group) const { return (rows(group) + rows_of_result - 1) / rows_of_result; }
  __device__ __forceinline__ int columns() const { return (n + columns_of_result - 1) / columns_of_result; }
  __device__ __forceinline__ int steps() const { return (k + run - 1) / run; }
  /// Of pairs of blocks: neighbouring columns of every row, and rows of the column that is left over.
  __device__ __forceinline__ int units(int group) const {
    const int high = row_results(group), wide = columns();
    return high * (wide / 2) + (wide % 2 != 0 ? (high + 1) / 2 : 0);
  }
};

struct alignas(16) E4m3Result {
  int group, row, column;
  int first, last;   // rows of the group
  bool shares_rows;  // with the other block of the pair; else it shares the matrix
  int slices;        // that have a row
};

/// Finds a block's results by the number of their pair; numbers must not fall.
class E4m3Walk {
 public:
  __device__ E4m3Walk(const E4m3Products& problem, const int32_t* units, int rank)
      : problem_(problem), units_(units), rank_(rank), wide_(problem.columns()) {}
  __device__ __forceinline__ E4m3Result at(int number) {
    while (units_[group_ + 1] <= number) ++group_;
    const int local = number - units_[group_], pairs = wide_ / 2, rows = problem_.row_results(group_);
    if (local >= rows * pairs) return result((local - rows * pairs) * 2 + rank_, wide_ - 1, false);
    const int top = local / (band * pairs) * band, high = min(band, rows - top), in_band = local - top * pairs;
    return result(top + in_band % high, in_band / high * 2 + rank_, true);
  }

 private:
  __device__ __forceinline__ E4m3Result result(int row, int column, bool shares_rows) const {
    const int first = problem_.offsets[group_], last = problem_.offsets[group_ + 1];
    const int live = last - first - row * E4m3Products::rows_of_result;
    return {group_, row, column, first, last, shares_rows,
            max(0, min(E4m3Products::slices, (live + E4m3Products::slice - 1) / E4m3Products::slice))};
  }

  const E4m3Products& problem_;
  const int32_t* units_;
  int rank_, wide_, group_ = 0;
};

struct E4m3Shared {
  struct alignas(128) Factors {
    float of_rows[E4m3Products::rows_of_result + 4], of_block[4];
    E4m3Result result;  // that begins with this step, else undefined
  };
  Factors factors[E4m3Products::stages];
  uint64_t full[E4m3Products::stages], empty[E4m3Products::stages];
  int32_t units[];  // before each group, and of all
};
inline int64_t e4m3_shared_bytes(int64_t groups) {
  return 1024 + E4m3Products::stages * E4m3Products::stage_bytes + consumer_warps * E4m3Products::staging_bytes +
         static_cast<int64_t>(sizeof(E4m3Shared)) + (groups + 1) * 4;
}

/// The stage of a step, and the parity of its barriers.
struct E4m3Ring {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == E4m3Products::stages) slot = 0, parity ^= 1;
  }
};

/// sum[64, 128] (+)= left[64, 32] right[128, 32]ᵀ of e4m3; threads hold it as multiply_64x192 says.
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

/// Copies the operands and factors of all steps of a block's results. One thread.
__device__ __forceinline__ void copy_e4m3_operands(const E4m3Products& problem, E4m3Walk walk, int rank, int units,
                                                   char* stage_memory, E4m3Shared* shared) {
  constexpr int box = E4m3Products::box_bytes, slice = E4m3Products::slice;
  const int steps = problem.steps();
  E4m3Ring ring;
  for (int number = blockIdx.x / pair; number < units; number += gridDim.x / pair) {
    const E4m3Result at = walk.at(number);
    const int row = at.row * E4m3Products::rows_of_result, column = at.column * E4m3Products::columns_of_result;
    const bool has_rows = at.slices > 0;
    const int factor_bytes = (has_rows ? E4m3Products::row_factor_bytes : 0) + E4m3Products::block_factor_bytes;
    const uint32_t bytes = static_cast<uint32_t>(at.slices * box + E4m3Products::right_bytes + factor_bytes);
    const float* of_rows = problem.row_factors + ((at.first + row) & ~3);
    int of_block = at.group * problem.group_stride + at.column * problem.column_stride;
    for (int step = 0; step < steps; ++step) {
      uint64_t* const full = &shared->full[ring.slot];
      char* const left = stage_memory + ring.slot * E4m3Products::stage_bytes;
      char* const right = left + E4m3Products::left_bytes;
      E4m3Shared::Factors& factors = shared->factors[ring.slot];
      const int x = step * E4m3Products::run;
      wait(&shared->empty[ring.slot], ring.parity ^ 1);
      if (step == 0) factors.result = at;
      arrive_expecting(full, bytes);
      if (at.shares_rows) {
#pragma unroll 1
        for (int i = rank; i < at.slices; i += pair) {
          copy_ragged_box_to_pair(left + i * box, problem.a, x, row + i * slice, at.first, at.last, full);
        }
        for (int i = 0; i < 2; ++i) copy_box(right + i * box, problem.b, x, column + i * slice, at.group, full);
      } else {
#pragma unroll 1
        for (int i = 0; i < at.slices; ++i) {
          copy_ragged_box(left + i * box, problem.a, x, row + i * slice, at.first, at.last, full);
        }
        copy_box_to_pair(right + rank * box, problem.b, x, column + rank * slice, at.group, full);
      }
      if (has_rows) copy_bytes(factors.of_rows, of_rows, E4m3Products::row_factor_bytes, full);
      copy_bytes(factors.of_block, problem.block_factors + (of_block & ~3), E4m3Products::block_factor_bytes, full);
      of_rows += problem.factor_stride, of_block += problem.run_stride;
      ring.advance();
    }
  }
}

/// A warpgroup's slices of a block's results: `half`, and the next but one.
class E4m3Half {
 public:
  __device__ E4m3Half(const E4m3Products& problem, int half, int units, const char* stage_memory, char* staging,
                      E4m3Shared* shared)
      : problem_(problem), units_(units), half_(half),
        warp_row_(half * E4m3Products::slice + threadIdx.x / 32 % 4 * 16),
        left_(operand(stage_memory + half * E4m3Products::box_bytes, false, 0)),
        right_(operand(stage_memory + E4m3Products::left_bytes, false, 0)), staging_(staging), shared_(shared) {}

  __device__ __forceinline__ void run() {
    const int stride = gridDim.x / pair;
    float sums[2][64];
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[0][i] = sums[1][i] = 0;
    E4m3Result finished{};
    finished.row = 1 << 20;  // no row of a group: there is nothing to store yet
    for (int number = blockIdx.x / pair; number < units_; number += stride) {
      wait(&shared_->full[ring_.slot], ring_.parity);
      const E4m3Result at = shared_->factors[ring_.slot].result;
      // From one lane, so that the compiler sees that warps stay together: products would wait for each other else.
      const int slices = __shfl_sync(all_lanes, (at.slices - half_ + 1) / 2, 0);
      of_block_ = at.group * problem_.group_stride + at.column * problem_.column_stride;
      own_factor_ = (at.first + at.row * E4m3Products::rows_of_result) % 4 + warp_row_ + threadIdx.x % 32 / 4;
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
  }

 private:
  __device__ __forceinline__ void release_stage() const {
    if (threadIdx.x % 32 == 0) release(&shared_->empty[ring_.slot]);
  }
  /// Multiplies all steps of a result that has `Slices` slices in this warpgroup, and stores the `finished` result beside the first
  /// products.
  template <int Slices>
  __device__ __forceinline__ void multiply(const E4m3Result& finished, float (&sums)[2][64]) {
    multiply_step<Slices, true>(finished, sums);
    for (int step = problem_.steps(); step > 1; --step) multiply_step<Slices, false>(finished, sums);
  }
  template <int Slices, bool first>
  __device__ __forceinline__ void multiply_step(const E4m3Result& finished, float (&sums)[2][64]) {
    wait(&shared_->full[ring_.slot], ring_.parity);
    const uint64_t stage = static_cast<uint32_t>(ring_.slot) * (E4m3Products::stage_bytes >> 4);
    const E4m3Shared::Factors& factors = shared_->factors[ring_.slot];
    const float block = factors.of_block[of_block_ & 3];
    of_block_ += problem_.run_stride;
    float factor[2][2];
#pragma unroll
    for (int i = 0; i < Slices; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) factor[i][j] = factors.of_rows[own_factor_ + i * 2 * E4m3Products::slice + j * 8] * block;
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
        queue(products, left_ + stage + 2 * (E4m3Products::box_bytes >> 4), right_ + stage);
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
    // Keeps the compiler from reading the products before they are there.
#pragma unroll
    for (float& product : products) asm volatile("" : "+f"(product)::"memory");
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[i] = fmaf(products[i], i % 4 < 2 ? upper : lower, sums[i]);
  }

  /// Stores a slice of a result, and clears its sums.
  template <int slice>
  __device__ __forceinline__ void store(const E4m3Result& result, float (&sums)[2][64]) const {
    const int row = result.row * E4m3Products::rows_of_result + slice * 2 * E4m3Products::slice + warp_row_;
    const int live = result.last - result.first - row;
    if (problem_.bias != nullptr) add_bias(result, row, live, sums[slice]);
    store_slice(result, row, live, sums[slice]);
#pragma unroll
    for (float& sum : sums[slice]) sum = 0;
  }
  __device__ __forceinline__ void add_bias(const E4m3Result& result, int row, int live, float (&sums)[64]) const {
    const int lane = threadIdx.x % 32, column = result.column * E4m3Products::columns_of_result + lane % 4 * 2;
    const bf16* const bias = problem_.bias + static_cast<int64_t>(result.group) * problem_.n + column;
    float weight[2] = {1.0f, 1.0f};
    if (problem_.bias_factors != nullptr) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int local = lane / 4 + 8 * i;
        weight[i] = local < live ? problem_.bias_factors[result.first + row + local] : 0.0f;
      }
    }
#pragma unroll
    for (int eight = 0; eight < 16; ++eight) {
      const uint32_t two = column + eight * 8 < problem_.n ? *reinterpret_cast<const uint32_t*>(bias + eight * 8) : 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sums[eight * 4 + 2 * i] += weight[i] * lower_bf16(two), sums[eight * 4 + 2 * i + 1] += weight[i] * upper_bf16(two);
      }
    }
  }
  /// Through shared memory of the warp, so that 16 bytes of eight lanes are a whole line.
  __device__ __forceinline__ void store_slice(const E4m3Result& result, int row, int live, const float (&sums)[64]) const {
    const int lane = threadIdx.x % 32, first_column = result.column * E4m3Products::columns_of_result + lane % 8 * 8;
    char* const to_row = staging_ + lane % 16 * tile_row_bytes;
    const char* const from = staging_ + lane / 8 * tile_row_bytes;
    bf16* to = problem_.c + (static_cast<int64_t>(result.first) + row + lane / 8) * problem_.n + first_column;
    const int64_t four_rows = 4 * static_cast<int64_t>(problem_.n);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      __syncwarp();
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const float* const from_sums = sums + (part * 8 + j) * 4;
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) word[i] = pack_bf16(from_sums[2 * i], from_sums[2 * i + 1]);
        store_matrices(to_row + (((j + lane / 16) ^ (lane % 8)) * 16), word);
      }
      __syncwarp();
      const bool in_matrix = first_column + part * 64 < problem_.n;
#pragma unroll
      for (int pass = 0; pass < 4; ++pass) {
        const int local = pass * 4 + lane / 8;
        const uint4 eight = *reinterpret_cast<const uint4*>(from + pass * 4 * tile_row_bytes + ((lane % 8 ^ (local % 8)) * 16));
        if (in_matrix && local < live) *reinterpret_cast<uint4*>(to + pass * four_rows + part * 64) = eight;
      }
    }
  }

  const E4m3Products& problem_;
  const int units_, half_, warp_row_;  // the warp's first row in a result
  const uint64_t left_, right_;
  char* const staging_;
  E4m3Shared* const shared_;
  E4m3Ring ring_;
  int of_block_ = 0, own_factor_ = 0;  // of the next step, and of this thread's first row in a stage
};

__device__ __forceinline__ void multiply_e4m3_groups(const E4m3Products& problem, int groups) {
  extern __shared__ char unaligned[];
  char* const stage_memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  char* const staging = stage_memory + E4m3Products::stages * E4m3Products::stage_bytes;
  E4m3Shared* const shared = reinterpret_cast<E4m3Shared*>(staging + consumer_warps * E4m3Products::staging_bytes);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < E4m3Products::stages; ++stage) {
      initialise(&shared->full[stage], 1);
      initialise(&shared->empty[stage], consumer_warps * pair);
    }
    publish_barriers();
  }
  previous_is_done();
  let_next_start();
  find_units(problem, groups, shared->units);
  synchronise_pair();
  const int rank = blockIdx.x % pair, units = __shfl_sync(all_lanes, shared->units[groups], 0);
  const int warpgroup = __shfl_sync(all_lanes, threadIdx.x / 128, 0);
  const E4m3Walk walk(problem, shared->units, rank);
  if (warpgroup == 0) {
    shrink_registers<producer_registers>();
    if (threadIdx.x == 0) copy_e4m3_operands(problem, walk, rank, units, stage_memory, shared);
  } else {
    grow_registers<consumer_registers>();
    char* const own_staging = staging + (threadIdx.x / 32 - 4) * E4m3Products::staging_bytes;
    E4m3Half(problem, warpgroup - 1, units, stage_memory, own_staging, shared).run();
  }
  __syncwarp();
  synchronise_pair();  // the other block may still write here
}

}  // namespace mimo::cuda::sm90
