// RMSNorm of the query and key heads of a fused projection (docs/spec/families.md 2.3), all heads of a pass at once: a team of
// 8, 16 or 32 lanes owns a head of up to 64, 128 or 256 columns, eight a lane.
#include "head_norm.h"

#include "operations.h"
#include "packed.cuh"

namespace mimo::cuda {
namespace {

constexpr int threads = 256, width = 8;

template <int Lanes>
__device__ __forceinline__ float team_sum(float x) {
#pragma unroll
  for (int offset = Lanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(all_lanes, x, offset);
  return x;
}

/// A pack of eight, zeros if not `live`.
template <class T>
__device__ __forceinline__ void read_live(bool live, const T* from, float (&to)[width]) {
  if (live) {
    read(from, to);
  } else {
#pragma unroll
    for (int i = 0; i < width; ++i) to[i] = 0;
  }
}

/// Teams take the heads of all rows in turn, value heads among them.
template <class T, class W, int Lanes>
__global__ void __launch_bounds__(threads) forward_kernel(mimo_head_norm_forward_args args, int64_t heads) {
  const int64_t number = (static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x) / Lanes;
  const int64_t row = number / heads;
  const int head = static_cast<int>(number % heads), normalised = static_cast<int>(heads) - 1;
  const int column = static_cast<int>(threadIdx.x % Lanes) * width;
  const bool live = row < args.rows && column < args.head_dim;
  const int64_t at = number * args.head_dim + column;
  float x[width], weight[width];
  read_live(live, static_cast<const T*>(args.x) + at, x);
  const void* const weights = head + 1 == normalised ? args.key_weight : args.query_weight;
  read_live(live, static_cast<const W*>(weights) + column, weight);
  float squares = 0;
#pragma unroll
  for (int i = 0; i < width; ++i) squares += x[i] * x[i];
  squares = team_sum<Lanes>(squares);
  if (!live) return;
  if (head < normalised) {
    const float rstd = __frsqrt_rn(squares / static_cast<float>(args.head_dim) + args.epsilon);
    if (column == 0) args.rstd[head * args.rows + row] = rstd;
#pragma unroll
    for (int i = 0; i < width; ++i) x[i] = x[i] * rstd * (args.weight_offset + weight[i]);
  }
  write(static_cast<T*>(args.y) + at, x);
}

/// blockIdx.y is a head of the group, so that a thread adds up gradients of one weight; partial[head][block][head_dim].
template <class T, class W, int Lanes>
__global__ void __launch_bounds__(threads, 3) backward_kernel(mimo_head_norm_backward_args args, int64_t rows_per_block, float* partial) {
  constexpr int teams = threads / Lanes, rows_at_once = 4;
  __shared__ float sums[teams][Lanes * width];
  const int head = static_cast<int>(blockIdx.y), normalised = static_cast<int>(gridDim.y) - 1;
  const int team = static_cast<int>(threadIdx.x) / Lanes, column = static_cast<int>(threadIdx.x % Lanes) * width;
  const int64_t begin = blockIdx.x * rows_per_block, end = smaller(begin + rows_per_block, args.rows);
  const bool inside = column < args.head_dim;
  const T* const x_data = static_cast<const T*>(args.x) + head * args.head_dim + column;
  const T* const dy_data = static_cast<const T*>(args.dy) + head * args.head_dim + column;
  T* const dx_data = static_cast<T*>(args.dx) + head * args.head_dim + column;
  if (head == normalised) {
    for (int64_t row = begin + team; row < end; row += teams) {
      if (inside) *reinterpret_cast<Packed<T, width>*>(dx_data + row * args.width) = read_packed<width>(dy_data + row * args.width);
    }
    return;
  }
  float gain[width], sum[width] = {};
  read_live(inside, static_cast<const W*>(head + 1 == normalised ? args.key_weight : args.query_weight) + column, gain);
#pragma unroll
  for (int i = 0; i < width; ++i) gain[i] += args.weight_offset;
  const float* const rstds = args.rstd + head * args.rows;
  const float inverse_size = 1.0f / static_cast<float>(args.head_dim);
  // All teams of a warp pass the same shuffles: the loop runs by the block's rows.
  for (int64_t first = begin; first < end; first += teams * rows_at_once) {
    Packed<T, width> packed_x[rows_at_once] = {}, packed_dy[rows_at_once] = {};
    float rstd[rows_at_once];
#pragma unroll
    for (int j = 0; j < rows_at_once; ++j) {
      const int64_t row = first + j * teams + team;
      if (inside && row < end) {
        packed_x[j] = read_packed<width>(x_data + row * args.width);
        packed_dy[j] = read_packed<width>(dy_data + row * args.width);
      }
      rstd[j] = row < end ? rstds[row] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < rows_at_once; ++j) {
      float x[width], dy[width], dot = 0;
#pragma unroll
      for (int i = 0; i < width; ++i) {
        x[i] = packed_x[j].get(i), dy[i] = packed_dy[j].get(i);
        const float product = dy[i] * x[i];
        sum[i] += product * rstd[j];
        dot += product * gain[i];
      }
      const float scaled_mean = team_sum<Lanes>(dot) * rstd[j] * inverse_size * rstd[j];
      const int64_t row = first + j * teams + team;
      if (!inside || row >= end) continue;
#pragma unroll
      for (int i = 0; i < width; ++i) dy[i] = rstd[j] * (gain[i] * dy[i] - x[i] * scaled_mean);
      write(dx_data + row * args.width, dy);
    }
  }
#pragma unroll
  for (int i = 0; i < width; ++i) sums[team][column + i] = sum[i];
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < args.head_dim; c += threads) {
    float total = 0;
    for (int t = 0; t < teams; ++t) total += sums[t][c];
    partial[(head * static_cast<int64_t>(gridDim.x) + blockIdx.x) * args.head_dim + c] = total;
  }
}

template <class Args>
bool in_packs(const Args& args, std::initializer_list<const void*> rows) {
  if (args.head_dim % width != 0 || args.head_dim > 32 * width) return false;
  for (const void* pointer : rows) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) return false;
  }
  return true;
}

