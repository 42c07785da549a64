// Depthwise causal conv1d with SiLU (docs/spec/language-model.md §2.2 step 2; backward §2.4). Memory-bound: a few
// multiply-adds an element. Tasks are runs of tokens x blocks of channels, whose taps stay in the L1 cache. Whole
// vectors of channels with the usual four taps use causal_conv1d_lanes.h.
#include "causal_conv1d_lanes.h"
#include "kernel.h"
#include "prefetch.h"
#include "sequences.h"

namespace mimo::MIMO_ISA {
namespace {

constexpr int64_t channel_block = 512;
// Each run of tokens has its own partial sum of the weight gradient.
constexpr int64_t tokens_per_run = 128;

int64_t blocks(int64_t total, int64_t size) { return (total + size - 1) / size; }

/// taps[k][c] in fp32 with the bias as row `width`: vectors run over channels.
template <class W>
void load_taps(const W* weight, const W* bias, int64_t channels, int64_t width, float* taps) {
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t k = 0; k < width; ++k) taps[k * channels + c] = load(weight[c * width + k]);
    taps[width * channels + c] = bias == nullptr ? 0.0f : load(bias[c]);
  }
}

/// p[c] = bias + Σ_k taps[k] x[t - width + 1 + k] over `count` channels; the first `missing` taps precede the sequence.
template <class T>
void convolve(const T* x, int64_t x_stride, const float* taps, int64_t channels, int64_t width, int64_t missing,
              int64_t count, float* p) {
  const float* bias = taps + width * channels;
  for (int64_t c = 0; c < count; ++c) p[c] = bias[c];
  for (int64_t k = missing; k < width; ++k) {
    const T* row = x - (width - 1 - k) * x_stride;
#pragma omp simd
    for (int64_t c = 0; c < count; ++c) p[c] += taps[k * channels + c] * load(row[c]);
  }
}

/// How many channels of a block the loops over whole vectors process.
int64_t whole_lanes(int64_t count, int64_t width) { return width == lanes_width ? count / lanes * lanes : 0; }

/// Number of taps that would read before the sequence's first token.
int64_t missing_taps(int64_t token, int64_t first, int64_t width) {
  const int64_t missing = first - (token - width + 1);
  return missing > 0 ? missing : 0;
}

/// Backward of one run of tokens and one block of channels. `dp`: the last `width` rows of the gradient before SiLU;
/// `partial`: the block's weight and bias gradients, in the layout of the taps.
template <class T>
struct BackwardBlock {
  const mimo_causal_conv1d_backward_args& args;
  const float* taps;
  float* partial;
  float* dp;
  int64_t channel, count;

  float* dp_row(int64_t token) const { return dp + token % args.width * channel_block; }

  /// Computes dp_row(token); the run that owns the token adds its share of the weight gradient.
  void gradient_before_silu(int64_t token, int64_t first, bool owned) const {
    const T* x = static_cast<const T*>(args.x) + token * args.x_stride + channel;
    const T* dy = static_cast<const T*>(args.dy) + token * args.dy_stride + channel;
    const int64_t missing = missing_taps(token, first, args.width);
    float* row = dp_row(token);
    if (token + 1 < args.tokens) {
      prefetch(x + args.x_stride, count);
      prefetch(dy + args.dy_stride, count);
    }
    convolve(x, args.x_stride, taps + channel, args.channels, args.width, missing, count, row);
#pragma omp simd
    for (int64_t c = 0; c < count; ++c) {
      const float s = sigmoid(row[c]);
      row[c] = load(dy[c]) * s * (1.0f + row[c] * (1.0f - s));
    }
    if (partial == nullptr || !owned) return;
    for (int64_t k = missing; k < args.width; ++k) {
      const T* tap = x - (args.width - 1 - k) * args.x_stride;
      float* sum = partial + k * args.channels + channel;
#pragma omp simd
      for (int64_t c = 0; c < count; ++c) sum[c] += row[c] * load(tap[c]);
    }
    float* sum = partial + args.width * args.channels + channel;
#pragma omp simd
    for (int64_t c = 0; c < count; ++c) sum[c] += row[c];
  }

