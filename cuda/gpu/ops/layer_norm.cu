// LayerNorm over rows: y = (x - mean) rstd γ + β with the biased variance; forward, optionally fused with a residual
// sum, and backward.
#include "norm.cuh"

namespace mimo::cuda {
namespace {

/// One team a row. Residual: the sum is stored and normalised as rounded.
template <class T, class W, int Width, class Team, bool Residual>
__global__ void __launch_bounds__(forward_threads<Team>) forward_kernel(mimo_layer_norm_forward_args args) {
  __shared__ float shared[2][Team::sum_floats];
  previous_is_done();
  let_next_start();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= args.rows) return;
  const int packs = static_cast<int>(args.width) / Width;
  const float inverse_width = 1.0f / static_cast<float>(args.width);
  const T* const from = static_cast<const T*>(args.x) + row * args.width;
  const T* const residual = static_cast<const T*>(args.residual) + row * args.width;
  Packed<T, Width> read_x[Team::packs], added[Team::packs];
  Packed<W, Width> weight[Team::packs], bias[Team::packs];
  Team::for_packs([&](int p) {
    read_x[p] = read_if<Width>(Team::pack(p) < packs, from + Team::pack(p) * Width);
    if constexpr (Residual) added[p] = read_if<Width>(Team::pack(p) < packs, residual + Team::pack(p) * Width);
  });
  Team::for_packs([&](int p) {
    const int at = Team::pack(p) * Width;
    weight[p] = read_if<Width>(Team::pack(p) < packs, static_cast<const W*>(args.weight) + at);
    bias[p] = read_if<Width>(Team::pack(p) < packs, static_cast<const W*>(args.bias) + at);
  });
  float x[Team::packs][Width], sum[1] = {0}, squares[1] = {0};
  T* const sums = static_cast<T*>(args.sum) + row * args.width;
  Team::for_packs([&](int p) {
    if constexpr (Residual) {
      read_x[p] = packed_sum(read_x[p], added[p]);
      if (Team::pack(p) < packs) *reinterpret_cast<Packed<T, Width>*>(sums + Team::pack(p) * Width) = read_x[p];
    }
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      x[p][i] = read_x[p].get(i);
      sum[0] += x[p][i];
    }
  });
  Team::sum(sum, shared[0]);
  const float mean = sum[0] * inverse_width;
  Team::for_packs([&](int p) {
    const float own_mean = Team::pack(p) < packs ? mean : 0.0f;
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      x[p][i] -= own_mean;
      squares[0] += x[p][i] * x[p][i];
    }
  });
  Team::sum(squares, shared[1]);
  const float rstd = __frsqrt_rn(squares[0] * inverse_width + args.epsilon);
  if (threadIdx.x == 0) {
    args.mean[row] = mean;
    args.rstd[row] = rstd;
  }
  T* const to = static_cast<T*>(args.y) + row * args.width;
  Team::for_packs([&](int p) {
#pragma unroll
    for (int i = 0; i < Width; ++i) x[p][i] = x[p][i] * rstd * weight[p].get(i) + bias[p].get(i);
    if (Team::pack(p) < packs) write(to + Team::pack(p) * Width, x[p]);
  });
}

