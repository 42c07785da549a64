// Products of the rows of groups with their group's matrix on Hopper, both operands in e4m3 (docs/spec/moe-performance.md
// §1.7): c_g = a_g b_gᵀ. Rows have a factor for every run of 128 columns, matrices a factor for every block of 128 x 128.
// Tensor cores add the products of a run; such a sum is multiplied by both factors and added to fp32 sums in registers.
//
// One block a multiprocessor walks results of 128 x 128, two blocks next to each other the same way. One thread copies
// operands, a run deep, six steps ahead; two warpgroups have 64 rows of a result each. A warpgroup queues the products of a
// step before it adds those of the step before, and does so across results: while it stores a result the first products of
// the next one are under way.
//
// A pair of blocks reads one operand once (multicast): the rows of two results side by side or, in the last of an odd number
// of columns, the matrix of two results one below the other.
#pragma once
#include "sm90_grouped.cuh"

namespace mimo::cuda::sm90 {

struct E4m3Products {
  static constexpr int side = 128, stages = 6;  // of a result, and of a run
  static constexpr int operand_bytes = side * side, stage_bytes = 2 * operand_bytes;

  CUtensorMap a, b;          // boxes of 64 rows
  const float* row_factors;  // [runs, row_count]
  const float* block_factors;
  int64_t row_count;
  int32_t group_stride, column_stride, run_stride;  // of block_factors
  const int32_t* offsets;
  const bf16* bias;           // [groups, n], or null
  const float* bias_factors;  // of every row, or null = 1
  bf16* c;
  int32_t n, k;

  __device__ __forceinline__ int rows(int group) const { return offsets[group + 1] - offsets[group]; }
  __device__ __forceinline__ int row_results(int group) const { return (rows(group) + side - 1) / side; }
  __device__ __forceinline__ int columns() const { return (n + side - 1) / side; }
  __device__ __forceinline__ int steps() const { return (k + side - 1) / side; }
  /// Of pairs of blocks: neighbouring columns of every row, and rows of the column that is left over.
  __device__ __forceinline__ int units(int group) const {
    const int high = row_results(group), wide = columns();
    return high * (wide / 2) + (wide % 2 != 0 ? (high + 1) / 2 : 0);
  }
};

struct E4m3Result {
  int group, row, column;
  bool shares_rows;  // with the other block of the pair; else it shares the matrix
};

/// Finds a block's results by the number of their pair; numbers must not fall.
class E4m3Walk {
 public:
  __device__ E4m3Walk(const E4m3Products& problem, const int32_t* units, int rank)
      : problem_(problem), units_(units), rank_(rank), wide_(problem.columns()) {}
  __device__ __forceinline__ E4m3Result at(int number) {
    while (units_[group_ + 1] <= number) ++group_;
    const int local = number - units_[group_], pairs = wide_ / 2, rows = problem_.row_results(group_);
    if (local >= rows * pairs) return {group_, (local - rows * pairs) * 2 + rank_, wide_ - 1, false};
    const int top = local / (band * pairs) * band, high = min(band, rows - top), in_band = local - top * pairs;
    return {group_, top + in_band % high, in_band / high * 2 + rank_, true};
  }

