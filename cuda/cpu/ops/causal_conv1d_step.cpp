// Decode step of the depthwise causal conv1d (docs/spec/language-model.md §2.2 step 2): appends the new input to each
// sequence's window of last inputs and computes one output.
#include "kernel.h"

namespace mimo::MIMO_ISA {
namespace {

constexpr int64_t channel_block = 512;

/// Processes `count` channels from `channel` on, for every sequence.
template <class T, class W>
void step(const mimo_causal_conv1d_step_args& args, int64_t channel, int64_t count) {
  const W* weight = static_cast<const W*>(args.weight) + channel * args.width;
  const W* bias = args.bias == nullptr ? nullptr : static_cast<const W*>(args.bias) + channel;
  for (int64_t s = 0; s < args.sequences; ++s) {
    const T* x = static_cast<const T*>(args.x) + s * args.x_stride + channel;
    T* window = static_cast<T*>(args.state) + args.slots[s] * (args.width - 1) * args.channels + channel;
    float p[channel_block];
#pragma omp simd
    for (int64_t c = 0; c < count; ++c) p[c] = bias == nullptr ? 0.0f : load(bias[c]);
    for (int64_t k = 0; k < args.width; ++k) {
      T* row = window + k * args.channels;
      const T* input = k + 1 < args.width ? row : x;
#pragma omp simd
      for (int64_t c = 0; c < count; ++c) p[c] += load(weight[c * args.width + k]) * load(input[c]);
      // Row k - 1 has been read and takes the values of row k.
      if (k > 0) std::memcpy(row - args.channels, input, static_cast<size_t>(count) * sizeof(T));
    }
    T* y = static_cast<T*>(args.y) + s * args.y_stride + channel;
#pragma omp simd
    for (int64_t c = 0; c < count; ++c) store(&y[c], p[c] * sigmoid(p[c]));
  }
}

}  // namespace

void causal_conv1d_step(mimo_stream& stream, const mimo_causal_conv1d_step_args& args) {
  MIMO_REQUIRE(args.width > 0 && args.channels >= 0 && args.sequences >= 0, "causal_conv1d_step");
  with_dtype(args.dtype, [&](auto* t) {
    with_dtype(args.weight_dtype, [&](auto* w) {
      using T = std::remove_pointer_t<decltype(t)>;
      using W = std::remove_pointer_t<decltype(w)>;
      parallel_range(stream.device->threads, args.channels, channel_block,
                     [&](int64_t begin, int64_t end) { step<T, W>(args, begin, end - begin); });
    });
  });
}

}  // namespace mimo::MIMO_ISA
