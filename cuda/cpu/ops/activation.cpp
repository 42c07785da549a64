// Activations of feed-forward layers and experts (docs/spec/language-model.md §4.1, docs/spec/moe-performance.md §1.2,
// §1.3), with the row probability that weights an expert's activation before its second projection. y = p act(x), one
// rounding.
#include "kernel.h"

namespace mimo::MIMO_ISA {
namespace {

struct ValueAndSlope {
  float value, slope;
};

// Comparisons are written so that a NaN input gives a NaN output: it must reach the loss to be found.
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

/// erf to a few ulp: odd rational approximation on |x| < 4, beyond which fp32 knows only ±1.
inline float erf_fast(float x) {
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

/// Gated kinds: gate σ(alpha gate) (linear + offset), both clamped first.
struct Gate {
  float alpha, offset, clamp;
};

inline float clamp_gate(float x, float clamp) { return x > clamp ? clamp : x; }
inline float clamp_linear(float x, float clamp) { return x > clamp ? clamp : (x < -clamp ? -clamp : x); }

template <class T>
void gated_forward(const T* x, const Gate g, float probability, T* y, int64_t width) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) {
    const float gate = clamp_gate(load(x[i]), g.clamp);
    const float linear = clamp_linear(load(x[width + i]), g.clamp) + g.offset;
    store(&y[i], probability * (gate * sigmoid(g.alpha * gate) * linear));
  }
}

template <class T>
float gated_backward(const T* dy, const T* x, const Gate g, float probability, T* dx, int64_t width) {
  float dprobability = 0;
#pragma omp simd reduction(+ : dprobability)
  for (int64_t i = 0; i < width; ++i) {
    const float gate_raw = load(x[i]), linear_raw = load(x[width + i]), gradient = load(dy[i]);
    const float gate = clamp_gate(gate_raw, g.clamp);
    const float linear = clamp_linear(linear_raw, g.clamp) + g.offset;
    const float s = sigmoid(g.alpha * gate);
    dprobability += gradient * (gate * s * linear);
    const float da = probability * gradient;
    const float dgate = da * linear * (s + g.alpha * gate * s * (1.0f - s));
    const float dlinear = da * gate * s;
    store(&dx[i], gate_raw > g.clamp ? 0.0f : dgate);
    store(&dx[width + i], linear_raw > g.clamp || linear_raw < -g.clamp ? 0.0f : dlinear);
  }
  return dprobability;
}

template <class Kind, class T>
void plain_forward(const T* x, float probability, T* y, int64_t width) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) store(&y[i], probability * Kind::value(load(x[i])));
}

template <class Kind, class T>
float plain_backward(const T* dy, const T* x, float probability, T* dx, int64_t width) {
  float dprobability = 0;
#pragma omp simd reduction(+ : dprobability)
  for (int64_t i = 0; i < width; ++i) {
    const float gradient = load(dy[i]);
    const ValueAndSlope a = Kind::both(load(x[i]));
    dprobability += gradient * a.value;
    store(&dx[i], probability * gradient * a.slope);
  }
  return dprobability;
}

/// Calls body(row) for the live rows on the pool's threads.
template <class Args, class Body>
void each_row(mimo_stream& stream, const Args& args, Body&& body) {
  parallel_range(stream.device->threads, live_rows(args.rows, args.row_count), rows_per_partial,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t row = begin; row < end; ++row) body(row);
                 });
}

template <class T, class Row>
void forward_rows(mimo_stream& stream, const mimo_activation_forward_args& args, int64_t x_width, Row&& row_forward) {
  each_row(stream, args, [&](int64_t row) {
    const float probability = args.row_probability ? args.row_probability[row] : 1.0f;
    row_forward(static_cast<const T*>(args.x) + row * x_width, probability,
                static_cast<T*>(args.y) + row * args.width);
  });
}

template <class T, class Row>
void backward_rows(mimo_stream& stream, const mimo_activation_backward_args& args, int64_t x_width,
                   Row&& row_backward) {
  each_row(stream, args, [&](int64_t row) {
    const float probability = args.row_probability ? args.row_probability[row] : 1.0f;
    const float dprobability =
        row_backward(static_cast<const T*>(args.dy) + row * args.width, static_cast<const T*>(args.x) + row * x_width,
                     probability, static_cast<T*>(args.dx) + row * x_width);
    if (args.drow_probability) args.drow_probability[row] = dprobability;
  });
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

}  // namespace

void activation_forward(mimo_stream& stream, const mimo_activation_forward_args& args) {
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    if (is_gated(args.kind)) {
      MIMO_REQUIRE(args.clamp > 0, "activation_forward");
      const Gate gate = gate_of(args);
      forward_rows<T>(stream, args, 2 * args.width, [&](const T* x, float probability, T* y) {
        gated_forward(x, gate, probability, y, args.width);
      });
      return;
    }
    with_plain_kind(args.kind, [&](auto kind) {
      forward_rows<T>(stream, args, args.width, [&](const T* x, float probability, T* y) {
        plain_forward<decltype(kind)>(x, probability, y, args.width);
      });
    });
  });
}

void activation_backward(mimo_stream& stream, const mimo_activation_backward_args& args) {
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    if (is_gated(args.kind)) {
      MIMO_REQUIRE(args.clamp > 0, "activation_backward");
      const Gate gate = gate_of(args);
      backward_rows<T>(stream, args, 2 * args.width, [&](const T* dy, const T* x, float probability, T* dx) {
        return gated_backward(dy, x, gate, probability, dx, args.width);
      });
      return;
    }
    with_plain_kind(args.kind, [&](auto kind) {
      backward_rows<T>(stream, args, args.width, [&](const T* dy, const T* x, float probability, T* dx) {
        return plain_backward<decltype(kind)>(dy, x, probability, dx, args.width);
      });
    });
  });
}

}  // namespace mimo::MIMO_ISA