 private:
  const E4m3Products& problem_;
  const int32_t* units_;
  int rank_, wide_, group_ = 0;
};

struct E4m3Shared {
  uint64_t full[E4m3Products::stages], empty[E4m3Products::stages];
  int32_t units[];  // before each group, and of all
};
inline int64_t e4m3_shared_bytes(int64_t groups) {
  return 1024 + E4m3Products::stages * E4m3Products::stage_bytes + static_cast<int64_t>(sizeof(E4m3Shared)) + (groups + 1) * 4;
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

/// Copies the operands of all steps of a block's results. One thread.
__device__ __forceinline__ void copy_e4m3_operands(const E4m3Products& problem, E4m3Walk walk, int rank, int units,
                                                   char* stage_memory, E4m3Shared* shared) {
  constexpr int half = E4m3Products::operand_bytes / 2;
  const int steps = problem.steps();
  E4m3Ring ring;
  for (int number = blockIdx.x / pair; number < units; number += gridDim.x / pair) {
    const E4m3Result at = walk.at(number);
    const int first = problem.offsets[at.group], last = problem.offsets[at.group + 1];
    const int row = at.row * E4m3Products::side, column = at.column * E4m3Products::side;
    for (int step = 0; step < steps; ++step) {
      uint64_t* const full = &shared->full[ring.slot];
      char* const left = stage_memory + ring.slot * E4m3Products::stage_bytes;
      char* const right = left + E4m3Products::operand_bytes;
      const int x = step * E4m3Products::side;
      wait(&shared->empty[ring.slot], ring.parity ^ 1);
      arrive_expecting(full, E4m3Products::stage_bytes);
      if (at.shares_rows) {
        copy_ragged_box_to_pair(left + rank * half, problem.a, x, row + rank * 64, first, last, full);
        copy_box(right, problem.b, x, column, at.group, full);
        copy_box(right + half, problem.b, x, column + 64, at.group, full);
      } else {
        copy_ragged_box(left, problem.a, x, row, first, last, full);
        copy_ragged_box(left + half, problem.a, x, row + 64, first, last, full);
        copy_box_to_pair(right + rank * half, problem.b, x, column + rank * 64, at.group, full);
      }
      ring.advance();
    }
  }
}

/// A warpgroup's half of a block's results.
class E4m3Half {
 public:
  __device__ E4m3Half(const E4m3Products& problem, const E4m3Walk& walk, int half, int units, const char* stage_memory,
                      E4m3Shared* shared)
      : problem_(problem), walk_(walk), units_(units), own_row_(half * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4),
        left_(operand(stage_memory + half * (E4m3Products::operand_bytes / 2), false, 0)),
        right_(operand(stage_memory + E4m3Products::operand_bytes, false, 0)), shared_(shared) {}

  __device__ __forceinline__ void run() {
    const int first_number = blockIdx.x / pair, stride = gridDim.x / pair;
    if (first_number >= units_) return;
    const int steps = problem_.steps();
    int left = (units_ - first_number + stride - 1) / stride * steps - 1;  // steps that are not queued
    float even[64], odd[64];
    Step first, second;
    clear();
    find(first_number);
    look_ahead();
    result_ = ahead_;
    queue(even, first);
    // Two turns at a time, because registers have no index.
    for (; left >= 2; left -= 2) {
      turn(even, first, odd, second);
      turn(odd, second, even, first);
    }
    if (left == 1) {
      turn(even, first, odd, second);
      end(odd, second);
    } else {
      end(even, first);
    }
  }

 private:
  /// What the products of a step are multiplied by.
  struct Factors {
    float upper, lower, block;
  };
  /// Products under way, and the stage they read.
  struct Step {
    Factors factors;
    int slot;
  };

  /// Queues the products of the next step, then adds those of `now`.
  __device__ __forceinline__ void turn(float (&products)[64], const Step& now, float (&next_products)[64], Step& next) {
    const bool ends = queued_ == problem_.steps();
    const E4m3Result result = result_;
    if (ends) result_ = ahead_, queued_ = 0;
    queue(next_products, next);
    wait_products<1>();
    add(products, now);
    if (!ends) return;
    store(result);
    clear();
  }
  __device__ __forceinline__ void end(float (&products)[64], const Step& now) {
    wait_products<0>();
    add(products, now);
    store(result_);
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 64; ++i) sums_[i] = 0;
  }

  __device__ __forceinline__ void add(float (&products)[64], const Step& now) {
    // Keeps the compiler from reading the products before they are there.
#pragma unroll
    for (float& product : products) asm volatile("" : "+f"(product)::"memory");
    if (threadIdx.x % 32 == 0) release(&shared_->empty[now.slot]);
    const float upper = now.factors.upper * now.factors.block, lower = now.factors.lower * now.factors.block;
#pragma unroll
    for (int i = 0; i < 64; ++i) sums_[i] = fmaf(products[i], i % 4 < 2 ? upper : lower, sums_[i]);
  }

  // ---- factors are read a step before the products are queued, two before they are used: memory takes that long ----

  /// Goes to a result. Behind the last the factors of no row are read.
  __device__ __forceinline__ void find(int number) {
    number_ = number, looked_ = 0;
    upper_lives_ = lower_lives_ = false, of_block_ = problem_.block_factors;
    if (number >= units_) return;
    ahead_ = walk_.at(number);
    const int row = ahead_.row * E4m3Products::side + own_row_, rows = problem_.rows(ahead_.group);
    upper_lives_ = row < rows, lower_lives_ = row + 8 < rows;
    of_rows_ = problem_.row_factors + problem_.offsets[ahead_.group] + row;
    of_block_ = problem_.block_factors + ahead_.group * problem_.group_stride + ahead_.column * problem_.column_stride;
  }
  __device__ __forceinline__ void look_ahead() {
    if (looked_ == problem_.steps()) find(number_ + gridDim.x / pair);
    next_factors_.upper = upper_lives_ ? __ldg(of_rows_) : 0.0f;
    next_factors_.lower = lower_lives_ ? __ldg(of_rows_ + 8) : 0.0f;
    next_factors_.block = __ldg(of_block_);
    of_rows_ += problem_.row_count, of_block_ += problem_.run_stride;
    ++looked_;
  }

  __device__ __forceinline__ void queue(float (&products)[64], Step& step) {
    const uint64_t stage = static_cast<uint32_t>(ring_.slot) * (E4m3Products::stage_bytes >> 4);
    const uint64_t left = left_ + stage, right = right_ + stage;
    wait(&shared_->full[ring_.slot], ring_.parity);
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply_64x128_e4m3(products, left + 2 * k, right + 2 * k, k > 0);
    commit_products();
    step.slot = ring_.slot, step.factors = next_factors_;
    ring_.advance();
    ++queued_;
    look_ahead();
  }

  __device__ __forceinline__ void store(const E4m3Result& result) const {
    const int quarter = threadIdx.x % 4, rows = problem_.rows(result.group), first = result.row * E4m3Products::side + own_row_;
    const int first_column = result.column * E4m3Products::side, live = problem_.n - first_column;
    const int64_t group_row = problem_.offsets[result.group];
    const bf16* const bias = problem_.bias == nullptr
                                 ? nullptr
                                 : problem_.bias + static_cast<int64_t>(result.group) * problem_.n + first_column;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int row = first + part * 8;
      bf16* const to = problem_.c + (group_row + row) * problem_.n + first_column;
      float weight = 1.0f;
      if (bias != nullptr && problem_.bias_factors != nullptr && row < rows) weight = problem_.bias_factors[group_row + row];
#pragma unroll
      for (int j = 0; j < 16; j += 4) {
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float2 value = make_float2(sums_[(j + i) * 4 + part * 2], sums_[(j + i) * 4 + part * 2 + 1]);
          const int at = (j + i) * 8 + quarter * 2;
          if (bias != nullptr && at < live) {
            value.x += weight * __bfloat162float(bias[at]);
            value.y += weight * __bfloat162float(bias[at + 1]);
          }
          word[i] = pack_bf16(value.x, value.y);
        }
        transpose_quad(word, quarter);
        const int at = j * 8 + quarter * 8;
        if (row < rows && at < live) *reinterpret_cast<uint4*>(to + at) = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  }

  const E4m3Products& problem_;
  E4m3Walk walk_;
  const int units_, own_row_;  // of this thread's upper sums in a result; the lower ones are eight rows below
  const uint64_t left_, right_;
  E4m3Shared* const shared_;
  E4m3Ring ring_;
  E4m3Result result_, ahead_;       // of the step that was queued last, and of the factors that were read last
  int queued_ = 0, looked_ = 0;     // steps of these results
  int number_ = 0;                  // of ahead_
  bool upper_lives_ = false, lower_lives_ = false;
  const float *of_rows_ = nullptr, *of_block_ = nullptr;
  Factors next_factors_;
  float sums_[64];
};

__device__ __forceinline__ void multiply_e4m3_groups(const E4m3Products& problem, int groups) {
  extern __shared__ char unaligned[];
  char* const stage_memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  E4m3Shared* const shared = reinterpret_cast<E4m3Shared*>(stage_memory + E4m3Products::stages * E4m3Products::stage_bytes);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < E4m3Products::stages; ++stage) {
      initialise(&shared->full[stage], 1);
      initialise(&shared->empty[stage], consumer_warps * pair);
    }
    publish_barriers();
  }
  find_units(problem, groups, shared->units);
  synchronise_pair();
  // From one lane, so that the compiler sees that warps stay together: products would wait for each other else.
  const int rank = blockIdx.x % pair, units = __shfl_sync(all_lanes, shared->units[groups], 0), warpgroup = threadIdx.x / 128;
  const E4m3Walk walk(problem, shared->units, rank);
  if (warpgroup == 0) {
    shrink_registers<producer_registers>();
    if (threadIdx.x == 0) copy_e4m3_operands(problem, walk, rank, units, stage_memory, shared);
  } else {
    grow_registers<consumer_registers>();
    E4m3Half(problem, walk, warpgroup - 1, units, stage_memory, shared).run();
  }
  __syncwarp();
  synchronise_pair();  // the other block may still write here
}

}  // namespace mimo::cuda::sm90
