// Wrappers of sm_90a instructions: mbarriers with transaction counts, TMA (bulk tensor copies), and wgmma with both
// operands in shared memory.
//
// Tiles in shared memory have TMA's 128-byte swizzle: rows of 64 bf16, the 16-byte chunk c of row r stored at chunk c ^
// (r mod 8), every tile aligned to 1024 bytes.
#pragma once
#include <cuda.h>

#include "mma.cuh"
#include "tensor_map.h"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MIMO_ON_SM90A 1
#elif defined(__CUDA_ARCH__)
#pragma nv_diag_suppress 177  // kernels compile to empty bodies for other GPUs, which leaves their helpers unused
#endif
/// A kernel launched as clusters of two thread blocks, which GPUs before sm_90 do not have.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define MIMO_BLOCK_PAIRS __cluster_dims__(2, 1, 1)
#else
#define MIMO_BLOCK_PAIRS
#endif

namespace mimo::cuda::sm90 {

// ---- barriers --------------------------------------------------------------------------------------------------

/// A phase completes after `arrivals` arrivals and the expected number of bytes.
__device__ __forceinline__ void initialise(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
/// Makes initialised barriers visible to TMA and to the cluster; a block or cluster barrier must follow.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void arrive_expecting(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
/// Waits until the phase of this parity has completed; the phase before the first counts as parity 1.
__device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

// ---- TMA -------------------------------------------------------------------------------------------------------

/// Loads a box to shared memory, counting its bytes on the barrier; elements outside the tensor are zero-filled.
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap& map, int x, int y, int z, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
      ::"r"(shared_address(to)), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
      : "memory");
}
/// copy_box for a ragged_map: rows from `row` on of the group first .. last - 1, zeros past the group's end.
__device__ __forceinline__ void copy_ragged_box(void* to, const CUtensorMap& map, int x, int row, int first, int last,
                                                uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];"
      ::"r"(shared_address(to)), "l"(&map), "r"(x), "r"(ragged_end - (last - first) + row), "r"(last), "r"(ragged_end),
        "r"(shared_address(barrier))
      : "memory");
}
/// copy_box for a heads_map: columns from `column` on of rows from `row` on of one head of tokens first .. last - 1.
__device__ __forceinline__ void copy_head_box(void* to, const CUtensorMap& map, int column, int head, int row, int first,
                                              int last, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(shared_address(to)),
      "l"(&map), "r"(column), "r"(head), "r"(ragged_end - (last - first) + row), "r"(last), "r"(ragged_end),
      "r"(shared_address(barrier))
      : "memory");
}
/// Copies contiguous bytes, both addresses aligned to 16 bytes, counting them on the barrier.
__device__ __forceinline__ void copy_bytes(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
/// copy_ragged_box with multicast to the same offset in both blocks of the cluster; bytes count on both blocks'
/// barriers.
__device__ __forceinline__ void copy_ragged_box_to_pair(void* to, const CUtensorMap& map, int x, int row, int first,
                                                        int last, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;"
      ::"r"(shared_address(to)), "l"(&map), "r"(x), "r"(ragged_end - (last - first) + row), "r"(last), "r"(ragged_end),
        "r"(shared_address(barrier)), "h"(static_cast<uint16_t>(3))
      : "memory");
}
__device__ __forceinline__ void copy_box_to_pair(void* to, const CUtensorMap& map, int x, int y, int z, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;"
      ::"r"(shared_address(to)), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)),
        "h"(static_cast<uint16_t>(3))
      : "memory");
}
/// Prefetches a box into the L2 cache.
__device__ __forceinline__ void prefetch_box(const CUtensorMap& map, int x, int y, int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(&map), "r"(x), "r"(y), "r"(z)
               : "memory");
}
/// Makes this thread's stores to shared memory visible to TMA (the async proxy).
__device__ __forceinline__ void publish_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
/// TMA reduce-add of an fp32 box in shared memory to the tensor in global memory; each addition rounds to nearest,
/// elements outside the tensor are skipped.
__device__ __forceinline__ void add_box(const void* from, const CUtensorMap& map, int x, int y, int z) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
      "r"(x), "r"(y), "r"(z), "r"(shared_address(from))
      : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// TMA store of an fp32 box to the tensor, with L2 evict-first so that operands which are read again stay in the cache.
