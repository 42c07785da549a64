// Activations of feed-forward layers and experts, row by row: y = p act(x) in fp32, rounded once
// (docs/spec/language-model.md §4.1, docs/spec/moe-performance.md §1.2, §1.3).
#pragma once
#include "kernel.h"

namespace mimo::MIMO_ISA {

struct ValueAndSlope {
  float value, slope;
};

// Comparisons are written so that NaN propagates: it must reach the loss to be detected.
struct SquaredRelu {
  static float value(float x) {
    const float positive = x < 0.0f ? 0.0f : x;
    return positive * positive;
  }
  static ValueAndSlope both(float x) {
    const float positive = x < 0.0f ? 0.0f : x;
    return {positive * positive, 2.0f * positive};
  }
};

/// 0.5 (1 + tanh u) = σ(2u): no cancellation for large negative x.
struct GeluTanh {
  static constexpr float scale = 2.0f * 0.7978845608028654f, cubic = 0.044715f;
  static float value(float x) { return x * sigmoid(scale * x * (1.0f + cubic * x * x)); }
  static ValueAndSlope both(float x) {
    const float s = sigmoid(scale * x * (1.0f + cubic * x * x));
    return {x * s, s + x * s * (1.0f - s) * scale * (1.0f + 3.0f * cubic * x * x)};
  }
};

/// erf to a few ulp: odd rational approximation on |x| < 4; beyond, erf rounds to ±1 in fp32.
static inline float erf_fast(float x) {
  const float c = x < -4.0f ? -4.0f : (x > 4.0f ? 4.0f : x);
  const float s = c * c;
  float p = -2.72614225801306e-10f;
  p = p * s + 2.77068142495902e-08f;
  p = p * s - 2.10102402082508e-06f;
  p = p * s - 5.69250639462346e-05f;
  p = p * s - 7.34990630326855e-04f;
  p = p * s - 2.95459980854025e-03f;
  p = p * s - 1.60960333262415e-02f;
  float q = -1.45660718464996e-05f;
  q = q * s - 2.13374055278905e-04f;
  q = q * s - 1.68282697438203e-03f;
  q = q * s - 7.37332916720468e-03f;
  q = q * s - 1.42647390514189e-02f;
  return c * p / q;
}

struct GeluErf {
  static constexpr float inverse_sqrt2 = 0.7071067811865476f, inverse_sqrt2pi = 0.3989422804014327f;
  static float value(float x) { return 0.5f * x * (1.0f + erf_fast(x * inverse_sqrt2)); }
  static ValueAndSlope both(float x) {
    const float phi = 0.5f * (1.0f + erf_fast(x * inverse_sqrt2));
    return {x * phi, phi + x * inverse_sqrt2pi * exp_fast(-0.5f * x * x)};
  }
};

/// Parameters of gated kinds: gate σ(alpha gate (1 + cubic gate²)) (linear + offset), gate and linear clamped first.
struct Gate {
  float alpha, offset, clamp, cubic;

  /// Argument of σ at a gate, and its derivative. Without a cubic term nothing overflows where the gate does not.
  float argument(float x) const { return alpha * (cubic == 0.0f ? x : x * (1.0f + cubic * x * x)); }
  float slope(float x) const { return alpha * (cubic == 0.0f ? 1.0f : 1.0f + 3.0f * cubic * x * x); }
};

static inline float clamp_gate(float x, float clamp) { return x > clamp ? clamp : x; }
static inline float clamp_linear(float x, float clamp) { return x > clamp ? clamp : (x < -clamp ? -clamp : x); }

/// Rows of a gated kind: x alternates blocks of `block` gate columns and `block` linear columns; with one block,
/// halves.
struct GatedRows {
  Gate gate;
  int64_t width, block;

  int64_t x_width() const { return 2 * width; }

  template <class T, class Y>
  void forward(const T* x, float probability, Y* y) const {
    for (int64_t column = 0; column < width; column += block) forward_block(x + 2 * column, probability, y + column);
  }

  /// Writes dx and returns the gradient of the probability.
  template <class G, class T>
  float backward(const G* dy, const T* x, float probability, T* dx) const {
    float dprobability = 0;
    for (int64_t column = 0; column < width; column += block) {
      dprobability += backward_block(dy + column, x + 2 * column, probability, dx + 2 * column);
    }
    return dprobability;
  }

