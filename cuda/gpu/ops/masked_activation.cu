// Activations of masked columns (docs/spec/elastic.md §9): y = p act(s m x). The gradient of a factor is summed in
// parts that depend on sizes alone, in a fixed order.
#include "activation.cuh"
#include "mask_gradients.cuh"
#include "packed.cuh"

namespace mimo::cuda {
namespace {

template <int Inputs>
struct ValueAndSlopes {
  float value, slope[Inputs];
};

/// Ungated kind: value and derivative at a column of x, and the position of that column.
template <class Kind>
struct PlainRule {
  static constexpr int inputs = 1;
  __device__ __forceinline__ ValueAndSlopes<1> at(const float (&x)[1]) const {
    const ValueAndSlope a = Kind::at(x[0]);
    return {a.value, {a.slope}};
  }
  __device__ __forceinline__ int64_t pack_of(int, int64_t pack) const { return pack; }
};

/// Gated kind: value and derivatives at a gate and a linear column.
struct GatedRule {
  static constexpr int inputs = 2;
  Gate g;
  uint32_t block;

  __device__ __forceinline__ ValueAndSlopes<2> at(const float (&x)[2]) const {
    const float gate = clamp_gate(x[0], g.clamp), linear = clamp_linear(x[1], g.clamp) + g.offset;
    const float s = sigmoid(g.argument(gate));
    const bool linear_clamped = x[1] > g.clamp || x[1] < -g.clamp;
    return {gate * s * linear,
            {x[0] > g.clamp ? 0.0f : linear * (s + g.slope(gate) * gate * s * (1.0f - s)), linear_clamped ? 0.0f : gate * s}};
  }
  __device__ __forceinline__ int64_t pack_of(int input, int64_t pack) const { return gate_pack(pack, block) + input * block; }
};

/// Loads the factors of a thread's columns.
template <class Rule, int Width>
__device__ __forceinline__ void read_factors(const Rule& rule, const float* factors, const float* scale, int64_t pack,
                                             float (&to)[Rule::inputs][Width]) {
  const float s = scale == nullptr ? 1.0f : *scale;
#pragma unroll
  for (int input = 0; input < Rule::inputs; ++input) {
    const int64_t column = rule.pack_of(input, pack) * Width;
#pragma unroll
    for (int i = 0; i < Width; ++i) to[input][i] = factors == nullptr ? s : s * factors[column + i];
  }
}

constexpr int rows_at_once = 4;
constexpr int64_t rows_per_block = 64;

/// Grid: packs of columns, whose factors stay in registers, x rows_per_block rows.
template <class Rule, class T, int Width>
__global__ void forward_kernel(mimo_masked_activation_forward_args args, Rule rule) {
  const int64_t packs = args.width / Width;
  const int64_t pack = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t begin = static_cast<int64_t>(blockIdx.y) * rows_per_block;
  const int64_t end = smaller(begin + rows_per_block, live_rows(args.rows, args.row_count));
  if (pack >= packs) return;
  float factor[Rule::inputs][Width];
  read_factors(rule, args.factors, args.scale, pack, factor);
  const T* const x_data = static_cast<const T*>(args.x);
  for (int64_t first = begin + threadIdx.y; first < end; first += rows_at_once * blockDim.y) {
    Packed<T, Width> x[rows_at_once][Rule::inputs];
#pragma unroll
    for (int j = 0; j < rows_at_once; ++j) {
      const int64_t row = first + j * static_cast<int64_t>(blockDim.y);
      if (row >= end) continue;
#pragma unroll
      for (int input = 0; input < Rule::inputs; ++input) {
        x[j][input] = read_packed<Width>(x_data + (row * Rule::inputs * packs + rule.pack_of(input, pack)) * Width);
      }
    }
#pragma unroll
    for (int j = 0; j < rows_at_once; ++j) {
      const int64_t row = first + j * static_cast<int64_t>(blockDim.y);
      if (row >= end) continue;
      const float probability = args.row_probability != nullptr ? args.row_probability[row] : 1.0f;
      float y[Width];
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        float masked[Rule::inputs];
#pragma unroll
        for (int input = 0; input < Rule::inputs; ++input) masked[input] = factor[input][i] * x[j][input].get(i);
        y[i] = probability * rule.at(masked).value;
      }
      write(static_cast<T*>(args.y) + (row * packs + pack) * Width, y);
    }
  }
}

/// dx, the gradients of the rows' probabilities, and partial[block][c] = Σ over the block's rows of x p dy act'. A warp
/// takes 32 packs of columns at a time through all rows of the block.
template <class Rule, class T, int Width>
__global__ void backward_kernel(mimo_masked_activation_backward_args args, Rule rule, float* partial) {
  extern __shared__ float row_sums[];  // [rows_per_block][warps]
  constexpr int inputs = Rule::inputs, at_once = rows_at_once / inputs;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int64_t packs = args.width / Width;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * rows_per_block;
  const int64_t end = smaller(begin + rows_per_block, live_rows(args.rows, args.row_count));
  // Partials of rows past the live ones are not read.
  if (begin >= end) return;
  for (int i = threadIdx.x; i < rows_per_block * warps; i += blockDim.x) row_sums[i] = 0;
  __syncthreads();
  const T* const x_data = static_cast<const T*>(args.x);
  const T* const dy_data = static_cast<const T*>(args.dy);
  for (int64_t first_pack = static_cast<int64_t>(warp) * 32; first_pack < packs; first_pack += blockDim.x) {
    const int64_t pack = first_pack + lane;
    const bool live = pack < packs;
    float factor[inputs][Width] = {}, sum[inputs][Width] = {};
    if (live) read_factors(rule, args.factors, args.scale, pack, factor);
    for (int64_t first = begin; first < end; first += at_once) {
      Packed<T, Width> x[at_once][inputs] = {}, dy[at_once] = {};
#pragma unroll
      for (int j = 0; j < at_once; ++j) {
        const int64_t row = first + j;
        if (!live || row >= end) continue;
#pragma unroll
        for (int input = 0; input < inputs; ++input) {
          x[j][input] = read_packed<Width>(x_data + (row * inputs * packs + rule.pack_of(input, pack)) * Width);
        }
        dy[j] = read_packed<Width>(dy_data + (row * packs + pack) * Width);
      }
#pragma unroll
      for (int j = 0; j < at_once; ++j) {
        const int64_t row = first + j;
        if (row >= end) continue;
        const float probability = args.row_probability != nullptr ? args.row_probability[row] : 1.0f;
        float of_row = 0, dx[inputs][Width];
#pragma unroll
        for (int i = 0; i < Width; ++i) {
          float masked[inputs];
#pragma unroll
          for (int input = 0; input < inputs; ++input) masked[input] = factor[input][i] * x[j][input].get(i);
          const ValueAndSlopes<inputs> a = rule.at(masked);
          const float gradient = dy[j].get(i);
          of_row += gradient * a.value;
#pragma unroll
          for (int input = 0; input < inputs; ++input) {
            const float dmasked = probability * gradient * a.slope[input];
            sum[input][i] += dmasked * x[j][input].get(i);
            dx[input][i] = factor[input][i] * dmasked;
          }
        }
        if (live) {
#pragma unroll
          for (int input = 0; input < inputs; ++input) {
            write(static_cast<T*>(args.dx) + (row * inputs * packs + rule.pack_of(input, pack)) * Width, dx[input]);
          }
        }
        if (args.drow_probability == nullptr) continue;
        of_row = warp_sum(of_row);
        if (lane == 0) row_sums[(row - begin) * warps + warp] += of_row;
      }
    }
    if (!live || partial == nullptr) continue;
#pragma unroll
    for (int input = 0; input < inputs; ++input) {
      float* const to = partial + (blockIdx.x * inputs * packs + rule.pack_of(input, pack)) * Width;
#pragma unroll
      for (int i = 0; i < Width; ++i) to[i] = sum[input][i];
    }
  }
  if (args.drow_probability == nullptr) return;
  __syncthreads();
  for (int64_t row = begin + threadIdx.x; row < end; row += blockDim.x) {
    float sum = 0;
    for (int w = 0; w < warps; ++w) sum += row_sums[(row - begin) * warps + w];
    args.drow_probability[row] = sum;
  }
}

/// Calls body with the rule of the operation's kind, for packs of `width` columns.
template <class Args, class Body>
void with_rule(const Args& args, int width, Body&& body) {
  if (is_gated(args.kind)) return body(GatedRule{gate_of(args), static_cast<uint32_t>(gate_block(args) / width)});
  with_plain_kind(args.kind, [&](auto kind) { body(PlainRule<decltype(kind)>{}); });
}

}  // namespace