/// With n = (x - mean) rstd and g = γ dy: dx = rstd (g - mean(g) - n mean(g n)) (+ dresidual), and partial[block] = Σ
/// over rows of dy n, then of dy. Ahead: rows are prefetched to shared memory, several at a time.
template <class T, class W, int Width, class Team, bool Ahead>
__global__ void __launch_bounds__(backward_threads<Team, Width>)
    backward_kernel(mimo_layer_norm_backward_args args, int64_t rows_per_block, float* partial_weight,
                    float* partial_bias) {
  extern __shared__ __align__(16) char copied[];
  __shared__ float shared[2][2 * Team::sum_floats];
  previous_is_done();
  const int packs = static_cast<int>(args.width) / Width;
  const float inverse_width = 1.0f / static_cast<float>(args.width);
  const int64_t end = smaller((blockIdx.x + 1) * rows_per_block, args.rows);
  const T* const x_data = static_cast<const T*>(args.x);
  const T* const dy_data = static_cast<const T*>(args.dy);
  const T* const residual_data = static_cast<const T*>(args.dresidual);
  const T* const residual_or_x = residual_data == nullptr ? x_data : residual_data;  // a valid address even if nothing is read
  const RowsAhead<Team, T, Width> ahead{copied};
  constexpr int rows = RowsAhead<Team, T, Width>::rows;
  const int64_t step = blockDim.y;
  const auto start = [&](int64_t row, int slot) {
    if (row < end) {
      Team::for_packs([&](int p) {
        const bool live = Team::pack(p) < packs;
        const int64_t at = row * args.width + Team::pack(p) * Width;
        ahead.copy(x_data + at, live, slot, 0, p);
        ahead.copy(dy_data + at, live, slot, 1, p);
        ahead.copy(residual_or_x + at, live && residual_data != nullptr, slot, 2, p);
      });
    }
    copy_commit();  // empty groups keep the number of groups in flight constant
  };
  int64_t row = blockIdx.x * rows_per_block + threadIdx.y;
  if constexpr (Ahead) {
    for (int turn = 0; turn < rows - 1; ++turn) start(row + turn * step, turn);
  }
  Packed<W, Width> weight[Team::packs];
  float gradients[2][Team::packs][Width] = {};  // of weight and bias
  Team::for_packs([&](int p) {
    weight[p] = read_if<Width>(Team::pack(p) < packs, static_cast<const W*>(args.weight) + Team::pack(p) * Width);
  });
  float mean = row < end ? args.mean[row] : 0.0f, rstd = row < end ? args.rstd[row] : 0.0f;
  for (int turn = 0, slot = 0; row < end; row += step, turn ^= 1) {
    const float next_mean = row + step < end ? args.mean[row + step] : 0.0f;
    const float next_rstd = row + step < end ? args.rstd[row + step] : 0.0f;
    float sums[2] = {0, 0};
    if constexpr (Ahead) {
      copy_wait<rows - 2>();
      start(row + (rows - 1) * step, slot == 0 ? rows - 1 : slot - 1);
    }
    stay_packed(weight);
    const auto read_pack = [&](const T* data, int tensor, int p, float (&to)[Width]) {
      if constexpr (Ahead) {
        read(ahead.get(slot, tensor, p), to);
      } else {
        const auto value = read_if<Width>(Team::pack(p) < packs, data + row * args.width + Team::pack(p) * Width);
#pragma unroll
        for (int i = 0; i < Width; ++i) to[i] = value.get(i);
      }
    };
    // Recomputed after the sums: the row does not fit in registers next to the sums over rows.
    const auto read_both = [&](int p, float (&n)[Width], float (&dy)[Width]) {
      read_pack(x_data, 0, p, n);
      read_pack(dy_data, 1, p, dy);
#pragma unroll
      for (int i = 0; i < Width; ++i) n[i] = (n[i] - mean) * rstd;
    };
    Team::for_packs([&](int p) {
      float n[Width], dy[Width];
      read_both(p, n, dy);
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        gradients[0][p][i] += dy[i] * n[i];
        gradients[1][p][i] += dy[i];
        const float g = dy[i] * weight[p].get(i);
        sums[0] += g;
        sums[1] += g * n[i];
      }
    });
    Team::sum(sums, shared[turn]);
    sums[0] *= inverse_width, sums[1] *= inverse_width;
    T* const to = static_cast<T*>(args.dx) + row * args.width;
    Team::for_packs([&](int p) {
      float n[Width], dy[Width], residual[Width] = {};
      read_both(p, n, dy);
      if (Ahead || residual_data != nullptr) read_pack(residual_data, 2, p, residual);
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        dy[i] = residual[i] + rstd * (dy[i] * weight[p].get(i) - (sums[0] + n[i] * sums[1]));
      }
      if (Team::pack(p) < packs) write(to + Team::pack(p) * Width, dy);
    });
    mean = next_mean, rstd = next_rstd;
    slot = slot == rows - 1 ? 0 : slot + 1;
  }
  let_next_start();
  if constexpr (Ahead) copy_wait<0>();
  const int64_t at = blockIdx.x * args.width;
  float* const partials[2] = {partial_weight == nullptr ? nullptr : partial_weight + at,
                              partial_bias == nullptr ? nullptr : partial_bias + at};
  if (partial_weight != nullptr || partial_bias != nullptr) {
    write_partials<Team>(gradients, args.width, reinterpret_cast<float*>(copied), partials);
  }
}

}  // namespace

