// The layer of experts in e4m3 on Hopper (docs/spec/moe-performance.md §1.7): forward and input gradients. Weight gradients
// read bf16. The kernels of the activation round their results: rows between two products are read as one byte an element.
#include <optional>

#include "activation.cuh"
#include "e4m3.h"
#include "grouped_gemm.h"
#include "grouped_mlp.h"
#include "sm90_e4m3_grouped.cuh"

namespace mimo::cuda {
namespace {

using namespace sm90;

__global__ void MIMO_BLOCK_PAIRS __launch_bounds__(threads, 1)
    e4m3_kernel(const __grid_constant__ E4m3Products problem, int groups) {
#ifdef MIMO_ON_SM90A
  multiply_e4m3_groups(problem, groups);
#endif
}

static_assert(E4m3Products::row_factor_bytes <= MIMO_E4M3_SPARE_FACTORS * static_cast<int>(sizeof(float)));

/// Memory of an operand [rows, width].
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

/// Rows [rows, hidden] that enter the layer, in e4m3: as they are given or, without `values`, rounded here.
struct Entering {
  template <class Args>
  Entering(mimo_stream& stream, const Args& args, const void* rows, const void* values, const float* factors)
      : operand{static_cast<uint8_t*>(const_cast<void*>(values)), const_cast<float*>(factors), e4m3_factor_stride(args.rows)} {
    if (values != nullptr) return;  // products read alone
    own.emplace(stream, args.rows, args.hidden);
    operand = own->operand;
    quantize_rows(stream, rows, args.rows, args.hidden, args.offsets + args.groups, operand);
  }
  std::optional<Rounded> own;
  E4m3Operand operand;
};

/// Matrices as [n, k], whose factors lie as [blocks of n, blocks of k] or, of transposed ones, the other way.
struct Matrices {
  const void* values;
  const float* factors;
  bool transposed;
};

/// c = a bᵀ + factor * bias, in bf16.
void multiply(mimo_stream& stream, const E4m3Operand& a, const Matrices& b, const int32_t* offsets, int64_t groups, int64_t n,
              int64_t k, void* c, const void* bias = nullptr, const float* bias_factors = nullptr) {
  const auto narrow = [](int64_t value) { return static_cast<int32_t>(value); };
  const int64_t blocks_n = ceil_div(n, e4m3_run), blocks_k = ceil_div(k, e4m3_run);
  E4m3Products problem;
  problem.a = byte_ragged_map(a.values, k, E4m3Products::slice);
  problem.b = byte_matrices_map(b.values, groups, n, k, E4m3Products::slice);
  problem.row_factors = a.factors, problem.factor_stride = a.factor_stride, problem.block_factors = b.factors;
  problem.group_stride = narrow(blocks_n * blocks_k);
  problem.column_stride = narrow(b.transposed ? 1 : blocks_k), problem.run_stride = narrow(b.transposed ? blocks_n : 1);
  problem.offsets = offsets;
  problem.bias = static_cast<const bf16*>(bias), problem.bias_factors = bias_factors;
  problem.c = static_cast<bf16*>(c), problem.n = narrow(n), problem.k = narrow(k);
  launch_early(stream, e4m3_kernel, grid_of(stream.device->multiprocessors / pair * pair), dim3(threads), e4m3_shared_bytes(groups),
               problem, narrow(groups));
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

bool sm90_e4m3_grouped_mlp_fits(const mimo_stream& stream, const mimo_grouped_mlp_forward_args& args) {
  return fits(stream, args, args.x, args.x_e4m3, args.x_factors, args.y) && packs_fit<bf16>(args.b1, 2, 2, 2) &&
         packs_fit<bf16>(args.b2, 2, 2, 2);
}
bool sm90_e4m3_grouped_mlp_fits(const mimo_stream& stream, const mimo_grouped_mlp_backward_args& args) {
  return fits(stream, args, args.dy, args.dy_e4m3, args.dy_factors, args.dx) && packs_fit<bf16>(args.dz, 16, 16, 16) &&
         packs_fit<bf16>(args.hs, 16, 16, 16);
}

void sm90_e4m3_grouped_mlp_forward(mimo_stream& stream, const mimo_grouped_mlp_forward_args& args) {
  const int64_t z_width = z_width_of(args);
  Workspace z_copy(&stream, args.z == nullptr ? args.rows * z_width * 2 : 0);
  void* const z = args.z == nullptr ? z_copy.as<void>() : args.z;
  {
    const Entering x(stream, args, args.x, args.x_e4m3, args.x_factors);
    multiply(stream, x.operand, {args.w1, args.w1_factors, false}, args.offsets, args.groups, z_width, args.hidden, z, args.b1);
  }
  const Rounded hs(stream, args.rows, args.width);
  activate_in_e4m3(stream, args, z, hs.operand);
  multiply(stream, hs.operand, {args.w2, args.w2_factors, false}, args.offsets, args.groups, args.hidden, args.width, args.y, args.b2,
           args.row_probability);
}

void sm90_e4m3_grouped_mlp_backward(mimo_stream& stream, const mimo_grouped_mlp_backward_args& args) {
  const int64_t z_width = z_width_of(args);
  Workspace dhs(&stream, args.rows * args.width * 2);
  {
    const Entering dy(stream, args, args.dy, args.dy_e4m3, args.dy_factors);
    multiply(stream, dy.operand, {args.w2, args.w2_factors, true}, args.offsets, args.groups, args.width, args.hidden,
             dhs.as<void>());
  }
  const Rounded dz(stream, args.rows, z_width);
  activation_gradient_in_e4m3(stream, args, dhs.as<void>(), dz.operand);
  if (args.dx == nullptr) return;
  multiply(stream, dz.operand, {args.w1, args.w1_factors, true}, args.offsets, args.groups, args.hidden, z_width, args.dx);
}

}  // namespace mimo::cuda
