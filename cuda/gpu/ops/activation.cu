// Activations of feed-forward layers and experts (docs/spec/language-model.md §4.1, docs/spec/moe-performance.md §1.2,
// §1.3), with the row probability that weights an expert's activation before its second projection. y = p act(x), one
// rounding.
#include "kernel.cuh"

namespace mimo::cuda {
namespace {

struct ValueAndSlope {
  float value, slope;
};

// Comparisons are written so that a NaN input gives a NaN output: it must reach the loss to be found.
struct SquaredRelu {
  __device__ static ValueAndSlope at(float x) {
    const float positive = x < 0.0f ? 0.0f : x;
    return {positive * positive, 2.0f * positive};
  }
};

/// 0.5 (1 + tanh u) = σ(2u): no cancellation for large negative x.
struct GeluTanh {
  static constexpr float scale = 2.0f * 0.7978845608028654f, cubic = 0.044715f;
  __device__ static ValueAndSlope at(float x) {
    const float s = sigmoid(scale * x * (1.0f + cubic * x * x));
    return {x * s, s + x * s * (1.0f - s) * scale * (1.0f + 3.0f * cubic * x * x)};
  }
};

struct GeluErf {
  static constexpr float inverse_sqrt2 = 0.7071067811865476f, inverse_sqrt2pi = 0.3989422804014327f;
  __device__ static ValueAndSlope at(float x) {
    const float phi = 0.5f * (1.0f + erff(x * inverse_sqrt2));
    return {x * phi, phi + x * inverse_sqrt2pi * expf(-0.5f * x * x)};
  }
};

/// Gated kinds: gate σ(alpha gate) (linear + offset), both clamped first.
struct Gate {
  float alpha, offset, clamp;
};

__device__ __forceinline__ float clamp_gate(float x, float clamp) { return x > clamp ? clamp : x; }
__device__ __forceinline__ float clamp_linear(float x, float clamp) {
  return x > clamp ? clamp : (x < -clamp ? -clamp : x);
}

/// Where a pack of a gated row's output has its gate columns, in packs from the row's start; its linear columns are a block
/// further on. Rows have blocks of `block` packs of gate and of linear columns in turn; one block is halves.
__device__ __forceinline__ int64_t gate_pack(int64_t pack, uint32_t block) {
  return pack + static_cast<int64_t>(static_cast<uint32_t>(pack) / block) * block;
}

template <class Kind, class T, int Width>
__global__ void plain_forward_kernel(const T* x, const float* row_probability, T* y, const int32_t* row_count,
                                     int64_t rows, int64_t packs) {
  for_each_pack(live_rows(rows, row_count), packs, [&](int64_t row, int64_t pack) {
    const float probability = row_probability != nullptr ? row_probability[row] : 1.0f;
    const int64_t at = (row * packs + pack) * Width;
    float value[Width];
    read(x + at, value);
#pragma unroll
    for (int i = 0; i < Width; ++i) value[i] = probability * Kind::at(value[i]).value;
    write(y + at, value);
  });
}

template <class T, int Width>
__global__ void gated_forward_kernel(const T* x, const float* row_probability, T* y, const int32_t* row_count,
                                     int64_t rows, int64_t packs, uint32_t block, Gate g) {
  for_each_pack(live_rows(rows, row_count), packs, [&](int64_t row, int64_t pack) {
    const float probability = row_probability != nullptr ? row_probability[row] : 1.0f;
    float value[Width], linear[Width];
    const int64_t gate_at = 2 * row * packs + gate_pack(pack, block);
    read(x + gate_at * Width, value);
    read(x + (gate_at + block) * Width, linear);
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      const float gate = clamp_gate(value[i], g.clamp);
      value[i] = probability * (gate * sigmoid(g.alpha * gate) * (clamp_linear(linear[i], g.clamp) + g.offset));
    }
    write(y + (row * packs + pack) * Width, value);
  });
}

/// One block a row: the gradient of the row's probability is a sum over it.
template <class Kind, class T, int Width>
__global__ void plain_backward_kernel(const T* dy, const T* x, const float* row_probability, T* dx,
                                      float* drow_probability, const int32_t* row_count, int64_t rows, int64_t packs) {
  __shared__ float shared[32];
  const int64_t row = blockIdx.x;
  if (row >= live_rows(rows, row_count)) return;
  const float probability = row_probability != nullptr ? row_probability[row] : 1.0f;
  float sum[1] = {0};
  for (int64_t pack = threadIdx.x; pack < packs; pack += blockDim.x) {
    const int64_t at = (row * packs + pack) * Width;
    float value[Width], gradient[Width];
    read(x + at, value);
    read(dy + at, gradient);
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      const ValueAndSlope a = Kind::at(value[i]);
      sum[0] += gradient[i] * a.value;
      value[i] = probability * gradient[i] * a.slope;
    }
    write(dx + at, value);
  }
  if (drow_probability == nullptr) return;
  block_sum(sum, shared);
  if (threadIdx.x == 0) drow_probability[row] = sum[0];
}

