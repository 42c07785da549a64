// Quantises matrices to e4m3 in blocks of 128 x 128, as they are and transposed (docs/spec/moe-performance.md §1.7).
// bf16 is read once; each thread transposes 8 x 8 values in registers, and the transposed block goes through shared
// memory so that its rows are stored as whole lines too.
#include "e4m3.cuh"
#include "operations.h"

namespace mimo::cuda {
namespace {

constexpr int side = static_cast<int>(e4m3_run), threads = 256, eights = side / 8;

__global__ void __launch_bounds__(threads)
    kernel(const bf16* matrices, int64_t rows, int64_t width, uint8_t* values, uint8_t* transposed, float* factors) {
  __shared__ float largest_of_warp[threads / 32];
  __shared__ uint2 turned[side][eights];
  const int across = threadIdx.x % eights, down = threadIdx.x / eights;
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * side, first_column = static_cast<int64_t>(blockIdx.x) * side;
  const int64_t row = first_row + down * 8, column = first_column + across * 8, matrix = blockIdx.z * rows * width;
  float value[8][8];
  float largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) value[i][j] = 0;
    if (row + i < rows && column < width) read(matrices + matrix + (row + i) * width + column, value[i]);
    largest = fmaxf(largest, largest_of(value[i]));
  }
  largest = warp_max(largest);
  if (threadIdx.x % 32 == 0) largest_of_warp[threadIdx.x / 32] = largest;
  __syncthreads();
  largest = warp_max(threadIdx.x % 32 < threads / 32 ? largest_of_warp[threadIdx.x % 32] : 0.0f);
  const int power = power_for(largest);
  const float factor = factor_for(largest, power);
  if (threadIdx.x == 0) {
    factors[(static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x] =
        largest < INFINITY ? power_of_two(-power) : 1.0f;
  }
  uint2 byte[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    byte[i] = eight_e4m3(value[i], factor);
    if (row + i < rows && column < width) *reinterpret_cast<uint2*>(values + matrix + (row + i) * width + column) = byte[i];
  }
  if (transposed == nullptr) return;
  turn(byte);
  // XOR swizzle against bank conflicts, both for 16 columns and for 16 groups of 8 of one column.
#pragma unroll
  for (int i = 0; i < 8; ++i) turned[across * 8 + i][down ^ across] = byte[i];
  __syncthreads();
#pragma unroll
  for (int pass = 0; pass < 8; ++pass) {
    const int local = pass * (threads / eights) + down;
    const int64_t to_row = first_column + local, to_column = first_row + across * 8;
    if (to_row < width && to_column < rows) {
      *reinterpret_cast<uint2*>(transposed + matrix + to_row * rows + to_column) = turned[local][across ^ (local / 8)];
    }
  }
}

}  // namespace

void e4m3_matrices(mimo_stream& stream, const mimo_e4m3_matrices_args& args) {
  MIMO_REQUIRE(args.count >= 0 && args.rows >= 1 && args.width >= 1, "e4m3_matrices");
  const auto fits = [](const void* bytes, int64_t width) { return packs_fit<uint8_t>(bytes, width, width, 8); };
  if (args.dtype != MIMO_DTYPE_BF16 || args.rows % 16 != 0 || args.width % 16 != 0 ||
      !packs_fit<bf16>(args.matrices, args.width, args.width, 8) || !fits(args.values, args.width) ||
      !fits(args.transposed, args.rows)) {
    fail(MIMO_ERROR_UNSUPPORTED, "e4m3_matrices on a GPU needs bf16 at addresses of 16 bytes, and sizes that are multiples of 16.");
  }
  const dim3 grid = grid_of(ceil_div(args.width, e4m3_run), ceil_div(args.rows, e4m3_run), args.count);
  launch(stream, kernel, grid, dim3(threads), 0, static_cast<const bf16*>(args.matrices), args.rows, args.width,
         static_cast<uint8_t*>(args.values), static_cast<uint8_t*>(args.transposed), args.factors);
}

}  // namespace mimo::cuda
