// Shared by attention forward and backward: blocks of packed sequences, packed fp32 copies of a head, the base-2
// exponential of the softmax, and the dropout mask.
#pragma once
#include "gemm.h"
#include "kernel.h"
#include "philox.h"
#include "transpose.h"
#include "vectors.h"

namespace mimo::MIMO_ISA {

constexpr float log2_e = 1.44269504088896341f;
constexpr float ln_2 = 0.693147180559945309f;

/// Maximum of query_block.
constexpr int64_t longest_query_block = 64;

/// Queries of a block. A causal block computes scores up to its last row's key, so shorter blocks waste less; the small
/// products of narrow heads gain from that.
static inline int64_t query_block(int64_t head_dim) { return head_dim <= 32 ? 32 : longest_query_block; }

/// Loops over a row of scores run to a whole number of vectors: the row is padded, and a scalar remainder loop takes as
/// long as the rest.
static inline int64_t whole_vectors(int64_t keys) { return (keys + 15) / 16 * 16; }

static inline int64_t key_block(int64_t head_dim) {
  if (head_dim <= 32) return 256;
  return head_dim <= 80 ? 128 : 64;
}

/// A run of `rows` tokens of one sequence: tokens begin + first, … of the microbatch.
struct SequenceBlock {
  int64_t begin;   // token at which the sequence starts
  int64_t length;  // of the sequence
  int64_t first;   // position of the run in the sequence
  int64_t rows;
};

static inline int64_t count_blocks(const int32_t* cu_seqlens, int64_t sequences, int64_t size) {
  int64_t count = 0;
  for (int64_t s = 0; s < sequences; ++s) count += (cu_seqlens[s + 1] - cu_seqlens[s] + size - 1) / size;
  return count;
}

static inline void cut_blocks(const int32_t* cu_seqlens, int64_t sequences, int64_t size, SequenceBlock* blocks) {
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t begin = cu_seqlens[s], length = cu_seqlens[s + 1] - begin;
    for (int64_t first = 0; first < length; first += size) {
      *blocks++ = SequenceBlock{begin, length, first, length - first < size ? length - first : size};
    }
  }
}

/// Keys that a query sees at most; without a window more than any sequence has.
template <class Args>
int64_t window_of(const Args& args) {
  return args.window > 0 ? args.window : int64_t{1} << 40;
}

/// Validates the arguments of either direction.
template <class Args>
void require_attention(const Args& args) {
  MIMO_REQUIRE(args.key_heads > 0 && args.query_heads % args.key_heads == 0, "attention");
  MIMO_REQUIRE(args.head_dim > 0 && args.value_dim > 0 && args.tokens >= 0 && args.sequences >= 0, "attention");
  MIMO_REQUIRE(args.mask == MIMO_ATTENTION_FULL || args.mask == MIMO_ATTENTION_CAUSAL, "attention");
  MIMO_REQUIRE(args.window == 0 || (args.window > 0 && args.mask == MIMO_ATTENTION_CAUSAL), "attention");
  MIMO_REQUIRE(args.dropout >= 0 && args.dropout < 1, "attention");
  const int32_t* cu_seqlens = args.cu_seqlens;
  MIMO_REQUIRE(cu_seqlens[0] == 0 && cu_seqlens[args.sequences] == args.tokens, "attention");
  for (int64_t s = 0; s < args.sequences; ++s) MIMO_REQUIRE(cu_seqlens[s] <= cu_seqlens[s + 1], "attention");
}

/// Packs to[r][i] = factor * from[r][i] into contiguous rows of `width`.
template <class T>
void gather(const T* from, int64_t stride, int64_t rows, int64_t width, float factor, float* to) {
  for (int64_t r = 0; r < rows; ++r) {
    short_loop(width, [=](int64_t i) { to[r * width + i] = factor * load(from[r * stride + i]); });
  }
}

/// Unpacks to[r][i] = factor * from[r][i] into strided storage.
template <class T>
void scatter(const float* from, int64_t rows, int64_t width, float factor, T* to, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r) {
    short_loop(width, [=](int64_t i) { store(&to[r * stride + i], factor * from[r * width + i]); });
  }
}

/// 2^x to about 1 ulp for x <= 127, of a float or a vector of floats. Clamped to 2^-100 below: negligible next to a
/// row's largest term of 1, and its products are not denormal. NaN stays NaN.
template <class Words, class Floats>
static inline Floats exp2_as(Floats x) {
  const Floats clamped = x < -100.0f ? Floats{} - 100.0f : x;
  const Floats shifted = clamped + 12582912.0f;  // 1.5·2²³ rounds to an integer
  const Floats f = clamped - (shifted - 12582912.0f);
  // Minimax on [-1/2, 1/2]: relative error 2e-9, 8e-8 with rounding.
  Floats p = 1.5353362e-4f * f + 1.3398874e-3f;
  p = p * f + 9.6184369e-3f;
  p = p * f + 5.5503324e-2f;
  p = p * f + 2.4022648e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  Words bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  const Words exponent = (bits + 127u) << 23;
  Floats scale;
  std::memcpy(&scale, &exponent, sizeof(scale));
  return p * scale;
}

static inline float exp2_fast(float x) { return exp2_as<uint32_t>(x); }
static inline Vector exp2_of_lanes(Vector x) { return exp2_as<WordVector>(x); }

/// Dropout mask of one query and head: factor[j] = 0 or 1 / (1 - probability) for keys first_key + j; first_key and the
/// capacity of `factor` are multiples of 4. `row` is global query token * heads + head.
static inline void dropout_factors(uint64_t seed, uint64_t row, int64_t first_key, int64_t keys, float probability,
                                   float* factor) {
  const float kept = 1.0f / (1.0f - probability);
  const uint64_t counter = (row << 30) + static_cast<uint64_t>(first_key) / 4;
  for (int64_t quad = 0; quad < (keys + 3) / 4; ++quad) {
    const PhiloxWords words = philox(seed, counter + static_cast<uint64_t>(quad));
    for (int i = 0; i < 4; ++i) factor[quad * 4 + i] = philox_uniform(words.word[i]) >= probability ? kept : 0.0f;
  }
}

}  // namespace mimo::MIMO_ISA
