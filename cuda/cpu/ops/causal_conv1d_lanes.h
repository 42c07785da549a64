// Depthwise causal conv1d with four taps for a vector of channels at a time: taps, sums, and the inputs and gradients
// of the last tokens stay in registers.
#pragma once
#include "vectors.h"

namespace mimo::MIMO_ISA {

/// Number of taps that these loops support.
constexpr int64_t lanes_width = 4;
/// Tokens processed for a vector of channels before the next channels, so that their rows stay in the L1 cache.
constexpr int64_t tokens_per_sweep = 16;

/// Taps and bias of a vector of channels.
struct LaneTaps {
  Vector tap[lanes_width], bias;

  LaneTaps(const float* taps, int64_t channels)
      : tap{load_vector(taps), load_vector(taps + channels), load_vector(taps + 2 * channels),
            load_vector(taps + 3 * channels)},
        bias(load_vector(taps + lanes_width * channels)) {}
};

/// Inputs of a token and the three before it, oldest first; zeros before a sequence's first token.
template <class T>
struct LaneInputs {
  const T* x;
  int64_t stride;
  Vector last[lanes_width];

  /// The next token is `token` of a sequence that begins at `first`.
  LaneInputs(const T* x, int64_t stride, int64_t token, int64_t first) : x(x), stride(stride), last{} {
    for (int64_t k = 1; k < lanes_width; ++k) {
      const int64_t before = token - lanes_width + k;
      if (before >= first) last[k] = load_vector(x + before * stride);
    }
  }

  /// Loads a token and returns its convolution, before SiLU.
  Vector convolve(int64_t token, const LaneTaps& by) {
    __builtin_prefetch(x + (token + tokens_per_sweep) * stride);
    last[0] = last[1];
    last[1] = last[2];
    last[2] = last[3];
    last[3] = load_vector(x + token * stride);
    return by.bias + by.tap[0] * last[0] + by.tap[1] * last[1] + by.tap[2] * last[2] + by.tap[3] * last[3];
  }
};

/// y of tokens [begin, end) of a sequence that begins at `first`.
template <class T>
void convolve_lanes(const LaneTaps& taps, const T* x, int64_t x_stride, int64_t begin, int64_t end, int64_t first, T* y,
                    int64_t y_stride) {
  LaneInputs<T> inputs(x, x_stride, begin, first);
  for (int64_t token = begin; token < end; ++token) {
    const Vector p = inputs.convolve(token, taps);
    store_vector(y + token * y_stride, p * sigmoid<WordVector>(p));
  }
}

/// Tokens [begin, end) of the piece [piece_begin, piece_end) of a sequence [first, last); sweeps of a piece are in
/// order.
struct LaneSweep {
  int64_t begin, end, piece_begin, piece_end, first, last;
};

/// dx of the tokens three before those of the sweep, and the sweep's contribution to the gradients of taps and bias.
/// Sweeps extend three tokens past the end of their piece, into the next piece (which adds its own contribution) or
/// zeros. `dp`: gradients before SiLU of the last three tokens, carried between sweeps in rows `dp_stride` apart.
/// `sums`: in the layout of the taps, or null.
template <class T>
void differentiate_lanes(const LaneTaps& taps, const T* x, int64_t x_stride, const T* dy, int64_t dy_stride, T* dx,
                         int64_t dx_stride, const LaneSweep& sweep, float* dp, int64_t dp_stride, float* sums,
                         int64_t channels) {
  LaneInputs<T> inputs(x, x_stride, sweep.begin, sweep.first);
  Vector late[lanes_width] = {{}, load_vector(dp), load_vector(dp + dp_stride), load_vector(dp + 2 * dp_stride)};
  Vector sum[lanes_width + 1] = {};
  const auto gradient = [&](int64_t token) {
    __builtin_prefetch(dy + (token + tokens_per_sweep) * dy_stride);
    const Vector p = inputs.convolve(token, taps), s = sigmoid<WordVector>(p);
    return load_vector(dy + token * dy_stride) * s * (1.0f + p * (1.0f - s));
  };
  const auto take = [&](int64_t token, Vector next) {
    late[0] = late[1];
    late[1] = late[2];
    late[2] = late[3];
    late[3] = next;
    const int64_t to = token - lanes_width + 1;
    if (to < sweep.piece_begin) return;
    store_vector(dx + to * dx_stride,
                 taps.tap[3] * late[0] + taps.tap[2] * late[1] + taps.tap[1] * late[2] + taps.tap[0] * late[3]);
  };
  const int64_t middle = sweep.end < sweep.piece_end ? sweep.end : sweep.piece_end;
  for (int64_t token = sweep.begin; token < middle; ++token) {
    const Vector next = gradient(token);
#pragma GCC unroll 4
    for (int64_t k = 0; k < lanes_width; ++k) sum[k] += next * inputs.last[k];
    sum[lanes_width] += next;
    take(token, next);
  }
  for (int64_t token = sweep.begin < middle ? middle : sweep.begin; token < sweep.end; ++token) {
    take(token, token < sweep.last ? gradient(token) : Vector{});
  }
  for (int64_t k = 0; k + 1 < lanes_width; ++k) store_vector(dp + k * dp_stride, late[k + 1]);
  for (int64_t k = 0; sums != nullptr && k <= lanes_width; ++k) {
    store_vector(sums + k * channels, load_vector(sums + k * channels) + sum[k]);
  }
}

}  // namespace mimo::MIMO_ISA
