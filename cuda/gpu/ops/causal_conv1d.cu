// Depthwise causal conv1d with SiLU, x [tokens, channels] (docs/spec/language-model.md §2.2 step 2; backward §2.4):
// p[t, c] = bias[c] + Σ_k weight[c, k] x[t - (Taps - 1) + k, c], y = p σ(p). A thread owns a few channels and slides
// over a run of tokens with the last inputs in registers, so each input is read once, plus a halo at the run's start.
#include "column_sums.cuh"
#include "mma.cuh"
#include "packed.cuh"

namespace mimo::cuda {
namespace {

constexpr int threads = 128;
/// 64 such runs of 6144 channels fill an H200 once.
constexpr int64_t forward_run = 128;  // tokens
/// Tokens whose loads are in flight while the previous ones are computed: single loads would expose memory latency.
constexpr int batch_tokens = 4;
/// Tokens of a run in backward, which is also the extent of one partial sum of dweight: 44 runs of 6144 channels fill
/// an H200 once.
inline int64_t backward_run(int64_t tokens) {
  return larger(48, smaller(188, round_up(ceil_div(tokens, 44), batch_tokens)));
}
/// Resident blocks an SM for bf16 with 4 taps: the most that their register use allows.
template <class T, int Taps>
constexpr int forward_blocks = sizeof(T) == 2 && Taps == 4 ? 6 : 1;
template <class T, int Taps>
constexpr int backward_blocks = sizeof(T) == 2 && Taps == 4 ? 4 : 1;

/// taps[k]: the weight of the token k - (Taps - 1) steps away; 0 beyond the convolution's width.
template <class W, int Taps, int Width>
__device__ __forceinline__ void load_taps(const W* weight, int64_t channel, int64_t width, float (&taps)[Taps][Width]) {
  const W* const own = weight + channel * width;
  if (Taps * Width * sizeof(W) % 16 == 0 && width == Taps && reinterpret_cast<uintptr_t>(own) % 16 == 0) {
    float all[Taps * Width];
    read(own, all);
#pragma unroll
    for (int k = 0; k < Taps; ++k) {
#pragma unroll
      for (int i = 0; i < Width; ++i) taps[k][i] = all[i * Taps + k];
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < Taps; ++k) {
    const int64_t tap = k - (Taps - width);
#pragma unroll
    for (int i = 0; i < Width; ++i) taps[k][i] = tap >= 0 ? load(own + i * width + tap) : 0.0f;
  }
}

/// Shifts the window by one token.
template <int Taps, int Width>
__device__ __forceinline__ void shift(float (&window)[Taps][Width]) {
#pragma unroll
  for (int k = 0; k + 1 < Taps; ++k) {
#pragma unroll
    for (int i = 0; i < Width; ++i) window[k][i] = window[k + 1][i];
  }
}

/// Fills the window with the Taps - 1 tokens before `token`; zeros before the sequence's first token.
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

/// Loads tokens token .. token + Batch - 1 of x below `end`; values from `end` on are undefined.
template <int Batch, class T, int Width>
__device__ __forceinline__ void read_batch(const T* x, int64_t stride, int token, int end,
                                           Packed<T, Width> (&to)[Batch]) {
  const T* from = x + token * stride;
#pragma unroll
  for (int i = 0; i < Batch; ++i, from += stride) {
    if (token + i < end) to[i] = read_packed<Width>(from);
  }
}

__device__ __forceinline__ float sigmoid_for(const float*, float x) { return sigmoid(x); }
__device__ __forceinline__ float sigmoid_for(const bf16* type, float x) {
  float quotient;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(1.0f + exp_for(type, -x)));
  return quotient;
}

/// Shifts a token into the window and returns the convolution at it.
template <class T, int Taps, int Width>
__device__ __forceinline__ void convolve(const Packed<T, Width>& token, const float (&taps)[Taps][Width],
                                         const float (&bias)[Width], float (&window)[Taps][Width], float (&p)[Width]) {
  shift(window);
#pragma unroll
  for (int i = 0; i < Width; ++i) {
    window[Taps - 1][i] = token.get(i);
    p[i] = bias[i];
#pragma unroll
    for (int k = 0; k < Taps; ++k) p[i] += taps[k][i] * window[k][i];
  }
}

template <class T, class W, int Taps, int Width>
__global__ void __launch_bounds__(threads, forward_blocks<T, Taps>)
    forward_kernel(mimo_causal_conv1d_forward_args args) {
  previous_is_done();
  let_next_start();
  const int64_t channel = (static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x) * Width;
  if (channel >= args.channels) return;
  float taps[Taps][Width], bias[Width], window[Taps][Width] = {};
  load_taps(static_cast<const W*>(args.weight), channel, args.width, taps);
#pragma unroll
  for (int i = 0; i < Width; ++i) bias[i] = args.bias == nullptr ? 0.0f : load(static_cast<const W*>(args.bias) + channel + i);
  const T* x = static_cast<const T*>(args.x) + channel;
  T* y = static_cast<T*>(args.y) + channel;
  const int64_t end = smaller((blockIdx.y + 1) * forward_run, args.tokens);
  int64_t sequence = sequence_of(args.cu_seqlens, args.sequences, blockIdx.y * forward_run);
  for (int64_t begin = blockIdx.y * forward_run; begin < end; ++sequence) {
    // The part of this sequence that lies in the run.
    const int64_t stop = smaller(args.cu_seqlens[sequence + 1], end);
    if (stop <= begin) continue;
    const int count = static_cast<int>(stop - begin);
    const T* const from = x + begin * args.x_stride;
    T* to = y + begin * args.y_stride;
    Packed<T, Width> batch[batch_tokens], next[batch_tokens];
    read_batch(from, args.x_stride, 0, count, batch);
    start(x, args.x_stride, begin, args.cu_seqlens[sequence], window);
    for (int token = 0; token < count; token += batch_tokens) {
      read_batch(from, args.x_stride, token + batch_tokens, count, next);
#pragma unroll
      for (int j = 0; j < batch_tokens; ++j, to += args.y_stride) {
        float p[Width];
        convolve(batch[j], taps, bias, window, p);
#pragma unroll
        for (int i = 0; i < Width; ++i) p[i] *= sigmoid_for(y, p[i]);
        if (token + j < count) write(to, p);
        batch[j] = next[j];
      }
    }
    begin = stop;
  }
}

/// Pipelined loads of x and dy for a thread's channels, batch by batch. If a thread's channels of a token are 8 or 16
/// bytes, cp.async keeps several batches in flight in shared memory; each thread reads only its own copies, so no
/// barrier is needed.
template <class T, int Width>
class TokensAhead {
 public:
  using Batch = Packed<T, Width>[batch_tokens];
  static constexpr int piece = Width * sizeof(T);
  static constexpr bool copied = piece == 8 || piece == 16;
  static constexpr int ring = 4;  // batches in flight
  static constexpr int shared_bytes = copied ? ring * batch_tokens * 2 * piece * threads : 0;

