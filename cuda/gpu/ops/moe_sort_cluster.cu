// MoE sort in one kernel: stable counting sort of the routed slots by expert, counts kept on the device
// (docs/spec/language-model.md §4.5).
//
// Slots are split into segments, one for each block of a cluster, and segments into shares, one for each cluster. Every
// cluster counts all slots and exchanges the segments' counts through distributed shared memory; each block then places
// one share of its segment. Counting repeatedly is cheaper than waiting for another kernel.
#include "moe_sort.cuh"

namespace mimo::cuda {
namespace {

constexpr int threads = sort_threads, warps = sort_warps;
constexpr int segments = 8;  // blocks of a cluster; 16 (a non-portable size) were slower

struct Cut {
  int64_t segment, share;
};

#if __CUDA_ARCH__ >= 900
/// Split cluster barrier: writes before come() are visible after all_came().
__device__ __forceinline__ void come() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void all_came() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
/// Stores to the address of `at` in another block's shared memory.
__device__ __forceinline__ void write_to_block(const int32_t* at, int block, int32_t value) {
  const uint32_t own = static_cast<uint32_t>(__cvta_generic_to_shared(at));
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(own), "r"(block));
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(there), "r"(value) : "memory");
}
#endif

__global__ void __launch_bounds__(threads) sort_kernel(mimo_moe_sort_args args, Cut cut) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ int32_t shared[];
  __shared__ int32_t warp_totals[warps];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int experts = static_cast<int>(args.experts);
  const int columns = columns_of(experts);
  const int column = thread % columns, sharer = thread / columns, sharers = threads / columns, share_warps = warps / sharers;
  int32_t* const earlier = shared;                      // [experts] slots of the segment before this block's share
  int32_t* const later = earlier + experts;             // [experts] the segment's other slots
  int32_t* const rows = later + experts;                // [warps][experts] lane masks; then slots of lower warps
  int32_t* const totals = rows + warps * experts;       // [segments][experts]
  int32_t* const next_row = totals + segments * experts;  // [experts]
  int32_t* const sums = next_row + experts;             // [sharers][experts]
  int32_t* const starts = sums + sharers * experts;     // [sharers][experts]
  come();  // this block has started
  for (int i = thread; i < (2 + warps) * experts; i += threads) shared[i] = 0;
  const int group = static_cast<int>(blockIdx.x) / segments, segment = static_cast<int>(blockIdx.x) % segments;
  const int64_t slots = args.tokens * args.topk, begin = segment * cut.segment, end = smaller(begin + cut.segment, slots);
  const int64_t own_begin = smaller(begin + group * cut.share, end), own_end = smaller(own_begin + cut.share, end);
  __syncthreads();

  previous_is_done();
  let_next_start();
  int expert = expert_of(args, own_begin + thread, own_end);
  constexpr int at_once = 8;
  for (int64_t first = begin + thread; first < end; first += at_once * threads) {
    int counted[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) counted[i] = expert_of(args, first + i * threads, end);
#pragma unroll
    for (int i = 0; i < at_once; ++i) {  // integer atomics: the order does not matter
      if (counted[i] >= 0) atomicAdd((first + i * threads < own_begin ? earlier : later) + counted[i], 1);
    }
  }
  if (expert >= 0) atomicOr(rows + warp * experts + expert, 1 << lane);
  __syncthreads();
  all_came();  // all blocks have started: their shared memory may be written
  for (int e = column; e < experts; e += columns) {
    const int32_t total = earlier[e] + later[e];
    for (int to = sharer; to < segments; to += sharers) write_to_block(totals + segment * experts + e, to, total);
  }
  __syncwarp();
  come();

  for (int64_t at = own_begin;; at += threads) {
    const bool first = at == own_begin;
    if (!first) {
      if (at >= own_end) break;
      __syncthreads();
      for (int e = column; e < experts && sharer == 0; e += columns) {
        for (int s = 0; s < sharers; ++s) next_row[e] += sums[s * experts + e];
      }
      for (int i = thread; i < warps * experts; i += threads) rows[i] = 0;
      __syncthreads();
      expert = expert_of(args, at + thread, own_end);
      if (expert >= 0) atomicOr(rows + warp * experts + expert, 1 << lane);
      __syncthreads();
    }
    const int lower = expert >= 0 ? __popc(rows[warp * experts + expert] & ((1u << lane) - 1u)) : 0;
    __syncthreads();
    count_lower_warps(rows, sums, experts, column, columns, sharer, sharers);
    if (first) {
      all_came();
      // Rows of lower experts, plus the expert's slots in earlier segments and earlier in this segment.
      int32_t base = 0;
      for (int chunk = 0; chunk < experts; chunk += columns) {
        const int e = chunk + column;
        const bool adds = sharer == 0 && e < experts;
        int32_t all = 0, before = adds ? earlier[e] : 0;
        if (adds) {
#pragma unroll 8
          for (int s = 0; s < segments; ++s) {
            const int32_t here = totals[s * experts + e];
            before += s < segment ? here : 0;
            all += here;
          }
        }
        const int2 lower_experts = sum_before<sort_warps>(all, warp_totals);
        if (adds) {
          next_row[e] = base + lower_experts.x + before;
          if (blockIdx.x == 0) args.offsets[e] = base + lower_experts.x;
        }
        base += lower_experts.y;
        __syncthreads();
      }
      if (blockIdx.x == 0 && thread == 0) args.offsets[experts] = base;
    } else {
      __syncthreads();
    }
    for (int e = column; e < experts; e += columns) {
      int32_t start = next_row[e];
      for (int s = 0; s < sharer; ++s) start += sums[s * experts + e];
      starts[sharer * experts + e] = start;
    }
    __syncthreads();
    const int64_t slot = at + thread;
    if (slot >= own_end) continue;
    const int32_t row =
        expert >= 0 ? starts[warp / share_warps * experts + expert] + rows[warp * experts + expert] + lower : -1;
    args.row_of_slot[slot] = row;
    if (row >= 0) args.slot_of_row[row] = static_cast<int32_t>(slot);
  }
#endif
}

}  // namespace

bool sort_in_clusters(mimo_stream& stream, const mimo_moe_sort_args& args) {
  const int64_t slots = args.tokens * args.topk;
  // Three quarters of the SMs: GPCs hold different numbers of clusters.
  const int64_t most_groups = larger(1, stream.device->multiprocessors * 3 / 4 / segments);
  const int64_t bytes = ((3 + warps + segments) * args.experts + 2 * larger(threads, args.experts)) *
                        static_cast<int64_t>(sizeof(int32_t));
  // Beyond two slots for each thread the two-kernel version is faster.
  if (stream.device->compute_major < 9 || slots > 2 * threads * segments * most_groups ||
      bytes > stream.device->shared_bytes_per_block) {
    return false;
  }
  const int64_t segment = round_up(ceil_div(slots, segments), 32);
  const int64_t groups = larger(1, smaller(most_groups, ceil_div(segment, threads)));
  const Cut cut{segment, round_up(ceil_div(segment, groups), 32)};
  if (bytes > 48 * 1024) {
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(sort_kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(bytes)),
          "asking for shared memory");
  }
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = segments, attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid_of(segments * groups), config.blockDim = dim3(threads);
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream.handle(), config.attrs = attributes, config.numAttrs = 2;
  check(cudaLaunchKernelEx(&config, sort_kernel, args, cut), "launching a kernel");
  return true;
}

}  // namespace mimo::cuda
