// Chunk scan (SSD) of heads of 72 to 128 on the kernels for heads of 64, on GPUs other than Hopper. A state's rows do not
// depend on each other: a wide head is two heads of 64 that share Δ, A, D, B and C, the second filled up with zeros. Heads
// of 128 lie so in memory already; narrower ones are copied. Gradients of what the halves share are added.
#include "kernel.cuh"
#include "ssd.h"

namespace mimo::cuda {
namespace {

constexpr int half = 64, whole = 2 * half, threads = 256, piece = vector_width<bf16>;

/// Copies heads of `head_dim` [T, H, head_dim] to heads of 128 filled up with zeros, or, `back`, the other way.
template <bool back>
__global__ void __launch_bounds__(threads) copy_heads_kernel(const bf16* from, int64_t from_stride, bf16* to, int64_t to_stride,
                                                             int64_t tokens, int64_t heads, int64_t head_dim) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
  const int64_t token = index / (heads * (whole / piece)), at = index % (heads * (whole / piece));
  const int64_t head = at / (whole / piece), column = at % (whole / piece) * piece;
  if (token >= tokens || (back && column >= head_dim)) return;
  const int64_t narrow = head * head_dim + column, wide = head * whole + column;
  uint4 value = make_uint4(0, 0, 0, 0);
  if (column < head_dim) value = *reinterpret_cast<const uint4*>(from + token * from_stride + (back ? wide : narrow));
  *reinterpret_cast<uint4*>(to + token * to_stride + (back ? narrow : wide)) = value;
}

void copy_heads(mimo_stream& stream, bool back, const void* from, int64_t from_stride, void* to, int64_t to_stride, int64_t tokens,
                int64_t heads, int64_t head_dim) {
  launch(stream, back ? copy_heads_kernel<true> : copy_heads_kernel<false>,
         grid_of(ceil_div(tokens * heads * (whole / piece), threads)), dim3(threads), 0, static_cast<const bf16*>(from), from_stride,
         static_cast<bf16*>(to), to_stride, tokens, heads, head_dim);
}

/// to[r, 2 h + {0, 1}] = from[r, h].
template <class T>
__global__ void __launch_bounds__(threads) repeat_kernel(const T* from, int64_t stride, T* to, int64_t rows, int64_t heads) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (index >= rows * 2 * heads) return;
  to[index] = from[index / (2 * heads) * stride + index % (2 * heads) / 2];
}
template <class T>
void repeat(mimo_stream& stream, const void* from, int64_t stride, void* to, int64_t rows, int64_t heads) {
  launch(stream, repeat_kernel<T>, grid_of(ceil_div(rows * 2 * heads, threads)), dim3(threads), 0, static_cast<const T*>(from),
         stride, static_cast<T*>(to), rows, heads);
}

/// to[r, h] (+)= from[r, 2 h] + from[r, 2 h + 1].
template <class T>
__global__ void __launch_bounds__(threads) add_pairs_kernel(const T* from, T* to, int64_t stride, int64_t rows, int64_t heads, bool add) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (index >= rows * heads) return;
  T* const at = to + index / heads * stride + index % heads;
  store(at, (add ? load(at) : 0.0f) + load(from + 2 * index) + load(from + 2 * index + 1));
}
template <class T>
void add_pairs(mimo_stream& stream, const T* from, void* to, int64_t stride, int64_t rows, int64_t heads, bool add) {
  if (to == nullptr) return;
  launch(stream, add_pairs_kernel<T>, grid_of(ceil_div(rows * heads, threads)), dim3(threads), 0, from, static_cast<T*>(to), stride,
         rows, heads, add);
}

/// Copies values of fp32 for each row of heads between [H, head_dim] and [H, 128], or adds them back.
__global__ void __launch_bounds__(threads) copy_factors_kernel(const float* from, float* to, int64_t heads, int64_t head_dim, bool back) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x, column = index % whole;
  if (index >= heads * whole) return;
  const int64_t narrow = index / whole * head_dim + column;
  if (!back) {
    to[index] = column < head_dim ? from[narrow] : 0.0f;
  } else if (column < head_dim) {
    to[narrow] += from[index];
  }
}
void copy_factors(mimo_stream& stream, const float* from, float* to, int64_t heads, int64_t head_dim, bool back) {
  launch(stream, copy_factors_kernel, grid_of(ceil_div(heads * whole, threads)), dim3(threads), 0, from, to, heads, head_dim, back);
}

