// The kinds of activations, value and slope, and where gated ones have their columns (docs/spec/language-model.md §4.1,
// docs/spec/moe-performance.md §1.2, §1.3).
#pragma once
#include "kernel.cuh"

namespace mimo::cuda {

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

__device__ __forceinline__ float clamp_gate(float x, float clamp) { return x > clamp ? clamp : x; }
__device__ __forceinline__ float clamp_linear(float x, float clamp) {
  return x > clamp ? clamp : (x < -clamp ? -clamp : x);
}

/// Gated kinds: gate σ(alpha gate) (linear + offset), both clamped first.
struct Gate {
  float alpha, offset, clamp;

  struct Gradient {
    float value, gate, linear;  // activation, and its derivatives
  };

  __device__ __forceinline__ float value(float gate, float linear) const {
    const float g = clamp_gate(gate, clamp);
    return g * sigmoid(alpha * g) * (clamp_linear(linear, clamp) + offset);
  }
  /// A value on a limit lets its gradient through.
  __device__ __forceinline__ Gradient gradient(float gate, float linear) const {
    const float g = clamp_gate(gate, clamp), l = clamp_linear(linear, clamp) + offset, s = sigmoid(alpha * g);
    const bool clamped = linear > clamp || linear < -clamp;
    return {g * s * l, gate > clamp ? 0.0f : l * (s + alpha * g * s * (1.0f - s)), clamped ? 0.0f : g * s};
  }
};

/// Where a pack of a gated row's output has its gate columns, in packs from the row's start; its linear columns are a block
/// further on. Rows have blocks of `block` packs of gate and of linear columns in turn; one block is halves.
__device__ __forceinline__ int64_t gate_pack(int64_t pack, uint32_t block) {
  return pack + static_cast<int64_t>(static_cast<uint32_t>(pack) / block) * block;
}

/// Calls body with the plain kind's type; throws for anything else.
template <class Body>
void with_plain_kind(int32_t kind, Body&& body) {
  if (kind == MIMO_ACTIVATION_SQUARED_RELU) return body(SquaredRelu{});
  if (kind == MIMO_ACTIVATION_GELU_TANH) return body(GeluTanh{});
  if (kind == MIMO_ACTIVATION_GELU_ERF) return body(GeluErf{});
  fail(MIMO_ERROR_ARGUMENT, "activation was given an unknown kind.");
}

inline bool is_gated(int32_t kind) { return kind == MIMO_ACTIVATION_SWIGLU || kind == MIMO_ACTIVATION_QUICK_GEGLU; }

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

}  // namespace mimo::cuda
