// Activations of feed-forward layers and experts: y = p act(x) with the routing probability p of a row (1 for dense
// layers), rounded once (docs/spec/language-model.md §4.1, docs/spec/moe-performance.md §1.2, §1.3).
#include "activation.cuh"
#include "activation_backward.h"

namespace mimo::cuda {
namespace {

template <class Kind, class T, int Width>
__global__ void plain_forward_kernel(const T* x, const float* row_probability, T* y, const int32_t* row_count,
                                     int64_t rows, int64_t packs) {
  for_each_pack(live_rows(rows, row_count), packs, [&](int64_t row, int64_t pack) {
    const float probability = row_probability != nullptr ? row_probability[row] : 1.0f;
    const int64_t at = (row * packs + pack) * Width;
    float value[Width];
    read(x + at, value);
#pragma unroll
    for (int i = 0; i < Width; ++i) value[i] = probability * Kind::at(value[i]).value;
    write(y + at, value);
  });
}

template <class Kind, class T, int Width>
__global__ void gated_forward_kernel(const T* x, const float* row_probability, T* y, const int32_t* row_count,
                                     int64_t rows, int64_t packs, uint32_t block, Kind kind) {
  for_each_pack(live_rows(rows, row_count), packs, [&](int64_t row, int64_t pack) {
    const float probability = row_probability != nullptr ? row_probability[row] : 1.0f;
    float gate[Width], linear[Width], value[Width];
    const int64_t gate_at = 2 * row * packs + gate_pack(pack, block);
    read(x + gate_at * Width, gate);
    read(x + (gate_at + block) * Width, linear);
    kind.values(gate, linear, value);
#pragma unroll
    for (int i = 0; i < Width; ++i) value[i] *= probability;
    write(y + (row * packs + pack) * Width, value);
  });
}

/// One block a row, because the gradient of the row's probability is a sum over the row.
template <class Kind, class T, int Width>
__global__ void plain_backward_kernel(const T* dy, const T* x, const float* row_probability, T* dx, T* y,
                                      float* drow_probability, const int32_t* row_count, int64_t rows, int64_t packs) {
  __shared__ float shared[32];
  const int64_t row = blockIdx.x;
  if (row >= live_rows(rows, row_count)) return;
  const float probability = row_probability != nullptr ? row_probability[row] : 1.0f;
  float sum[1] = {0};
  for (int64_t pack = threadIdx.x; pack < packs; pack += blockDim.x) {
    const int64_t at = (row * packs + pack) * Width;
    float value[Width], gradient[Width], weighted[Width];
    read(x + at, value);
    read(dy + at, gradient);
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      const ValueAndSlope a = Kind::at(value[i]);
      sum[0] += gradient[i] * a.value;
      weighted[i] = probability * a.value;
      value[i] = probability * gradient[i] * a.slope;
    }
    write(dx + at, value);
    if (y != nullptr) write(y + at, weighted);
  }
  if (drow_probability == nullptr) return;
  block_sum(sum, shared);
  if (threadIdx.x == 0) drow_probability[row] = sum[0];
}

template <class Kind, class T, int Width>
__global__ void gated_backward_kernel(const T* dy, const T* x, const float* row_probability, T* dx, T* y,
                                      float* drow_probability, const int32_t* row_count, int64_t rows, int64_t packs,
                                      uint32_t gate_block, Kind kind) {
  __shared__ float shared[32];
  const int64_t row = blockIdx.x;
  if (row >= live_rows(rows, row_count)) return;
  const float probability = row_probability != nullptr ? row_probability[row] : 1.0f;
  float sum[1] = {0};
  for (int64_t pack = threadIdx.x; pack < packs; pack += blockDim.x) {
    const int64_t gate_at = (2 * row * packs + gate_pack(pack, gate_block)) * Width;
    const int64_t linear_at = gate_at + static_cast<int64_t>(gate_block) * Width;
    const int64_t at = (row * packs + pack) * Width;
    float value[Width], linear_value[Width], gradient[Width], weighted[Width], sigma[Width];
    read(x + gate_at, value);
    read(x + linear_at, linear_value);
    read(dy + at, gradient);
    kind.sigmas(value, sigma);
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      const auto a = kind.gradient(value[i], linear_value[i], sigma[i]);
      const float da = probability * gradient[i];
      sum[0] += gradient[i] * a.value;
      weighted[i] = probability * a.value;
      value[i] = da * a.gate;
      linear_value[i] = da * a.linear;
    }
    write(dx + gate_at, value);
    write(dx + linear_at, linear_value);
    if (y != nullptr) write(y + at, weighted);
  }
  if (drow_probability == nullptr) return;
  block_sum(sum, shared);
  if (threadIdx.x == 0) drow_probability[row] = sum[0];
}