template <class T, int Width>
__global__ void gated_backward_kernel(const T* dy, const T* x, const float* row_probability, T* dx,
                                      float* drow_probability, const int32_t* row_count, int64_t rows, int64_t packs,
                                      uint32_t gate_block, Gate g) {
  __shared__ float shared[32];
  const int64_t row = blockIdx.x;
  if (row >= live_rows(rows, row_count)) return;
  const float probability = row_probability != nullptr ? row_probability[row] : 1.0f;
  float sum[1] = {0};
  for (int64_t pack = threadIdx.x; pack < packs; pack += blockDim.x) {
    const int64_t gate_at = (2 * row * packs + gate_pack(pack, gate_block)) * Width;
    const int64_t linear_at = gate_at + static_cast<int64_t>(gate_block) * Width;
    float value[Width], linear_value[Width], gradient[Width];
    read(x + gate_at, value);
    read(x + linear_at, linear_value);
    read(dy + (row * packs + pack) * Width, gradient);
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      const float gate = clamp_gate(value[i], g.clamp);
      const float linear = clamp_linear(linear_value[i], g.clamp) + g.offset;
      const float s = sigmoid(g.alpha * gate), da = probability * gradient[i];
      sum[0] += gradient[i] * (gate * s * linear);
      const bool gate_clamped = value[i] > g.clamp;
      const bool linear_clamped = linear_value[i] > g.clamp || linear_value[i] < -g.clamp;
      value[i] = gate_clamped ? 0.0f : da * linear * (s + g.alpha * gate * s * (1.0f - s));
      linear_value[i] = linear_clamped ? 0.0f : da * gate * s;
    }
    write(dx + gate_at, value);
    write(dx + linear_at, linear_value);
  }
  if (drow_probability == nullptr) return;
  block_sum(sum, shared);
  if (threadIdx.x == 0) drow_probability[row] = sum[0];
}

/// Calls body with the plain kind's type; throws for anything else.
template <class Body>
void with_plain_kind(int32_t kind, Body&& body) {
  if (kind == MIMO_ACTIVATION_SQUARED_RELU) return body(SquaredRelu{});
  if (kind == MIMO_ACTIVATION_GELU_TANH) return body(GeluTanh{});
  if (kind == MIMO_ACTIVATION_GELU_ERF) return body(GeluErf{});
  fail(MIMO_ERROR_ARGUMENT, "activation was given an unknown kind.");
}

bool is_gated(int32_t kind) { return kind == MIMO_ACTIVATION_SWIGLU || kind == MIMO_ACTIVATION_QUICK_GEGLU; }

template <class Args>
Gate gate_of(const Args& args) {
  if (args.kind == MIMO_ACTIVATION_SWIGLU) return {1.0f, 0.0f, args.clamp};
  return {1.702f, args.linear_offset, args.clamp};
}

/// Columns of a block of gate columns; the width where they are halves.
template <class Args>
int64_t gate_block(const Args& args) {
  return args.interleave == 0 ? args.width : args.interleave;
}

template <class Args>
void require_legal(const Args& args) {
  if (!is_gated(args.kind)) return;
  MIMO_REQUIRE(args.clamp > 0 && args.interleave >= 0, "activation");
  MIMO_REQUIRE(args.interleave == 0 || args.width % args.interleave == 0, "activation");
}

unsigned backward_threads(int64_t packs) { return static_cast<unsigned>(smaller(256, round_up(packs, 32))); }

}  // namespace

void activation_forward(mimo_stream& stream, const mimo_activation_forward_args& args) {
  require_legal(args);
  if (args.rows == 0 || args.width == 0) return;
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    constexpr int wide = vector_width<T>;
    const auto fits = [&](const void* pointer) { return packs_fit<T>(pointer, gate_block(args), args.width, wide); };
    with_width<wide>(fits(args.x) && fits(args.y), [&](auto w) {
      const int64_t packs = args.width / w;
      const Cover covered = cover(args.rows, packs);
      const T* x = static_cast<const T*>(args.x);
      T* y = static_cast<T*>(args.y);
      if (is_gated(args.kind)) {
        launch(stream, gated_forward_kernel<T, w>, covered.grid, covered.block, 0, x, args.row_probability, y, args.row_count,
               args.rows, packs, static_cast<uint32_t>(gate_block(args) / w), gate_of(args));
        return;
      }
      with_plain_kind(args.kind, [&](auto kind) {
        launch(stream, plain_forward_kernel<decltype(kind), T, w>, covered.grid, covered.block, 0, x,
               args.row_probability, y, args.row_count, args.rows, packs);
      });
    });
  });
}

void activation_backward(mimo_stream& stream, const mimo_activation_backward_args& args) {
  require_legal(args);
  if (args.rows == 0 || args.width == 0) return;
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    constexpr int wide = vector_width<T>;
    const auto fits = [&](const void* pointer) { return packs_fit<T>(pointer, gate_block(args), args.width, wide); };
    with_width<wide>(fits(args.dy) && fits(args.x) && fits(args.dx), [&](auto w) {
      const int64_t packs = args.width / w;
      const T* dy = static_cast<const T*>(args.dy);
      const T* x = static_cast<const T*>(args.x);
      T* dx = static_cast<T*>(args.dx);
      const dim3 grid = grid_of(args.rows), block(backward_threads(packs));
      if (is_gated(args.kind)) {
        launch(stream, gated_backward_kernel<T, w>, grid, block, 0, dy, x, args.row_probability, dx,
               args.drow_probability, args.row_count, args.rows, packs, static_cast<uint32_t>(gate_block(args) / w),
               gate_of(args));
        return;
      }
      with_plain_kind(args.kind, [&](auto kind) {
        launch(stream, plain_backward_kernel<decltype(kind), T, w>, grid, block, 0, dy, x, args.row_probability, dx,
               args.drow_probability, args.row_count, args.rows, packs);
      });
    });
  });
}

}  // namespace mimo::cuda
