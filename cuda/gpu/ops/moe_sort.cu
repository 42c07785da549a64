// MoE sort: stable counting sort of the routed slots by expert, counts kept on the device (docs/spec/language-model.md
// §4.5).
//
// For sizes that the single-kernel version (moe_sort_cluster.cu) does not support there are two kernels. The first
// counts the slots of each run; meanwhile the blocks of the second sort their run in shared memory, then wait for the
// counts, which give the destinations.
#include "moe_sort.cuh"

namespace mimo::cuda {
namespace {

constexpr int threads = sort_threads, warps = sort_warps;
constexpr int place_bits = 10;  // bits of a slot's index in a block's order

/// count[run][e]: slots of expert e in the run; rows of `stride` experts. A run has `passes` slots for each thread.
__global__ void __launch_bounds__(threads)
    count_kernel(mimo_moe_sort_args args, int32_t* count, int stride, int passes) {
  extern __shared__ int32_t shared_counts[];
  for (int e = threadIdx.x; e < stride; e += threads) shared_counts[e] = 0;
  __syncthreads();
  previous_is_done();
  let_next_start();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * passes * threads + threadIdx.x;
#pragma unroll 4
  for (int i = 0; i < passes; ++i) {
    const int expert = expert_of(args, first + i * threads, args.tokens * args.topk);
    if (expert >= 0) atomicAdd(&shared_counts[expert], 1);  // integer atomics: the order does not matter
  }
  __syncthreads();
  int32_t* const of_run = count + static_cast<int64_t>(blockIdx.x) * stride;
  for (int e = threadIdx.x; e < stride; e += threads) of_run[e] = shared_counts[e];
}

/// Destination row of a slot: the rows of lower experts, plus the slots of its expert in earlier runs, earlier passes,
/// lower warps and lower lanes. Each block sums the counts of all runs itself: they are few, and no block waits for
/// another.
__global__ void __launch_bounds__(threads)
    place_kernel(mimo_moe_sort_args args, const int32_t* count, int stride, int runs, int passes) {
  extern __shared__ int32_t shared[];
  __shared__ int32_t warp_totals[2][warps];
  __shared__ int32_t order[threads];  // slots of a pass by expert: expert and thread index
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int experts = static_cast<int>(args.experts);
  const int columns = columns_of(experts), column = thread % columns, sharer = thread / columns, sharers = threads / columns;
  const int share_warps = warps / sharers;
  int32_t* const all = shared;                                  // [sharers][stride] partial sums over runs
  int32_t* const earlier = all + larger(4 * threads, stride);   // [sharers][stride]
  int32_t* const rows = earlier + larger(4 * threads, stride);  // [warps][experts] lane masks; then slots of lower warps
  int32_t* const next_row = rows + warps * experts;             // [experts]
  int32_t* const first = next_row + experts;                    // [experts] first slot of an expert in `order`
  int32_t* const moved = first + experts;                       // [experts] offset from `order` to rows
  int32_t* const sums = moved + experts;                        // [sharers][experts] slots in the warps that a thread sums

  for (int pass = 0; pass < passes; ++pass) {
    const int64_t begin = (static_cast<int64_t>(blockIdx.x) * passes + pass) * threads, slot = begin + thread;
    for (int i = thread; i < warps * experts; i += threads) rows[i] = 0;
    // Safe before previous_is_done(): the kernel that wrote the experts has ended, otherwise the counting kernel would
    // not have started.
    const int expert = expert_of(args, slot, args.tokens * args.topk);
    __syncthreads();
    if (expert >= 0) atomicOr(rows + warp * experts + expert, 1 << lane);
    __syncthreads();
    const int lower = expert >= 0 ? __popc(rows[warp * experts + expert] & ((1u << lane) - 1u)) : 0;
    __syncthreads();
    count_lower_warps(rows, sums, experts, column, columns, sharer, sharers);
    __syncthreads();
    int32_t kept = 0;
    for (int chunk = 0; chunk < experts; chunk += columns) {
      const int e = chunk + column;
      const bool adds = sharer == 0 && e < experts;
      int32_t sum = 0;
      if (adds) {
        for (int s = 0; s < sharers; ++s) {
          const int32_t here = sums[s * experts + e];
          sums[s * experts + e] = sum;
          sum += here;
        }
      }
      const int2 before = sum_before<sort_warps>(sum, warp_totals[0]);
      if (adds) first[e] = kept + before.x;
      kept += before.y;
      __syncthreads();
    }
    int place = -1;
    if (expert >= 0) {
      place = first[expert] + sums[warp / share_warps * experts + expert] + rows[warp * experts + expert] + lower;
      order[place] = expert << place_bits | thread;
    }

    if (pass == 0) {
      previous_is_done();
      let_next_start();
      const int quads = stride / 4, quad_columns = columns_of(quads);
      const int quad_sharers = threads / quad_columns, quad_sharer = thread / quad_columns;
      for (int q = thread % quad_columns; q < quads; q += quad_columns) {
        int4 of_all = make_int4(0, 0, 0, 0), of_earlier = of_all;
#pragma unroll 8
        for (int r = quad_sharer; r < runs; r += quad_sharers) {
          const int4 here = reinterpret_cast<const int4*>(count)[static_cast<int64_t>(r) * quads + q];
          of_all.x += here.x, of_all.y += here.y, of_all.z += here.z, of_all.w += here.w;
          if (r < static_cast<int>(blockIdx.x)) {
            of_earlier.x += here.x, of_earlier.y += here.y, of_earlier.z += here.z, of_earlier.w += here.w;
          }
        }
        reinterpret_cast<int4*>(all)[quad_sharer * quads + q] = of_all;
        reinterpret_cast<int4*>(earlier)[quad_sharer * quads + q] = of_earlier;
      }
      __syncthreads();
      int32_t base = 0;  // rows of the experts before `chunk`
      for (int chunk = 0; chunk < experts; chunk += columns) {
        const int e = chunk + column;
        const bool adds = sharer == 0 && e < experts;
        int32_t total = 0, before = 0;
        if (adds) {
#pragma unroll 8
          for (int s = 0; s < quad_sharers; ++s) total += all[s * stride + e], before += earlier[s * stride + e];
        }
        const int2 lower_experts = sum_before<sort_warps>(total, warp_totals[1]);
        if (adds) {
          next_row[e] = base + lower_experts.x + before;
          if (blockIdx.x == 0) args.offsets[e] = base + lower_experts.x;
        }
        base += lower_experts.y;
        if (chunk + columns < experts) __syncthreads();
      }
      if (blockIdx.x == 0 && thread == 0) args.offsets[experts] = base;
    }
    // Threads have the same experts here as in the sums above.
    for (int e = column; e < experts && sharer == 0; e += columns) {
      moved[e] = next_row[e] - first[e];
      next_row[e] += (e + 1 < experts ? first[e + 1] : kept) - first[e];
    }
    __syncthreads();
    if (slot < args.tokens * args.topk) args.row_of_slot[slot] = expert >= 0 ? place + moved[expert] : -1;
    if (thread < kept) {
      const int of = order[thread];
      args.slot_of_row[thread + moved[of >> place_bits]] = static_cast<int32_t>(begin) + (of & ((1 << place_bits) - 1));
    }
    __syncthreads();
  }
}

}  // namespace

void moe_sort(mimo_stream& stream, const mimo_moe_sort_args& args) {
  const int64_t slots = args.tokens * args.topk;
  MIMO_REQUIRE(slots <= INT32_MAX, "moe_sort");
  MIMO_REQUIRE(args.experts >= 1, "moe_sort");
  if (sort_in_clusters(stream, args)) return;
  // At most one block an SM, because every block reads the counts of all runs.
  const int64_t passes = larger(1, ceil_div(slots, static_cast<int64_t>(threads) * stream.device->multiprocessors));
  const int64_t runs = larger(1, ceil_div(slots, passes * threads)), stride = round_up(args.experts, 4);
  const int64_t words = (warps + 3) * args.experts + larger(threads, args.experts) + 2 * larger(4 * threads, stride);
  const int64_t place_bytes = words * static_cast<int64_t>(sizeof(int32_t));
  if (place_bytes > stream.device->shared_bytes_per_block) {
    fail(MIMO_ERROR_UNSUPPORTED, "This GPU's shared memory is too small to sort by so many experts.");
  }
  Workspace workspace(&stream, runs * stride * static_cast<int64_t>(sizeof(int32_t)));
  int32_t* const count = workspace.as<int32_t>();
  launch_early(stream, count_kernel, grid_of(runs), dim3(threads), stride * static_cast<int64_t>(sizeof(int32_t)), args, count,
               static_cast<int>(stride), static_cast<int>(passes));
  launch_early(stream, place_kernel, grid_of(runs), dim3(threads), place_bytes, args, count, static_cast<int>(stride),
               static_cast<int>(runs), static_cast<int>(passes));
}

}  // namespace mimo::cuda
