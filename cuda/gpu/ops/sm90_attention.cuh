// Shared by Hopper's attention kernels: tiles for head dimension 80 and the wgmma shapes that use them.
//
// A row of a head is 80 bf16. wgmma takes it unpadded: five k-steps of 16, or n = 80. In shared memory a row is split
// over two 128-byte-swizzled tiles, 64 columns and 16, because the columns of one wgmma must all have the same tile
// layout; TMA zero-fills the second tile's other columns, which no wgmma reads.
#pragma once
#include "sm90.cuh"

namespace mimo::cuda::sm90 {

constexpr int head_dim = 80;
constexpr int head_sums = head_dim / 2;  // accumulators of a thread for [64, 80]
constexpr int score_columns = 112;       // keys of a tile in the forward pass

/// Bytes of `rows` rows of a head, and of the first of its two tiles.
constexpr int head_tile_bytes(int rows) { return 2 * rows * tile_row_bytes; }
constexpr int half_tile_bytes(int rows) { return rows * tile_row_bytes; }

/// Copies rows from `row` on of a head of a sequence (tokens first .. last - 1) from a heads_map; rows past the
/// sequence's end are zero-filled.
__device__ __forceinline__ void copy_head(char* to, const CUtensorMap& map, int rows, int head, int row, int first, int last,
                                          uint64_t* barrier) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    copy_head_box(to + half * half_tile_bytes(rows), map, half * tile_width, head, row, first, last, barrier);
  }
}

/// Descriptor of a head tile as an operand whose k runs along the head dimension; `step` 0 .. 4.
__device__ __forceinline__ uint64_t head_along_k(const char* tile, int rows, int step) {
  return step < 4 ? operand(tile, false, 0) + step * operand_step<false>
                  : operand(tile + half_tile_bytes(rows), false, 0);
}
/// The same for heads of 128, two whole tiles; `step` 0 .. 7.
__device__ __forceinline__ uint64_t wide_head_along_k(const char* tile, int rows, int step) {
  return operand(tile + step / 4 * half_tile_bytes(rows), false, 0) + step % 4 * operand_step<false>;
}
/// Descriptor of a head tile as an operand whose k runs down the rows, 16 a step; its columns are the head dimension.
__device__ __forceinline__ uint64_t head_along_columns(const char* tile, int rows, int step) {
  return operand(tile, true, half_tile_bytes(rows)) + step * operand_step<true>;
}

// Where k only runs along the head dimension, the second tile can have rows of 32 bytes: 160 bytes a row in all.

constexpr int narrow_row_bytes = 2 * (head_dim - tile_width);
constexpr int narrow_tile_bytes(int rows) { return half_tile_bytes(rows) + rows * narrow_row_bytes; }

/// copy_head to such narrow tiles, from a heads_map and a heads_end_map; `rows` is a multiple of 8.
__device__ __forceinline__ void copy_narrow_head(char* to, const CUtensorMap& map, const CUtensorMap& end, int rows, int head,
                                                 int row, int first, int last, uint64_t* barrier) {
  copy_head_box(to, map, 0, head, row, first, last, barrier);
  copy_head_box(to + half_tile_bytes(rows), end, 0, head, row, first, last, barrier);
}
/// head_along_k for narrow tiles, from row `first` on, a multiple of 8.
__device__ __forceinline__ uint64_t narrow_head_along_k(const char* tile, int rows, int step, int first = 0) {
  if (step < 4) return operand(tile + first * tile_row_bytes, false, 0) + step * operand_step<false>;
  constexpr uint64_t swizzle_32 = uint64_t(3) << 62, eight_rows = uint64_t(8 * narrow_row_bytes >> 4) << 32;
  const char* const end = tile + half_tile_bytes(rows) + first * narrow_row_bytes;
  return swizzle_32 | eight_rows | uint64_t(1) << 16 | ((shared_address(end) & 0x3FFFF) >> 4);
}

#define MIMO_4(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define MIMO_16(i) MIMO_4(i), MIMO_4(i + 4), MIMO_4(i + 8), MIMO_4(i + 12)
#define MIMO_SUMS_32                                                                                                 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31}"
#define MIMO_SUMS_40                                                                                                 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39}"
#define MIMO_SUMS_56                                                                                                 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "  \
  "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55}"
