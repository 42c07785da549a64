// Token copies into expert order and their sum back into token order (spec language-model 4.5). Each is the other's
// backward. A width of 0 moves the probabilities alone.
#include "kernel.cuh"

namespace mimo::cuda {
namespace {

template <class T, int Width>
__global__ void permute_kernel(mimo_moe_permute_args args, int64_t packs) {
  for_each_pack(live_rows(args.tokens * args.topk, args.row_count), larger(packs, 1), [&](int64_t row, int64_t pack) {
    const int64_t slot = args.slot_of_row[row];
    if (pack < packs) {
      float value[Width];
      read(static_cast<const T*>(args.x) + slot / args.topk * args.width + pack * Width, value);
      write(static_cast<T*>(args.rows) + row * args.width + pack * Width, value);
    }
    if (pack == 0 && args.probabilities != nullptr) args.row_probability[row] = args.probabilities[slot];
  });
}

/// fp32 sums; rows are read several at a time so that their latencies overlap.
template <class T, int Width>
__global__ void unpermute_kernel(mimo_moe_unpermute_args args, int64_t packs) {
  constexpr int at_once = 4;
  for_each_pack(args.tokens, larger(packs, 1), [&](int64_t token, int64_t pack) {
    const int64_t first = token * args.topk;
    if (pack < packs) {
      float sum[Width] = {};
      for (int64_t k = 0; k < args.topk; k += at_once) {
        float value[at_once][Width] = {};
#pragma unroll
        for (int j = 0; j < at_once; ++j) {
          const int64_t row = k + j < args.topk ? args.row_of_slot[first + k + j] : -1;
          if (row >= 0) read(static_cast<const T*>(args.rows) + row * args.width + pack * Width, value[j]);
        }
#pragma unroll
        for (int j = 0; j < at_once; ++j) {
#pragma unroll
          for (int i = 0; i < Width; ++i) sum[i] += value[j][i];
        }
      }
      write(static_cast<T*>(args.y) + token * args.width + pack * Width, sum);
    }
    if (pack == 0 && args.probabilities != nullptr) {
      for (int64_t slot = first; slot < first + args.topk; ++slot) {
        const int64_t row = args.row_of_slot[slot];
        args.probabilities[slot] = row < 0 ? 0.0f : args.row_probability[row];
      }
    }
  });
}

}  // namespace

void moe_permute(mimo_stream& stream, const mimo_moe_permute_args& args) {
  MIMO_REQUIRE((args.probabilities == nullptr) == (args.row_probability == nullptr), "moe_permute");
  if (args.tokens * args.topk == 0) return;
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    constexpr int wide = vector_width<T>;
    const auto fits = [&](const void* pointer) { return packs_fit<T>(pointer, args.width, args.width, wide); };
    with_width<wide>(fits(args.x) && fits(args.rows), [&](auto w) {
      const auto [grid, block] = cover(args.tokens * args.topk, larger(args.width / w, 1));
      launch(stream, permute_kernel<T, w>, grid, block, 0, args, args.width / w);
    });
  });
}

void moe_unpermute(mimo_stream& stream, const mimo_moe_unpermute_args& args) {
  MIMO_REQUIRE((args.probabilities == nullptr) == (args.row_probability == nullptr), "moe_unpermute");
  if (args.tokens == 0) return;
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    constexpr int wide = vector_width<T>;
    const auto fits = [&](const void* pointer) { return packs_fit<T>(pointer, args.width, args.width, wide); };
    with_width<wide>(fits(args.rows) && fits(args.y), [&](auto w) {
      const auto [grid, block] = cover(args.tokens, larger(args.width / w, 1));
      launch(stream, unpermute_kernel<T, w>, grid, block, 0, args, args.width / w);
    });
  });
}

}  // namespace mimo::cuda
