// Depthwise causal convolution with SiLU (spec language-model 2.2 step 2; backward 2.4). A thread owns a few channels and
// walks a run of tokens with the window of taps in registers: every input is read once (and its halo).
#include "kernel.cuh"

namespace mimo::cuda {
namespace {

constexpr int threads = 128;
constexpr int64_t forward_run = 64;   // tokens
constexpr int64_t backward_run = 128;  // also the tokens of one partial sum of the weights' gradients

/// taps[k]: the weight of the token k - (Taps - 1) steps away, 0 for those the convolution has not.
template <class W, int Taps, int Width>
__device__ __forceinline__ void load_taps(const W* weight, int64_t channel, int64_t width, float (&taps)[Taps][Width]) {
#pragma unroll
  for (int k = 0; k < Taps; ++k) {
    const int64_t tap = k - (Taps - width);
#pragma unroll
    for (int i = 0; i < Width; ++i) taps[k][i] = tap >= 0 ? load(weight + (channel + i) * width + tap) : 0.0f;
  }
}

/// Moves the window on by one token.
template <int Taps, int Width>
__device__ __forceinline__ void shift(float (&window)[Taps][Width]) {
#pragma unroll
  for (int k = 0; k + 1 < Taps; ++k) {
#pragma unroll
    for (int i = 0; i < Width; ++i) window[k][i] = window[k + 1][i];
  }
}

/// Fills the window with the Taps - 1 tokens before `token`, zeros left of the sequence.
template <class T, int Taps, int Width>
__device__ __forceinline__ void start(const T* x, int64_t stride, int64_t token, int64_t first,
                                      float (&window)[Taps][Width]) {
#pragma unroll
  for (int k = 0; k + 1 < Taps; ++k) {
    const int64_t from = token - (Taps - 1) + k;
    if (from >= first) {
      read(x + from * stride, window[k + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < Width; ++i) window[k + 1][i] = 0.0f;
    }
  }
}

template <class T, class W, int Taps, int Width>
__global__ void __launch_bounds__(threads) forward_kernel(mimo_causal_conv1d_forward_args args) {
  const int64_t channel = (static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x) * Width;
  if (channel >= args.channels) return;
  float taps[Taps][Width], bias[Width], window[Taps][Width] = {};
  load_taps(static_cast<const W*>(args.weight), channel, args.width, taps);
#pragma unroll
  for (int i = 0; i < Width; ++i) bias[i] = load(static_cast<const W*>(args.bias) + channel + i);
  const T* x = static_cast<const T*>(args.x) + channel;
  T* y = static_cast<T*>(args.y) + channel;
  const int64_t begin = blockIdx.y * forward_run, end = smaller(begin + forward_run, args.tokens);
  int64_t sequence = sequence_of(args.cu_seqlens, args.sequences, begin), last = begin;
  for (int64_t token = begin; token < end; ++token) {
    if (token == last) {  // a sequence begins, or the run
      while (args.cu_seqlens[sequence + 1] <= token) ++sequence;
      last = args.cu_seqlens[sequence + 1];
      start(x, args.x_stride, token, args.cu_seqlens[sequence], window);
    }
    shift(window);
    read(x + token * args.x_stride, window[Taps - 1]);
    float out[Width];
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      float p = bias[i];
#pragma unroll
      for (int k = 0; k < Taps; ++k) p += taps[k][i] * window[k][i];
      out[i] = p * sigmoid(p);
    }
    write(y + token * args.y_stride, out);
  }
}

/// Gradient dp before the SiLU at every token, dx[t] = Σ_k taps[k] dp[t + Taps - 1 - k] as far as the sequence goes, and
/// partial[run] = Σ over the run of dp x (a row a tap) and of dp.
template <class T, class W, int Taps, int Width>
__global__ void __launch_bounds__(threads) backward_kernel(mimo_causal_conv1d_backward_args args, float* partial) {
  const int64_t channel = (static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x) * Width;
  if (channel >= args.channels) return;
  float taps[Taps][Width], bias[Width], window[Taps][Width] = {}, dp[Taps][Width] = {};
  float dtaps[Taps][Width] = {}, dbias[Width] = {};
  load_taps(static_cast<const W*>(args.weight), channel, args.width, taps);
#pragma unroll
  for (int i = 0; i < Width; ++i) bias[i] = load(static_cast<const W*>(args.bias) + channel + i);
  const T* x = static_cast<const T*>(args.x) + channel;
  const T* dy = static_cast<const T*>(args.dy) + channel;
  T* dx = static_cast<T*>(args.dx) + channel;
  const int64_t end = smaller((blockIdx.y + 1) * backward_run, args.tokens);
  int64_t sequence = sequence_of(args.cu_seqlens, args.sequences, blockIdx.y * backward_run);
  for (int64_t begin = blockIdx.y * backward_run; begin < end; ++sequence) {
    // The piece of one sequence in this run; dp of the tokens that follow it is made again by the next run.
    const int64_t first = args.cu_seqlens[sequence], last = args.cu_seqlens[sequence + 1];
    const int64_t stop = smaller(last, end);
    if (stop <= begin) continue;
    start(x, args.x_stride, begin, first, window);
    for (int64_t token = begin; token < stop + Taps - 1; ++token) {
      shift(window);
      shift(dp);
      if (token < last) {
        float gradient[Width];
        read(x + token * args.x_stride, window[Taps - 1]);
        read(dy + token * args.dy_stride, gradient);
#pragma unroll
        for (int i = 0; i < Width; ++i) {
          float p = bias[i];
#pragma unroll
          for (int k = 0; k < Taps; ++k) p += taps[k][i] * window[k][i];
          const float s = sigmoid(p);
          const float d = gradient[i] * s * (1.0f + p * (1.0f - s));
          dp[Taps - 1][i] = d;
          if (token < stop) {
#pragma unroll
            for (int k = 0; k < Taps; ++k) dtaps[k][i] += d * window[k][i];
            dbias[i] += d;
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < Width; ++i) dp[Taps - 1][i] = 0.0f;
      }
      const int64_t done = token - (Taps - 1);
      if (done < begin) continue;
      float out[Width];
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        out[i] = 0.0f;
#pragma unroll
        for (int k = 0; k < Taps; ++k) out[i] += taps[Taps - 1 - k][i] * dp[k][i];
      }
      write(dx + done * args.dx_stride, out);
    }
    begin = stop;
  }
  if (partial == nullptr) return;
  float* own = partial + blockIdx.y * (args.width + 1) * args.channels + channel;
#pragma unroll
  for (int k = 0; k < Taps; ++k) {
    const int64_t tap = k - (Taps - args.width);
    if (tap >= 0) write(own + tap * args.channels, dtaps[k]);
  }
  write(own + args.width * args.channels, dbias);
}

/// dweight and dbias += the partial sums, [runs, width + 1, channels], in order.
__global__ void add_weight_gradients_kernel(const float* partial, int64_t runs, int64_t channels, int64_t width,
                                            float* dweight, float* dbias) {
  for_each_pack(width + 1, channels, [&](int64_t tap, int64_t channel) {
    float sum = 0;
#pragma unroll 8
    for (int64_t run = 0; run < runs; ++run) sum += partial[(run * (width + 1) + tap) * channels + channel];
    if (tap < width) {
      if (dweight != nullptr) dweight[channel * width + tap] += sum;
    } else if (dbias != nullptr) {
      dbias[channel] += sum;
    }
  });
}

/// Calls body(T*, W*, taps, width of a thread) for the storage types.
template <class Args, class Body>
void with_types(const Args& args, bool (*fits)(const Args&, int, int64_t), Body&& body) {
  with_dtype(args.dtype, [&](auto* t) {
    with_dtype(args.weight_dtype, [&](auto* w) {
      using T = std::remove_pointer_t<decltype(t)>;
      // Half a 16-byte pack of bf16: the window and the sums of eight channels would not fit the registers.
      constexpr int wide = 4;
      const auto run = [&](auto width) {
        if (args.width <= 4) {
          body(t, w, std::integral_constant<int, 4>{}, width);
        } else {
          body(t, w, std::integral_constant<int, 8>{}, std::integral_constant<int, 1>{});
        }
      };
      with_width<wide>(fits(args, wide, static_cast<int64_t>(sizeof(T))), run);
    });
  });
}

bool aligned(const void* pointer, int64_t stride, int64_t bytes, int64_t element) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0 && stride * element % bytes == 0;
}

}  // namespace

