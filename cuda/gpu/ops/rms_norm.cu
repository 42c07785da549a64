// RMSNorm and group RMSNorm, forward and backward (docs/spec/language-model.md §1.5, §2.2): y = s h rsqrt(mean(h²) + ε)
// γ with h = m x. Without masks (docs/spec/elastic.md §9) m = s = 1, and γ is weight_offset + weight. A residual r is fused: x
// becomes r + x, or r + f x with masks.
#include "norm.cuh"

namespace mimo::cuda {
namespace {

using LargeTeam = Team<6, 2>;  // rows of up to 3072 in bf16

struct Factors {
  const float* factors;  // of columns, or null
  const float* scale;    // of all columns, or null

  __device__ __forceinline__ float scale_or_one() const { return scale == nullptr ? 1.0f : *scale; }
  /// Loads the factors of a pack of columns, without the scale: they stay in the cache instead of registers.
  template <int Width>
  __device__ __forceinline__ void read_pack(bool live, int64_t column, float (&to)[Width]) const {
    const auto value = live && factors != nullptr ? read_packed<Width>(factors + column) : Packed<float, Width>{};
#pragma unroll
    for (int i = 0; i < Width; ++i) to[i] = factors == nullptr ? 1.0f : value.get(i);
  }
};

struct NormMasks {
  Factors norm;     // m and s
  Factors of_x{};  // f, with a residual
};

/// One team for each row and group of columns.
template <class T, class W, int Width, class Team, bool Residual, bool Masked>
__global__ void __launch_bounds__(forward_threads<Team>)
    forward_kernel(mimo_rms_norm_forward_args args, NormMasks masks) {
  __shared__ float shared[Team::sum_floats];
  previous_is_done();
  let_next_start();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= args.rows) return;
  const int packs = static_cast<int>(args.group_size) / Width;
  const int64_t column = blockIdx.y * args.group_size;
  const T* const x = static_cast<const T*>(args.x) + row * args.x_stride + column;
  const T* const residual = static_cast<const T*>(args.residual) + row * args.x_stride + column;
  Packed<T, Width> h[Team::packs], added[Team::packs];
  Packed<W, Width> weight[Team::packs];
  Team::for_packs([&](int p) {
    h[p] = read_if<Width>(Team::pack(p) < packs, x + Team::pack(p) * Width);
    if constexpr (Residual) added[p] = read_if<Width>(Team::pack(p) < packs, residual + Team::pack(p) * Width);
  });
  Team::for_packs([&](int p) {
    weight[p] = read_if<Width>(Team::pack(p) < packs, static_cast<const W*>(args.weight) + column + Team::pack(p) * Width);
  });
  float squares[1] = {0};
  const float x_scale = Residual && Masked ? masks.of_x.scale_or_one() : 1.0f;
  T* const sum = static_cast<T*>(args.sum) + row * args.width + column;
  Team::for_packs([&](int p) {
    if constexpr (Residual) {
      if constexpr (Masked) {
        float factor[Width];
        masks.of_x.read_pack(Team::pack(p) < packs, column + Team::pack(p) * Width, factor);
#pragma unroll
        for (int i = 0; i < Width; ++i) factor[i] = added[p].get(i) + x_scale * factor[i] * h[p].get(i);
        h[p] = packed<T>(factor);
      } else {
        h[p] = packed_sum(added[p], h[p]);
      }
      if (Team::pack(p) < packs) *reinterpret_cast<Packed<T, Width>*>(sum + Team::pack(p) * Width) = h[p];
    }
    if constexpr (Masked) {
      float factor[Width];
      masks.norm.read_pack(Team::pack(p) < packs, column + Team::pack(p) * Width, factor);
#pragma unroll
      for (int i = 0; i < Width; ++i) squares[0] += (factor[i] * h[p].get(i)) * (factor[i] * h[p].get(i));
    } else {
#pragma unroll
      for (int i = 0; i < Width; ++i) squares[0] += h[p].get(i) * h[p].get(i);
    }
  });
  Team::sum(squares, shared);
  stay_packed(h);
  const float rstd = __frsqrt_rn(squares[0] / static_cast<float>(args.group_size) + args.epsilon);
  if (threadIdx.x == 0) args.rstd[row * gridDim.y + blockIdx.y] = rstd;
  T* const to = static_cast<T*>(args.y) + row * args.y_stride + column;
  const float scaled = Masked ? rstd * masks.norm.scale_or_one() : rstd;
  Team::for_packs([&](int p) {
    float y[Width];
#pragma unroll
    for (int i = 0; i < Width; ++i) y[i] = h[p].get(i) * scaled * (args.weight_offset + weight[p].get(i));
    if constexpr (Masked) {
      float factor[Width];
      masks.norm.read_pack(Team::pack(p) < packs, column + Team::pack(p) * Width, factor);
#pragma unroll
      for (int i = 0; i < Width; ++i) y[i] *= factor[i];
    }
    if (Team::pack(p) < packs) write(to + Team::pack(p) * Width, y);
  });
}

/// dx = rstd (γ dy - x rstd mean) (+ dresidual), mean = Σ γ dy x rstd / size, and partial[block] = Σ over rows of dy x
/// rstd. Ahead: rows are prefetched to shared memory, several at a time. Masked: mean is s times as large, dx = rstd m
/// (s γ dy - m x rstd mean), and square_partial[block] = Σ over rows of x² rstd² mean.
template <class T, class W, int Width, class Team, bool Ahead, bool Masked>
__global__ void __launch_bounds__(backward_threads<Team, Width>)
    backward_kernel(mimo_rms_norm_backward_args args, NormMasks masks, int64_t rows_per_block, float* partial,
                    float* square_partial) {
  extern __shared__ __align__(16) char copied[];
  __shared__ float shared[2][Team::sum_floats];
  previous_is_done();
  const int packs = static_cast<int>(args.group_size) / Width;
  const int64_t column = blockIdx.y * args.group_size;
  const float inverse_size = 1.0f / static_cast<float>(args.group_size);
  const int64_t end = smaller((blockIdx.x + 1) * rows_per_block, args.rows);
  const T* const x_data = static_cast<const T*>(args.x) + column;
  const T* const dy_data = static_cast<const T*>(args.dy) + column;
  const T* const residual_data = args.dresidual == nullptr ? nullptr : static_cast<const T*>(args.dresidual) + column;
  const RowsAhead<Team, T, Width> ahead{copied};
  constexpr int rows = RowsAhead<Team, T, Width>::rows;
  const int64_t step = blockDim.y;
  const auto start = [&](int64_t row, int slot) {
    if (row < end) {
      Team::for_packs([&](int p) {
        const bool live = Team::pack(p) < packs;
        ahead.copy(x_data + row * args.x_stride + Team::pack(p) * Width, live, slot, 0, p);
        ahead.copy(dy_data + row * args.dy_stride + Team::pack(p) * Width, live, slot, 1, p);
        ahead.copy((residual_data == nullptr ? x_data + row * args.x_stride : residual_data + row * args.dx_stride) +
                       Team::pack(p) * Width,
                   live && residual_data != nullptr, slot, 2, p);
      });
    }
    copy_commit();  // empty groups keep the number of groups in flight constant
  };
  int64_t row = blockIdx.x * rows_per_block + threadIdx.y;
  if constexpr (Ahead) {
    for (int turn = 0; turn < rows - 1; ++turn) start(row + turn * step, turn);
  }
  constexpr int sums = Masked ? 2 : 1;
  float sum[sums][Team::packs][Width] = {};
  const float scale = Masked ? masks.norm.scale_or_one() : 1.0f;
  const auto weight_at = [&](int p) {
    return read_if<Width>(Team::pack(p) < packs, static_cast<const W*>(args.weight) + column + Team::pack(p) * Width);
  };
  // With two sums over rows the weight does not fit in registers.
  Packed<W, Width> weight[Masked ? 1 : Team::packs];
  if constexpr (!Masked) Team::for_packs([&](int p) { weight[p] = weight_at(p); });
  const float* const rstds = args.rstd + blockIdx.y;
  float rstd = row < end ? rstds[row * gridDim.y] : 0.0f;
  for (int turn = 0, slot = 0; row < end; row += step, turn ^= 1) {
    const float next_rstd = row + step < end ? rstds[(row + step) * gridDim.y] : 0.0f;
    float dot[1] = {0};
    if constexpr (Ahead) {
      copy_wait<rows - 2>();
      start(row + (rows - 1) * step, slot == 0 ? rows - 1 : slot - 1);
    }
    if constexpr (!Masked) stay_packed(weight);
    const auto read_pack = [&](const T* data, int64_t stride, int tensor, int p, float (&to)[Width]) {
      if constexpr (Ahead) {
        read(ahead.get(slot, tensor, p), to);
      } else {
        const auto value = read_if<Width>(Team::pack(p) < packs, data + row * stride + Team::pack(p) * Width);
#pragma unroll
        for (int i = 0; i < Width; ++i) to[i] = value.get(i);
      }
    };
    Team::for_packs([&](int p) {
      float x[Width], dy[Width];
      read_pack(x_data, args.x_stride, 0, p, x);
      read_pack(dy_data, args.dy_stride, 1, p, dy);
      if constexpr (Masked) {
        float factor[Width];
        masks.norm.read_pack(Team::pack(p) < packs, column + Team::pack(p) * Width, factor);
        const auto gamma = weight_at(p);
#pragma unroll
        for (int i = 0; i < Width; ++i) {
          const float product = dy[i] * x[i];
          sum[0][p][i] += product * rstd;
          dot[0] += product * gamma.get(i) * factor[i];
        }
      } else {
#pragma unroll
        for (int i = 0; i < Width; ++i) {
          const float product = dy[i] * x[i];
          sum[0][p][i] += product * rstd;
          dot[0] += product * (args.weight_offset + weight[p].get(i));
        }
      }
    });
    Team::sum(dot, shared[turn]);
    if constexpr (Masked) dot[0] *= scale;
    const float scaled_mean = dot[0] * rstd * inverse_size * rstd;
    T* const to = static_cast<T*>(args.dx) + row * args.dx_stride + column;
    // Reread: the row does not fit in registers next to the sums over rows.
    Team::for_packs([&](int p) {
      float x[Width], dy[Width], residual[Width] = {};
      read_pack(x_data, args.x_stride, 0, p, x);
      read_pack(dy_data, args.dy_stride, 1, p, dy);
      if (Ahead || residual_data != nullptr) read_pack(residual_data, args.dx_stride, 2, p, residual);
      if constexpr (Masked) {
        float factor[Width];
        masks.norm.read_pack(Team::pack(p) < packs, column + Team::pack(p) * Width, factor);
        const auto gamma = weight_at(p);
#pragma unroll
        for (int i = 0; i < Width; ++i) {
          sum[1][p][i] += x[i] * x[i] * (rstd * scaled_mean);
          dy[i] = residual[i] + rstd * factor[i] * (scale * gamma.get(i) * dy[i] - factor[i] * x[i] * scaled_mean);
        }
      } else {
#pragma unroll
        for (int i = 0; i < Width; ++i) {
          dy[i] = residual[i] + rstd * ((args.weight_offset + weight[p].get(i)) * dy[i] - x[i] * scaled_mean);
        }
      }
      if (Team::pack(p) < packs) write(to + Team::pack(p) * Width, dy);
    });
    rstd = next_rstd;
    slot = slot == rows - 1 ? 0 : slot + 1;
  }
  // Every team passes as many barriers as the block's first: compute-sanitizer's racecheck counts barriers by warp.
  for (; row - threadIdx.y < end; row += step) Team::meet();
  let_next_start();
  if constexpr (Ahead) copy_wait<0>();
  if (partial == nullptr) return;
  float* partials[sums] = {partial + blockIdx.x * args.width + column};
  if constexpr (Masked) {
    partials[1] = square_partial == nullptr ? nullptr : square_partial + blockIdx.x * args.width + column;
  }
  write_partials<Team>(sum, args.group_size, reinterpret_cast<float*>(copied), partials);
}

constexpr int partial_lanes = 16;

/// With A and B the sums of the two kinds of partials: dweight += s m A, dfactors += s γ A - m B, dscale += γ m A.
/// Threads: 32 columns x 16 lanes of partials.
template <class W>
__global__ void masked_gradients_kernel(mimo_masked_rms_norm_backward_args args, const float* partial,
                                        const float* square_partial, int64_t partials) {
  __shared__ float shared[2][partial_lanes][33];
  previous_is_done();
  let_next_start();
  const int64_t column = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
  const int lane = static_cast<int>(threadIdx.y);
  const bool live = column < args.width;
  shared[0][lane][threadIdx.x] = live ? strided_sum(partial + column, partials, args.width, lane, partial_lanes) : 0.0f;
  shared[1][lane][threadIdx.x] =
      live && square_partial != nullptr ? strided_sum(square_partial + column, partials, args.width, lane, partial_lanes) : 0.0f;
  __syncthreads();
  if (lane != 0 || !live) return;
  float products = 0, squares = 0;
#pragma unroll
  for (int i = 0; i < partial_lanes; ++i) {
    products += shared[0][i][threadIdx.x];
    squares += shared[1][i][threadIdx.x];
  }
  const float m = args.factors == nullptr ? 1.0f : args.factors[column], s = args.scale == nullptr ? 1.0f : *args.scale;
  const float gamma = load(static_cast<const W*>(args.weight) + column);
  if (args.dweight != nullptr) args.dweight[column] += s * m * products;
  if (args.dfactors != nullptr) args.dfactors[column] += s * gamma * products - m * squares;
  if (args.dscale != nullptr) args.dscale[column] += gamma * m * products;
}


/// Copies the fields that masked and plain operations share.
template <class To, class From>
To common_of(const From& from) {
  To to{};
  to.x = from.x, to.weight = from.weight;
  to.rows = from.rows, to.width = from.width, to.group_size = from.group_size, to.x_stride = from.x_stride;
  to.dtype = from.dtype, to.weight_dtype = from.weight_dtype;
  return to;
}

template <bool Masked>
void forward(mimo_stream& stream, const mimo_rms_norm_forward_args& args, const NormMasks& masks) {
  MIMO_REQUIRE(args.group_size > 0 && args.width % args.group_size == 0, "rms_norm_forward");
  MIMO_REQUIRE((args.residual == nullptr) == (args.sum == nullptr), "rms_norm_forward");
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
      const bool whole = fits(args.x, args.x_stride) && fits(args.residual, args.x_stride) &&
                         fits(args.sum, args.width) && fits(args.y, args.y_stride) &&
                         packs_fit<W>(args.weight, args.group_size, 0, wide) &&
                         packs_fit<float>(masks.norm.factors, args.group_size, 0, wide) &&
                         packs_fit<float>(masks.of_x.factors, args.group_size, 0, wide);
      with_width<wide>(whole, [&](auto width) {
        with_team<T, width, LargeTeam, most_forward_threads>(args.group_size / width, [&](auto team) {
          using Team = decltype(team);
          const dim3 block = team_block<Team>(args.group_size / width, forward_teams<Team>);
          const auto run = [&](auto kernel) {
            launch_early(stream, kernel, grid_of(ceil_div(args.rows, block.y), groups), block, 0, args, masks);
          };
          args.residual != nullptr ? run(forward_kernel<T, W, width, Team, true, Masked>)
                                   : run(forward_kernel<T, W, width, Team, false, Masked>);
        });
      });
    });
  });
}