#define MIMO_SUMS_64                                                                                                 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "  \
  "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"

// Accumulators have the layout of multiply_64x192. A left operand in registers has mma's layout, 16 rows for each warp.

/// sum[64, 64] (+)= left[64, 16] right[16, 64], both k-major.
__device__ __forceinline__ void multiply_64x64(float (&sum)[32], uint64_t left, uint64_t right, bool add) {
#ifdef MIMO_ON_SM90A
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " MIMO_SUMS_32 ", %32, %33, p, 1, 1, 0, 0;\n}"
               : MIMO_16(0), MIMO_16(16)
               : "l"(left), "l"(right), "r"(static_cast<int>(add)));
#endif
}
/// sum[64, 112] (+)= left[64, 16] right[16, 112], both k-major.
__device__ __forceinline__ void multiply_64x112(float (&sum)[56], uint64_t left, uint64_t right, bool add) {
#ifdef MIMO_ON_SM90A
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %58, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n112k16.f32.bf16.bf16 " MIMO_SUMS_56 ", %56, %57, p, 1, 1, 0, 0;\n}"
               : MIMO_16(0), MIMO_16(16), MIMO_16(32), MIMO_4(48), MIMO_4(52)
               : "l"(left), "l"(right), "r"(static_cast<int>(add)));
#endif
}
/// sum[64, 80] (+)= left[64, 16] right[16, 80], both k-rows.
__device__ __forceinline__ void multiply_64x80(float (&sum)[40], uint64_t left, uint64_t right, bool add) {
#ifdef MIMO_ON_SM90A
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %42, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 " MIMO_SUMS_40 ", %40, %41, p, 1, 1, 1, 1;\n}"
               : MIMO_16(0), MIMO_16(16), MIMO_4(32), MIMO_4(36)
               : "l"(left), "l"(right), "r"(static_cast<int>(add)));
#endif
}
__device__ __forceinline__ void multiply_64x80(float (&sum)[40], const uint32_t* left, uint64_t right, bool add) {
#ifdef MIMO_ON_SM90A
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %45, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 " MIMO_SUMS_40
               ", {%40, %41, %42, %43}, %44, p, 1, 1, 1;\n}"
               : MIMO_16(0), MIMO_16(16), MIMO_4(32), MIMO_4(36)
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(static_cast<int>(add)));
#endif
}
/// sum[64, 128] (+)= left[64, 16] right[16, 128], both k-major.
__device__ __forceinline__ void multiply_64x128(float (&sum)[64], uint64_t left, uint64_t right, bool add) {
#ifdef MIMO_ON_SM90A
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " MIMO_SUMS_64 ", %64, %65, p, 1, 1, 0, 0;\n}"
               : MIMO_16(0), MIMO_16(16), MIMO_16(32), MIMO_16(48)
               : "l"(left), "l"(right), "r"(static_cast<int>(add)));
#endif
}
/// The same, the left operand in registers and the right k-rows.
__device__ __forceinline__ void multiply_64x128(float (&sum)[64], const uint32_t* left, uint64_t right, bool add) {
#ifdef MIMO_ON_SM90A
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " MIMO_SUMS_64
               ", {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"
               : MIMO_16(0), MIMO_16(16), MIMO_16(32), MIMO_16(48)
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(static_cast<int>(add)));
#endif
}
#undef MIMO_SUMS_64
#undef MIMO_SUMS_56
#undef MIMO_SUMS_40
#undef MIMO_SUMS_32
#undef MIMO_16
#undef MIMO_4

/// Named barrier of the 128 threads of a warpgroup; `number` 1 .. 15.
__device__ __forceinline__ void synchronise_warpgroup(int number) {
  asm volatile("bar.sync %0, 128;" ::"r"(number) : "memory");
}

// Ping-pong of two warpgroups: they compute their exponentials in turn. At the same time they would share the
// exponential unit and then both wait for the tensor cores; in turn, the wgmma of one overlaps the exponentials of the
// other.