void causal_conv1d_forward(mimo_stream& stream, const mimo_causal_conv1d_forward_args& args) {
  MIMO_REQUIRE(args.width > 0 && args.width <= 8 && args.channels >= 0 && args.tokens >= 0, "causal_conv1d_forward");
  if (args.tokens == 0 || args.channels == 0) return;
  const auto fits = [](const mimo_causal_conv1d_forward_args& a, int wide, int64_t element) {
    return a.channels % wide == 0 && aligned(a.x, a.x_stride, wide * element, element) &&
           aligned(a.y, a.y_stride, wide * element, element);
  };
  with_types<mimo_causal_conv1d_forward_args>(args, fits, [&](auto* t, auto* w, auto taps, auto width) {
    using T = std::remove_pointer_t<decltype(t)>;
    using W = std::remove_pointer_t<decltype(w)>;
    launch(stream, forward_kernel<T, W, taps, width>,
           grid_of(ceil_div(args.channels, threads * width), ceil_div(args.tokens, forward_run)), dim3(threads), 0, args);
  });
}

void causal_conv1d_backward(mimo_stream& stream, const mimo_causal_conv1d_backward_args& args) {
  MIMO_REQUIRE(args.width > 0 && args.width <= 8 && args.channels >= 0 && args.tokens >= 0, "causal_conv1d_backward");
  if (args.tokens == 0 || args.channels == 0) return;
  const bool weights = args.dweight != nullptr || args.dbias != nullptr;
  const int64_t runs = ceil_div(args.tokens, backward_run);
  const int64_t partial_floats = weights ? runs * (args.width + 1) * args.channels : 0;
  Workspace workspace(&stream, partial_floats * static_cast<int64_t>(sizeof(float)));
  float* const partial = weights ? workspace.as<float>() : nullptr;
  const auto fits = [](const mimo_causal_conv1d_backward_args& a, int wide, int64_t element) {
    return a.channels % wide == 0 && aligned(a.x, a.x_stride, wide * element, element) &&
           aligned(a.dy, a.dy_stride, wide * element, element) && aligned(a.dx, a.dx_stride, wide * element, element);
  };
  with_types<mimo_causal_conv1d_backward_args>(args, fits, [&](auto* t, auto* w, auto taps, auto width) {
    using T = std::remove_pointer_t<decltype(t)>;
    using W = std::remove_pointer_t<decltype(w)>;
    launch(stream, backward_kernel<T, W, taps, width>, grid_of(ceil_div(args.channels, threads * width), runs),
           dim3(threads), 0, args, partial);
  });
  if (!weights) return;
  const auto [grid, block] = cover(args.width + 1, args.channels);
  launch(stream, add_weight_gradients_kernel, grid, block, 0, partial, runs, args.channels, args.width, args.dweight,
         args.dbias);
}

}  // namespace mimo::cuda
