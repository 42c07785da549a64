// RMSNorm and group RMSNorm, forward and backward (docs/spec/language-model.md §1.5, §2.2): y = h rsqrt(mean(h²) + ε)
// γ, γ = offset + weight.
#include "kernel.h"
#include "prefetch.h"
#include "streaming.h"
#include "vectors.h"

namespace mimo::MIMO_ISA {
namespace {

/// A group of columns of a row, normalised together. Groups are numbered row by row.
struct Place {
  int64_t row, column;
};

Place place_of(int64_t index, int64_t groups, int64_t group_size) {
  return {index / groups, index % groups * group_size};
}

template <class T>
void add_residual(const T* x, const T* residual, T* sum, int64_t size) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) store(&sum[i], load(x[i]) + load(residual[i]));
}

/// γ of a group's columns.
template <class W>
struct Gain {
  const W* weight;
  float offset;

  Gain from(int64_t column) const { return {weight + column, offset}; }
  Vector vector(int64_t i) const { return load_vector(weight + i) + offset; }
  float at(int64_t i) const { return load(weight[i]) + offset; }
};

template <class T, class W>
void scale_group(const T* h, Gain<W> gain, float rstd, T* y, int64_t size) {
  row_loop(
      size, [=](int64_t i) { store_vector(y + i, load_vector(h + i) * rstd * gain.vector(i)); },
      [=](int64_t i) { store(&y[i], load(h[i]) * rstd * gain.at(i)); });
}

/// Groups [begin, end), numbered row by row.
template <class T, class W>
void forward_groups(const mimo_rms_norm_forward_args& args, int64_t begin, int64_t end) {
  const int64_t size = args.group_size, groups = args.width / size;
  const bool streamed = is_streamed(args.rows * args.width, sizeof(T));
  const auto normalised = [&](Place at) -> const T* {
    if (args.residual != nullptr) return static_cast<const T*>(args.sum) + at.row * args.width + at.column;
    return static_cast<const T*>(args.x) + at.row * args.x_stride + at.column;
  };
  for (int64_t index = begin; index < end; ++index) {
    const Place at = place_of(index, groups, size);
    if (args.residual != nullptr) {
      const int64_t offset = at.row * args.x_stride + at.column;
      add_residual(static_cast<const T*>(args.x) + offset, static_cast<const T*>(args.residual) + offset,
                   static_cast<T*>(args.sum) + at.row * args.width + at.column, size);
    }
    const T* h = normalised(at);
    const float squares = row_sum(
        size, [h](int64_t i) { return load_vector(h + i) * load_vector(h + i); },
        [h](int64_t i) { return load(h[i]) * load(h[i]); });
    args.rstd[index] = 1.0f / std::sqrt(squares / static_cast<float>(size) + args.epsilon);
  }
  // Prefetches the next groups while results are computed from cached data. Nothing past the last group is read.
  const Place next = place_of(end, groups, size);
  prefetch(static_cast<const T*>(args.x) + next.row * args.x_stride + next.column, (end - begin) * size);
  for (int64_t index = begin; index < end; ++index) {
    const Place at = place_of(index, groups, size);
    const T* h = normalised(at);
    const Gain<W> gain{static_cast<const W*>(args.weight) + at.column, args.weight_offset};
    T* y = static_cast<T*>(args.y) + at.row * args.y_stride + at.column;
    write_row(streamed, y, size, [&](T* to, int64_t from, int64_t past) {
      scale_group(h + from, gain.from(from), args.rstd[index], to, past - from);
    });
  }
  finish_streaming(streamed);
}

/// Returns Σ γ dy x of one group; dweight += dy x rstd unless null. Separate from the loop that writes dx: stores
/// retire in order, and these, to cached memory, would wait behind dx's misses.
template <class T, class W>
float dot_and_weight_gradient(const T* dy, const T* x, Gain<W> gain, float* dweight, int64_t size, float rstd) {
  if (dweight == nullptr) {
    return row_sum(
        size, [=](int64_t i) { return load_vector(dy + i) * load_vector(x + i) * gain.vector(i); },
        [=](int64_t i) { return load(dy[i]) * load(x[i]) * gain.at(i); });
  }
  return row_sum(
      size,
      [=](int64_t i) {
        const Vector product = load_vector(dy + i) * load_vector(x + i);
        store_vector(dweight + i, load_vector(dweight + i) + product * rstd);
        return product * gain.vector(i);
      },
      [=](int64_t i) {
        const float product = load(dy[i]) * load(x[i]);
        dweight[i] += product * rstd;
        return product * gain.at(i);
      });
}

/// dx = rstd (γ dy - x rstd² mean) (+ dresidual) of a part of a group, mean = Σ γ dy x / size over the whole group.
template <bool with_residual, class T, class W>
void input_gradient(const T* dy, const T* x, Gain<W> gain, const T* dresidual, T* dx, int64_t size, float rstd,
                    float mean) {
  const float scaled_mean = mean * rstd * rstd;
  row_loop(
      size,
      [=](int64_t i) {
        const Vector gradient = rstd * (gain.vector(i) * load_vector(dy + i) - load_vector(x + i) * scaled_mean);
        if constexpr (with_residual) store_vector(dx + i, load_vector(dresidual + i) + gradient);
        else store_vector(dx + i, gradient);
      },
      [=](int64_t i) {
        const float gradient = rstd * (gain.at(i) * load(dy[i]) - load(x[i]) * scaled_mean);
        store(&dx[i], with_residual ? load(dresidual[i]) + gradient : gradient);
      });
}