/// Calls body(T*, W*, number of lanes).
template <class Args, class Body>
void with_types(const Args& args, Body&& body) {
  with_dtype(args.dtype, [&](auto* t) {
    with_dtype(args.weight_dtype, [&](auto* w) {
      if (args.head_dim <= 8 * width) {
        body(t, w, std::integral_constant<int, 8>{});
      } else if (args.head_dim <= 16 * width) {
        body(t, w, std::integral_constant<int, 16>{});
      } else {
        body(t, w, std::integral_constant<int, 32>{});
      }
    });
  });
}

}  // namespace

void head_norm_forward(mimo_stream& stream, const mimo_head_norm_forward_args& args) {
  const int64_t heads = normalised_heads(args) + 1;
  if (args.rows == 0) return;
  if (!in_packs(args, {args.x, args.y, args.query_weight, args.key_weight})) {
    return head_norm_by_heads(args, [&](const auto& head) { rms_norm_forward(stream, head); }, [&](const auto& values) { axpby(stream, values); });
  }
  with_types(args, [&](auto* t, auto* w, auto lanes) {
    launch(stream, forward_kernel<std::remove_pointer_t<decltype(t)>, std::remove_pointer_t<decltype(w)>, lanes>,
           grid_of(ceil_div(args.rows * heads * lanes, threads)), dim3(threads), 0, args, heads);
  });
}

void head_norm_backward(mimo_stream& stream, const mimo_head_norm_backward_args& args) {
  const int64_t normalised = normalised_heads(args);
  if (args.rows == 0) return;
  if (!in_packs(args, {args.x, args.dy, args.dx, args.query_weight, args.key_weight})) {
    return head_norm_by_heads(args, [&](const auto& head) { rms_norm_backward(stream, head); }, [&](const auto& values) { axpby(stream, values); });
  }
  constexpr int64_t most_blocks = 1056, least_rows = 64;
  const int64_t rows_per_block = larger(least_rows, ceil_div(args.rows, larger(1, most_blocks / (normalised + 1))));
  const int64_t blocks = ceil_div(args.rows, rows_per_block);
  const Workspace partial(&stream, 4 * normalised * blocks * args.head_dim);
  with_types(args, [&](auto* t, auto* w, auto lanes) {
    launch(stream, backward_kernel<std::remove_pointer_t<decltype(t)>, std::remove_pointer_t<decltype(w)>, lanes>,
           grid_of(blocks, normalised + 1), dim3(threads), 0, args, rows_per_block, partial.template as<float>());
  });
  const int64_t of_queries = (normalised - 1) * blocks;
  const auto add = [&](const float* from, int64_t partials, float* to) {
    if (to != nullptr) add_partials(stream, from, partials, args.head_dim, to);
  };
  add(partial.as<float>(), of_queries, args.dquery_weight);
  add(partial.as<float>() + of_queries * args.head_dim, blocks, args.dkey_weight);
}

}  // namespace mimo::cuda
