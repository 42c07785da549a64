// MLP of the experts on Hopper with e4m3 products (docs/spec/moe-performance.md §1.7): forward and input gradients;
// weight gradients read bf16. The activation kernels quantise their own results: rows between the two products take one
// byte an element. Also a single product of a projection.
#include <optional>

#include "activation.cuh"
#include "e4m3.h"
#include "grouped_gemm.h"
#include "grouped_mlp.h"
#include "sm90_e4m3_grouped.cuh"

namespace mimo::cuda {
namespace {

using namespace sm90;

/// Grouped GEMM with the epilogue of the layer: c_g = a_g b_gᵀ + row factor * bias, in bf16.
struct E4m3Products : E4m3Problem<4, 16 * tile_row_bytes> {
  static constexpr bool steps_vary = false;
  int32_t group_stride, column_stride;  // of block_factors
  const int32_t* offsets;     // null: one group of all rows
  int32_t rows;
  const bf16* bias;           // [groups, n], or null
  const float* bias_factors;  // of each row; null: 1
  bf16* c;
  int32_t k;

  __device__ __forceinline__ int first(int group) const { return offsets == nullptr ? 0 : offsets[group]; }
  __device__ __forceinline__ int last(int group) const { return offsets == nullptr ? rows : offsets[group + 1]; }
  __device__ __forceinline__ int height(int first, int last) const { return last - first; }
  __device__ __forceinline__ int units(int group) const { return units_of(last(group) - first(group)); }
  __device__ __forceinline__ int steps(const E4m3Result&) const { return (k + run - 1) / run; }
  __device__ __forceinline__ void copy_rows(void* to, const E4m3Result& at, int step, int row, uint64_t* full) const {
    copy_ragged_box(to, a, step * run, row, at.first, at.last, full);
  }
  __device__ __forceinline__ void copy_rows_to_pair(void* to, const E4m3Result& at, int step, int row, uint64_t* full) const {
    copy_ragged_box_to_pair(to, a, step * run, row, at.first, at.last, full);
  }
  __device__ __forceinline__ int column(int step) const { return step * run; }
  __device__ __forceinline__ int matrix(const E4m3Result& at, int) const { return at.group; }
  __device__ __forceinline__ const float* factors_of_rows(const E4m3Result& at) const {
    return row_factors + ((at.first + at.row) & ~3);
  }
  __device__ __forceinline__ int factors_skipped(const E4m3Result& at) const { return (at.first + at.row) % 4; }
  __device__ __forceinline__ int factor_of_block(const E4m3Result& at) const {
    return at.group * group_stride + at.column * column_stride;
  }
  __device__ __forceinline__ void store(const E4m3Result& result, int row, float (&sums)[64], char* staging) const {
    const int live = result.last - result.first - row;
    if (bias != nullptr) add_bias(result, row, live, sums);
    store_rows(result, row, live, sums, staging);
  }
  __device__ __forceinline__ void finish() const {}

 private:
  __device__ __forceinline__ void add_bias(const E4m3Result& result, int row, int live, float (&sums)[64]) const {
    const int lane = threadIdx.x % 32, column = result.column * columns_of_result + lane % 4 * 2;
    const bf16* const of_group = bias + static_cast<int64_t>(result.group) * n + column;
    float weight[2] = {1.0f, 1.0f};
    if (bias_factors != nullptr) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int local = lane / 4 + 8 * i;
        weight[i] = local < live ? bias_factors[result.first + row + local] : 0.0f;
      }
    }
#pragma unroll
    for (int eight = 0; eight < 16; ++eight) {
      const uint32_t two = column + eight * 8 < n ? *reinterpret_cast<const uint32_t*>(of_group + eight * 8) : 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sums[eight * 4 + 2 * i] += weight[i] * lower_bf16(two), sums[eight * 4 + 2 * i + 1] += weight[i] * upper_bf16(two);
      }
    }
  }
  /// Stages a warp's rows in shared memory, so that eight lanes store a whole 128-byte line.
  __device__ __forceinline__ void store_rows(const E4m3Result& result, int row, int live, const float (&sums)[64],
                                             char* staging) const {
    const int lane = threadIdx.x % 32, first_column = result.column * columns_of_result + lane % 8 * 8;
    char* const to_row = staging + lane % 16 * tile_row_bytes;
    const char* const from = staging + lane / 8 * tile_row_bytes;
    bf16* to = c + (static_cast<int64_t>(result.first) + row + lane / 8) * n + first_column;
    const int64_t four_rows = 4 * static_cast<int64_t>(n);
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
      const bool in_matrix = first_column + part * 64 < n;
#pragma unroll
      for (int pass = 0; pass < 4; ++pass) {
        const int local = pass * 4 + lane / 8;
        const uint4 eight = *reinterpret_cast<const uint4*>(from + pass * 4 * tile_row_bytes + ((lane % 8 ^ (local % 8)) * 16));
        if (in_matrix && local < live) *reinterpret_cast<uint4*>(to + pass * four_rows + part * 64) = eight;
      }
    }
  }
};

