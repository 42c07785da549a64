// Decode step of the depthwise causal conv1d (docs/spec/language-model.md §2.2 step 2): a thread for each channel of a
// sequence appends the new input to the window of last inputs and computes one output.
#include "kernel.cuh"

namespace mimo::cuda {
namespace {

template <class T, class W>
__global__ void step_kernel(mimo_causal_conv1d_step_args args) {
  for_each_pack(args.sequences, args.channels, [&](int64_t sequence, int64_t channel) {
    const T x = static_cast<const T*>(args.x)[sequence * args.x_stride + channel];
    const W* weight = static_cast<const W*>(args.weight) + channel * args.width;
    T* window = static_cast<T*>(args.state) + args.slots[sequence] * (args.width - 1) * args.channels + channel;
    float p = args.bias == nullptr ? 0.0f : load(static_cast<const W*>(args.bias) + channel);
    for (int64_t k = 0; k + 1 < args.width; ++k) {
      T* const row = window + k * args.channels;
      p += load(weight + k) * load(row);
      *row = k + 2 < args.width ? row[args.channels] : x;
    }
    p += load(weight + args.width - 1) * load(&x);
    store(static_cast<T*>(args.y) + sequence * args.y_stride + channel, p * sigmoid(p));
  });
}

}  // namespace

void causal_conv1d_step(mimo_stream& stream, const mimo_causal_conv1d_step_args& args) {
  MIMO_REQUIRE(args.width > 0 && args.channels >= 0 && args.sequences >= 0, "causal_conv1d_step");
  if (args.channels == 0 || args.sequences == 0) return;
  with_dtype(args.dtype, [&](auto* t) {
    with_dtype(args.weight_dtype, [&](auto* w) {
      using T = std::remove_pointer_t<decltype(t)>;
      using W = std::remove_pointer_t<decltype(w)>;
      const auto [grid, block] = cover(args.sequences, args.channels);
      launch(stream, step_kernel<T, W>, grid, block, 0, args);
    });
  });
}

}  // namespace mimo::cuda
