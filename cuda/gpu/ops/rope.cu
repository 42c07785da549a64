// Rotary position embedding (docs/spec/language-model.md §3; Su et al., RoFormer): pairs of a head's columns become
// (x₁ cos θ - x₂ sin θ, x₂ cos θ + x₁ sin θ) with θ_i = position * base^(-2i / rotary_dim) or position * frequencies[i].
#include "kernel.cuh"

namespace mimo::cuda {
namespace {

/// angles[row][i] = (cos, sin), computed in fp64 because an fp32 angle loses precision at large positions. One row for
/// each position; where sequences start at positions of their own, one for each token.
__global__ void angles_kernel(mimo_rope_forward_args args, int64_t rows, float2* angles) {
  const int64_t half = args.rotary_dim / 2;
  for_each_pack(1, rows * half, [&](int64_t, int64_t index) {
    int64_t position = index / half;
    if (args.first_positions != nullptr) {
      const int64_t sequence = sequence_of(args.cu_seqlens, args.sequences, position);
      position += args.first_positions[sequence] - args.cu_seqlens[sequence];
    }
    const double exponent = -2.0 * static_cast<double>(index % half) / static_cast<double>(args.rotary_dim);
    const double frequency = args.frequencies != nullptr ? args.frequencies[index % half]
                                                         : pow(static_cast<double>(args.base), exponent);
    const double step = static_cast<double>(args.angle_scale) * frequency;
    double sine, cosine;
    sincos(step * static_cast<double>(position), &sine, &cosine);
    angles[index] = make_float2(args.amplitude * static_cast<float>(cosine), args.amplitude * static_cast<float>(sine));
  });
}

/// A thread rotates one pair of columns of a head or copies two columns; `slots` of a head are the pairs, then the
/// remaining columns.
template <class T>
__global__ void rotate_kernel(mimo_rope_forward_args args, const float2* angles, int64_t slots) {
  const int64_t half = args.rotary_dim / 2, heads = args.groups * args.heads_per_group;
  for_each_pack(args.tokens, heads * slots, [&](int64_t token, int64_t index) {
    const int64_t head = index / slots, slot = index % slots;
    const T* x = static_cast<const T*>(args.x) + token * args.x_stride + head * args.head_dim;
    T* y = static_cast<T*>(args.y) + token * args.y_stride + head * args.head_dim;
    if (slot >= half) {
      const int64_t other = slot - half, column = other < args.first_column ? other : args.rotary_dim + other;
      if (x != y) y[column] = x[column];
      return;
    }
    const int64_t one = args.first_column + (args.interleaved != 0 ? 2 * slot : slot);
    const int64_t two = one + (args.interleaved != 0 ? 1 : half);
    const float x1 = load(x + one), x2 = load(x + two);
    if (head % args.heads_per_group >= args.rotated_per_group) {
      store(y + one, x1);
      store(y + two, x2);
      return;
    }
    const bool by_token = args.first_positions != nullptr;
    const int64_t first = by_token ? 0 : args.cu_seqlens[sequence_of(args.cu_seqlens, args.sequences, token)];
    const float2 angle = angles[(token - first) * half + slot];
    store(y + one, x1 * angle.x - x2 * angle.y);
    store(y + two, x2 * angle.x + x1 * angle.y);
  });
}

}  // namespace

void rope_forward(mimo_stream& stream, const mimo_rope_forward_args& args) {
  MIMO_REQUIRE(args.rotary_dim >= 0 && args.rotary_dim % 2 == 0 && args.first_column >= 0 &&
                   args.first_column + args.rotary_dim <= args.head_dim,
               "rope_forward");
  MIMO_REQUIRE(args.rotated_per_group <= args.heads_per_group, "rope_forward");
  const int64_t half = args.rotary_dim / 2;
  const int64_t rows = args.first_positions == nullptr ? args.max_seqlen : args.tokens, angles = rows * half;
  const int64_t slots = half + args.head_dim - args.rotary_dim, per_token = args.groups * args.heads_per_group * slots;
  if (args.tokens == 0 || per_token == 0) return;
  Workspace table(&stream, angles * static_cast<int64_t>(sizeof(float2)));
  if (angles > 0) {
    const auto [grid, block] = cover(1, angles);
    launch(stream, angles_kernel, grid, block, 0, args, rows, table.as<float2>());
  }
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const auto [grid, block] = cover(args.tokens, per_token);
    launch(stream, rotate_kernel<T>, grid, block, 0, args, table.as<float2>(), slots);
  });
}

}  // namespace mimo::cuda
