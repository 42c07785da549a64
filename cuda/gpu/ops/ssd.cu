// Chunk scan (SSD) dispatch, and kernels that several implementations share: decays, the state pass over chunks (Hopper
// has its own of both), and the sums of the heads' gradients.
#include <initializer_list>
#include <utility>

#include "ssd.cuh"

#include "ssd.h"
#include "tensor_map.h"

namespace mimo::cuda {
namespace {

constexpr int warps = 8;

template <class T>
__global__ void decays_kernel(const T* dt, int64_t dt_stride, const float* dt_bias, const float* a_log,
                              float dt_minimum, const int32_t* cu_seqlens, int64_t sequences, int64_t tokens,
                              int64_t heads, int64_t chunk, float* step, float* sum) {
  const Piece piece = piece_at(cu_seqlens, sequences, chunk, blockIdx.x);
  const int64_t head = static_cast<int64_t>(blockIdx.y) * warps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (head >= heads || piece.count == 0) return;
  const float a = -expf(a_log[head]), bias = dt_bias[head];
  float before = 0;
  for (int64_t first = 0; first < piece.count; first += 32) {
    const int64_t token = piece.begin + first + lane;
    const bool live = first + lane < piece.count;
    const float free = live ? softplus(load(dt + token * dt_stride + head) + bias) : 0.0f;
    const float delta = live && free < dt_minimum ? dt_minimum : free;  // NaN stays NaN
    float total = a * delta;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const float other = __shfl_up_sync(all_lanes, total, offset);
      if (lane >= offset) total += other;
    }
    total += before;
    if (live) {
      step[head * tokens + token] = delta;
      sum[head * tokens + token] = total;
    }
    before = __shfl_sync(all_lanes, total, 31);
  }
}

/// A thread carries `Width` elements of a head's state through one sequence.
template <class To, bool reverse, int Width>
__global__ void pass_kernel(const float* from, To* to, float* last_state, const float* sum, const int32_t* cu_seqlens, int64_t tokens,
                            int64_t heads, int64_t elements, int64_t chunk) {
  constexpr int at_once = 4;  // loads in flight
  const int64_t element = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * Width;
  if (element >= elements) return;
  const int64_t head = blockIdx.y, sequence = blockIdx.z;
  const int64_t first_token = cu_seqlens[sequence], last_token = cu_seqlens[sequence + 1];
  const int64_t first = first_piece(cu_seqlens, sequence, chunk), pieces = ceil_div(last_token - first_token, chunk);
  float running[Width] = {};
  for (int64_t base = 0; base < pieces; base += at_once) {
    float value[at_once][Width], decay[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      if (base + i >= pieces) continue;
      const int64_t piece = reverse ? pieces - 1 - base - i : base + i;
      const int64_t end = smaller(first_token + (piece + 1) * chunk, last_token);
      decay[i] = expf(sum[head * tokens + end - 1]);
      read(from + ((first + piece) * heads + head) * elements + element, value[i]);
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      if (base + i >= pieces) continue;
      const int64_t piece = reverse ? pieces - 1 - base - i : base + i;
      write(to + ((first + piece) * heads + head) * elements + element, running);
#pragma unroll
      for (int e = 0; e < Width; ++e) running[e] = decay[i] * running[e] + value[i][e];
    }
  }
  if (last_state != nullptr) write(last_state + (sequence * heads + head) * elements + element, running);
}

__global__ void add_head_sums_kernel(const SsdHeadSums* sums, const int32_t* cu_seqlens, int64_t sequences,
                                     int64_t pieces, int64_t heads, int64_t chunk, float* dd, float* da_log,
                                     float* ddt_bias) {
  __shared__ double shared[3 * 32];
  const int64_t head = blockIdx.x;
  double total[3] = {0, 0, 0};
  for (int64_t p = threadIdx.x; p < pieces; p += blockDim.x) {
    if (piece_at(cu_seqlens, sequences, chunk, p).count == 0) continue;
    const SsdHeadSums part = sums[p * heads + head];
    total[0] += part.d;
    total[1] += part.a_log;
    total[2] += part.dt_bias;
  }
  block_sum(total, shared);
  if (threadIdx.x != 0) return;
  if (dd != nullptr) dd[head] += static_cast<float>(total[0]);
  if (da_log != nullptr) da_log[head] += static_cast<float>(total[1]);
  if (ddt_bias != nullptr) ddt_bias[head] += static_cast<float>(total[2]);
}

/// Whether the tensor-core kernels support these sizes; `rows` are the matrices that need 16-byte aligned rows.
template <class Args>
bool fits_tensor_cores(const Args& args, std::initializer_list<std::pair<const void*, int64_t>> rows) {
  if (args.dtype != MIMO_DTYPE_BF16 || args.chunk_size < 64) return false;
  if (args.head_dim != 64 && (args.head_dim < 72 || args.head_dim > 128 || args.head_dim % 8 != 0)) return false;
  if (args.state_dim != 64 && args.state_dim != 128) return false;
  for (const auto& [pointer, stride] : rows) {
    if (!packs_fit<bf16>(pointer, 64, stride, 8)) return false;
  }
  return true;
}

/// Whether Hopper's kernels support arguments that fit tensor cores: the grid has a row of blocks for each sequence,
/// and TMA coordinates stay below ragged_end rows.
template <class Args>
bool fits_sm90(const mimo_stream& stream, const Args& args) {
#ifdef MIMO_HAS_SM90A
  return stream.device->compute_major == 9 && args.sequences <= 65535 && args.tokens < ragged_end;
#else
  return false;
#endif
}

}  // namespace