  /// `readable` tokens follow `x` and `dy`; the first batch has number 0.
  __device__ TokensAhead(char* memory, const T* x, int64_t x_stride, const T* dy, int64_t dy_stride, int readable)
      : memory_(memory + threadIdx.x * piece), x_(x), dy_(dy), x_stride_(x_stride), dy_stride_(dy_stride),
        readable_(readable) {
    if constexpr (copied) {
#pragma unroll
      for (int number = 0; number < ring - 1; ++number) start(number);
    }
  }
  /// Returns batch `number`; to be called in order. Values of tokens past `readable` are left unchanged.
  __device__ __forceinline__ void get(int number, Batch& x, Batch& dy) {
    if constexpr (copied) {
      copy_wait<ring - 2>();
#pragma unroll
      for (int i = 0; i < batch_tokens; ++i) {
        x[i] = *reinterpret_cast<const Packed<T, Width>*>(place(number, i, 0));
        dy[i] = *reinterpret_cast<const Packed<T, Width>*>(place(number, i, 1));
      }
      start(number + ring - 1);
    } else {
      read_batch(x_, x_stride_, number * batch_tokens, readable_, x);
      read_batch(dy_, dy_stride_, number * batch_tokens, readable_, dy);
    }
  }
  /// To be called before the memory is reused for other tokens.
  __device__ __forceinline__ void finish() {
    if constexpr (copied) copy_wait<0>();
  }

