// Muon's elementwise halves, around the products of its Newton-Schulz iteration, and its normalization (docs/spec/runtime.md
// §4.5). Partial sums depend on sizes alone and are added in order.
#include "kernel.cuh"

namespace mimo::cuda {
namespace {

constexpr int threads = 256;
constexpr int64_t elements_per_partial = 65536;

/// Type tag: the update writes no bf16 model weights.
struct NoModel {};

template <int Width>
__global__ void muon_momentum_kernel(mimo_muon_momentum_args args, int64_t packs) {
  if (args.found_inf != nullptr && args.found_inf[0] != 0) return;
  const float clip = args.clip_factor != nullptr ? args.clip_factor[0] : 1.0f;
  for_each_pack(1, packs, [&](int64_t, int64_t pack) {
    const int64_t at = pack * Width;
    float m[Width], g[Width];
    read(args.momentum + at, m);
    read(args.gradient + at, g);
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      const float gradient = g[i] * clip;
      m[i] = args.beta * m[i] + (1.0f - args.beta) * gradient;
      g[i] = args.nesterov != 0 ? args.beta * m[i] + (1.0f - args.beta) * gradient : m[i];
    }
    write(args.momentum + at, m);
    write(args.gradient + at, g);
  });
}

/// partial[matrix][blockIdx.x] = Σ x² over the block's range of matrix blockIdx.y.
template <int Width>
__global__ void squares_kernel(const float* x, int64_t elements, double* partial) {
  __shared__ double shared[32];
  const float* const matrix = x + static_cast<int64_t>(blockIdx.y) * elements;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * elements_per_partial;
  const int64_t end = smaller(begin + elements_per_partial, elements);
  double sum[1] = {0};
  for (int64_t at = begin + threadIdx.x * Width; at < end; at += blockDim.x * Width) {
    float value[Width];
    read(matrix + at, value);
#pragma unroll
    for (int i = 0; i < Width; ++i) sum[0] += static_cast<double>(value[i]) * static_cast<double>(value[i]);
  }
  block_sum(sum, shared);
  if (threadIdx.x == 0) partial[static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x] = sum[0];
}

/// y = x / norm over the block's range, the norm from all partial sums of its matrix, which every block adds in one order.
template <class Y, int Width>
__global__ void normalize_kernel(const float* x, Y* y, int64_t elements, const double* partial, float epsilon) {
  __shared__ double shared[32];
  __shared__ float norm;
  const double* const own = partial + static_cast<int64_t>(blockIdx.y) * gridDim.x;
  double sum[1] = {0};
  for (int64_t i = threadIdx.x; i < gridDim.x; i += blockDim.x) sum[0] += own[i];
  block_sum(sum, shared);
  if (threadIdx.x == 0) {
    const float root = static_cast<float>(sqrt(sum[0]));
    norm = root < epsilon ? epsilon : root;
  }
  __syncthreads();
  const int64_t matrix = static_cast<int64_t>(blockIdx.y) * elements;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * elements_per_partial;
  const int64_t end = smaller(begin + elements_per_partial, elements);
  for (int64_t at = begin + threadIdx.x * Width; at < end; at += blockDim.x * Width) {
    float value[Width];
    read(x + matrix + at, value);
#pragma unroll
    for (int i = 0; i < Width; ++i) value[i] /= norm;
    write(y + matrix + at, value);
  }
}

template <class M, int Width>
__global__ void muon_update_kernel(mimo_muon_update_args args, int64_t packs) {
  if (args.found_inf != nullptr && args.found_inf[0] != 0) return;
  const float decay = args.weight_decay[0] * args.weight_decay_multiplier;
  const float rate = args.learning_rate[0] * args.learning_rate_multiplier;
  for_each_pack(1, packs, [&](int64_t, int64_t pack) {
    const int64_t at = pack * Width;
    float p[Width], u[Width];
    read(args.master + at, p);
    read(args.update + at, u);
#pragma unroll
    for (int i = 0; i < Width; ++i) p[i] -= rate * (decay * p[i] + u[i]);
    write(args.master + at, p);
    if constexpr (!std::is_same_v<M, NoModel>) write(static_cast<M*>(args.model) + at, p);
  });
}

}  // namespace

void muon_momentum(mimo_stream& stream, const mimo_muon_momentum_args& args) {
  MIMO_REQUIRE(args.elements >= 0, "muon_momentum");
  const auto fits = [&](const void* pointer) { return packs_fit<float>(pointer, args.elements, 0, 4); };
  with_width<4>(fits(args.momentum) && fits(args.gradient), [&](auto w) {
    const auto [grid, block] = cover(1, args.elements / w);
    launch(stream, muon_momentum_kernel<w>, grid, block, 0, args, args.elements / w);
  });
}

void muon_normalize(mimo_stream& stream, const mimo_muon_normalize_args& args) {
  MIMO_REQUIRE(args.matrices >= 0 && args.matrices <= 65535 && args.elements > 0, "muon_normalize");
  if (args.matrices == 0) return;
  const int64_t partials = ceil_div(args.elements, elements_per_partial);
  Workspace workspace(&stream, args.matrices * partials * static_cast<int64_t>(sizeof(double)));
  with_dtype(args.dtype, [&](auto* type) {
    using Y = std::remove_pointer_t<decltype(type)>;
    const bool fits = packs_fit<float>(args.x, args.elements, 0, 4) && packs_fit<Y>(args.y, args.elements, 0, 4);
    with_width<4>(fits, [&](auto w) {
      const dim3 grid = grid_of(partials, args.matrices);
      launch(stream, squares_kernel<w>, grid, dim3(threads), 0, args.x, args.elements, workspace.as<double>());
      launch(stream, normalize_kernel<Y, w>, grid, dim3(threads), 0, args.x, static_cast<Y*>(args.y), args.elements,
             static_cast<const double*>(workspace.as<double>()), args.epsilon);
    });
  });
}

void muon_update(mimo_stream& stream, const mimo_muon_update_args& args) {
  MIMO_REQUIRE(args.elements >= 0, "muon_update");
  const auto run = [&](auto* model) {
    using M = std::remove_pointer_t<decltype(model)>;
    const auto fits = [&](const void* pointer) { return packs_fit<float>(pointer, args.elements, 0, 4); };
    const bool model_fits = sizeof(M) == 1 || reinterpret_cast<uintptr_t>(args.model) % (4 * sizeof(M)) == 0;
    with_width<4>(fits(args.master) && fits(args.update) && model_fits, [&](auto w) {
      const auto [grid, block] = cover(1, args.elements / w);
      launch(stream, muon_update_kernel<M, w>, grid, block, 0, args, args.elements / w);
    });
  };
  if (args.model == nullptr) return run(static_cast<NoModel*>(nullptr));
  with_dtype(args.model_dtype, run);
}

}  // namespace mimo::cuda