  /// dx[token] = Σ_k taps[k] dp[token + width - 1 - k] within the sequence.
  void input_gradient(int64_t token, int64_t last) const {
    T* dx = static_cast<T*>(args.dx) + token * args.dx_stride + channel;
    const int64_t ahead = last - 1 - token < args.width - 1 ? last - 1 - token : args.width - 1;
    const float* tap = taps + (args.width - 1) * args.channels + channel;
    float sum[channel_block];
    for (int64_t c = 0; c < count; ++c) sum[c] = 0;
    for (int64_t i = 0; i <= ahead; ++i) {
      const float* row = dp_row(token + i);
#pragma omp simd
      for (int64_t c = 0; c < count; ++c) sum[c] += tap[c - i * args.channels] * row[c];
    }
    for (int64_t c = 0; c < count; ++c) store(&dx[c], sum[c]);
  }

  /// The same for the first `whole` channels, in whole vectors.
  void piece_of_lanes(int64_t begin, int64_t end, int64_t first, int64_t last, int64_t whole) const {
    for (int64_t k = 0; k + 1 < lanes_width; ++k) {
      std::memset(dp + k * channel_block, 0, static_cast<size_t>(whole) * sizeof(float));
    }
    const int64_t stop = end + lanes_width - 1;
    for (int64_t token = begin; token < stop; token += tokens_per_sweep) {
      const LaneSweep sweep{token, token + tokens_per_sweep < stop ? token + tokens_per_sweep : stop, begin, end, first, last};
      for (int64_t c = channel; c < channel + whole; c += lanes) {
        differentiate_lanes(LaneTaps(taps + c, args.channels), static_cast<const T*>(args.x) + c, args.x_stride,
                            static_cast<const T*>(args.dy) + c, args.dy_stride, static_cast<T*>(args.dx) + c, args.dx_stride,
                            sweep, dp + c - channel, channel_block, partial == nullptr ? nullptr : partial + c, args.channels);
      }
    }
  }

  void piece(int64_t begin, int64_t end, int64_t first, int64_t last) const {
    const int64_t halo = args.width - 1;
    const int64_t stop = end + halo < last ? end + halo : last;
    for (int64_t token = begin; token < stop; ++token) {
      gradient_before_silu(token, first, token < end);
      if (token - halo >= begin) input_gradient(token - halo, last);
    }
    // Tokens with fewer than `width` tokens after them in their sequence.
    for (int64_t token = stop - halo < begin ? begin : stop - halo; token < end; ++token) input_gradient(token, last);
  }
};

}  // namespace

void causal_conv1d_forward(mimo_stream& stream, const mimo_causal_conv1d_forward_args& args) {
  MIMO_REQUIRE(args.width > 0 && args.channels >= 0 && args.tokens >= 0, "causal_conv1d_forward");
  if (args.tokens == 0 || args.channels == 0) return;
  Workspace workspace(&stream, (args.width + 1) * args.channels * static_cast<int64_t>(sizeof(float)));
  float* taps = workspace.as<float>();
  const int64_t channel_blocks = blocks(args.channels, channel_block);
  with_dtype(args.weight_dtype, [&](auto* w) {
    using W = std::remove_pointer_t<decltype(w)>;
    load_taps(static_cast<const W*>(args.weight), static_cast<const W*>(args.bias), args.channels, args.width, taps);
  });
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    parallel_for(stream.device->threads, blocks(args.tokens, tokens_per_run) * channel_blocks, [&](int64_t task) {
      const int64_t begin = task / channel_blocks * tokens_per_run, channel = task % channel_blocks * channel_block;
      const int64_t end = begin + tokens_per_run < args.tokens ? begin + tokens_per_run : args.tokens;
      const int64_t count = channel + channel_block < args.channels ? channel_block : args.channels - channel;
      const int64_t whole = whole_lanes(count, args.width), rest = count - whole;
      const auto sweep = [&](int64_t from, int64_t to, int64_t first) {
        for (int64_t c = channel; c < channel + whole; c += lanes) {
          convolve_lanes(LaneTaps(taps + c, args.channels), static_cast<const T*>(args.x) + c, args.x_stride, from, to, first,
                         static_cast<T*>(args.y) + c, args.y_stride);
        }
      };
      const auto row = [&](int64_t token, int64_t first) {
        const T* x = static_cast<const T*>(args.x) + token * args.x_stride + channel + whole;
        T* y = static_cast<T*>(args.y) + token * args.y_stride + channel + whole;
        float p[channel_block];
        if (token + 1 < end) prefetch(x + args.x_stride, rest);
        convolve(x, args.x_stride, taps + channel + whole, args.channels, args.width,
                 missing_taps(token, first, args.width), rest, p);
#pragma omp simd
        for (int64_t c = 0; c < rest; ++c) store(&y[c], p[c] * sigmoid(p[c]));
      };
      for_each_piece(args.cu_seqlens, args.sequences, begin, end,
                     [&](int64_t from, int64_t to, int64_t first, int64_t) {
                       for (int64_t token = from; token < to; token += tokens_per_sweep) {
                         sweep(token, token + tokens_per_sweep < to ? token + tokens_per_sweep : to, first);
                       }
                       for (int64_t token = from; rest > 0 && token < to; ++token) row(token, first);
                     });
    });
  });
}

