// Router that processes several tokens in a warp. Most of a router's time is selection, in comparisons that run at half
// rate. A few lanes own a token: each sorts its own experts in registers, lists are merged across the lanes, and
// per-token work runs for all tokens of the warp at once.
#include "early.cuh"
#include "router_keys.cuh"
#include "router_lists.cuh"

namespace mimo::cuda {

namespace {

__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// Error below 2.6e-7: 2^-22 from the exponential, 2^-24 its argument, 2^-23 the reciprocal, 2^-24 the sum.
__device__ __forceinline__ float sigmoid_score(float logit) { return reciprocal(1.0f + power_of_2(-log2_e * logit)); }

/// The chosen experts of a token as a bit mask.
template <int Words>
struct Chosen {
  uint32_t word[Words];
};

/// Exact top-k of one token by the whole warp: by logits, or by biased scores in fp64 as in the CPU library.
template <int Words>
__device__ __noinline__ Chosen<Words> exact_choice(const float* logits, const float* bias, int64_t k) {
  constexpr int own = Words;  // consecutive experts of a lane
  const int first = lane_id() * own;
  unsigned taken;
  if (bias == nullptr) {
    Key32 key[own];
#pragma unroll
    for (int j = 0; j < own; ++j) key[j] = key_of(logits[first + j]);
    taken = take_best(key, k);
  } else {
    Key64 key[own];
#pragma unroll
    for (int j = 0; j < own; ++j) {
      key[j] = key_of(1.0 / (1.0 + exp(-static_cast<double>(logits[first + j]))) + static_cast<double>(bias[first + j]));
    }
    taken = take_best(key, k);
  }
  Chosen<Words> chosen;
#pragma unroll
  for (int w = 0; w < Words; ++w) {
    chosen.word[w] = __reduce_or_sync(all_lanes, first / 32 == w ? taken << first % 32 : 0u);
  }
  return chosen;
}

/// A token's experts in the registers of a team of lanes: value j of a lane belongs to expert expert_at(j).
template <int Lanes, int Words>
struct Team {
  static constexpr int own = 32 * Words / Lanes;
  int lane;             // index in the team
  const float* logits;  // of the token

