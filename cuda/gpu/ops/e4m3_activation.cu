// Activation of the experts between two e4m3 products (docs/spec/moe-performance.md §1.2, §1.3, §1.7): reads z (and
// dhs) once and writes the next product's operand in e4m3, with a factor for each run of 128 columns.
#include "activation.cuh"
#include "activation_backward.h"
#include "e4m3.cuh"
#include "early.cuh"
#include "operations.h"

namespace mimo::cuda {
namespace {

constexpr int threads = 256, lanes = 16;  // lanes of a run: eight columns each
constexpr int block_rows = threads / 32;   // one warp for each row

template <class Kind>
constexpr bool is_gate = false;
template <bool Usual>
constexpr bool is_gate<Gated<Usual>> = true;

/// Gives an ungated kind the interface of a gated one.
template <class Kind>
struct Plain {
  __device__ __forceinline__ void values(const float (&x)[8], const float (&)[8], float (&to)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = Kind::at(x[i]).value;
  }
  __device__ __forceinline__ void sigmas(const float (&)[8], float (&)[8]) const {}
  __device__ __forceinline__ Gated<false>::Gradient gradient(float x, float, float) const {
    const ValueAndSlope a = Kind::at(x);
    return {a.value, a.slope, 0.0f};
  }
};

/// Positions of an output column's gate and linear values in a row of 2 width columns: two halves, or alternating
/// blocks of `interleave` columns (docs/spec/moe-performance.md §1.5).
struct GatedColumns {
  int32_t width, interleave;
  __device__ __forceinline__ int gate(int column) const {
    return interleave == 0 ? column : 2 * column - column % interleave;
  }
  __device__ __forceinline__ int to_linear() const { return interleave == 0 ? width : interleave; }
};

template <class Args, class Body>
void with_activation(const Args& args, Body&& body) {
  if (is_gated(args.kind)) return with_gated_kind(args, body);
  with_plain_kind(args.kind, [&](auto kind) { body(Plain<decltype(kind)>{}); });
}

/// One warp a row; it processes four runs at a time, two for gated kinds.
template <class Activation>
__global__ void __launch_bounds__(threads)
    forward_kernel(const bf16* z, const float* probability, const int32_t* live, GatedColumns columns, int runs,
                   Activation activation, E4m3Operand hs) {
  previous_is_done();
  let_next_start();
  constexpr int own_columns = is_gate<Activation> ? 8 : 16, pieces = own_columns / 8, at_once = is_gate<Activation> ? 2 : 4;
  constexpr int own_lanes = run / own_columns, sides = 32 / own_lanes;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * block_rows + threadIdx.x / 32;
  if (row >= *live) return;
  const float p = probability != nullptr ? probability[row] : 1.0f;
  const bf16* const of_row = z + row * (is_gate<Activation> ? 2 : 1) * columns.width;
  const int lane = threadIdx.x % own_lanes, side = threadIdx.x % 32 / own_lanes;
  for (int base = 0; base < runs; base += sides * at_once) {
    uint4 gate[at_once][pieces], linear[at_once][pieces];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {  // independent loads in flight
      const int column = (base + i * sides + side) * run + lane * own_columns;
#pragma unroll
      for (int piece = 0; piece < pieces; ++piece) {
        gate[i][piece] = linear[i][piece] = make_uint4(0, 0, 0, 0);
        if (column >= columns.width) continue;
        const int at = column + piece * 8;
        const bf16* const from = of_row + (is_gate<Activation> ? columns.gate(at) : at);
        gate[i][piece] = eight_bf16(from);
        if constexpr (is_gate<Activation>) linear[i][piece] = eight_bf16(from + columns.to_linear());
      }
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      if (base + i * sides >= runs) break;
      const int index = base + i * sides + side, column = index * run + lane * own_columns;
      const bool lives = column < columns.width;
      float value[own_columns];
#pragma unroll
      for (int piece = 0; piece < pieces; ++piece) {
        float gates[8], linears[8], activated[8];
        read(gate[i][piece], gates), read(linear[i][piece], linears);
        activation.values(gates, linears, activated);
#pragma unroll
        for (int j = 0; j < 8; ++j) value[piece * 8 + j] = p * activated[j];
      }
      round_to_bf16(value);  // columns past the width are zeros and stay zeros
      store_run(value, hs.values + row * columns.width + column, hs.factors + index * hs.factor_stride + row, lives);
    }
  }
}

/// One warp a row, two runs at a time. Requires halves of whole runs for gated kinds: each half holds whole runs of dz.
template <class Activation>
__global__ void __launch_bounds__(threads, 4)
    gradient_kernel(const bf16* dhs, const bf16* z, const float* probability, const int32_t* live, int width, int runs,
                    Activation activation, bf16* dz, bf16* hs, float* dprobability, E4m3Operand to, E4m3Operand hs_to) {
  previous_is_done();
  let_next_start();
  constexpr int at_once = 2;  // pairs of runs in flight
  const int64_t row = static_cast<int64_t>(blockIdx.x) * block_rows + threadIdx.x / 32;
  if (row >= *live) return;
  const float p = probability != nullptr ? probability[row] : 1.0f;
  const int64_t z_width = is_gate<Activation> ? 2 * static_cast<int64_t>(width) : width;
  float sum = 0;
  const int side = threadIdx.x % 32 / lanes;
  for (int base = 0; base < runs; base += 2 * at_once) {
    uint4 read_gate[at_once], read_linear[at_once], read_gradient[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const int column = (base + 2 * i + side) * run + threadIdx.x % lanes * 8;
      read_gate[i] = read_linear[i] = read_gradient[i] = make_uint4(0, 0, 0, 0);
      if (column >= width) continue;
      read_gate[i] = eight_bf16(z + row * z_width + column);
      if constexpr (is_gate<Activation>) read_linear[i] = eight_bf16(z + row * z_width + column + width);
      read_gradient[i] = eight_bf16(dhs + row * width + column);
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      if (base + 2 * i >= runs) break;
      const int index = base + 2 * i + side, column = index * run + threadIdx.x % lanes * 8;
      const bool lives = column < width;
      const int64_t at = row * z_width + column;
      float gate[8], linear[8], gradient[8], value[8], sigma[8];
      read(read_gate[i], gate), read(read_linear[i], linear), read(read_gradient[i], gradient);
      activation.sigmas(gate, sigma);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const auto a = activation.gradient(gate[j], linear[j], sigma[j]);
        const float da = p * gradient[j];
        if (lives) sum += gradient[j] * a.value;
        value[j] = p * a.value;
        gate[j] = lives ? da * a.gate : 0.0f, linear[j] = lives ? da * a.linear : 0.0f;
      }
      round_to_bf16(gate);
      if constexpr (is_gate<Activation>) round_to_bf16(linear);
      if (lives && dz != nullptr) {
        write(dz + at, gate);
        if constexpr (is_gate<Activation>) write(dz + at + width, linear);
      }
      if (lives && hs != nullptr) write(hs + row * width + column, value);
      store_run(gate, to.values + at, to.factors + index * to.factor_stride + row, lives);
      if constexpr (is_gate<Activation>) {
        store_run(linear, to.values + at + width, to.factors + (runs + index) * to.factor_stride + row, lives);
      }
      if (hs_to.values != nullptr) {
        round_to_bf16(value);  // columns past the width are zeros here too
        store_run(value, hs_to.values + row * width + column, hs_to.factors + index * hs_to.factor_stride + row, lives);
      }
    }
  }
  sum = warp_sum(sum);
  if (dprobability != nullptr && threadIdx.x % 32 == 0) dprobability[row] = sum;
}

/// Fallback in separate passes, for interleaved blocks and for halves that are not whole runs.
void gradient_in_steps(mimo_stream& stream, const mimo_grouped_mlp_backward_args& args, const void* dhs, const E4m3Operand& dz_to,
                       const E4m3Operand& hs_to) {
  const int32_t* const live = args.offsets + args.groups;
  const int64_t z_width = is_gated(args.kind) ? 2 * args.width : args.width;
  const bool hs_alone = args.hs == nullptr && args.hs_e4m3 != nullptr;
  Workspace own_dz(&stream, args.dz == nullptr ? args.rows * z_width * 2 : 0), own_hs(&stream, hs_alone ? args.rows * args.width * 2 : 0);
  void *const dz = args.dz == nullptr ? own_dz.as<void>() : args.dz, *const hs = hs_alone ? own_hs.as<void>() : args.hs;
  mimo_activation_backward_args b{};
  b.dy = dhs, b.x = args.z, b.row_probability = args.row_probability, b.dx = dz;
  b.drow_probability = args.drow_probability, b.row_count = live;
  b.rows = args.rows, b.width = args.width, b.interleave = args.interleave;
  b.clamp = args.clamp, b.linear_offset = args.linear_offset, b.kind = args.kind, b.dtype = args.dtype;
  activation_backward_and_forward(stream, b, hs);
  quantize_rows(stream, dz, args.rows, z_width, live, dz_to);
  if (hs_to.values != nullptr) quantize_rows(stream, hs, args.rows, args.width, live, hs_to);
}

}  // namespace