__global__ void MIMO_BLOCK_PAIRS __launch_bounds__(threads, 1)
    e4m3_kernel(const __grid_constant__ E4m3Products problem, int groups) {
#ifdef MIMO_ON_SM90A
  multiply_e4m3_groups(problem, groups);
#endif
}

static_assert(E4m3Products::row_factor_bytes <= MIMO_E4M3_SPARE_FACTORS * static_cast<int>(sizeof(float)));

/// Buffers of an operand [rows, width].
struct Rounded {
  Rounded(mimo_stream& stream, int64_t rows, int64_t width)
      : memory(&stream, value_bytes(rows, width) +
                            e4m3_factor_stride(rows) * ceil_div(width, e4m3_run) * static_cast<int64_t>(sizeof(float)) +
                            E4m3Products::row_factor_bytes),
        operand{memory.as<uint8_t>(), reinterpret_cast<float*>(memory.as<uint8_t>() + value_bytes(rows, width)),
                e4m3_factor_stride(rows)} {}
  static int64_t value_bytes(int64_t rows, int64_t width) { return round_up(rows * width, 16); }
  Workspace memory;
  E4m3Operand operand;
};

/// The layer's input rows [rows, hidden] in e4m3: as given or, without `values`, quantised here.
struct Entering {
  template <class Args>
  Entering(mimo_stream& stream, const Args& args, const void* rows, const void* values, const float* factors)
      : operand{e4m3_operand(values, factors, args.rows)} {
    if (values != nullptr) return;  // given: only read by the products
    own.emplace(stream, args.rows, args.hidden);
    operand = own->operand;
    quantize_rows(stream, rows, args.rows, args.hidden, args.offsets + args.groups, operand);
  }
  std::optional<Rounded> own;
  E4m3Operand operand;
};

/// Matrices as [n, k]; their factors are [blocks of n, blocks of k], or transposed for transposed matrices.
struct Matrices {
  const void* values;
  const float* factors;
  bool transposed;
};

/// Groups of rows; without offsets one group.
struct Groups {
  const int32_t* offsets;
  int64_t rows, count;
};

/// c = a bᵀ + row factor * bias, in bf16.
void multiply(mimo_stream& stream, const E4m3Operand& a, const Matrices& b, const Groups& groups, int64_t n, int64_t k, void* c,
              const void* bias = nullptr, const float* bias_factors = nullptr) {
  const auto narrow = [](int64_t value) { return static_cast<int32_t>(value); };
  const int64_t blocks_n = ceil_div(n, e4m3_run), blocks_k = ceil_div(k, e4m3_run);
  E4m3Products problem;
  problem.a = byte_ragged_map(a.values, k, E4m3Products::slice);
  problem.b = byte_matrices_map(b.values, groups.count, n, k, E4m3Products::slice);
  problem.row_factors = a.factors, problem.factor_stride = a.factor_stride, problem.block_factors = b.factors;
  problem.group_stride = narrow(blocks_n * blocks_k);
  problem.column_stride = narrow(b.transposed ? 1 : blocks_k), problem.run_stride = narrow(b.transposed ? blocks_n : 1);
  problem.offsets = groups.offsets, problem.rows = narrow(groups.rows);
  problem.bias = static_cast<const bf16*>(bias), problem.bias_factors = bias_factors;
  problem.c = static_cast<bf16*>(c), problem.n = narrow(n), problem.k = narrow(k);
  launch_early(stream, e4m3_kernel, grid_of(stream.device->multiprocessors / pair * pair), dim3(threads), e4m3_shared_bytes<E4m3Products>(groups.count),
               problem, narrow(groups.count));
}

template <class Args>
Groups groups_of(const Args& args) {
  return {args.offsets, args.rows, args.groups};
}

template <class Args>
int64_t z_width_of(const Args& args) {
  return is_gated(args.kind) ? 2 * args.width : args.width;
}

template <class Args>
bool fits(const mimo_stream& stream, const Args& args, const void* rows, const void* in_e4m3, const float* factors,
          const void* other_rows) {
  const int64_t z_width = z_width_of(args);
  const auto readable = [](const void* pointer, int64_t width) { return packs_fit<bf16>(pointer, width, width, 16); };
  return args.dtype == MIMO_DTYPE_BF16 && (!is_gated(args.kind) || (args.interleave % 8 == 0 && args.clamp > 0)) &&
         readable(rows, args.hidden) && readable(in_e4m3, args.hidden) && packs_fit<float>(factors, 4, 4, 4) &&
         readable(other_rows, args.hidden) && readable(args.w1, args.hidden) && readable(args.w2, args.width) &&
         readable(args.z, z_width) && packs_fit<float>(args.w1_factors, 4, 4, 4) && packs_fit<float>(args.w2_factors, 4, 4, 4) &&
         sm90_grouped_gemm_fits(stream, args.rows, args.groups, larger(z_width, args.hidden), args.hidden) &&
         args.groups * ceil_div(larger(z_width, args.width), e4m3_run) * ceil_div(args.hidden, e4m3_run) <= INT32_MAX;
}

}  // namespace