/// `finish` gets the partial sums, their number and a null pointer of the weight's type.
template <bool Masked, class Finish>
void backward(mimo_stream& stream, const mimo_rms_norm_backward_args& args, const NormMasks& masks, bool sums_wanted,
              bool squares_wanted, Finish&& finish) {
  MIMO_REQUIRE(args.group_size > 0 && args.width % args.group_size == 0, "rms_norm_backward");
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
      const bool whole = fits(args.dy, args.dy_stride) && fits(args.x, args.x_stride) &&
                         fits(args.dx, args.dx_stride) && fits(args.dresidual, args.dx_stride) &&
                         packs_fit<W>(args.weight, args.group_size, 0, wide) &&
                         packs_fit<float>(masks.norm.factors, args.group_size, 0, wide);
      with_width<wide>(whole, [&](auto width) {
        with_team<T, width, LargeTeam, most_backward_threads<width>>(args.group_size / width, [&](auto team) {
          using Team = decltype(team);
          using Ahead = RowsAhead<Team, T, width>;
          const BackwardShare share = backward_share<Ahead>(stream, args.group_size / width, args.rows, groups);
          const int64_t sum = share.partials * args.width;
          const int64_t sums = squares_wanted ? 2 : sums_wanted ? 1 : 0;
          Workspace workspace(&stream, sums * sum * static_cast<int64_t>(sizeof(float)));
          float* const partial = sums_wanted ? workspace.as<float>() : nullptr;
          float* const square_partial = squares_wanted ? partial + sum : nullptr;
          const auto run = [&](auto kernel) {
            launch_early(stream, kernel, grid_of(share.partials, groups), share.block, share.shared_bytes, args, masks,
                         share.rows_per_block, partial, square_partial);
          };
          with_rows_ahead<Ahead>(share, [&](auto ahead) { run(backward_kernel<T, W, width, Team, ahead, Masked>); });
          if (partial != nullptr) finish(partial, square_partial, share.partials, w);
        });
      });
    });
  });
}

}  // namespace