void masked_activation_forward(mimo_stream& stream, const mimo_masked_activation_forward_args& args) {
  require_legal(args);
  if (args.rows == 0 || args.width == 0) return;
  const int64_t blocks = ceil_div(args.rows, rows_per_block);
  MIMO_REQUIRE(blocks <= 65535, "masked_activation_forward");
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    constexpr int wide = vector_width<T>;
    const auto fits = [&](const void* pointer) { return packs_fit<T>(pointer, gate_block(args), args.width, wide); };
    with_width<wide>(fits(args.x) && fits(args.y), [&](auto w) {
      with_rule(args, w, [&](auto rule) {
        const dim3 grid = grid_of(ceil_div(args.width / w, 32), blocks);
        launch(stream, forward_kernel<decltype(rule), T, w>, grid, dim3(32, 8), 0, args, rule);
      });
    });
  });
}

void masked_activation_backward(mimo_stream& stream, const mimo_masked_activation_backward_args& args) {
  require_legal(args);
  if (args.rows == 0 || args.width == 0) return;
  const int64_t blocks = ceil_div(args.rows, rows_per_block);
  const int64_t x_width = is_gated(args.kind) ? 2 * args.width : args.width;
  const bool wanted = args.dfactors != nullptr || args.dscale != nullptr;
  Workspace workspace(&stream, wanted ? blocks * x_width * static_cast<int64_t>(sizeof(float)) : 0);
  float* const partial = wanted ? workspace.as<float>() : nullptr;
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    constexpr int wide = vector_width<T>;
    const auto fits = [&](const void* pointer) { return packs_fit<T>(pointer, gate_block(args), args.width, wide); };
    with_width<wide>(fits(args.dy) && fits(args.x) && fits(args.dx), [&](auto w) {
      const int64_t threads = smaller(256, round_up(args.width / w, 32));
      const int64_t shared = rows_per_block * (threads / 32) * static_cast<int64_t>(sizeof(float));
      with_rule(args, w, [&](auto rule) {
        launch(stream, backward_kernel<decltype(rule), T, w>, grid_of(blocks), dim3(static_cast<unsigned>(threads)), shared,
               args, rule, partial);
      });
    });
  });
  if (!wanted) return;
  const PartialSums sums{partial, args.rows, rows_per_block, x_width, args.row_count};
  add_mask_gradients(stream, sums, args.factors, args.scale, args.dfactors, args.dscale);
}

}  // namespace mimo::cuda
