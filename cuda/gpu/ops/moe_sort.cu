// Order of the routed token copies (spec language-model 4.5): a stable counting sort of the slots by expert, in runs of
// slots. Counts stay on the device.
#include "early.cuh"

namespace mimo::cuda {
namespace {

constexpr int run = 1024;  // slots, and threads of the kernels that walk them
constexpr int warps = run / 32;

__device__ __forceinline__ int expert_of(const mimo_moe_sort_args& args, int64_t slot) {
  if (slot >= args.tokens * args.topk) return -1;
  const int expert = args.expert_index[slot];
  return expert >= 0 && expert < args.experts ? expert : -1;
}

/// count[run][e]: the run's slots of expert e.
__global__ void count_kernel(mimo_moe_sort_args args, int32_t* count) {
  extern __shared__ int32_t shared_counts[];
  previous_is_done();
  let_next_start();
  for (int e = threadIdx.x; e < args.experts; e += run) shared_counts[e] = 0;
  const int expert = expert_of(args, static_cast<int64_t>(blockIdx.x) * run + threadIdx.x);
  __syncthreads();
  if (expert >= 0) atomicAdd(&shared_counts[expert], 1);  // integers: the order does not matter
  __syncthreads();
  for (int e = threadIdx.x; e < args.experts; e += run) count[blockIdx.x * args.experts + e] = shared_counts[e];
}

/// Exclusive sum over the block's threads of what those of the first `experts` give, and the sum of all.
__device__ __forceinline__ int2 sum_before(int32_t value, int32_t* warp_totals) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t inclusive = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int32_t other = __shfl_up_sync(all_lanes, inclusive, offset);
    if (lane >= offset) inclusive += other;
  }
  if (lane == 31) warp_totals[warp] = inclusive;
  __syncthreads();
  const int32_t total = warp_totals[lane];  // as many warps as lanes
  const int32_t before = __reduce_add_sync(all_lanes, lane < warp ? total : 0);
  const int32_t all = __reduce_add_sync(all_lanes, total);
  __syncthreads();
  return make_int2(before + inclusive - value, all);
}

/// Places the run's slots: rows of lower experts, plus the same expert's slots of earlier runs, of earlier warps and of lower
/// lanes. Every block adds up the counts of all runs for itself: they are few, and nobody need be waited for.
__global__ void __launch_bounds__(run) place_kernel(mimo_moe_sort_args args, const int32_t* count, int runs) {
  extern __shared__ int32_t shared_rows[];  // [warps][experts], then [2][run]
  __shared__ int32_t warp_totals[warps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, thread = static_cast<int>(threadIdx.x);
  const int experts = static_cast<int>(args.experts);
  int32_t* const sums = shared_rows + warps * experts;
  for (int i = thread; i < warps * experts; i += run) shared_rows[i] = 0;
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * run + threadIdx.x;
  const int expert = expert_of(args, slot);
  const unsigned same = __match_any_sync(all_lanes, expert);
  const int lower = __popc(same & ((1u << lane) - 1u));
  __syncthreads();
  if (expert >= 0 && lower == 0) shared_rows[warp * experts + expert] = __popc(same);

  previous_is_done();
  // Threads beside each other take experts beside each other; several share an expert's runs.
  int columns = 32;
  while (columns < experts && columns < run) columns *= 2;
  const int shares = run / columns, column = thread % columns, share = thread / columns;
  int32_t base = 0;  // rows of the experts before `begin`
  for (int begin = 0; begin < experts; begin += columns) {
    const int e = begin + column;
    int32_t earlier = 0, total = 0;
    if (e < experts) {
#pragma unroll 8
      for (int r = share; r < runs; r += shares) {
        const int32_t here = count[static_cast<int64_t>(r) * experts + e];
        total += here;
        earlier += r < static_cast<int>(blockIdx.x) ? here : 0;
      }
    }
    sums[thread] = total;
    sums[run + thread] = earlier;
    __syncthreads();
    total = earlier = 0;
    if (thread < columns) {
      for (int s = 0; s < shares; ++s) total += sums[s * columns + thread], earlier += sums[run + s * columns + thread];
    }
    const int2 before = sum_before(total, warp_totals);
    if (thread < columns && e < experts) {
      const int32_t first = base + before.x;
      if (blockIdx.x == 0) args.offsets[e] = first;
      int32_t here[warps], row = first + earlier;
#pragma unroll
      for (int w = 0; w < warps; ++w) here[w] = shared_rows[w * experts + e];
#pragma unroll
      for (int w = 0; w < warps; ++w) {
        shared_rows[w * experts + e] = row;
        row += here[w];
      }
    }
    base += before.y;
  }
  if (blockIdx.x == 0 && thread == 0) args.offsets[experts] = base;
  __syncthreads();
  if (slot >= args.tokens * args.topk) return;
  const int32_t row = expert >= 0 ? shared_rows[warp * experts + expert] + lower : -1;
  args.row_of_slot[slot] = row;
  if (row >= 0) args.slot_of_row[row] = static_cast<int32_t>(slot);
}

}  // namespace

void moe_sort(mimo_stream& stream, const mimo_moe_sort_args& args) {
  const int64_t slots = args.tokens * args.topk;
  MIMO_REQUIRE(slots <= INT32_MAX, "moe_sort");
  MIMO_REQUIRE(args.experts >= 1, "moe_sort");
  const int64_t runs = larger(1, ceil_div(slots, run)), expert_bytes = args.experts * static_cast<int64_t>(sizeof(int32_t));
  const int64_t place_bytes = warps * expert_bytes + 2 * run * static_cast<int64_t>(sizeof(int32_t));
  if (place_bytes > stream.device->shared_bytes_per_block) {
    fail(MIMO_ERROR_UNSUPPORTED, "This GPU's shared memory is too small to sort by so many experts.");
  }
  Workspace workspace(&stream, runs * expert_bytes);
  int32_t* const count = workspace.as<int32_t>();
  launch_early(stream, count_kernel, grid_of(runs), dim3(run), expert_bytes, args, count);
  launch_early(stream, place_kernel, grid_of(runs), dim3(run), place_bytes, args, count, runs);
}

}  // namespace mimo::cuda
