// LayerNorm: y = (x - mean) rstd γ + β over whole rows, biased variance.
#include "norm.cuh"

namespace mimo::cuda {
namespace {

template <class T, class W, int Width>
__global__ void __launch_bounds__(most_norm_threads) forward_kernel(mimo_layer_norm_forward_args args) {
  __shared__ float shared[2][2][32];
  const int64_t packs = args.width / Width;
  const float inverse_width = 1.0f / static_cast<float>(args.width);
  Packed<W, Width> weight[packs_per_thread], bias[packs_per_thread];
  for_own_packs(packs, [&](int p, int64_t pack) {
    weight[p] = read_packed<Width>(static_cast<const W*>(args.weight) + pack * Width);
    bias[p] = read_packed<Width>(static_cast<const W*>(args.bias) + pack * Width);
  });
  Packed<T, Width> next[packs_per_thread];
  const auto fetch = [&](int64_t row) {
    if (row >= args.rows) return;
    for_own_packs(packs, [&](int p, int64_t pack) {
      next[p] = read_packed<Width>(static_cast<const T*>(args.x) + row * args.width + pack * Width);
    });
  };
  fetch(blockIdx.x);
  int turn = 0;
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x, turn ^= 1) {
    float x[packs_per_thread][Width];
    float sum[1] = {0}, squares[1] = {0};
    for_own_packs(packs, [&](int p, int64_t) {
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        x[p][i] = next[p].get(i);
        sum[0] += x[p][i];
      }
    });
    fetch(row + gridDim.x);
    block_sum(sum, shared[turn][0]);
    const float mean = sum[0] * inverse_width;
    for_own_packs(packs, [&](int p, int64_t) {
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        x[p][i] -= mean;
        squares[0] += x[p][i] * x[p][i];
      }
    });
    block_sum(squares, shared[turn][1]);
    const float rstd = 1.0f / sqrtf(squares[0] * inverse_width + args.epsilon);
    if (threadIdx.x == 0) {
      args.mean[row] = mean;
      args.rstd[row] = rstd;
    }
    for_own_packs(packs, [&](int p, int64_t pack) {
#pragma unroll
      for (int i = 0; i < Width; ++i) x[p][i] = x[p][i] * rstd * weight[p].get(i) + bias[p].get(i);
      write(static_cast<T*>(args.y) + row * args.width + pack * Width, x[p]);
    });
  }
}

/// Rows of one partial sum of the weights' gradients.
inline int64_t rows_of_partial(int64_t rows) { return larger(16, ceil_div(rows, 512)); }

/// With n = (x - mean) rstd and g = γ dy: dx = rstd (g - mean(g) - n mean(g n)) (+ dresidual).
/// partial[block] = Σ over rows of dy n, then of dy.
/// Ahead: rows come through shared memory, several at a time.
template <class T, class W, int Width, bool Ahead>
__global__ void backward_kernel(mimo_layer_norm_backward_args args, int64_t rows_per_block, float* partial_weight,
                                float* partial_bias) {
  extern __shared__ __align__(16) char copied[];
  __shared__ float shared[2][2 * 32];
  const int64_t packs = args.width / Width;
  const float inverse_width = 1.0f / static_cast<float>(args.width);
  float weight[packs_per_thread][Width], dweight[packs_per_thread][Width] = {}, dbias[packs_per_thread][Width] = {};
  for_own_packs(packs, [&](int p, int64_t pack) {
    read(static_cast<const W*>(args.weight) + pack * Width, weight[p]);
  });
  const int64_t begin = blockIdx.x * rows_per_block, end = smaller(begin + rows_per_block, args.rows);
  const T* const tensors[copied_tensors] = {static_cast<const T*>(args.x), static_cast<const T*>(args.dy),
                                            static_cast<const T*>(args.dresidual)};
  const RowsAhead<T, Width> ahead{copied};
  const auto start = [&](int64_t row) {
    if (row < end) {
      for_own_packs(packs, [&](int p, int64_t pack) {
#pragma unroll
        for (int tensor = 0; tensor < copied_tensors; ++tensor) {
          if (tensors[tensor] != nullptr) ahead.copy(tensors[tensor] + row * args.width + pack * Width, row, tensor, p);
        }
      });
    }
    copy_commit();  // empty groups keep the count of those under way
  };
  if constexpr (Ahead) {
    for (int64_t row = begin; row < begin + rows_ahead - 1; ++row) start(row);
  }
  float mean = begin < end ? args.mean[begin] : 0.0f, rstd = begin < end ? args.rstd[begin] : 0.0f;
  for (int64_t row = begin; row < end; ++row) {
    const float next_mean = row + 1 < end ? args.mean[row + 1] : 0.0f;
    const float next_rstd = row + 1 < end ? args.rstd[row + 1] : 0.0f;
    float n[packs_per_thread][Width], dy[packs_per_thread][Width], residual[packs_per_thread][Width] = {};
    float sums[2] = {0, 0};
    if constexpr (Ahead) {
      copy_wait<rows_ahead - 2>();
      start(row + rows_ahead - 1);
    }
    for_own_packs(packs, [&](int p, int64_t pack) {
      const int64_t at = row * args.width + pack * Width;
      read(Ahead ? ahead.get(row, 0, p) : tensors[0] + at, n[p]);
      read(Ahead ? ahead.get(row, 1, p) : tensors[1] + at, dy[p]);
      // Wanted only after the sums, but on its way meanwhile.
      if (tensors[2] != nullptr) read(Ahead ? ahead.get(row, 2, p) : tensors[2] + at, residual[p]);
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        n[p][i] = (n[p][i] - mean) * rstd;
        dbias[p][i] += dy[p][i];
        dweight[p][i] += dy[p][i] * n[p][i];
        dy[p][i] *= weight[p][i];
        sums[0] += dy[p][i];
        sums[1] += dy[p][i] * n[p][i];
      }
    });
    block_sum(sums, shared[row & 1]);
    for_own_packs(packs, [&](int p, int64_t pack) {
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        dy[p][i] = residual[p][i] + rstd * (dy[p][i] - (sums[0] + n[p][i] * sums[1]) * inverse_width);
      }
      write(static_cast<T*>(args.dx) + row * args.width + pack * Width, dy[p]);
    });
    mean = next_mean, rstd = next_rstd;
  }
  for_own_packs(packs, [&](int p, int64_t pack) {
    const int64_t at = blockIdx.x * args.width + pack * Width;
    if (partial_weight != nullptr) write(partial_weight + at, dweight[p]);
    if (partial_bias != nullptr) write(partial_bias + at, dbias[p]);
  });
}

}  // namespace