  __device__ __forceinline__ int expert_at(int j) const { return j / 4 * 4 * Lanes + lane * 4 + j % 4; }
  __device__ __forceinline__ void read_row(const float* row, float (&value)[own]) const {
#pragma unroll
    for (int j = 0; j < own; j += 4) {
      const float4 v = *reinterpret_cast<const float4*>(row + expert_at(j));
      value[j] = v.x, value[j + 1] = v.y, value[j + 2] = v.z, value[j + 3] = v.w;
    }
  }
  __device__ __forceinline__ void write_row(float* row, const float (&value)[own]) const {
#pragma unroll
    for (int j = 0; j < own; j += 4) {
      *reinterpret_cast<float4*>(row + expert_at(j)) = make_float4(value[j], value[j + 1], value[j + 2], value[j + 3]);
    }
  }
  __device__ __forceinline__ float sum(float value) const {
#pragma unroll
    for (int distance = Lanes / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(all_lanes, value, distance);
    return value;
  }
  __device__ __forceinline__ float largest(float value) const {
#pragma unroll
    for (int distance = Lanes / 2; distance > 0; distance /= 2) {
      value = fmaxf(value, __shfl_xor_sync(all_lanes, value, distance));
    }
    return value;
  }

  /// The k best experts by `value`: logits, or biased scores if `bias` is given. fp32 decides if no more than k values
  /// are within the error bound of the k-th; tokens with near ties or NaN are decided exactly by the whole warp, one by
  /// one.
  template <int List>
  __device__ __forceinline__ Chosen<Words> choose(const float (&value)[own], const float* bias, int k) const {
    const float kth = kth_of_team<Lanes, List>(value, k);
    const float least = bias == nullptr ? kth : kth - fmaf(fabsf(kth), 2.5e-7f, 1e-6f);
    uint32_t below = 0;  // bit j: value j is not chosen; NaN sets all bits
#pragma unroll
    for (int j = own - 1; j >= 0; --j) {
      below = __funnelshift_l(__float_as_uint(value[j] - least), below, 1);
    }
    Chosen<Words> chosen{};
#pragma unroll
    for (int j = 0; j < own; j += 4) {
      const int begin = j * Lanes;  // expert of the team's first lane
      const uint32_t four = ~below >> j & 15u;
      if constexpr (Lanes <= 8) {
        chosen.word[begin / 32] |= four << (begin % 32 + 4 * lane);
      } else {
        chosen.word[begin / 32 + 0] |= lane < 8 ? four << 4 * lane : 0u;
        chosen.word[begin / 32 + 1] |= lane < 8 ? 0u : four << 4 * (lane - 8);
      }
    }
    int count = 0;
#pragma unroll
    for (int w = 0; w < Words; ++w) {
#pragma unroll
      for (int distance = Lanes / 2; distance > 0; distance /= 2) {
        chosen.word[w] |= __shfl_xor_sync(all_lanes, chosen.word[w], distance);
      }
      count += __popc(chosen.word[w]);
    }
    unsigned unsure = __ballot_sync(all_lanes, count != k);
    while (unsure != 0) {
      const int one = __ffs(static_cast<int>(unsure)) - 1;
      const auto of = reinterpret_cast<const float*>(
          __shfl_sync(all_lanes, reinterpret_cast<unsigned long long>(logits), one));
      const Chosen<Words> exact = exact_choice<Words>(of, bias, k);
      if (lane_id() / Lanes == one / Lanes) chosen = exact;
      unsure &= ~(((1ull << Lanes) - 1) << one / Lanes * Lanes);
    }
    return chosen;
  }
};

/// The chosen expert of rank `rank` < List in ascending order.
template <int List, int Words>
__device__ __forceinline__ int expert_of_rank(const Chosen<Words>& chosen, int rank) {
  uint32_t word = chosen.word[0];
  int begin = 0, before = 0, counted = 0;
#pragma unroll
  for (int w = 1; w < Words; ++w) {
    counted += __popc(chosen.word[w - 1]);
    if (rank >= counted) word = chosen.word[w], begin = 32 * w, before = counted;
  }
#pragma unroll
  for (int i = 0; i + 1 < List; ++i) word = i < rank - before ? word & (word - 1) : word;
  return begin + __ffs(static_cast<int>(word)) - 1;
}

constexpr int several_warps = 4;

enum class Scores { softmax, sigmoid, biased_sigmoid };

/// Minimum resident blocks an SM; 0: no constraint. At 8192 tokens four are resident, and there must be room for the
/// next launch's four: with 72 registers instead of 64, back-to-back launches took 0.7 µs longer each.
constexpr int blocks_at_once(Scores kind, int words) { return kind != Scores::biased_sigmoid ? 0 : words <= 4 ? 8 : 4; }

/// `Lanes` lanes a token, 32 * Words experts, topk <= List, no groups.
template <int Lanes, int Words, int List, Scores Kind>
__global__ void __launch_bounds__(32 * several_warps, blocks_at_once(Kind, Words))
    route_several_kernel(mimo_router_forward_args args, TokenStatistics statistics) {
  constexpr int teams = 32 / Lanes, own = Team<Lanes, Words>::own, experts = 32 * Words;
  previous_is_done();
  let_next_start();
  const int64_t warp_token = (static_cast<int64_t>(blockIdx.x) * several_warps + warp_id()) * teams;
  if (warp_token >= args.tokens) return;
  // Teams past the last token repeat its work and do not write.
  const int64_t asked = warp_token + lane_id() / Lanes, token = smaller(asked, args.tokens - 1);
  const bool live = asked == token;
  const Team<Lanes, Words> team{lane_id() % Lanes, args.logits + token * experts};
  constexpr bool sigmoid_scores = Kind != Scores::softmax, biased = Kind == Scores::biased_sigmoid;
  const bool padding = args.padding_mask != nullptr && args.padding_mask[token] != 0;
  const int k = static_cast<int>(args.topk);
  float logit[own], score[own];
  team.read_row(team.logits, logit);
  float bias[own];  // loaded before any store, so that no thread waits for it later
  if constexpr (biased) team.read_row(args.expert_bias, bias);

  float shift = 0, score_sum = 0, scale = 1;
  if constexpr (sigmoid_scores) {
#pragma unroll
    for (int j = 0; j < own; ++j) score[j] = sigmoid_score(logit[j]);
  } else {
    shift = logit[0];
#pragma unroll
    for (int j = 1; j < own; ++j) shift = fmaxf(shift, logit[j]);
    shift = team.largest(shift);
#pragma unroll
    for (int j = 0; j < own; ++j) score[j] = expf(logit[j] - shift);
  }
  if (!sigmoid_scores || statistics.selected != nullptr) {
#pragma unroll
    for (int j = 0; j < own; ++j) score_sum += score[j];
    score_sum = team.sum(score_sum);
  }
  if (!sigmoid_scores) {
    scale = __fdividef(1.0f, score_sum);
#pragma unroll
    for (int j = 0; j < own; ++j) score[j] *= scale;
  }
  if (live) team.write_row(args.scores + token * experts, score);

  Chosen<Words> chosen;
  if constexpr (biased) {
#pragma unroll
    for (int j = 0; j < own; ++j) score[j] += bias[j];
    chosen = team.template choose<List>(score, args.expert_bias, k);
  } else {
    chosen = team.template choose<List>(logit, nullptr, k);
  }

  // A lane handles the chosen experts of its ranks; weights come from all experts' scores, or softmax over the chosen.
  constexpr int ranks = (List + Lanes - 1) / Lanes;
  const bool over_selected = !sigmoid_scores && args.pre_softmax == 0;
  int expert[ranks];
  float weight[ranks], weight_sum = 0;
#pragma unroll
  for (int i = 0; i < ranks; ++i) {
    const int rank = team.lane + i * Lanes;
    expert[i] = rank < k ? expert_of_rank<List>(chosen, rank) : -1;
    weight[i] = 0;
    if (rank < k) {
      const float own_logit = team.logits[expert[i]];  // reloaded from the cache: cheaper than a shuffle from the owning lane
      weight[i] = sigmoid_scores ? sigmoid_score(own_logit) : expf(own_logit - shift) * (over_selected ? 1.0f : scale);
    }
    weight_sum += weight[i];
  }
  float factor = args.scaling_factor;
  if (over_selected || (sigmoid_scores && k > 1)) {
    weight_sum = team.sum(weight_sum);
    factor = __fdividef(factor, over_selected ? weight_sum : weight_sum + 1e-20f);
  }
  if (live) {
#pragma unroll
    for (int i = 0; i < ranks; ++i) {
      if (expert[i] < 0) continue;
      args.expert_index[token * k + team.lane + i * Lanes] = expert[i];
      args.probabilities[token * k + team.lane + i * Lanes] = factor * weight[i];
    }
  }

  if (statistics.selected == nullptr) return;
  if constexpr (biased) chosen = team.template choose<List>(logit, nullptr, k);
  if (!live) return;
#pragma unroll
  for (int j = 0; j < own; j += 4) {
    const int e = team.expert_at(j);
    uint32_t word = 0;
#pragma unroll
    for (int w = 0; w < Words; ++w) word = e / 32 == w ? chosen.word[w] : word;
    // Spreads four bits to four bytes.
    const uint32_t bytes = (word >> e % 32 & 15u) * 0x00204081u & 0x01010101u;
    *reinterpret_cast<uint32_t*>(statistics.selected + token * experts + e) = padding ? 0u : bytes;
  }
  if (team.lane == 0) {
    statistics.normalisation[token] = padding ? 0.0f : (sigmoid_scores ? 1.0f / (score_sum + 1e-20f) : 1.0f);
  }
}

constexpr int lanes = 8;  // lanes of a token: 4 were slower for lack of warps, 16 for more comparisons

template <int Words, int List>
void route(mimo_stream& stream, const mimo_router_forward_args& args, const TokenStatistics& statistics) {
  const auto run = [&](auto kernel) {
    launch_early(stream, kernel, grid_of(ceil_div(args.tokens, several_warps * 32 / lanes)), dim3(32 * several_warps), 0, args,
                 statistics);
  };
  if (args.score_function == MIMO_SCORE_SOFTMAX) {
    run(route_several_kernel<lanes, Words, List, Scores::softmax>);
  } else if (args.expert_bias == nullptr) {
    run(route_several_kernel<lanes, Words, List, Scores::sigmoid>);
  } else {
    run(route_several_kernel<lanes, Words, List, Scores::biased_sigmoid>);
  }
}
template <int Words>
void route(mimo_stream& stream, const mimo_router_forward_args& args, const TokenStatistics& statistics) {
  args.topk <= 6 ? route<Words, 6>(stream, args, statistics) : route<Words, 8>(stream, args, statistics);
}

}  // namespace

bool route_several(mimo_stream& stream, const mimo_router_forward_args& args, const TokenStatistics& statistics) {
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(args.logits) | reinterpret_cast<uintptr_t>(args.scores) |
                              reinterpret_cast<uintptr_t>(args.expert_bias);
  if (args.topk > 8 || args.expert_groups > 1 || args.logit_offsets != nullptr || addresses % 16 != 0) return false;
  if (args.experts == 64) {
    route<2>(stream, args, statistics);
  } else if (args.experts == 128) {
    route<4>(stream, args, statistics);
  } else if (args.experts == 256) {
    route<8>(stream, args, statistics);
  } else {
    return false;
  }
  return true;
}

}  // namespace mimo::cuda
