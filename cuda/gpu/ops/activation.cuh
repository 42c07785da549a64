// Activation functions with their derivatives, and the column layout of gated ones (docs/spec/language-model.md §4.1,
// docs/spec/moe-performance.md §1.2, §1.3).
#pragma once
#include "kernel.cuh"

namespace mimo::cuda {

struct ValueAndSlope {
  float value, slope;
};

// Comparisons are written so that NaN propagates: it must reach the loss to be detected.
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

__device__ __forceinline__ float clamp_gate(float x, float clamp) { return x > clamp ? clamp : x; }
__device__ __forceinline__ float clamp_linear(float x, float clamp) {
  return x > clamp ? clamp : (x < -clamp ? -clamp : x);
}

/// Parameters of gated kinds: gate σ(alpha gate (1 + cubic gate²)) (linear + offset), gate and linear clamped first.
struct Gate {
  float alpha, offset, clamp, cubic;

  /// Argument of σ at a gate, and its derivative. Without a cubic term nothing overflows where the gate does not.
  __device__ __forceinline__ float argument(float x) const { return alpha * (cubic == 0.0f ? x : x * (1.0f + cubic * x * x)); }
  __device__ __forceinline__ float slope(float x) const { return alpha * (cubic == 0.0f ? 1.0f : 1.0f + 3.0f * cubic * x * x); }
};

/// 1 / x rounded to nearest, for 1 <= x <= 2^126.
__device__ __forceinline__ float inverse(float x) {
  float near;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(x));
  return fmaf(near, -fmaf(x, near, -1.0f), near);
}

/// A gated kind applied to several columns. Usual: SwiGLU without clamping, whose parameters are compile-time
/// constants.
template <bool Usual>
struct Gated {
  struct Gradient {
    float value, gate, linear;  // activation and its partial derivatives
  };

  Gate given;

  __device__ __forceinline__ Gate gate() const { return Usual ? Gate{1.0f, 0.0f, INFINITY, 0.0f} : given; }

  /// σ of the gate's argument. A division branches on whether its operands are in the range of the fast path; here one branch
  /// serves all columns.
  template <int Width>
  __device__ __forceinline__ void sigmas(const float (&x)[Width], float (&to)[Width]) const {
    const Gate g = gate();
    float sum[Width], largest = 0;
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      sum[i] = 1.0f + expf(-g.argument(clamp_gate(x[i], g.clamp)));
      largest = fmaxf(largest, sum[i]);
    }
    if (largest < 0x1p126f) {
#pragma unroll
      for (int i = 0; i < Width; ++i) to[i] = inverse(sum[i]);
    } else {
#pragma unroll
      for (int i = 0; i < Width; ++i) to[i] = 1.0f / sum[i];
    }
  }

  template <int Width>
  __device__ __forceinline__ void values(const float (&x)[Width], const float (&linear)[Width], float (&to)[Width]) const {
    const Gate g = gate();
    float sigma[Width];
    sigmas(x, sigma);
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      to[i] = clamp_gate(x[i], g.clamp) * sigma[i] * (clamp_linear(linear[i], g.clamp) + g.offset);
    }
  }

  /// Gradient of one column, given its sigma. At a clamp's limit the gradient passes.
  __device__ __forceinline__ Gradient gradient(float x, float linear, float sigma) const {
    const Gate g = gate();
    const float v = clamp_gate(x, g.clamp), l = clamp_linear(linear, g.clamp) + g.offset;
    const bool clamped = linear > g.clamp || linear < -g.clamp;
    const float slope = l * (sigma + g.slope(v) * v * sigma * (1.0f - sigma));
    return {v * sigma * l, x > g.clamp ? 0.0f : slope, clamped ? 0.0f : v * sigma};
  }
};

/// Index of a pack's gate columns within a gated row; its linear columns follow one block later. Rows alternate blocks
/// of `block` packs of gate and of linear columns; with one block they are two halves.
__device__ __forceinline__ int64_t gate_pack(int64_t pack, uint32_t block) {
  return pack + static_cast<int64_t>(static_cast<uint32_t>(pack) / block) * block;
}

/// Calls body with the type of an ungated kind; throws for any other kind.
template <class Body>
void with_plain_kind(int32_t kind, Body&& body) {
  if (kind == MIMO_ACTIVATION_SQUARED_RELU) return body(SquaredRelu{});
  if (kind == MIMO_ACTIVATION_GELU_TANH) return body(GeluTanh{});
  if (kind == MIMO_ACTIVATION_GELU_ERF) return body(GeluErf{});
  fail(MIMO_ERROR_ARGUMENT, "activation was given an unknown kind.");
}

inline bool is_gated(int32_t kind) {
  return kind == MIMO_ACTIVATION_SWIGLU || kind == MIMO_ACTIVATION_QUICK_GEGLU || kind == MIMO_ACTIVATION_GEGLU;
}

template <class Args>
Gate gate_of(const Args& args) {
  if (args.kind == MIMO_ACTIVATION_SWIGLU) return {1.0f, 0.0f, args.clamp, 0.0f};
  if (args.kind == MIMO_ACTIVATION_GEGLU) return {GeluTanh::scale, 0.0f, args.clamp, GeluTanh::cubic};
  return {1.702f, args.linear_offset, args.clamp, 0.0f};
}

/// Calls body with the gated kind.
template <class Args, class Body>
void with_gated_kind(const Args& args, Body&& body) {
  if (args.kind == MIMO_ACTIVATION_SWIGLU && args.clamp == INFINITY) return body(Gated<true>{gate_of(args)});
  body(Gated<false>{gate_of(args)});
}

/// Columns of a block of gate columns; the output width where gate and linear columns are two halves.
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

}  // namespace mimo::cuda
