// LayerNorm: y = (x - mean) rstd γ + β over whole rows, biased variance.
#include "norm.cuh"

namespace mimo::cuda {
namespace {

template <class T, class W, int Width>
__global__ void forward_kernel(mimo_layer_norm_forward_args args, int64_t rows_per_block) {
  __shared__ float shared[2][2][32];
  const int64_t packs = args.width / Width;
  const float inverse_width = 1.0f / static_cast<float>(args.width);
  float weight[packs_per_thread][Width], bias[packs_per_thread][Width];
  for_own_packs(packs, [&](int p, int64_t pack) {
    read(static_cast<const W*>(args.weight) + pack * Width, weight[p]);
    read(static_cast<const W*>(args.bias) + pack * Width, bias[p]);
  });
  const int64_t begin = blockIdx.x * rows_per_block, end = smaller(begin + rows_per_block, args.rows);
  for (int64_t row = begin; row < end; ++row) {
    float x[packs_per_thread][Width];
    float sum[1] = {0}, squares[1] = {0};
    for_own_packs(packs, [&](int p, int64_t pack) {
      read(static_cast<const T*>(args.x) + row * args.width + pack * Width, x[p]);
#pragma unroll
      for (int i = 0; i < Width; ++i) sum[0] += x[p][i];
    });
    block_sum(sum, shared[row & 1][0]);
    const float mean = sum[0] * inverse_width;
    for_own_packs(packs, [&](int p, int64_t) {
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        x[p][i] -= mean;
        squares[0] += x[p][i] * x[p][i];
      }
    });
    block_sum(squares, shared[row & 1][1]);
    const float rstd = 1.0f / sqrtf(squares[0] * inverse_width + args.epsilon);
    if (threadIdx.x == 0) {
      args.mean[row] = mean;
      args.rstd[row] = rstd;
    }
    for_own_packs(packs, [&](int p, int64_t pack) {
#pragma unroll
      for (int i = 0; i < Width; ++i) x[p][i] = x[p][i] * rstd * weight[p][i] + bias[p][i];
      write(static_cast<T*>(args.y) + row * args.width + pack * Width, x[p]);
    });
  }
}

/// With n = (x - mean) rstd and g = γ dy: dx = rstd (g - mean(g) - n mean(g n)) (+ dresidual).
/// partial[block] = Σ over rows of dy n, then of dy.
template <class T, class W, int Width>
__global__ void backward_kernel(mimo_layer_norm_backward_args args, int64_t rows_per_block, float* partial_weight,
                                float* partial_bias) {
  __shared__ float shared[2][2 * 32];
  const int64_t packs = args.width / Width;
  const float inverse_width = 1.0f / static_cast<float>(args.width);
  float weight[packs_per_thread][Width], dweight[packs_per_thread][Width] = {}, dbias[packs_per_thread][Width] = {};
  for_own_packs(packs, [&](int p, int64_t pack) {
    read(static_cast<const W*>(args.weight) + pack * Width, weight[p]);
  });
  const int64_t begin = blockIdx.x * rows_per_block, end = smaller(begin + rows_per_block, args.rows);
  for (int64_t row = begin; row < end; ++row) {
    const float mean = args.mean[row], rstd = args.rstd[row];
    float n[packs_per_thread][Width], dy[packs_per_thread][Width];
    float sums[2] = {0, 0};
    for_own_packs(packs, [&](int p, int64_t pack) {
      const int64_t at = row * args.width + pack * Width;
      read(static_cast<const T*>(args.x) + at, n[p]);
      read(static_cast<const T*>(args.dy) + at, dy[p]);
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
      const int64_t at = row * args.width + pack * Width;
      float residual[Width] = {};
      if (args.dresidual != nullptr) read(static_cast<const T*>(args.dresidual) + at, residual);
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        dy[p][i] = residual[i] + rstd * (dy[p][i] - (sums[0] + n[p][i] * sums[1]) * inverse_width);
      }
      write(static_cast<T*>(args.dx) + at, dy[p]);
    });
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
  const int64_t rows_per_block = forward_rows_per_block(args.rows, 1);
  with_dtype(args.dtype, [&](auto* t) {
    with_dtype(args.weight_dtype, [&](auto* w) {
      using T = std::remove_pointer_t<decltype(t)>;
      using W = std::remove_pointer_t<decltype(w)>;
      constexpr int wide = vector_width<T>;
      const bool fits = packs_fit<T>(args.x, args.width, args.width, wide) &&
                        packs_fit<T>(args.y, args.width, args.width, wide) &&
                        packs_fit<W>(args.weight, args.width, 0, wide) && packs_fit<W>(args.bias, args.width, 0, wide);
      with_width<wide>(fits, [&](auto width) {
        launch(stream, forward_kernel<T, W, width>, grid_of(ceil_div(args.rows, rows_per_block)),
               dim3(norm_threads(args.width / width)), 0, args, rows_per_block);
      });
    });
  });
}

void layer_norm_backward(mimo_stream& stream, const mimo_layer_norm_backward_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width > 0, "layer_norm_backward");
  if (args.rows == 0) return;
  const int64_t rows_per_block = backward_rows_per_block(args.rows), partials = ceil_div(args.rows, rows_per_block);
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
                         launch(stream, backward_kernel<T, W, width>, grid_of(partials),
                                dim3(norm_threads(args.width / width)), 0, args, rows_per_block, partial_weight,
                                partial_bias);
                       });
    });
  });
  if (partial_weight != nullptr) add_partials(stream, partial_weight, partials, args.width, args.dweight);
  if (partial_bias != nullptr) add_partials(stream, partial_bias, partials, args.width, args.dbias);
}

}  // namespace mimo::cuda