__device__ __forceinline__ void write_box(const void* from, const CUtensorMap& map, int x, int y, int z) {
  uint64_t evict_first;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(evict_first));
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%1, %2, %3}], [%4], %5;" ::"l"(&map),
      "r"(x), "r"(y), "r"(z), "r"(shared_address(from)), "l"(evict_first)
      : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Waits until TMA has read the sources of all but the last `Pending` boxes that this thread passed to add_box or
/// write_box.
template <int Pending = 0>
__device__ __forceinline__ void wait_boxes_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

// ---- clusters of two blocks ------------------------------------------------------------------------------------

/// Arrives at the barrier at the same offset in block `rank` of the cluster. Relaxed: a release would wait for all of
/// the thread's stores at every k-step, and the arrival only says that a stage has been read.
__device__ __forceinline__ void arrive_at(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}
/// Barrier over all threads of both blocks of the cluster.
__device__ __forceinline__ void synchronise_pair() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// ---- registers -------------------------------------------------------------------------------------------------

template <int Registers>
__device__ __forceinline__ void shrink_registers() {
#ifdef MIMO_ON_SM90A
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
#endif
}
template <int Registers>
__device__ __forceinline__ void grow_registers() {
#ifdef MIMO_ON_SM90A
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
#endif
}

// ---- wgmma -----------------------------------------------------------------------------------------------------

/// Matrix descriptor of a wgmma operand with 128-byte swizzle. k-major: rows run along k, groups of 8 rows are 1024
/// bytes apart. k_rows (MN-major): tiles of 64 columns whose rows run along k, `tile_bytes` apart.
__device__ __forceinline__ uint64_t operand(const void* tile, bool k_rows, uint32_t tile_bytes) {
  constexpr uint64_t swizzle_128 = uint64_t(1) << 62, eight_rows = uint64_t(1024 >> 4) << 32;
  const uint64_t next_tile = uint64_t(k_rows ? tile_bytes >> 4 : 1) << 16;
  return swizzle_128 | eight_rows | next_tile | ((shared_address(tile) & 0x3FFFF) >> 4);
}
/// Increment of a descriptor for each 16 of k.
template <bool k_rows>
constexpr uint64_t operand_step = (k_rows ? 16 * tile_row_bytes : 16 * 2) >> 4;

__device__ __forceinline__ void begin_products() {
#ifdef MIMO_ON_SM90A
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void commit_products() {
#ifdef MIMO_ON_SM90A
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
/// wgmma.wait_group: waits until at most `Pending` committed groups are in flight.
template <int Pending>
__device__ __forceinline__ void wait_products() {
#ifdef MIMO_ON_SM90A
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
#endif
}

/// Keeps the compiler from reading accumulators before the preceding wait.
template <int N>
__device__ __forceinline__ void settle(float (&sum)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}

/// sum[64, 192] (+)= left[64, 16] right[16, 192]. Thread t of the warpgroup holds rows r = 16 (t / 32) + t % 32 / 4 and
/// r + 8: of the j-th 8 columns, columns 2 (t % 4) + {0, 1} of row r in sum[4 j + {0, 1}], of row r + 8 in sum[4 j +
/// {2, 3}].
template <bool left_rows, bool right_rows>
__device__ __forceinline__ void multiply_64x192(float (&sum)[96], uint64_t left, uint64_t right, bool add) {
#ifdef MIMO_ON_SM90A
#define MIMO_4(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define MIMO_16(i) MIMO_4(i), MIMO_4(i + 4), MIMO_4(i + 8), MIMO_4(i + 12)
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "
      "%96, %97, p, 1, 1, %99, %100;\n}"
      : MIMO_16(0), MIMO_16(16), MIMO_16(32), MIMO_16(48), MIMO_16(64), MIMO_16(80)
      : "l"(left), "l"(right), "r"(static_cast<int>(add)), "n"(left_rows ? 1 : 0), "n"(right_rows ? 1 : 0));
#undef MIMO_16
#undef MIMO_4
#endif
}

/// stmatrix.x4: stores 16 x 16 bf16 held in registers in the layout of mma's left operand.
__device__ __forceinline__ void store_matrices(char* row, const uint32_t* from) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(from[0]),
               "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}
/// 2^x (ex2.approx.ftz): error at most 2 ulp, results below 2^-126 flush to 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace mimo::cuda::sm90