unsigned backward_threads(int64_t packs) { return static_cast<unsigned>(smaller(256, round_up(packs, 32))); }

}  // namespace

void activation_forward(mimo_stream& stream, const mimo_activation_forward_args& args) {
  require_legal(args);
  if (args.rows == 0 || args.width == 0) return;
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    constexpr int wide = vector_width<T>;
    const auto fits = [&](const void* pointer) { return packs_fit<T>(pointer, gate_block(args), args.width, wide); };
    with_width<wide>(fits(args.x) && fits(args.y), [&](auto w) {
      const int64_t packs = args.width / w;
      const Cover covered = cover(args.rows, packs);
      const T* x = static_cast<const T*>(args.x);
      T* y = static_cast<T*>(args.y);
      if (is_gated(args.kind)) {
        return with_gated_kind(args, [&](auto kind) {
          launch(stream, gated_forward_kernel<decltype(kind), T, w>, covered.grid, covered.block, 0, x, args.row_probability, y,
                 args.row_count, args.rows, packs, static_cast<uint32_t>(gate_block(args) / w), kind);
        });
      }
      with_plain_kind(args.kind, [&](auto kind) {
        launch(stream, plain_forward_kernel<decltype(kind), T, w>, covered.grid, covered.block, 0, x,
               args.row_probability, y, args.row_count, args.rows, packs);
      });
    });
  });
}

void activation_backward(mimo_stream& stream, const mimo_activation_backward_args& args) {
  activation_backward_and_forward(stream, args, nullptr);
}

void activation_backward_and_forward(mimo_stream& stream, const mimo_activation_backward_args& args, void* activated) {
  require_legal(args);
  if (args.rows == 0 || args.width == 0) return;
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    constexpr int wide = vector_width<T>;
    const auto fits = [&](const void* pointer) { return packs_fit<T>(pointer, gate_block(args), args.width, wide); };
    with_width<wide>(fits(args.dy) && fits(args.x) && fits(args.dx) && fits(activated), [&](auto w) {
      const int64_t packs = args.width / w;
      const T* dy = static_cast<const T*>(args.dy);
      const T* x = static_cast<const T*>(args.x);
      T* dx = static_cast<T*>(args.dx);
      T* y = static_cast<T*>(activated);
      const dim3 grid = grid_of(args.rows), block(backward_threads(packs));
      if (is_gated(args.kind)) {
        return with_gated_kind(args, [&](auto kind) {
          launch(stream, gated_backward_kernel<decltype(kind), T, w>, grid, block, 0, dy, x, args.row_probability, dx, y,
                 args.drow_probability, args.row_count, args.rows, packs, static_cast<uint32_t>(gate_block(args) / w), kind);
        });
      }
      with_plain_kind(args.kind, [&](auto kind) {
        launch(stream, plain_backward_kernel<decltype(kind), T, w>, grid, block, 0, dy, x, args.row_probability, dx, y,
               args.drow_probability, args.row_count, args.rows, packs);
      });
    });
  });
}

}  // namespace mimo::cuda
