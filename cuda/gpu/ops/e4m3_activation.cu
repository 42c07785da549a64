// The activation of experts between two products in e4m3 (docs/spec/moe-performance.md §1.2, §1.3, §1.7): reads z (and dhs)
// once, and writes what the next product reads in one byte an element, with a factor for every run of 128 columns.
#include "activation.cuh"
#include "e4m3.cuh"
#include "operations.h"

namespace mimo::cuda {
namespace {

constexpr int threads = 256, lanes = 16;  // of a run: eight columns each

/// A plain kind with the face of a gated one.
template <class Kind>
struct Plain {
  static constexpr bool gated = false;
  __device__ __forceinline__ float value(float x, float) const { return Kind::at(x).value; }
  __device__ __forceinline__ Gate::Gradient gradient(float x, float) const {
    const ValueAndSlope a = Kind::at(x);
    return {a.value, a.slope, 0.0f};
  }
};
struct Gated {
  static constexpr bool gated = true;
  Gate gate;
  __device__ __forceinline__ float value(float x, float linear) const { return gate.value(x, linear); }
  __device__ __forceinline__ Gate::Gradient gradient(float x, float linear) const { return gate.gradient(x, linear); }
};

/// Where the gate and the linear value of an output column are in a row of 2 width columns: halves, or blocks of
/// `interleave` columns in turn (docs/spec/moe-performance.md §1.5).
struct GatedColumns {
  int32_t width, interleave;
  __device__ __forceinline__ int gate(int column) const {
    return interleave == 0 ? column : 2 * column - column % interleave;
  }
  __device__ __forceinline__ int to_linear() const { return interleave == 0 ? width : interleave; }
};

template <class Args, class Body>
void with_activation(const Args& args, Body&& body) {
  if (is_gated(args.kind)) return body(Gated{gate_of(args)});
  with_plain_kind(args.kind, [&](auto kind) { body(Plain<decltype(kind)>{}); });
}

template <class Activation>
__global__ void forward_kernel(const bf16* z, const float* probability, const int32_t* live, int64_t rows, GatedColumns columns,
                               int runs, Activation activation, E4m3Operand hs) {
  const int64_t number = (static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x) / lanes, row = number / runs;
  const int index = static_cast<int>(number - row * runs), column = index * run + threadIdx.x % lanes * 8;
  const bool lives = row < *live && column < columns.width;
  float value[8] = {};
  if (lives) {
    const float p = probability != nullptr ? probability[row] : 1.0f;
    float linear[8] = {};
    if constexpr (Activation::gated) {
      const bf16* const from = z + 2 * row * columns.width + columns.gate(column);
      read(from, value);
      read(from + columns.to_linear(), linear);
    } else {
      read(z + row * columns.width + column, value);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = rounded(static_cast<const bf16*>(nullptr), p * activation.value(value[i], linear[i]));
  }
  store_run(value, hs.values + row * columns.width + column, hs.factors + index * rows + row, lives);
}

/// A warp a row, two runs at a time. Gated kinds in halves of whole runs: a half of each is a run of dz.
template <class Activation>
__global__ void gradient_kernel(const bf16* dhs, const bf16* z, const float* probability, const int32_t* live, int64_t rows,
                                int width, int runs, Activation activation, bf16* dz, bf16* hs, float* dprobability,
                                E4m3Operand to) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (threads / 32) + threadIdx.x / 32;
  if (row >= *live) return;
  const float p = probability != nullptr ? probability[row] : 1.0f;
  const int64_t z_width = Activation::gated ? 2 * static_cast<int64_t>(width) : width;
  float sum = 0;
  for (int pair = 0; pair < runs; pair += 2) {
    const int index = pair + threadIdx.x % 32 / lanes, column = index * run + threadIdx.x % lanes * 8;
    const bool lives = column < width;
    const int64_t at = row * z_width + column;
    float gate[8] = {}, linear[8] = {}, gradient[8] = {};
    if (lives) {
      float value[8];
      read(z + at, gate);
      if constexpr (Activation::gated) read(z + at + width, linear);
      read(dhs + row * width + column, gradient);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const Gate::Gradient a = activation.gradient(gate[i], linear[i]);
        const float da = p * gradient[i];
        sum += gradient[i] * a.value;
        value[i] = p * a.value;
        gate[i] = rounded(dz, da * a.gate), linear[i] = rounded(dz, da * a.linear);
      }
      write(dz + at, gate);
      if constexpr (Activation::gated) write(dz + at + width, linear);
      if (hs != nullptr) write(hs + row * width + column, value);
    }
    store_run(gate, to.values + at, to.factors + index * rows + row, lives);
    if constexpr (Activation::gated) store_run(linear, to.values + at + width, to.factors + (runs + index) * rows + row, lives);
  }
  sum = warp_sum(sum);
  if (dprobability != nullptr && threadIdx.x % 32 == 0) dprobability[row] = sum;
}

/// With kernels that know no runs: for blocks, and for halves that are no whole runs.
void gradient_in_steps(mimo_stream& stream, const mimo_grouped_mlp_backward_args& args, const void* dhs, const E4m3Operand& dz) {
  const int32_t* const live = args.offsets + args.groups;
  mimo_activation_backward_args b{};
  b.dy = dhs, b.x = args.z, b.row_probability = args.row_probability, b.dx = args.dz;
  b.drow_probability = args.drow_probability, b.row_count = live;
  b.rows = args.rows, b.width = args.width, b.interleave = args.interleave;
  b.clamp = args.clamp, b.linear_offset = args.linear_offset, b.kind = args.kind, b.dtype = args.dtype;
  activation_backward(stream, b);
  if (args.hs != nullptr) {
    mimo_activation_forward_args f{};
    f.x = args.z, f.row_probability = args.row_probability, f.y = args.hs, f.row_count = live;
    f.rows = args.rows, f.width = args.width, f.interleave = args.interleave;
    f.clamp = args.clamp, f.linear_offset = args.linear_offset, f.kind = args.kind, f.dtype = args.dtype;
    activation_forward(stream, f);
  }
  quantize_rows(stream, args.dz, args.rows, 2 * args.width, live, dz);
}

}  // namespace