void ssd_decays(mimo_stream& stream, const void* dt, int64_t dt_stride, const float* dt_bias, const float* a_log,
                float dt_minimum, const int32_t* cu_seqlens, int64_t sequences, int64_t tokens, int64_t heads,
                int64_t chunk, int32_t dtype, float* step, float* sum) {
  with_dtype(dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    launch(stream, decays_kernel<T>, grid_of(piece_count(tokens, sequences, chunk), ceil_div(heads, warps)),
           dim3(32 * warps), 0, static_cast<const T*>(dt), dt_stride, dt_bias, a_log, dt_minimum, cu_seqlens, sequences,
           tokens, heads, chunk, step, sum);
  });
}

void ssd_pass(mimo_stream& stream, bool reverse, const float* from, void* to, int32_t to_dtype, float* last_state,
              const float* sum, const int32_t* cu_seqlens, int64_t sequences, int64_t tokens, int64_t heads,
              int64_t elements, int64_t chunk) {
  with_dtype(to_dtype, [&](auto* t) {
    using To = std::remove_pointer_t<decltype(t)>;
    with_width<4>(elements % 4 == 0, [&](auto w) {
      launch(stream, reverse ? pass_kernel<To, true, w> : pass_kernel<To, false, w>,
             grid_of(ceil_div(elements, w * 128), heads, sequences), dim3(128), 0, from, static_cast<To*>(to),
             last_state, sum,
             cu_seqlens, tokens, heads, elements, chunk);
    });
  });
}

void ssd_add_head_sums(mimo_stream& stream, const SsdHeadSums* sums, const int32_t* cu_seqlens, int64_t sequences,
                       int64_t pieces, int64_t heads, int64_t chunk, float* dd, float* da_log, float* ddt_bias) {
  launch(stream, add_head_sums_kernel, grid_of(heads), dim3(128), 0, sums, cu_seqlens, sequences, pieces, heads, chunk,
         dd, da_log, ddt_bias);
}

void ssd_forward(mimo_stream& stream, const mimo_ssd_forward_args& args) {
  MIMO_REQUIRE(args.groups > 0 && args.heads % args.groups == 0, "ssd_forward");
  MIMO_REQUIRE(args.chunk_size > 0 && args.head_dim > 0 && args.state_dim > 0, "ssd_forward");
  if (args.tokens == 0 || args.heads == 0) {
    const int64_t states = args.sequences * args.heads * args.head_dim * args.state_dim;
    if (args.final_state == nullptr || states == 0) return;
    return check(cudaMemsetAsync(args.final_state, 0, static_cast<size_t>(states) * sizeof(float), stream.handle()),
                 "clearing states");
  }
  const int64_t width = args.heads * args.head_dim;
  const bool tensor_cores =
      fits_tensor_cores(args, {{args.x, args.xbc_stride}, {args.b, args.xbc_stride}, {args.c, args.xbc_stride},
                               {args.z, args.z_stride}, {args.o, width}, {args.y, width}});
  if (!tensor_cores) return ssd_forward_plain(stream, args);
  if (fits_sm90(stream, args)) return sm90_bf16_ssd_forward(stream, args);
  args.head_dim == 64 ? sm80_bf16_ssd_forward(stream, args) : sm80_bf16_ssd_wide_heads_forward(stream, args);
}

void ssd_backward(mimo_stream& stream, const mimo_ssd_backward_args& args) {
  MIMO_REQUIRE(args.groups > 0 && args.heads % args.groups == 0, "ssd_backward");
  MIMO_REQUIRE(args.chunk_size > 0 && args.head_dim > 0 && args.state_dim > 0, "ssd_backward");
  if (args.tokens == 0 || args.heads == 0) return;
  const int64_t width = args.heads * args.head_dim;
  const bool tensor_cores = fits_tensor_cores(
      args, {{args.x, args.xbc_stride}, {args.b, args.xbc_stride}, {args.c, args.xbc_stride}, {args.z, args.z_stride},
             {args.y, width}, {args.d_o, width}, {args.dx, args.dxbc_stride}, {args.db, args.dxbc_stride},
             {args.dc, args.dxbc_stride}, {args.dz, args.dz_stride}});
  if (!tensor_cores) return ssd_backward_plain(stream, args);
  if (fits_sm90(stream, args)) return sm90_bf16_ssd_backward(stream, args);
  args.head_dim == 64 ? sm80_bf16_ssd_backward(stream, args) : sm80_bf16_ssd_wide_heads_backward(stream, args);
}

}  // namespace mimo::cuda