void copy_columns(mimo_stream& stream, const void* from, int64_t from_stride, void* to, int64_t to_stride, int64_t tokens, int64_t width) {
  check(cudaMemcpy2DAsync(to, static_cast<size_t>(2 * to_stride), from, static_cast<size_t>(2 * from_stride), static_cast<size_t>(2 * width),
                          static_cast<size_t>(tokens), cudaMemcpyDeviceToDevice, stream.handle()),
        "copying columns");
}

/// Inputs with heads of 64, and their memory.
class HalfHeads {
 public:
  template <class Args>
  HalfHeads(mimo_stream& stream, const Args& args)
      : copies_(args.head_dim < whole),
        width_(args.heads * whole),
        states_(args.groups * args.state_dim),
        rows_(&stream, copies_ ? 2 * args.tokens * (2 * width_ + 2 * states_) : 0),
        dt_(&stream, 2 * args.tokens * 2 * args.heads),
        parameters_(&stream, 4 * 3 * 2 * args.heads),
        factors_(&stream, copies_ && args.z_factors != nullptr ? 4 * width_ : 0) {}

  /// Replaces the inputs of `args` by those of twice as many heads of 64.
  template <class Args>
  void prepare(mimo_stream& stream, Args& args) {
    const int64_t heads = args.heads, head_dim = args.head_dim;
    if (copies_) {
      bf16* const z = rows_.as<bf16>();
      bf16* const x = z + args.tokens * width_;
      const int64_t stride = width_ + 2 * states_;
      copy_heads(stream, false, args.z, args.z_stride, z, width_, args.tokens, heads, head_dim);
      copy_heads(stream, false, args.x, args.xbc_stride, x, stride, args.tokens, heads, head_dim);
      copy_columns(stream, args.b, args.xbc_stride, x + width_, stride, args.tokens, states_);
      copy_columns(stream, args.c, args.xbc_stride, x + width_ + states_, stride, args.tokens, states_);
      args.z = z, args.x = x, args.b = x + width_, args.c = x + width_ + states_;
      args.z_stride = width_, args.xbc_stride = stride;
      if (args.z_factors != nullptr) {
        copy_factors(stream, args.z_factors, factors_.as<float>(), heads, head_dim, false);
        args.z_factors = factors_.as<float>();
      }
    }
    repeat<bf16>(stream, args.dt, args.dt_stride, dt_.as<void>(), args.tokens, heads);
    float* const parameters = parameters_.as<float>();
    repeat<float>(stream, args.dt_bias, heads, parameters, 1, heads);
    repeat<float>(stream, args.a_log, heads, parameters + 2 * heads, 1, heads);
    repeat<float>(stream, args.d, heads, parameters + 4 * heads, 1, heads);
    args.dt = dt_.as<void>(), args.dt_stride = 2 * heads;
    args.dt_bias = parameters, args.a_log = parameters + 2 * heads, args.d = parameters + 4 * heads;
    args.heads = 2 * heads, args.head_dim = half;
  }

  bool copies() const { return copies_; }
  /// Columns of all heads of 64, and of B.
  int64_t width() const { return width_; }
  int64_t states() const { return states_; }

 private:
  bool copies_;
  int64_t width_, states_;
  Workspace rows_, dt_, parameters_, factors_;
};

}  // namespace

void sm80_bf16_ssd_wide_heads_forward(mimo_stream& stream, const mimo_ssd_forward_args& args) {
  HalfHeads halves(stream, args);
  mimo_ssd_forward_args of_halves = args;
  halves.prepare(stream, of_halves);
  if (!halves.copies()) return sm80_bf16_ssd_forward(stream, of_halves);
  const int64_t rows = args.tokens * halves.width(), state = args.head_dim * args.state_dim, wide_state = whole * args.state_dim;
  Workspace outputs(&stream, 2 * rows * (args.y == nullptr ? 1 : 2));
  Workspace final_state(&stream, args.final_state == nullptr ? 0 : 4 * args.sequences * args.heads * wide_state);
  of_halves.o = outputs.as<bf16>();
  if (args.y != nullptr) of_halves.y = outputs.as<bf16>() + rows;
  if (args.final_state != nullptr) of_halves.final_state = final_state.as<float>();
  sm80_bf16_ssd_forward(stream, of_halves);
  const int64_t width = args.heads * args.head_dim;
  copy_heads(stream, true, of_halves.o, halves.width(), args.o, width, args.tokens, args.heads, args.head_dim);
  if (args.y != nullptr) copy_heads(stream, true, of_halves.y, halves.width(), args.y, width, args.tokens, args.heads, args.head_dim);
  if (args.final_state == nullptr) return;
  check(cudaMemcpy2DAsync(args.final_state, static_cast<size_t>(4 * state), of_halves.final_state, static_cast<size_t>(4 * wide_state),
                          static_cast<size_t>(4 * state), static_cast<size_t>(args.sequences * args.heads), cudaMemcpyDeviceToDevice,
                          stream.handle()),
        "copying states");
}