void layer_norm_forward(mimo_stream& stream, const mimo_layer_norm_forward_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width > 0, "layer_norm_forward");
  MIMO_REQUIRE((args.residual == nullptr) == (args.sum == nullptr), "layer_norm_forward");
  if (args.rows == 0) return;
  with_dtype(args.dtype, [&](auto* t) {
    with_dtype(args.weight_dtype, [&](auto* w) {
      using T = std::remove_pointer_t<decltype(t)>;
      using W = std::remove_pointer_t<decltype(w)>;
      constexpr int wide = vector_width<T>;
      const auto fits = [&](const void* pointer) { return packs_fit<T>(pointer, args.width, args.width, wide); };
      const bool whole = fits(args.x) && fits(args.residual) && fits(args.sum) && fits(args.y) &&
                         packs_fit<W>(args.weight, args.width, 0, wide) && packs_fit<W>(args.bias, args.width, 0, wide);
      with_width<wide>(whole, [&](auto width) {
        with_team<T, width, void, most_forward_threads>(args.width / width, [&](auto team) {
          using Team = decltype(team);
          const dim3 block = team_block<Team>(args.width / width, forward_teams<Team>);
          const auto run = [&](auto kernel) {
            launch_early(stream, kernel, grid_of(ceil_div(args.rows, block.y)), block, 0, args);
          };
          args.residual != nullptr ? run(forward_kernel<T, W, width, Team, true>)
                                   : run(forward_kernel<T, W, width, Team, false>);
        });
      });
    });
  });
}

void layer_norm_backward(mimo_stream& stream, const mimo_layer_norm_backward_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width > 0, "layer_norm_backward");
  if (args.rows == 0) return;
  with_dtype(args.dtype, [&](auto* t) {
    with_dtype(args.weight_dtype, [&](auto* w) {
      using T = std::remove_pointer_t<decltype(t)>;
      using W = std::remove_pointer_t<decltype(w)>;
      constexpr int wide = vector_width<T>;
      const auto fits = [&](const void* pointer) { return packs_fit<T>(pointer, args.width, args.width, wide); };
      const bool whole = fits(args.dy) && fits(args.x) && fits(args.dx) && fits(args.dresidual) &&
                         packs_fit<W>(args.weight, args.width, 0, wide);
      with_width<wide>(whole, [&](auto width) {
        with_team<T, width, void, most_backward_threads<width>>(args.width / width, [&](auto team) {
          using Team = decltype(team);
          using Ahead = RowsAhead<Team, T, width>;
          const BackwardShare share = backward_share<Ahead>(stream, args.width / width, args.rows, 1);
          const int64_t partial_bytes = share.partials * args.width * static_cast<int64_t>(sizeof(float));
          Workspace weight_space(&stream, args.dweight ? partial_bytes : 0);
          Workspace bias_space(&stream, args.dbias ? partial_bytes : 0);
          float* const partial_weight = args.dweight ? weight_space.as<float>() : nullptr;
          float* const partial_bias = args.dbias ? bias_space.as<float>() : nullptr;
          const auto run = [&](auto kernel) {
            launch_early(stream, kernel, grid_of(share.partials), share.block, share.shared_bytes, args,
                         share.rows_per_block, partial_weight, partial_bias);
          };
          with_rows_ahead<Ahead>(share, [&](auto ahead) { run(backward_kernel<T, W, width, Team, ahead>); });
          if (partial_weight == nullptr && partial_bias == nullptr) return;
          add_partials_of_two(stream, partial_weight, args.dweight, partial_bias, args.dbias, share.partials, args.width);
        });
      });
    });
  });
}

}  // namespace mimo::cuda