 private:
  __device__ __forceinline__ char* place(int number, int token, int tensor) const {
    return memory_ + ((number % ring * batch_tokens + token) * 2 + tensor) * (piece * threads);
  }
  __device__ __forceinline__ void start(int number) {
    const int first = number * batch_tokens;
    const T* x = x_ + first * x_stride_;
    const T* dy = dy_ + first * dy_stride_;
#pragma unroll
    for (int i = 0; i < batch_tokens; ++i, x += x_stride_, dy += dy_stride_) {
      if (first + i < readable_) {
        copy_piece_async<piece>(place(number, i, 0), x);
        copy_piece_async<piece>(place(number, i, 1), dy);
      }
    }
    copy_commit();  // empty groups keep the number of groups in flight constant
  }

  char* memory_;
  const T *x_, *dy_;
  int64_t x_stride_, dy_stride_;
  int readable_;
};

/// Computes dp, the gradient before SiLU; dx[t] = Σ_k taps[k] dp[t + Taps - 1 - k] within the sequence; and
/// partial[run] = Σ over the run of dp x (a row for each tap) and of dp.
template <class T, class W, int Taps, int Width>
__global__ void __launch_bounds__(threads, backward_blocks<T, Taps>)
    backward_kernel(mimo_causal_conv1d_backward_args args, int64_t run, float* partial) {
  extern __shared__ __align__(16) char copied[];
  previous_is_done();
  const int64_t channel = (static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x) * Width;
  if (channel >= args.channels) return;
  float taps[Taps][Width], bias[Width], window[Taps][Width] = {}, dp[Taps][Width] = {};
  float dtaps[Taps][Width] = {}, dbias[Width] = {};
  load_taps(static_cast<const W*>(args.weight), channel, args.width, taps);
#pragma unroll
  for (int i = 0; i < Width; ++i) bias[i] = args.bias == nullptr ? 0.0f : load(static_cast<const W*>(args.bias) + channel + i);
  const T* x = static_cast<const T*>(args.x) + channel;
  const T* dy = static_cast<const T*>(args.dy) + channel;
  T* dx = static_cast<T*>(args.dx) + channel;
  const int64_t end = smaller((blockIdx.y + 1) * run, args.tokens);
  int64_t sequence = sequence_of(args.cu_seqlens, args.sequences, blockIdx.y * run);
  for (int64_t begin = blockIdx.y * run; begin < end; ++sequence) {
    // The part of this sequence that lies in the run. dp of the tokens after it is recomputed by the next run.
    const int64_t first = args.cu_seqlens[sequence], last = args.cu_seqlens[sequence + 1];
    const int64_t stop = smaller(last, end);
    if (stop <= begin) continue;
    // Counted from `begin`: this run's tokens; those plus the tokens whose dp its dx needs; and how many of these the
    // sequence has.
    const int count = static_cast<int>(stop - begin), beyond = count + Taps - 1;
    const int readable = static_cast<int>(smaller(last - begin, beyond));
    T* to = dx + (begin - (Taps - 1)) * args.dx_stride;
    TokensAhead<T, Width> ahead(copied, x + begin * args.x_stride, args.x_stride, dy + begin * args.dy_stride,
                                args.dy_stride, readable);
    start(x, args.x_stride, begin, first, window);
    for (int batch = 0; batch < beyond; batch += batch_tokens) {
      Packed<T, Width> x_batch[batch_tokens], dy_batch[batch_tokens];
      ahead.get(batch / batch_tokens, x_batch, dy_batch);
#pragma unroll
      for (int j = 0; j < batch_tokens; ++j, to += args.dx_stride) {
        const int token = batch + j, done = token - (Taps - 1);
        float p[Width], out[Width];
        convolve(x_batch[j], taps, bias, window, p);
        shift(dp);
        // Selects instead of branches: only the last batches of a run are incomplete.
        const bool in_sequence = token < readable, in_piece = token < count;
#pragma unroll
        for (int i = 0; i < Width; ++i) {
          const float s = sigmoid_for(dx, p[i]);
          const float d = dy_batch[j].get(i) * s * (1.0f + p[i] * (1.0f - s));
          dp[Taps - 1][i] = in_sequence ? d : 0.0f;
          if (in_piece) {
#pragma unroll
            for (int k = 0; k < Taps; ++k) dtaps[k][i] += d * window[k][i];
            dbias[i] += d;
          }
          out[i] = 0.0f;
#pragma unroll
          for (int k = 0; k < Taps; ++k) out[i] += taps[Taps - 1 - k][i] * dp[k][i];
        }
        if (done >= 0 && done < count) write(to, out);
      }
    }
    ahead.finish();
    begin = stop;
  }
  let_next_start();
  if (partial == nullptr) return;
  float* own = partial + blockIdx.y * (args.width + 1) * args.channels + channel;
#pragma unroll
  for (int k = 0; k < Taps; ++k) {
    const int64_t tap = k - (Taps - args.width);
    if (tap >= 0) write(own + tap * args.channels, dtaps[k]);
  }
  write(own + args.width * args.channels, dbias);
}

/// dweight and dbias += Σ of the partial sums [runs, width + 1, channels].
__global__ void add_weight_gradients_kernel(const float* partial, int64_t runs, int64_t channels, int64_t width,
                                            float* dweight, float* dbias) {
  previous_is_done();
  let_next_start();
  const int64_t columns = (width + 1) * channels, column = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
  const float sum = sum_partials(partial, runs, columns, column);
  if (threadIdx.y != 0 || column >= columns) return;
  const int64_t tap = column / channels, channel = column % channels;
  if (tap < width) {
    if (dweight != nullptr) dweight[channel * width + tap] += sum;
  } else if (dbias != nullptr) {
    dbias[channel] += sum;
  }
}

/// Calls body(T*, W*, taps, channels of a thread) for the storage types.
template <class Args, class Body>
void with_types(const Args& args, bool (*fits)(const Args&, int, int64_t), Body&& body) {
  with_dtype(args.dtype, [&](auto* t) {
    with_dtype(args.weight_dtype, [&](auto* w) {
      using T = std::remove_pointer_t<decltype(t)>;
      // 8 bytes of bf16: the window and sums of eight channels would not fit in registers.
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
    launch_early(stream, forward_kernel<T, W, taps, width>,
           grid_of(ceil_div(args.channels, threads * width), ceil_div(args.tokens, forward_run)), dim3(threads), 0, args);
  });
}

void causal_conv1d_backward(mimo_stream& stream, const mimo_causal_conv1d_backward_args& args) {
  MIMO_REQUIRE(args.width > 0 && args.width <= 8 && args.channels >= 0 && args.tokens >= 0, "causal_conv1d_backward");
  if (args.tokens == 0 || args.channels == 0) return;
  const bool weights = args.dweight != nullptr || args.dbias != nullptr;
  const int64_t run = backward_run(args.tokens), runs = ceil_div(args.tokens, run);
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
    launch_early(stream, backward_kernel<T, W, taps, width>, grid_of(ceil_div(args.channels, threads * width), runs),
           dim3(threads), TokensAhead<T, width>::shared_bytes, args, run, partial);
  });
  if (!weights) return;
  launch_early(stream, add_weight_gradients_kernel, grid_of(ceil_div((args.width + 1) * args.channels, 32)),
         dim3(32, partial_lanes), 0, partial, runs, args.channels, args.width, args.dweight, args.dbias);
}

}  // namespace mimo::cuda