/// Waits on the named barrier until the other warpgroup passes the turn to warpgroup `own`.
__device__ __forceinline__ void await_turn(int own) { asm volatile("bar.sync %0, 256;" ::"r"(4 + own) : "memory"); }
__device__ __forceinline__ void pass_turn(int own) { asm volatile("bar.arrive %0, 256;" ::"r"(5 - own) : "memory"); }

/// Shared memory through which a warp stores 16 rows of a head, and bytes of each row.
constexpr int room_row_bytes = 2 * head_dim, room_bytes = 16 * room_row_bytes;

/// Stores a warp's 16 rows of the [64, 80] accumulators times `factor` with 16-byte stores. Rows of `to` are `stride`
/// elements apart; rows from `count` on are skipped. `room`: room_bytes of shared memory of this warp, aligned to 16
/// bytes.
__device__ __forceinline__ void store_head_rows(const float (&sum)[head_sums], float factor, char* room, bf16* to, int64_t stride,
                                                int count) {
  const int lane = threadIdx.x % 32;
  char* const from = room + lane % 16 * room_row_bytes + lane / 16 * 16;
  __syncwarp();
#pragma unroll
  for (int k = 0; k < head_dim / 16; ++k) {
    uint32_t packed[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) packed[j] = pack_bf16(factor * sum[8 * k + 2 * j], factor * sum[8 * k + 2 * j + 1]);
    store_matrices(from + k * 32, packed);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16 * (head_dim / 8) / 32; ++i) {
    const int piece = i * 32 + lane, r = piece / (head_dim / 8), chunk = piece % (head_dim / 8);
    const uint4 value = *reinterpret_cast<const uint4*>(room + r * room_row_bytes + chunk * 16);
    if (r < count) *reinterpret_cast<uint4*>(to + r * stride + chunk * 8) = value;
  }
}

/// Transposes the 4 x 4 words of four adjacent lanes: lane i's word j becomes lane j's word i.
__device__ __forceinline__ uint4 exchange_in_fours(const uint32_t (&word)[4]) {
  const bool odd = threadIdx.x % 2 != 0, high = threadIdx.x / 2 % 2 != 0;
  const uint32_t a = __shfl_xor_sync(all_lanes, odd ? word[0] : word[1], 1);
  const uint32_t b = __shfl_xor_sync(all_lanes, odd ? word[2] : word[3], 1);
  const uint32_t x = odd ? a : word[0], y = odd ? word[1] : a, z = odd ? b : word[2], w = odd ? word[3] : b;
  const uint32_t c = __shfl_xor_sync(all_lanes, high ? x : z, 2), d = __shfl_xor_sync(all_lanes, high ? y : w, 2);
  return high ? make_uint4(c, d, z, w) : make_uint4(x, y, c, d);
}

/// store_head_rows without shared memory, at the cost of registers. Four lanes hold two rows of N / 4 16-byte pieces:
/// each lane stores every fourth piece of both rows, then, of heads of 80, one of the four remaining pieces.
template <int N>
__device__ __forceinline__ void store_head_rows(const float (&sum)[N], float factor, bf16* to, int64_t stride, int count) {
  constexpr int pieces = N / 4;
  const int lane = threadIdx.x % 32, row = lane / 4, piece = lane % 4;
  const auto packed = [&](int half, int n) {
    return pack_bf16(factor * sum[4 * n + 2 * half], factor * sum[4 * n + 2 * half + 1]);
  };
  const auto store = [&](const uint32_t (&word)[4], int to_row, int to_piece) {
    const uint4 value = exchange_in_fours(word);
    if (to_row < count) *reinterpret_cast<uint4*>(to + to_row * stride + to_piece * 8) = value;
  };
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int n = 0; n + 4 <= pieces; n += 4) {
      store({packed(half, n), packed(half, n + 1), packed(half, n + 2), packed(half, n + 3)}, row + 8 * half, n + piece);
    }
  }
  if constexpr (pieces % 4 == 2) {
    constexpr int n = pieces - 2;
    store({packed(0, n), packed(0, n + 1), packed(1, n), packed(1, n + 1)}, row + piece / 2 * 8, n + piece % 2);
  }
}

}  // namespace mimo::cuda::sm90
