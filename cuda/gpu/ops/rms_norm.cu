// RMSNorm and group RMSNorm (spec language-model 1.5, 2.2): y = h rsqrt(mean(h²) + ε) γ.
#include "norm.cuh"
#include "packed.cuh"

namespace mimo::cuda {
namespace {

template <class T, class W, int Width>
__global__ void __launch_bounds__(most_norm_threads) forward_kernel(mimo_rms_norm_forward_args args) {
  __shared__ float shared[2][32];
  const int64_t packs = args.group_size / Width, column = blockIdx.y * args.group_size;
  Packed<W, Width> weight[packs_per_thread];
  for_own_packs(packs, [&](int p, int64_t pack) {
    weight[p] = read_packed<Width>(static_cast<const W*>(args.weight) + column + pack * Width);
  });
  Packed<T, Width> x[packs_per_thread], residual[packs_per_thread];
  const auto fetch = [&](int64_t row) {
    if (row >= args.rows) return;
    for_own_packs(packs, [&](int p, int64_t pack) {
      const int64_t at = row * args.x_stride + column + pack * Width;
      x[p] = read_packed<Width>(static_cast<const T*>(args.x) + at);
      if (args.residual != nullptr) residual[p] = read_packed<Width>(static_cast<const T*>(args.residual) + at);
    });
  };
  fetch(blockIdx.x);
  int turn = 0;
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x, turn ^= 1) {
    float h[packs_per_thread][Width];
    float squares[1] = {0};
    for_own_packs(packs, [&](int p, int64_t pack) {
#pragma unroll
      for (int i = 0; i < Width; ++i) h[p][i] = x[p].get(i);
      if (args.residual != nullptr) {
        T* sum = static_cast<T*>(args.sum) + row * args.width + column + pack * Width;
#pragma unroll
        for (int i = 0; i < Width; ++i) h[p][i] = rounded(sum, h[p][i] + residual[p].get(i));
        write(sum, h[p]);
      }
#pragma unroll
      for (int i = 0; i < Width; ++i) squares[0] += h[p][i] * h[p][i];
    });
    fetch(row + gridDim.x);
    block_sum(squares, shared[turn]);
    const float rstd = 1.0f / sqrtf(squares[0] / static_cast<float>(args.group_size) + args.epsilon);
    if (threadIdx.x == 0) args.rstd[row * gridDim.y + blockIdx.y] = rstd;
    for_own_packs(packs, [&](int p, int64_t pack) {
#pragma unroll
      for (int i = 0; i < Width; ++i) h[p][i] = h[p][i] * rstd * weight[p].get(i);
      write(static_cast<T*>(args.y) + row * args.y_stride + column + pack * Width, h[p]);
    });
  }
}

/// Also the rows of one partial sum of the weights' gradients: many, as the sums are read again.
inline int64_t rows_of_partial(int64_t rows) { return larger(16, ceil_div(rows, 256)); }

/// dx = rstd (γ dy - x rstd mean) (+ dresidual), mean = Σ γ dy x rstd / size; partial[block] = Σ over rows of dy x rstd.
/// Ahead: rows come through shared memory, several at a time.
template <class T, class W, int Width, bool Ahead>
__global__ void backward_kernel(mimo_rms_norm_backward_args args, int64_t rows_per_block, float* partial) {
  extern __shared__ __align__(16) char copied[];
  __shared__ float shared[2][32];
  const int64_t packs = args.group_size / Width, column = blockIdx.y * args.group_size;
  float weight[packs_per_thread][Width], dweight[packs_per_thread][Width] = {};
  for_own_packs(packs, [&](int p, int64_t pack) {
    read(static_cast<const W*>(args.weight) + column + pack * Width, weight[p]);
  });
  const int64_t begin = blockIdx.x * rows_per_block, end = smaller(begin + rows_per_block, args.rows);
  const T* const x_data = static_cast<const T*>(args.x) + column;
  const T* const dy_data = static_cast<const T*>(args.dy) + column;
  const T* const residual_data = static_cast<const T*>(args.dresidual);
  const RowsAhead<T, Width> ahead{copied};
  const auto start = [&](int64_t row) {
    if (row < end) {
      for_own_packs(packs, [&](int p, int64_t pack) {
        ahead.copy(x_data + row * args.x_stride + pack * Width, row, 0, p);
        ahead.copy(dy_data + row * args.dy_stride + pack * Width, row, 1, p);
        if (residual_data != nullptr) {
          ahead.copy(residual_data + row * args.dx_stride + column + pack * Width, row, 2, p);
        }
      });
    }
    copy_commit();  // empty groups keep the count of those under way
  };
  if constexpr (Ahead) {
    for (int64_t row = begin; row < begin + rows_ahead - 1; ++row) start(row);
  }
  const float* const rstds = args.rstd + blockIdx.y;
  float rstd = begin < end ? rstds[begin * gridDim.y] : 0.0f;
  for (int64_t row = begin; row < end; ++row) {
    const float next_rstd = row + 1 < end ? rstds[(row + 1) * gridDim.y] : 0.0f;
    float x[packs_per_thread][Width], dy[packs_per_thread][Width], residual[packs_per_thread][Width] = {};
    float dot[1] = {0};
    if constexpr (Ahead) {
      copy_wait<rows_ahead - 2>();
      start(row + rows_ahead - 1);
    }
    for_own_packs(packs, [&](int p, int64_t pack) {
      read(Ahead ? ahead.get(row, 0, p) : x_data + row * args.x_stride + pack * Width, x[p]);
      read(Ahead ? ahead.get(row, 1, p) : dy_data + row * args.dy_stride + pack * Width, dy[p]);
      // Wanted only after the sum, but on its way meanwhile.
      if (residual_data != nullptr) {
        read(Ahead ? ahead.get(row, 2, p) : residual_data + row * args.dx_stride + column + pack * Width, residual[p]);
      }
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        const float product = dy[p][i] * x[p][i];
        dweight[p][i] += product * rstd;
        dot[0] += product * weight[p][i];
      }
    });
    block_sum(dot, shared[row & 1]);
    const float scaled_mean = dot[0] * rstd / static_cast<float>(args.group_size) * rstd;
    for_own_packs(packs, [&](int p, int64_t pack) {
      const int64_t at = row * args.dx_stride + column + pack * Width;
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        dy[p][i] = residual[p][i] + rstd * (weight[p][i] * dy[p][i] - x[p][i] * scaled_mean);
      }
      write(static_cast<T*>(args.dx) + at, dy[p]);
    });
    rstd = next_rstd;
  }
  if (partial == nullptr) return;
  for_own_packs(packs, [&](int p, int64_t pack) {
    write(partial + blockIdx.x * args.width + column + pack * Width, dweight[p]);
  });
}

}  // namespace