bool sm90_e4m3_grouped_gemm_fits(const mimo_stream& stream, const mimo_grouped_gemm_args& args) {
  return args.a_dtype == MIMO_DTYPE_BF16 && args.c_dtype == MIMO_DTYPE_BF16 && packs_fit<bf16>(args.a, args.k, args.k, 16) &&
         packs_fit<bf16>(args.c, args.n, args.n, 16) && packs_fit<uint8_t>(args.b, args.k, args.k, 16) &&
         packs_fit<float>(args.b_factors, 4, 4, 4) && sm90_grouped_gemm_fits(stream, args.rows, args.groups, args.n, args.k) &&
         args.groups * ceil_div(args.n, e4m3_run) * ceil_div(args.k, e4m3_run) <= INT32_MAX;
}

void sm90_e4m3_grouped_gemm(mimo_stream& stream, const mimo_grouped_gemm_args& args) {
  const Rounded a(stream, args.rows, args.k);
  quantize_rows(stream, args.a, args.rows, args.k, args.offsets == nullptr ? nullptr : args.offsets + args.groups, a.operand);
  multiply(stream, a.operand, {args.b, args.b_factors, args.transpose_b == 0}, groups_of(args), args.n, args.k, args.c);
}

bool sm90_e4m3_grouped_mlp_fits(const mimo_stream& stream, const mimo_grouped_mlp_forward_args& args) {
  return fits(stream, args, args.x, args.x_e4m3, args.x_factors, args.y) && packs_fit<bf16>(args.b1, 2, 2, 2) &&
         packs_fit<bf16>(args.b2, 2, 2, 2);
}
bool sm90_e4m3_grouped_mlp_fits(const mimo_stream& stream, const mimo_grouped_mlp_backward_args& args) {
  return fits(stream, args, args.dy, args.dy_e4m3, args.dy_factors, args.dx) && packs_fit<bf16>(args.dz, 16, 16, 16) &&
         packs_fit<bf16>(args.hs, 16, 16, 16) && packs_fit<uint8_t>(args.dz_e4m3, 16, 16, 16) &&
         packs_fit<float>(args.dz_factors, 4, 4, 4) && packs_fit<uint8_t>(args.hs_e4m3, 16, 16, 16);
}

void sm90_e4m3_grouped_mlp_forward(mimo_stream& stream, const mimo_grouped_mlp_forward_args& args) {
  const int64_t z_width = z_width_of(args);
  Workspace z_copy(&stream, args.z == nullptr ? args.rows * z_width * 2 : 0);
  void* const z = args.z == nullptr ? z_copy.as<void>() : args.z;
  {
    const Entering x(stream, args, args.x, args.x_e4m3, args.x_factors);
    multiply(stream, x.operand, {args.w1, args.w1_factors, false}, groups_of(args), z_width, args.hidden, z, args.b1);
  }
  const Rounded hs(stream, args.rows, args.width);
  activate_in_e4m3(stream, args, z, hs.operand);
  multiply(stream, hs.operand, {args.w2, args.w2_factors, false}, groups_of(args), args.hidden, args.width, args.y, args.b2,
           args.row_probability);
}

void sm90_e4m3_grouped_mlp_backward(mimo_stream& stream, const mimo_grouped_mlp_backward_args& args) {
  const int64_t z_width = z_width_of(args);
  Workspace dhs(&stream, args.rows * args.width * 2);
  {
    const Entering dy(stream, args, args.dy, args.dy_e4m3, args.dy_factors);
    multiply(stream, dy.operand, {args.w2, args.w2_factors, true}, groups_of(args), args.width, args.hidden,
             dhs.as<void>());
  }
  std::optional<Rounded> own;
  if (args.dz_e4m3 == nullptr) own.emplace(stream, args.rows, z_width);
  const E4m3Operand dz = own ? own->operand : e4m3_operand(args.dz_e4m3, args.dz_factors, args.rows);
  activation_gradient_in_e4m3(stream, args, dhs.as<void>(), dz);
  if (args.dx == nullptr) return;
  multiply(stream, dz, {args.w1, args.w1_factors, true}, groups_of(args), args.hidden, z_width, args.dx);
}

}  // namespace mimo::cuda
