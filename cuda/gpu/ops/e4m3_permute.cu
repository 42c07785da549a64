// MoE permute into expert order in e4m3 and, if wanted, bf16 (docs/spec/moe-performance.md §1.7). Each token is
// quantised once while it is copied, which saves a second pass over the rows.
#include "e4m3.cuh"
#include "early.cuh"

namespace mimo::cuda {
namespace {

constexpr int threads = 256, most_lanes = 128;  // of a block; of a token
constexpr int lanes_of_run = 16;                // of eight columns each
constexpr int packs_at_once = 3;                // packs of a lane in flight

/// Processes token by token, as permute_kernel does. A token's lanes hold whole runs; all lanes of a warp take the same
/// number of steps.
template <bool in_bf16>
__global__ void __launch_bounds__(threads)
    permute_kernel(mimo_moe_permute_args args, const int32_t* row_of_slot, int packs, int64_t factor_stride) {
  constexpr int at_once = packs_at_once;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  previous_is_done();
  const bool lives = token < args.tokens;
  const uint4* const from = static_cast<const uint4*>(args.x) + token * packs;
  const int32_t* const rows = row_of_slot + token * args.topk;
  const int lanes = static_cast<int>(blockDim.x), topk = lives ? static_cast<int>(args.topk) : 0;
  for (int base = 0; base < packs; base += lanes * at_once) {
    const int first = base + static_cast<int>(threadIdx.x);
    uint4 pack[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      pack[i] = lives && first + i * lanes < packs ? from[first + i * lanes] : make_uint4(0, 0, 0, 0);
    }
    RoundedColumns<8> rounded[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      float value[8];
      read(pack[i], value);
      rounded[i] = round_run(value);
    }
#pragma unroll 6
    for (int k = 0; k < topk; ++k) {
      const int32_t row = rows[k];
      if (row < 0) continue;
      uint4* const to = static_cast<uint4*>(args.rows) + static_cast<int64_t>(row) * packs;
      uint2* const bytes = static_cast<uint2*>(args.e4m3) + static_cast<int64_t>(row) * packs;
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        const int at = first + i * lanes;
        if (at >= packs) continue;
        if constexpr (in_bf16) to[at] = pack[i];
        bytes[at] = rounded[i].bytes[0];
        if (has_factor<8>()) args.e4m3_factors[at / lanes_of_run * factor_stride + row] = rounded[i].factor;
      }
    }
  }
}

}  // namespace

void permute_in_e4m3(mimo_stream& stream, const mimo_moe_permute_args& args, const int32_t* row_of_slot) {
  const auto fits = [&](const void* pointer) { return packs_fit<bf16>(pointer, args.width, args.width, 8); };
  if (args.dtype != MIMO_DTYPE_BF16 || args.width % 16 != 0 || !fits(args.x) || !fits(args.rows) || !fits(args.e4m3)) {
    fail(MIMO_ERROR_UNSUPPORTED, "moe_permute in e4m3 on a GPU needs bf16 and a width that is a multiple of 16.");
  }
  const int packs = static_cast<int>(args.width / 8);
  // As few passes over the row as possible, then the fewest lanes that keep all passes full.
  const int64_t passes = ceil_div(packs, packs_at_once * most_lanes);
  const unsigned lanes = static_cast<unsigned>(round_up(ceil_div(packs, packs_at_once * passes), lanes_of_run));
  const dim3 block(lanes, threads / lanes);
  const auto kernel = args.rows != nullptr ? permute_kernel<true> : permute_kernel<false>;
  launch_early(stream, kernel, grid_of(ceil_div(args.tokens, block.y)), block, 0, args, row_of_slot, packs,
               e4m3_factor_stride(args.tokens * args.topk));
}

}  // namespace mimo::cuda
