// Order of the routed token copies (spec language-model 4.5): a stable counting sort of the slots by expert, in runs of
// slots. Counts stay on the device.
#include "kernel.cuh"

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
  for (int e = threadIdx.x; e < args.experts; e += run) shared_counts[e] = 0;
  __syncthreads();
  const int expert = expert_of(args, static_cast<int64_t>(blockIdx.x) * run + threadIdx.x);
  if (expert >= 0) atomicAdd(&shared_counts[expert], 1);  // integers: the order does not matter
  __syncthreads();
  for (int e = threadIdx.x; e < args.experts; e += run) count[blockIdx.x * args.experts + e] = shared_counts[e];
}

/// count[run][e] becomes the row of the run's first slot of expert e; writes offsets. One block.
__global__ void scan_kernel(mimo_moe_sort_args args, int32_t* count, int64_t runs) {
  __shared__ int32_t warp_totals[warps];
  __shared__ int32_t base;
  if (threadIdx.x == 0) base = 0;
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int64_t first = 0; first < args.experts; first += run) {
    const int64_t e = first + threadIdx.x;
    int32_t total = 0;
    if (e < args.experts) {
#pragma unroll 8
      for (int64_t r = 0; r < runs; ++r) total += count[r * args.experts + e];
    }
    int32_t inclusive = total;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int32_t other = __shfl_up_sync(all_lanes, inclusive, offset);
      if (lane >= offset) inclusive += other;
    }
    if (lane == 31) warp_totals[warp] = inclusive;
    __syncthreads();
    int32_t before = base;
    for (int w = 0; w < warp; ++w) before += warp_totals[w];
    const int32_t start = before + inclusive - total;
    __syncthreads();
    if (threadIdx.x == run - 1) base = before + inclusive;
    if (e < args.experts) {
      args.offsets[e] = start;
      int32_t row = start;
#pragma unroll 8
      for (int64_t r = 0; r < runs; ++r) {
        const int32_t here = count[r * args.experts + e];
        count[r * args.experts + e] = row;
        row += here;
      }
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) args.offsets[args.experts] = base;
}

/// Places the run's slots: row of its first one, plus the same expert's slots of earlier warps and of lower lanes.
__global__ void place_kernel(mimo_moe_sort_args args, const int32_t* first_row) {
  extern __shared__ int32_t shared_counts[];  // [warps][experts]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int experts = static_cast<int>(args.experts);
  for (int i = threadIdx.x; i < warps * experts; i += run) shared_counts[i] = 0;
  __syncthreads();
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * run + threadIdx.x;
  const int expert = expert_of(args, slot);
  const unsigned same = __match_any_sync(all_lanes, expert);
  const int lower = __popc(same & ((1u << lane) - 1u));
  if (expert >= 0 && lower == 0) shared_counts[warp * experts + expert] = __popc(same);
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += run) {
    int32_t row = first_row[blockIdx.x * args.experts + e];
    for (int w = 0; w < warps; ++w) {
      const int32_t here = shared_counts[w * experts + e];
      shared_counts[w * experts + e] = row;
      row += here;
    }
  }
  __syncthreads();
  if (slot >= args.tokens * args.topk) return;
  const int32_t row = expert >= 0 ? shared_counts[warp * experts + expert] + lower : -1;
  args.row_of_slot[slot] = row;
  if (row >= 0) args.slot_of_row[row] = static_cast<int32_t>(slot);
}

}  // namespace

void moe_sort(mimo_stream& stream, const mimo_moe_sort_args& args) {
  const int64_t slots = args.tokens * args.topk;
  MIMO_REQUIRE(slots <= INT32_MAX, "moe_sort");
  MIMO_REQUIRE(args.experts >= 1, "moe_sort");
  const int64_t runs = ceil_div(slots, run), expert_bytes = args.experts * static_cast<int64_t>(sizeof(int32_t));
  if (warps * expert_bytes > stream.device->shared_bytes_per_block) {
    fail(MIMO_ERROR_UNSUPPORTED, "This GPU's shared memory is too small to sort by so many experts.");
  }
  Workspace workspace(&stream, runs * expert_bytes);
  int32_t* const count = workspace.as<int32_t>();
  launch(stream, count_kernel, grid_of(runs), dim3(run), expert_bytes, args, count);
  launch(stream, scan_kernel, dim3(1), dim3(run), 0, args, count, runs);
  launch(stream, place_kernel, grid_of(runs), dim3(run), warps * expert_bytes, args, count);
}

}  // namespace mimo::cuda