/// Groups [begin, end), at most 32, numbered row by row, of one partial sum of dweight (may be null).
template <class T, class W>
void backward_groups(const mimo_rms_norm_backward_args& args, int64_t begin, int64_t end, float* dweight) {
  const int64_t size = args.group_size, groups = args.width / size;
  const bool streamed = is_streamed(args.rows * args.width, sizeof(T));
  const auto gain_of = [&](Place at) {
    return Gain<W>{static_cast<const W*>(args.weight) + at.column, args.weight_offset};
  };
  float dots[32];
  for (int64_t index = begin; index < end; ++index) {
    const Place at = place_of(index, groups, size);
    dots[index - begin] = dot_and_weight_gradient(static_cast<const T*>(args.dy) + at.row * args.dy_stride + at.column,
                                                  static_cast<const T*>(args.x) + at.row * args.x_stride + at.column,
                                                  gain_of(at), dweight ? dweight + at.column : nullptr, size, args.rstd[index]);
  }
  for (int64_t index = begin; index < end; ++index) {
    const Place at = place_of(index, groups, size);
    const auto gradient = args.dresidual ? input_gradient<true, T, W> : input_gradient<false, T, W>;
    const int64_t offset = at.row * args.dx_stride + at.column;
    const T* dy = static_cast<const T*>(args.dy) + at.row * args.dy_stride + at.column;
    const T* x = static_cast<const T*>(args.x) + at.row * args.x_stride + at.column;
    const Gain<W> gain = gain_of(at);
    const T* dresidual = args.dresidual ? static_cast<const T*>(args.dresidual) + offset : nullptr;
    // Over the whole group; write_row calls for parts of it.
    const float mean = dots[index - begin] / static_cast<float>(size);
    write_row(streamed, static_cast<T*>(args.dx) + offset, size, [&](T* to, int64_t from, int64_t past) {
      gradient(dy + from, x + from, gain.from(from), dresidual ? dresidual + from : nullptr, to, past - from,
               args.rstd[index], mean);
    });
  }
  finish_streaming(streamed);
}

/// Calls body(begin, end) for runs of few groups of the rows [begin, end).
template <class Body>
void in_batches(int64_t begin_row, int64_t end_row, int64_t groups, int64_t group_size, Body&& body) {
  const int64_t end = end_row * groups, batch = rows_per_batch(group_size);
  for (int64_t index = begin_row * groups; index < end; index += batch)
    body(index, index + batch < end ? index + batch : end);
}

}  // namespace

void rms_norm_forward(mimo_stream& stream, const mimo_rms_norm_forward_args& args) {
  MIMO_REQUIRE(args.group_size > 0 && args.width % args.group_size == 0, "rms_norm_forward");
  MIMO_REQUIRE((args.residual == nullptr) == (args.sum == nullptr), "rms_norm_forward");
  with_dtype(args.dtype, [&](auto* t) {
    with_dtype(args.weight_dtype, [&](auto* w) {
      using T = std::remove_pointer_t<decltype(t)>;
      using W = std::remove_pointer_t<decltype(w)>;
      parallel_range(stream.device->threads, args.rows, rows_per_partial, [&](int64_t begin, int64_t end) {
        in_batches(begin, end, args.width / args.group_size, args.group_size,
                   [&](int64_t first, int64_t last) { forward_groups<T, W>(args, first, last); });
      });
    });
  });
}

void rms_norm_backward(mimo_stream& stream, const mimo_rms_norm_backward_args& args) {
  MIMO_REQUIRE(args.group_size > 0 && args.width % args.group_size == 0, "rms_norm_backward");
  const int64_t partials = (args.rows + rows_per_partial - 1) / rows_per_partial;
  const int64_t partial_bytes = args.dweight ? partials * args.width * static_cast<int64_t>(sizeof(float)) : 0;
  Workspace workspace(&stream, partial_bytes);
  float* partial = args.dweight ? workspace.as<float>() : nullptr;
  with_dtype(args.dtype, [&](auto* t) {
    with_dtype(args.weight_dtype, [&](auto* w) {
      using T = std::remove_pointer_t<decltype(t)>;
      using W = std::remove_pointer_t<decltype(w)>;
      parallel_range(stream.device->threads, args.rows, rows_per_partial, [&](int64_t begin, int64_t end) {
        float* dweight = partial ? partial + begin / rows_per_partial * args.width : nullptr;
        if (dweight != nullptr) std::memset(dweight, 0, static_cast<size_t>(args.width) * sizeof(float));
        in_batches(begin, end, args.width / args.group_size, args.group_size,
                   [&](int64_t first, int64_t last) { backward_groups<T, W>(args, first, last, dweight); });
      });
    });
  });
  if (partial != nullptr) add_partials(stream, partial, partials, args.width, args.dweight);
}

}  // namespace mimo::MIMO_ISA