 private:
  template <class T, class Y>
  void forward_block(const T* x, float probability, Y* y) const {
    const Gate g = gate;
    const int64_t columns = block;
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) {
      const float gated = clamp_gate(load(x[i]), g.clamp);
      const float linear = clamp_linear(load(x[columns + i]), g.clamp) + g.offset;
      store(&y[i], probability * (gated * sigmoid(g.argument(gated)) * linear));
    }
  }

  template <class G, class T>
  float backward_block(const G* dy, const T* x, float probability, T* dx) const {
    const Gate g = gate;
    const int64_t columns = block;
    float dprobability = 0;
#pragma omp simd reduction(+ : dprobability)
    for (int64_t i = 0; i < columns; ++i) {
      const float gate_raw = load(x[i]), linear_raw = load(x[columns + i]), gradient = load(dy[i]);
      const float gated = clamp_gate(gate_raw, g.clamp);
      const float linear = clamp_linear(linear_raw, g.clamp) + g.offset;
      const float s = sigmoid(g.argument(gated));
      dprobability += gradient * (gated * s * linear);
      const float da = probability * gradient;
      const float dgate = da * linear * (s + g.slope(gated) * gated * s * (1.0f - s));
      const float dlinear = da * gated * s;
      store(&dx[i], gate_raw > g.clamp ? 0.0f : dgate);
      store(&dx[columns + i], linear_raw > g.clamp || linear_raw < -g.clamp ? 0.0f : dlinear);
    }
    return dprobability;
  }
};

/// Rows of an ungated kind.
template <class Kind>
struct PlainRows {
  int64_t width;

  int64_t x_width() const { return width; }

  template <class T, class Y>
  void forward(const T* x, float probability, Y* y) const {
    const int64_t columns = width;
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) store(&y[i], probability * Kind::value(load(x[i])));
  }

  template <class G, class T>
  float backward(const G* dy, const T* x, float probability, T* dx) const {
    const int64_t columns = width;
    float dprobability = 0;
#pragma omp simd reduction(+ : dprobability)
    for (int64_t i = 0; i < columns; ++i) {
      const float gradient = load(dy[i]);
      const ValueAndSlope a = Kind::both(load(x[i]));
      dprobability += gradient * a.value;
      store(&dx[i], probability * gradient * a.slope);
    }
    return dprobability;
  }
};

static inline bool is_gated(int32_t kind) {
  return kind == MIMO_ACTIVATION_SWIGLU || kind == MIMO_ACTIVATION_QUICK_GEGLU || kind == MIMO_ACTIVATION_GEGLU;
}

template <class Args>
static Gate gate_of(const Args& args) {
  if (args.kind == MIMO_ACTIVATION_SWIGLU) return {1.0f, 0.0f, args.clamp, 0.0f};
  if (args.kind == MIMO_ACTIVATION_GEGLU) return {GeluTanh::scale, 0.0f, args.clamp, GeluTanh::cubic};
  return {1.702f, args.linear_offset, args.clamp, 0.0f};
}

/// Calls body with the rows of an operation's activation, from its fields kind, width, interleave, clamp and
/// linear_offset.
template <class Args, class Body>
static void with_activation(const Args& args, Body&& body) {
  if (is_gated(args.kind)) {
    MIMO_REQUIRE(args.clamp > 0 && args.interleave >= 0, "activation");
    MIMO_REQUIRE(args.interleave == 0 || args.width % args.interleave == 0, "activation");
    return body(GatedRows{gate_of(args), args.width, args.interleave == 0 ? args.width : args.interleave});
  }
  if (args.kind == MIMO_ACTIVATION_SQUARED_RELU) return body(PlainRows<SquaredRelu>{args.width});
  if (args.kind == MIMO_ACTIVATION_GELU_TANH) return body(PlainRows<GeluTanh>{args.width});
  if (args.kind == MIMO_ACTIVATION_GELU_ERF) return body(PlainRows<GeluErf>{args.width});
  fail(MIMO_ERROR_ARGUMENT, "activation was given an unknown kind.");
}

}  // namespace mimo::MIMO_ISA