void activate_in_e4m3(mimo_stream& stream, const mimo_grouped_mlp_forward_args& args, const void* z, const E4m3Operand& hs) {
  const int64_t runs = ceil_div(args.width, e4m3_run);
  with_activation(args, [&](auto activation) {
    launch_early(stream, forward_kernel<decltype(activation)>, grid_of(ceil_div(args.rows, block_rows)), dim3(threads), 0,
                 static_cast<const bf16*>(z), args.row_probability, args.offsets + args.groups,
                 GatedColumns{static_cast<int32_t>(args.width), static_cast<int32_t>(args.interleave)}, runs, activation, hs);
  });
}

void activation_gradient_in_e4m3(mimo_stream& stream, const mimo_grouped_mlp_backward_args& args, const void* dhs,
                                 const E4m3Operand& dz) {
  const E4m3Operand hs = e4m3_operand(args.hs_e4m3, args.hs_factors, args.rows);
  if (is_gated(args.kind) && (args.interleave != 0 || args.width % e4m3_run != 0)) {
    return gradient_in_steps(stream, args, dhs, dz, hs);
  }
  with_activation(args, [&](auto activation) {
    launch_early(stream, gradient_kernel<decltype(activation)>, grid_of(ceil_div(args.rows, block_rows)), dim3(threads), 0,
                 static_cast<const bf16*>(dhs), static_cast<const bf16*>(args.z), args.row_probability, args.offsets + args.groups,
                 args.width, ceil_div(args.width, e4m3_run), activation, static_cast<bf16*>(args.dz),
                 static_cast<bf16*>(args.hs), args.drow_probability, dz, hs);
  });
}

}  // namespace mimo::cuda
