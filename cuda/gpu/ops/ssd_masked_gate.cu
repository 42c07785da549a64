// Backward of the gate of the chunk scan (SSD) with mask factors on z: o = y silu(m z) (docs/spec/elastic.md §9).
#include "mask_gradients.cuh"
#include "packed.cuh"
#include "ssd.h"

namespace mimo::cuda {
namespace {

constexpr int rows_at_once = 2;

/// dz, dy, and partial[blockIdx.y][c] = Σ over the block's tokens of z times the gradient of m z.
template <class T, class D, int Width>
__global__ void __launch_bounds__(32 * row_lanes)
    masked_gate_kernel(mimo_ssd_backward_args args, D* dy, float* partial) {
  const int64_t width = args.heads * args.head_dim;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x) * Width;
  const int64_t begin = static_cast<int64_t>(blockIdx.y) * mask_rows_per_block;
  const int64_t end = smaller(begin + mask_rows_per_block, args.tokens);
  const bool live = column < width;
  float factor[Width], sum[Width] = {};
#pragma unroll
  for (int i = 0; i < Width; ++i) factor[i] = live ? args.z_factors[column + i] : 0.0f;
  for (int64_t first = begin + threadIdx.y; live && first < end; first += row_lanes * rows_at_once) {
    Packed<T, Width> z[rows_at_once], y[rows_at_once], d_o[rows_at_once];
#pragma unroll
    for (int j = 0; j < rows_at_once; ++j) {
      const int64_t token = first + j * row_lanes;
      if (token >= end) continue;
      z[j] = read_packed<Width>(static_cast<const T*>(args.z) + token * args.z_stride + column);
      y[j] = read_packed<Width>(static_cast<const T*>(args.y) + token * width + column);
      d_o[j] = read_packed<Width>(static_cast<const T*>(args.d_o) + token * width + column);
    }
#pragma unroll
    for (int j = 0; j < rows_at_once; ++j) {
      const int64_t token = first + j * row_lanes;
      if (token >= end) continue;
      float dz[Width], to_y[Width];
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        const float gate = factor[i] * z[j].get(i), s = sigmoid(gate), gradient = d_o[j].get(i);
        const float dgate = gradient * y[j].get(i) * s * (1.0f + gate * (1.0f - s));
        to_y[i] = gradient * gate * s;
        sum[i] += dgate * z[j].get(i);
        dz[i] = factor[i] * dgate;
      }
      write(static_cast<T*>(args.dz) + token * args.dz_stride + column, dz);
      write(dy + token * width + column, to_y);
    }
  }
  if (partial != nullptr) write_column_sums(sum, width, partial);
}

}  // namespace

void ssd_masked_gate(mimo_stream& stream, const mimo_ssd_backward_args& args, void* dy, int32_t dy_dtype) {
  const int64_t width = args.heads * args.head_dim, blocks = ceil_div(args.tokens, mask_rows_per_block);
  MIMO_REQUIRE(blocks <= 65535, "ssd_backward");
  Workspace workspace(&stream, args.dz_factors == nullptr ? 0 : blocks * width * static_cast<int64_t>(sizeof(float)));
  float* const partial = args.dz_factors == nullptr ? nullptr : workspace.as<float>();
  with_dtype(args.dtype, [&](auto* t) {
    with_dtype(dy_dtype, [&](auto* d) {
      using T = std::remove_pointer_t<decltype(t)>;
      using D = std::remove_pointer_t<decltype(d)>;
      constexpr int wide = smaller(vector_width<T>, vector_width<D>);
      const auto fits = [&](const void* data, int64_t stride) { return packs_fit<T>(data, width, stride, wide); };
      const bool whole = fits(args.z, args.z_stride) && fits(args.y, width) && fits(args.d_o, width) &&
                         fits(args.dz, args.dz_stride) && packs_fit<D>(dy, width, width, wide);
      with_width<wide>(whole, [&](auto w) {
        launch(stream, masked_gate_kernel<T, D, w>, grid_of(ceil_div(width, 32 * w), blocks), dim3(32, row_lanes), 0,
               args, static_cast<D*>(dy), partial);
      });
    });
  });
  if (partial == nullptr) return;
  const PartialSums sums{partial, args.tokens, mask_rows_per_block, width, nullptr};
  add_mask_gradients(stream, sums, args.z_factors, nullptr, args.dz_factors, nullptr);
}

}  // namespace mimo::cuda