void causal_conv1d_backward(mimo_stream& stream, const mimo_causal_conv1d_backward_args& args) {
  MIMO_REQUIRE(args.width > 0 && args.channels >= 0 && args.tokens >= 0, "causal_conv1d_backward");
  if (args.tokens == 0 || args.channels == 0) return;
  const int64_t channel_blocks = blocks(args.channels, channel_block), runs = blocks(args.tokens, tokens_per_run);
  const int64_t tap_floats = (args.width + 1) * args.channels;
  const bool weights = args.dweight != nullptr || args.dbias != nullptr;
  Workspace tap_space(&stream, tap_floats * static_cast<int64_t>(sizeof(float)));
  Workspace partial_space(&stream, weights ? runs * tap_floats * static_cast<int64_t>(sizeof(float)) : 0);
  Workspace dp_space(&stream, runs * channel_blocks * args.width * channel_block * static_cast<int64_t>(sizeof(float)));
  float* taps = tap_space.as<float>();
  float* partial = partial_space.as<float>();
  with_dtype(args.weight_dtype, [&](auto* w) {
    using W = std::remove_pointer_t<decltype(w)>;
    load_taps(static_cast<const W*>(args.weight), static_cast<const W*>(args.bias), args.channels, args.width, taps);
  });
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    parallel_for(stream.device->threads, runs * channel_blocks, [&](int64_t task) {
      const int64_t run = task / channel_blocks, begin = run * tokens_per_run;
      const int64_t channel = task % channel_blocks * channel_block;
      const int64_t end = begin + tokens_per_run < args.tokens ? begin + tokens_per_run : args.tokens;
      const int64_t count = channel + channel_block < args.channels ? channel_block : args.channels - channel;
      float* sums = weights ? partial + run * tap_floats : nullptr;
      for (int64_t k = 0; weights && k <= args.width; ++k) {
        std::memset(sums + k * args.channels + channel, 0, static_cast<size_t>(count) * sizeof(float));
      }
      float* const dp = dp_space.as<float>() + task * args.width * channel_block;
      const int64_t whole = whole_lanes(count, args.width);
      const BackwardBlock<T> block{args, taps, sums, dp, channel, count};
      const BackwardBlock<T> rest{args, taps, sums, dp, channel + whole, count - whole};
      for_each_piece(args.cu_seqlens, args.sequences, begin, end,
                     [&](int64_t from, int64_t to, int64_t first, int64_t last) {
                       if (whole > 0) block.piece_of_lanes(from, to, first, last, whole);
                       if (whole < count) rest.piece(from, to, first, last);
                     });
    });
  });
  if (!weights) return;
  parallel_range(stream.device->threads, args.channels, channel_block, [&](int64_t begin, int64_t end) {
    for (int64_t run = 1; run < runs; ++run) {
      for (int64_t k = 0; k <= args.width; ++k) {
        const float* row = partial + run * tap_floats + k * args.channels;
        float* sum = partial + k * args.channels;
#pragma omp simd
        for (int64_t c = begin; c < end; ++c) sum[c] += row[c];
      }
    }
    for (int64_t c = begin; c < end; ++c) {
      for (int64_t k = 0; args.dweight != nullptr && k < args.width; ++k) {
        args.dweight[c * args.width + k] += partial[k * args.channels + c];
      }
      if (args.dbias != nullptr) args.dbias[c] += partial[args.width * args.channels + c];
    }
  });
}

}  // namespace mimo::MIMO_ISA
