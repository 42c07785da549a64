// RMSNorm and group RMSNorm (docs/spec/language-model.md §1.5, §2.2): y = h rsqrt(mean(h²) + ε) γ.
#include "norm.cuh"

namespace mimo::cuda {
namespace {

using LargeTeam = Team<6, 2>;  // rows of up to 3072 in bf16

/// A team a row's group of columns.
template <class T, class W, int Width, class Team, bool Residual>
__global__ void __launch_bounds__(forward_threads<Team>) forward_kernel(mimo_rms_norm_forward_args args) {
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
  T* const sum = static_cast<T*>(args.sum) + row * args.width + column;
  Team::for_packs([&](int p) {
    if constexpr (Residual) {
      float both[Width];
#pragma unroll
      for (int i = 0; i < Width; ++i) both[i] = h[p].get(i) + added[p].get(i);
      h[p] = packed<T>(both);
      if (Team::pack(p) < packs) *reinterpret_cast<Packed<T, Width>*>(sum + Team::pack(p) * Width) = h[p];
    }
#pragma unroll
    for (int i = 0; i < Width; ++i) squares[0] += h[p].get(i) * h[p].get(i);
  });
  Team::sum(squares, shared);
  stay_packed(h);
  const float rstd = __frsqrt_rn(squares[0] / static_cast<float>(args.group_size) + args.epsilon);
  if (threadIdx.x == 0) args.rstd[row * gridDim.y + blockIdx.y] = rstd;
  T* const to = static_cast<T*>(args.y) + row * args.y_stride + column;
  Team::for_packs([&](int p) {
    float y[Width];
#pragma unroll
    for (int i = 0; i < Width; ++i) y[i] = h[p].get(i) * rstd * weight[p].get(i);
    if (Team::pack(p) < packs) write(to + Team::pack(p) * Width, y);
  });
}

/// dx = rstd (γ dy - x rstd mean) (+ dresidual), mean = Σ γ dy x rstd / size; partial[block] = Σ over rows of dy x rstd.
/// Ahead: rows come through shared memory, several at a time.
template <class T, class W, int Width, class Team, bool Ahead>
__global__ void __launch_bounds__(backward_threads<Team, Width>)
    backward_kernel(mimo_rms_norm_backward_args args, int64_t rows_per_block, float* partial) {
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
    copy_commit();  // empty groups keep the count of those under way
  };
  int64_t row = blockIdx.x * rows_per_block + threadIdx.y;
  if constexpr (Ahead) {
    for (int turn = 0; turn < rows - 1; ++turn) start(row + turn * step, turn);
  }
  Packed<W, Width> weight[Team::packs];
  float dweight[1][Team::packs][Width] = {};
  Team::for_packs([&](int p) {
    weight[p] = read_if<Width>(Team::pack(p) < packs, static_cast<const W*>(args.weight) + column + Team::pack(p) * Width);
  });
  const float* const rstds = args.rstd + blockIdx.y;
  float rstd = row < end ? rstds[row * gridDim.y] : 0.0f;
  for (int turn = 0, slot = 0; row < end; row += step, turn ^= 1) {
    const float next_rstd = row + step < end ? rstds[(row + step) * gridDim.y] : 0.0f;
    float dot[1] = {0};
    if constexpr (Ahead) {
      copy_wait<rows - 2>();
      start(row + (rows - 1) * step, slot == 0 ? rows - 1 : slot - 1);
    }
    stay_packed(weight);
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
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        const float product = dy[i] * x[i];
        dweight[0][p][i] += product * rstd;
        dot[0] += product * weight[p].get(i);
      }
    });
    Team::sum(dot, shared[turn]);
    const float scaled_mean = dot[0] * rstd * inverse_size * rstd;
    T* const to = static_cast<T*>(args.dx) + row * args.dx_stride + column;
    // Read again: registers would not hold the row besides the sums over rows.
    Team::for_packs([&](int p) {
      float x[Width], dy[Width], residual[Width] = {};
      read_pack(x_data, args.x_stride, 0, p, x);
      read_pack(dy_data, args.dy_stride, 1, p, dy);
      if (Ahead || residual_data != nullptr) read_pack(residual_data, args.dx_stride, 2, p, residual);
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        dy[i] = residual[i] + rstd * (weight[p].get(i) * dy[i] - x[i] * scaled_mean);
      }
      if (Team::pack(p) < packs) write(to + Team::pack(p) * Width, dy);
    });
    rstd = next_rstd;
    slot = slot == rows - 1 ? 0 : slot + 1;
  }
  // Every team meets as often as the block's first: racecheck goes by how many barriers a warp has passed.
  for (; row - threadIdx.y < end; row += step) Team::meet();
  let_next_start();
  if constexpr (Ahead) copy_wait<0>();
  if (partial == nullptr) return;
  float* const partials[1] = {partial + blockIdx.x * args.width + column};
  write_partials<Team>(dweight, args.group_size, reinterpret_cast<float*>(copied), partials);
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
      const bool whole = fits(args.x, args.x_stride) && fits(args.residual, args.x_stride) &&
                         fits(args.sum, args.width) && fits(args.y, args.y_stride) &&
                         packs_fit<W>(args.weight, args.group_size, 0, wide);
      with_width<wide>(whole, [&](auto width) {
        with_team<T, width, LargeTeam, most_forward_threads>(args.group_size / width, [&](auto team) {
          using Team = decltype(team);
          const dim3 block = team_block<Team>(args.group_size / width, forward_teams<Team>);
          const auto run = [&](auto kernel) {
            launch_early(stream, kernel, grid_of(ceil_div(args.rows, block.y), groups), block, 0, args);
          };
          args.residual != nullptr ? run(forward_kernel<T, W, width, Team, true>)
                                   : run(forward_kernel<T, W, width, Team, false>);
        });
      });
    });
  });
}

void rms_norm_backward(mimo_stream& stream, const mimo_rms_norm_backward_args& args) {
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
                         packs_fit<W>(args.weight, args.group_size, 0, wide);
      with_width<wide>(whole, [&](auto width) {
        with_team<T, width, LargeTeam, most_backward_threads<width>>(args.group_size / width, [&](auto team) {
          using Team = decltype(team);
          using Ahead = RowsAhead<Team, T, width>;
          const BackwardShare share = backward_share<Ahead>(stream, args.group_size / width, args.rows, groups);
          Workspace workspace(&stream, args.dweight ? share.partials * args.width * static_cast<int64_t>(sizeof(float)) : 0);
          float* const partial = args.dweight ? workspace.as<float>() : nullptr;
          const auto run = [&](auto kernel) {
            launch_early(stream, kernel, grid_of(share.partials, groups), share.block, share.shared_bytes, args,
                         share.rows_per_block, partial);
          };
          with_rows_ahead<Ahead>(share, [&](auto ahead) { run(backward_kernel<T, W, width, Team, ahead>); });
          if (partial != nullptr) add_partials(stream, partial, share.partials, args.width, args.dweight);
        });
      });
    });
  });
}

}  // namespace mimo::cuda