void layer_norm_forward(mimo_stream& stream, const mimo_layer_norm_forward_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width > 0, "layer_norm_forward");
  if (args.rows == 0) return;
  with_dtype(args.dtype, [&](auto* t) {
    with_dtype(args.weight_dtype, [&](auto* w) {
      using T = std::remove_pointer_t<decltype(t)>;
      using W = std::remove_pointer_t<decltype(w)>;
      constexpr int wide = vector_width<T>;
      const bool fits = packs_fit<T>(args.x, args.width, args.width, wide) &&
                        packs_fit<T>(args.y, args.width, args.width, wide) &&
                        packs_fit<W>(args.weight, args.width, 0, wide) && packs_fit<W>(args.bias, args.width, 0, wide);
      with_width<wide>(fits, [&](auto width) {
        const unsigned threads = norm_threads(args.width / width);
        launch(stream, forward_kernel<T, W, width>, forward_grid(stream, args.rows, 1, threads, 1), dim3(threads), 0,
               args);
      });
    });
  });
}

void layer_norm_backward(mimo_stream& stream, const mimo_layer_norm_backward_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width > 0, "layer_norm_backward");
  if (args.rows == 0) return;
  const int64_t rows_per_block = rows_of_partial(args.rows), partials = ceil_div(args.rows, rows_per_block);
  const int64_t partial_bytes = partials * args.width * static_cast<int64_t>(sizeof(float));
  Workspace weight_space(&stream, args.dweight ? partial_bytes : 0);
  Workspace bias_space(&stream, args.dbias ? partial_bytes : 0);
  float* partial_weight = args.dweight ? weight_space.as<float>() : nullptr;
  float* partial_bias = args.dbias ? bias_space.as<float>() : nullptr;
  with_dtype(args.dtype, [&](auto* t) {
    with_dtype(args.weight_dtype, [&](auto* w) {
      using T = std::remove_pointer_t<decltype(t)>;
      using W = std::remove_pointer_t<decltype(w)>;
      constexpr int wide = vector_width<T>;
      const auto fits = [&](const void* pointer) { return packs_fit<T>(pointer, args.width, args.width, wide); };
      with_width<wide>(fits(args.dy) && fits(args.x) && fits(args.dx) && fits(args.dresidual) &&
                           packs_fit<W>(args.weight, args.width, 0, wide),
                       [&](auto width) {
                         const unsigned threads = norm_threads(args.width / width);
                         const int64_t bytes = ahead_bytes(threads);
                         // Two blocks share a multiprocessor's memory.
                         if constexpr (RowsAhead<T, width>::possible) {
                           if (2 * bytes <= stream.device->shared_bytes_per_block) {
                             launch(stream, backward_kernel<T, W, width, true>, grid_of(partials), dim3(threads), bytes,
                                    args, rows_per_block, partial_weight, partial_bias);
                             return;
                           }
                         }
                         launch(stream, backward_kernel<T, W, width, false>, grid_of(partials), dim3(threads), 0, args,
                                rows_per_block, partial_weight, partial_bias);
                       });
    });
  });
  if (partial_weight == nullptr && partial_bias == nullptr) return;
  add_partials_of_two(stream, partial_weight, args.dweight, partial_bias, args.dbias, partials, args.width);
}

}  // namespace mimo::cuda