void rms_norm_forward(mimo_stream& stream, const mimo_rms_norm_forward_args& args) {
  MIMO_REQUIRE(args.group_size > 0 && args.width % args.group_size == 0, "rms_norm_forward");
  MIMO_REQUIRE(args.residual == nullptr || args.sum != nullptr, "rms_norm_forward");
  if (args.rows == 0) return;
  const int64_t groups = args.width / args.group_size;
  with_dtype(args.dtype, [&](auto* t) {
    with_dtype(args.weight_dtype, [&](auto* w) {
      using T = std::remove_pointer_t<decltype(t)>;
      using W = std::remove_pointer_t<decltype(w)>;
      constexpr int wide = vector_width<T>;
      const auto fits = [&](const void* pointer, int64_t stride) {
        return packs_fit<T>(pointer, args.group_size, stride, wide);
      };
      with_width<wide>(fits(args.x, args.x_stride) && fits(args.residual, args.x_stride) &&
                           fits(args.sum, args.width) && fits(args.y, args.y_stride) &&
                           packs_fit<W>(args.weight, args.group_size, 0, wide),
                       [&](auto width) {
                         const unsigned threads = norm_threads(args.group_size / width);
                         const dim3 grid = forward_grid(stream, args.rows, groups, threads, args.residual ? 2 : 1);
                         launch(stream, forward_kernel<T, W, width>, grid, dim3(threads), 0, args);
                       });
    });
  });
}

void rms_norm_backward(mimo_stream& stream, const mimo_rms_norm_backward_args& args) {
  MIMO_REQUIRE(args.group_size > 0 && args.width % args.group_size == 0, "rms_norm_backward");
  if (args.rows == 0) return;
  const int64_t groups = args.width / args.group_size, rows_per_block = rows_of_partial(args.rows);
  const int64_t partials = ceil_div(args.rows, rows_per_block);
  Workspace workspace(&stream, args.dweight ? partials * args.width * static_cast<int64_t>(sizeof(float)) : 0);
  float* partial = args.dweight ? workspace.as<float>() : nullptr;
  with_dtype(args.dtype, [&](auto* t) {
    with_dtype(args.weight_dtype, [&](auto* w) {
      using T = std::remove_pointer_t<decltype(t)>;
      using W = std::remove_pointer_t<decltype(w)>;
      constexpr int wide = vector_width<T>;
      const auto fits = [&](const void* pointer, int64_t stride) {
        return packs_fit<T>(pointer, args.group_size, stride, wide);
      };
      with_width<wide>(fits(args.dy, args.dy_stride) && fits(args.x, args.x_stride) && fits(args.dx, args.dx_stride) &&
                           fits(args.dresidual, args.dx_stride) && packs_fit<W>(args.weight, args.group_size, 0, wide),
                       [&](auto width) {
                         const unsigned threads = norm_threads(args.group_size / width);
                         const dim3 grid = grid_of(partials, groups);
                         const int64_t bytes = ahead_bytes(threads);
                         // Two blocks share a multiprocessor's memory.
                         if constexpr (RowsAhead<T, width>::possible) {
                           if (2 * bytes <= stream.device->shared_bytes_per_block) {
                             launch(stream, backward_kernel<T, W, width, true>, grid, dim3(threads), bytes, args,
                                    rows_per_block, partial);
                             return;
                           }
                         }
                         launch(stream, backward_kernel<T, W, width, false>, grid, dim3(threads), 0, args,
                                rows_per_block, partial);
                       });
    });
  });
  if (partial != nullptr) add_partials(stream, partial, partials, args.width, args.dweight);
}

}  // namespace mimo::cuda
