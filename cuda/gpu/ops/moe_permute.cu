// MoE permute: copies of tokens in expert order, and unpermute: their weighted sum in token order
// (docs/spec/language-model.md §4.5). Each is the other's backward. With a width of 0 only the probabilities move.
#include "e4m3.h"
#include "early.cuh"

namespace mimo::cuda {
namespace {

/// Writes row_of_slot[slot] for slots that have a row, and the rows' probabilities.
__global__ void invert_kernel(mimo_moe_permute_args args, int32_t* row_of_slot) {
  previous_is_done();
  let_next_start();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= live_rows(args.tokens * args.topk, args.row_count)) return;
  const int64_t slot = args.slot_of_row[row];
  if (row_of_slot != nullptr) row_of_slot[slot] = static_cast<int32_t>(row);
  if (args.probabilities != nullptr) args.row_probability[row] = args.probabilities[slot];
}

constexpr int permute_threads = 256, permute_lanes = 128;
constexpr int packs_at_once = 3;  // packs of a thread in flight

/// Iterates over tokens: each is read once and written to all its rows. Iterating over rows would read a token topk
/// times, with more data in between than the cache holds.
template <class T, int Width>
__global__ void __launch_bounds__(permute_threads)
    permute_kernel(mimo_moe_permute_args args, const int32_t* row_of_slot, int64_t packs) {
  constexpr int at_once = packs_at_once;
  using Pack = std::conditional_t<Width * sizeof(T) == 16, uint4, T>;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  previous_is_done();
  if (token >= args.tokens) return;
  const Pack* const from = reinterpret_cast<const Pack*>(static_cast<const T*>(args.x) + token * args.width);
  const int32_t* const rows = row_of_slot + token * args.topk;
  const int lanes = static_cast<int>(blockDim.x), count = static_cast<int>(packs), topk = static_cast<int>(args.topk);
  for (int first = static_cast<int>(threadIdx.x); first < count; first += lanes * at_once) {
    Pack value[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      if (first + i * lanes < count) value[i] = from[first + i * lanes];
    }
#pragma unroll 6
    for (int k = 0; k < topk; ++k) {
      const int32_t row = rows[k];
      if (row < 0) continue;
      Pack* const to = reinterpret_cast<Pack*>(static_cast<T*>(args.rows) + row * args.width);
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        if (first + i * lanes < count) to[first + i * lanes] = value[i];
      }
    }
  }
}

/// Sums in fp32; several rows are loaded at a time so that their latencies overlap.
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
  MIMO_REQUIRE((args.e4m3 == nullptr) == (args.e4m3_factors == nullptr), "moe_permute");
  MIMO_REQUIRE(args.rows != nullptr || args.e4m3 != nullptr || args.width == 0, "moe_permute");
  const int64_t slots = args.tokens * args.topk;
  if (slots == 0) return;
  MIMO_REQUIRE(slots <= INT32_MAX, "moe_permute");
  const int64_t bytes = args.width > 0 ? slots * static_cast<int64_t>(sizeof(int32_t)) : 0;
  Workspace workspace(&stream, bytes);
  int32_t* const row_of_slot = args.width > 0 ? workspace.as<int32_t>() : nullptr;
  // -1 marks slots without a row; with as many rows as slots there are no such slots.
  if (bytes > 0 && args.row_count != nullptr) {
    check(cudaMemsetAsync(row_of_slot, 0xFF, static_cast<size_t>(bytes), stream.handle()), "clearing rows");
  }
  launch_early(stream, invert_kernel, grid_of(ceil_div(slots, 256)), dim3(256), 0, args, row_of_slot);
  if (args.width == 0) return;
  if (args.e4m3 != nullptr) return permute_in_e4m3(stream, args, row_of_slot);
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    constexpr int wide = vector_width<T>;
    const auto fits = [&](const void* pointer) { return packs_fit<T>(pointer, args.width, args.width, wide); };
    with_width<wide>(fits(args.x) && fits(args.rows), [&](auto w) {
      const int64_t packs = args.width / w;
      // As few passes over the row as possible, then the fewest lanes that keep all passes full.
      const int64_t passes = ceil_div(packs, packs_at_once * permute_lanes);
      const unsigned lanes = static_cast<unsigned>(larger(16, round_up(ceil_div(packs, packs_at_once * passes), 16)));
      const dim3 block(lanes, permute_threads / lanes);
      launch_early(stream, permute_kernel<T, w>, grid_of(ceil_div(args.tokens, block.y)), block, 0, args, row_of_slot,
                   packs);
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