void rms_norm_forward(mimo_stream& stream, const mimo_rms_norm_forward_args& args) {
  forward<false>(stream, args, NormMasks{});
}

void rms_norm_backward(mimo_stream& stream, const mimo_rms_norm_backward_args& args) {
  backward<false>(stream, args, NormMasks{}, args.dweight != nullptr, false,
                  [&](const float* partial, const float*, int64_t partials, auto*) {
                    add_partials(stream, partial, partials, args.width, args.dweight);
                  });
}

void masked_rms_norm_forward(mimo_stream& stream, const mimo_masked_rms_norm_forward_args& args) {
  MIMO_REQUIRE(args.residual != nullptr || (args.x_factors == nullptr && args.x_scale == nullptr), "masked_rms_norm_forward");
  auto plain = common_of<mimo_rms_norm_forward_args>(args);
  plain.residual = args.residual, plain.sum = args.sum;
  plain.y = args.y, plain.rstd = args.rstd, plain.y_stride = args.y_stride, plain.epsilon = args.epsilon;
  forward<true>(stream, plain, NormMasks{{args.factors, args.scale}, {args.x_factors, args.x_scale}});
}

void masked_rms_norm_backward(mimo_stream& stream, const mimo_masked_rms_norm_backward_args& args) {
  auto plain = common_of<mimo_rms_norm_backward_args>(args);
  plain.dy = args.dy, plain.rstd = args.rstd, plain.dresidual = args.dresidual, plain.dx = args.dx;
  plain.dweight = args.dweight, plain.dy_stride = args.dy_stride, plain.dx_stride = args.dx_stride;
  const bool sums_wanted = args.dweight != nullptr || args.dfactors != nullptr || args.dscale != nullptr;
  backward<true>(stream, plain, NormMasks{{args.factors, args.scale}}, sums_wanted, args.dfactors != nullptr,
                 [&](const float* partial, const float* square_partial, int64_t partials, auto* w) {
                   using W = std::remove_pointer_t<decltype(w)>;
                   launch_early(stream, masked_gradients_kernel<W>, grid_of(ceil_div(args.width, 32)), dim3(32, partial_lanes),
                                0, args, partial, square_partial, partials);
                 });
}

}  // namespace mimo::cuda
