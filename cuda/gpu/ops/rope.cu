// Rotary position embedding (docs/spec/language-model.md §3; Su et al., RoFormer): pairs of a head's columns become
// (x₁ cos θ - x₂ sin θ, x₂ cos θ + x₁ sin θ) with θ_i = position * base^(-2i / rotary_dim) or position * frequencies[i].
#include "packed.cuh"

namespace mimo::cuda {
namespace {

constexpr int angle_rows = 16;  // of a thread

/// angles[row][i] = (cos, sin), computed in fp64 because an fp32 angle loses precision at large positions. One row for
/// each position; where sequences start at positions of their own, one for each token.
__global__ void angles_kernel(mimo_rope_forward_args args, int64_t rows, float2* angles) {
  const int64_t half = args.rotary_dim / 2, i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= half) return;
  const double exponent = -2.0 * static_cast<double>(i) / static_cast<double>(args.rotary_dim);
  const double frequency = args.frequencies != nullptr ? args.frequencies[i] : pow(static_cast<double>(args.base), exponent);
  const double step = static_cast<double>(args.angle_scale) * frequency;
  const int64_t first = (static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y) * angle_rows;
  for (int64_t row = first; row < smaller(first + angle_rows, rows); ++row) {
    int64_t position = row;
    if (args.first_positions != nullptr) {
      const int64_t sequence = sequence_of(args.cu_seqlens, args.sequences, row);
      position += args.first_positions[sequence] - args.cu_seqlens[sequence];
    }
    double sine, cosine;
    sincos(step * static_cast<double>(position), &sine, &cosine);
    angles[row * half + i] = make_float2(args.amplitude * static_cast<float>(cosine), args.amplitude * static_cast<float>(sine));
  }
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

/// rotate_kernel where both halves of a head's rotated columns are whole packs. A block takes a token, threadIdx.x a slot:
/// a pair of packs, or one pack of the remaining columns. Its lanes share the heads, so that a thread reads its angles once.
template <class T, int Width>
__global__ void rotate_packs_kernel(mimo_rope_forward_args args, const float2* angles) {
  const int64_t token = blockIdx.x;
  const int half = static_cast<int>(args.rotary_dim) / 2, pairs = half / Width, slot = static_cast<int>(threadIdx.x);
  const int heads = static_cast<int>(args.groups * args.heads_per_group), per_group = static_cast<int>(args.heads_per_group);
  const int first_column = static_cast<int>(args.first_column), head_dim = static_cast<int>(args.head_dim);
  const T* const x = static_cast<const T*>(args.x) + token * args.x_stride;
  T* const y = static_cast<T*>(args.y) + token * args.y_stride;
  if (slot >= pairs) {
    const int other = (slot - pairs) * Width, column = other < first_column ? other : 2 * half + other;
    if (x == y) return;
    for (int head = static_cast<int>(threadIdx.y); head < heads; head += static_cast<int>(blockDim.y)) {
      const int at = head * head_dim + column;
      *reinterpret_cast<Packed<T, Width>*>(y + at) = read_packed<Width>(x + at);
    }
    return;
  }
  const int64_t first =
      args.first_positions != nullptr ? 0 : args.cu_seqlens[sequence_of(args.cu_seqlens, args.sequences, token)];
  float2 angle[Width];
  const float4* const from = reinterpret_cast<const float4*>(angles + (token - first) * half + slot * Width);
#pragma unroll
  for (int i = 0; i < Width; i += 2) {
    const float4 two = from[i / 2];
    angle[i] = make_float2(two.x, two.y), angle[i + 1] = make_float2(two.z, two.w);
  }
#pragma unroll 4
  for (int head = static_cast<int>(threadIdx.y); head < heads; head += static_cast<int>(blockDim.y)) {
    const int at = head * head_dim + first_column + slot * Width;
    const bool turns = head % per_group < args.rotated_per_group;
    if (!turns && x == y) continue;
    const Packed<T, Width> one = read_packed<Width>(x + at), two = read_packed<Width>(x + at + half);
    float first_half[Width], second_half[Width];
#pragma unroll
    for (int i = 0; i < Width; ++i) {
      const float x1 = one.get(i), x2 = two.get(i);
      first_half[i] = turns ? x1 * angle[i].x - x2 * angle[i].y : x1;
      second_half[i] = turns ? x2 * angle[i].x + x1 * angle[i].y : x2;
    }
    write(y + at, first_half);
    write(y + at + half, second_half);
  }
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
    const dim3 block(32, 4);
    launch(stream, angles_kernel, grid_of(ceil_div(half, block.x), ceil_div(rows, block.y * angle_rows)), block, 0, args, rows,
           table.as<float2>());
  }
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    constexpr int wide = vector_width<T>;
    const int64_t packs = slots / wide;
    const bool whole = args.interleaved == 0 && half > 0 && half % wide == 0 && args.first_column % wide == 0 && packs <= 64 &&
                       packs_fit<T>(args.x, args.head_dim, args.x_stride, wide) &&
                       packs_fit<T>(args.y, args.head_dim, args.y_stride, wide);
    if (whole) {
      constexpr int64_t threads = 128;
      const int64_t heads = args.groups * args.heads_per_group, turns = ceil_div(heads * packs, threads);
      const dim3 block(static_cast<unsigned>(packs), static_cast<unsigned>(ceil_div(heads, turns)));
      return launch(stream, rotate_packs_kernel<T, wide>, grid_of(args.tokens), block, 0, args, table.as<float2>());
    }
    const auto [grid, block] = cover(args.tokens, per_token);
    launch(stream, rotate_kernel<T>, grid, block, 0, args, table.as<float2>(), slots);
  });
}

}  // namespace mimo::cuda
