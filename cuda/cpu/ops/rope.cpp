// Rotary position embedding (docs/spec/language-model.md §3; Su et al., RoFormer): pairs of a head's columns become
// (x₁ cos θ - x₂ sin θ, x₂ cos θ + x₁ sin θ) with θ_i = position * base^(-2i / rotary_dim) or position * frequencies[i].
#include "kernel.h"

namespace mimo::MIMO_ISA {
namespace {

/// The angles of every angle_run-th position are computed directly, the others by the addition theorem.
constexpr int64_t angle_run = 64;

/// Cosines and sines in fp32, [rows, half] each, computed in fp64 because an fp32 angle loses precision at large
/// positions.
struct Angles {
  float* cosine;
  float* sine;
};

/// Fills rows [begin, end) of the table; row 0 is position `first`.
void fill_angles(const mimo_rope_forward_args& args, int64_t begin, int64_t end, int64_t first, const Angles& angles) {
  const int64_t half = args.rotary_dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const double exponent = -2.0 * static_cast<double>(i) / static_cast<double>(args.rotary_dim);
    const double frequency =
        args.frequencies != nullptr ? args.frequencies[i] : std::pow(static_cast<double>(args.base), exponent);
    const double step = args.angle_scale * frequency;
    const double step_cosine = std::cos(step), step_sine = std::sin(step);
    double cosine = std::cos(step * static_cast<double>(first)), sine = std::sin(step * static_cast<double>(first));
    for (int64_t row = begin; row < end; ++row) {
      angles.cosine[row * half + i] = args.amplitude * static_cast<float>(cosine);
      angles.sine[row * half + i] = args.amplitude * static_cast<float>(sine);
      const double next = cosine * step_cosine - sine * step_sine;
      sine = sine * step_cosine + cosine * step_sine;
      cosine = next;
    }
  }
}

template <class T>
void rotate_token(const mimo_rope_forward_args& args, int64_t token, const float* cosine, const float* sine) {
  const int64_t half = args.rotary_dim / 2, d = args.head_dim;
  for (int64_t head = 0; head < args.groups * args.heads_per_group; ++head) {
    const T* x = static_cast<const T*>(args.x) + token * args.x_stride + head * d;
    T* y = static_cast<T*>(args.y) + token * args.y_stride + head * d;
    const bool rotated = head % args.heads_per_group < args.rotated_per_group;
    const int64_t first = rotated ? args.first_column : 0, end = rotated ? first + args.rotary_dim : 0;
    if (rotated && args.interleaved != 0) {
      for (int64_t i = 0; i < half; ++i) {
        const float x1 = load(x[first + 2 * i]), x2 = load(x[first + 2 * i + 1]);
        store(&y[first + 2 * i], x1 * cosine[i] - x2 * sine[i]);
        store(&y[first + 2 * i + 1], x2 * cosine[i] + x1 * sine[i]);
      }
    } else if (rotated) {
      const T* const from = x + first;
      T* const to = y + first;
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        const float x1 = load(from[i]), x2 = load(from[half + i]);
        store(&to[i], x1 * cosine[i] - x2 * sine[i]);
        store(&to[half + i], x2 * cosine[i] + x1 * sine[i]);
      }
    }
    std::memmove(y, x, static_cast<size_t>(first) * sizeof(T));
    std::memmove(y + end, x + end, static_cast<size_t>(d - end) * sizeof(T));
  }
}

}  // namespace

void rope_forward(mimo_stream& stream, const mimo_rope_forward_args& args) {
  MIMO_REQUIRE(args.rotary_dim >= 0 && args.rotary_dim % 2 == 0 && args.first_column >= 0 &&
                   args.first_column + args.rotary_dim <= args.head_dim,
               "rope_forward");
  MIMO_REQUIRE(args.rotated_per_group <= args.heads_per_group, "rope_forward");
  MIMO_REQUIRE(args.cu_seqlens[0] == 0 && args.cu_seqlens[args.sequences] == args.tokens, "rope_forward");
  // One row for each position; where sequences start at positions of their own, one for each token.
  const bool by_token = args.first_positions != nullptr;
  const int64_t half = args.rotary_dim / 2, elements = (by_token ? args.tokens : args.max_seqlen) * half;
  Workspace table(&stream, 2 * elements * static_cast<int64_t>(sizeof(float)));
  const Angles angles{table.as<float>(), table.as<float>() + elements};
  Workspace table_rows(&stream, args.tokens * static_cast<int64_t>(sizeof(int32_t)));
  int32_t* const row = table_rows.as<int32_t>();
  for (int64_t s = 0; s < args.sequences; ++s) {
    const int32_t begin = args.cu_seqlens[s], end = args.cu_seqlens[s + 1];
    MIMO_REQUIRE(begin <= end && end - begin <= args.max_seqlen, "rope_forward");
    for (int32_t token = begin; token < end; ++token) row[token] = by_token ? token : token - begin;
    if (by_token) fill_angles(args, begin, end, args.first_positions[s], angles);
  }
  ThreadPool& threads = stream.device->threads;
  if (!by_token) {
    parallel_range(threads, args.max_seqlen, angle_run,
                   [&](int64_t begin, int64_t end) { fill_angles(args, begin, end, begin, angles); });
  }
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    parallel_range(threads, args.tokens, rows_per_partial, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        rotate_token<T>(args, token, angles.cosine + row[token] * half, angles.sine + row[token] * half);
      }
    });
  });
}

}  // namespace mimo::MIMO_ISA