void activate_in_e4m3(mimo_stream& stream, const mimo_grouped_mlp_forward_args& args, const void* z, const E4m3Operand& hs) {
  const int64_t runs = ceil_div(args.width, e4m3_run);
  with_activation(args, [&](auto activation) {
    launch(stream, forward_kernel<decltype(activation)>, grid_of(ceil_div(args.rows * runs * lanes, threads)), dim3(threads), 0,
           static_cast<const bf16*>(z), args.row_probability, args.offsets + args.groups, args.rows,
           GatedColumns{static_cast<int32_t>(args.width), static_cast<int32_t>(args.interleave)}, runs, activation, hs);
  });
}

void activation_gradient_in_e4m3(mimo_stream& stream, const mimo_grouped_mlp_backward_args& args, const void* dhs,
                                 const E4m3Operand& dz) {
  if (is_gated(args.kind) && (args.interleave != 0 || args.width % e4m3_run != 0)) {
    return gradient_in_steps(stream, args, dhs, dz);
  }
  with_activation(args, [&](auto activation) {
    launch(stream, gradient_kernel<decltype(activation)>, grid_of(ceil_div(args.rows, threads / 32)), dim3(threads), 0,
           static_cast<const bf16*>(dhs), static_cast<const bf16*>(args.z), args.row_probability, args.offsets + args.groups,
           args.rows, args.width, ceil_div(args.width, e4m3_run), activation, static_cast<bf16*>(args.dz),
           static_cast<bf16*>(args.hs), args.drow_probability, dz);
  });
}

}  // namespace mimo::cuda