void sm80_bf16_ssd_wide_heads_backward(mimo_stream& stream, const mimo_ssd_backward_args& args) {
  HalfHeads halves(stream, args);
  mimo_ssd_backward_args of_halves = args;
  halves.prepare(stream, of_halves);
  const int64_t heads = args.heads, rows = halves.copies() ? args.tokens * halves.width() : 0, columns = halves.width() + 2 * halves.states();
  const int64_t width = heads * args.head_dim;
  // d_o and y; dz; dx, db and dc.
  Workspace inputs(&stream, 4 * rows), gates(&stream, 2 * rows), gradients(&stream, halves.copies() ? 2 * args.tokens * columns : 0);
  Workspace shared(&stream, 2 * args.tokens * 2 * heads), sums(&stream, 4 * 3 * 2 * heads);
  Workspace factors(&stream, rows > 0 && args.dz_factors != nullptr ? 4 * halves.width() : 0);
  if (halves.copies()) {
    bf16* const d_o = inputs.as<bf16>();
    copy_heads(stream, false, args.d_o, width, d_o, halves.width(), args.tokens, heads, args.head_dim);
    copy_heads(stream, false, args.y, width, d_o + rows, halves.width(), args.tokens, heads, args.head_dim);
    bf16* const dx = gradients.as<bf16>();
    of_halves.d_o = d_o, of_halves.y = d_o + rows;
    of_halves.dz = gates.as<void>(), of_halves.dz_stride = halves.width();
    of_halves.dx = dx, of_halves.db = dx + halves.width(), of_halves.dc = dx + halves.width() + halves.states();
    of_halves.dxbc_stride = columns;
    if (args.dz_factors != nullptr) {
      of_halves.dz_factors = factors.as<float>();
      check(cudaMemsetAsync(of_halves.dz_factors, 0, static_cast<size_t>(4 * halves.width()), stream.handle()), "clearing sums");
    }
  }
  float* const of_heads = sums.as<float>();
  check(cudaMemsetAsync(of_heads, 0, static_cast<size_t>(4 * 3 * 2 * heads), stream.handle()), "clearing sums");
  of_halves.ddt = shared.as<void>(), of_halves.ddt_stride = 2 * heads;
  of_halves.ddt_bias = of_heads, of_halves.da_log = of_heads + 2 * heads, of_halves.dd = of_heads + 4 * heads;
  sm80_bf16_ssd_backward(stream, of_halves);
  add_pairs(stream, shared.as<bf16>(), args.ddt, args.ddt_stride, args.tokens, heads, false);
  add_pairs(stream, of_heads, args.ddt_bias, heads, 1, heads, true);
  add_pairs(stream, of_heads + 2 * heads, args.da_log, heads, 1, heads, true);
  add_pairs(stream, of_heads + 4 * heads, args.dd, heads, 1, heads, true);
  if (!halves.copies()) return;
  copy_heads(stream, true, of_halves.dz, halves.width(), args.dz, args.dz_stride, args.tokens, heads, args.head_dim);
  copy_heads(stream, true, of_halves.dx, columns, args.dx, args.dxbc_stride, args.tokens, heads, args.head_dim);
  copy_columns(stream, of_halves.db, columns, args.db, args.dxbc_stride, args.tokens, halves.states());
  copy_columns(stream, of_halves.dc, columns, args.dc, args.dxbc_stride, args.tokens, halves.states());
  if (args.dz_factors != nullptr) copy_factors(stream, of_halves.dz_factors, args.dz_factors, heads, args.head_dim, true);
}

}  // namespace mimo::cuda
