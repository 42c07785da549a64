// The gated delta rule through tensor cores (docs/spec/families.md §2.5): bf16, key and value heads of 128, chunks of 64 tokens from a
// sequence's first.
//
// Keys and queries stay as they are stored, which is exact; the factors that make them unit vectors multiply fp32 sums. With S the
// state at a chunk's start, Λ the decays from there on, Γ those between tokens, E = V - Λ K̂ S the errors and A = β (K̂ K̂ᵀ ⊙ Γ) below the
// diagonal, the chunk writes U = (I + A)⁻¹ β E, returns O = Λ Q̂ S + P U with P = Q̂ K̂ᵀ ⊙ Γ, and leaves S' = Λ_end S + K̂ᵀ (Γ_end U).
// (I + A)⁻¹ and P do not depend on the state: a kernel computes them for all chunks at once.
//
// Backward, with dU the gradient of U, R = (I + A)⁻ᵀ dU, and dV = β R:
//
//   dU = Pᵀ dO + Γ_end K̂ dS'    dS = Λ_end dS' + Q̂ᵀ (Λ dO) - K̂ᵀ (Λ dV)
//   dQ̂ = Λ dO Sᵀ + (dO Uᵀ ⊙ Γ) K̂    dK̂ = Γ_end U dS'ᵀ - Λ dV Sᵀ + (dO Uᵀ ⊙ Γ)ᵀ Q̂ + (M + Mᵀ) K̂ with M = -β (R Uᵀ ⊙ Γ) below the diagonal
//   dβ = R · U / β
#pragma once
#include "kernel.cuh"

namespace mimo::cuda {

constexpr int delta_head = 128, delta_chunk = 64;
constexpr int64_t delta_tile = delta_chunk * delta_chunk;  // elements

/// The inputs of both directions. Pointers and strides as in the ABI.
struct DeltaInputs {
  const bf16 *q, *k, *v, *b, *a;
  const float *dt_bias, *a_log;
  const int32_t* cu_seqlens;
  int64_t sequences, tokens, key_heads, value_heads, qkv_stride, ba_stride;

  int64_t pieces() const { return piece_count(tokens, sequences, delta_chunk); }
};
template <class Args>
DeltaInputs delta_inputs(const Args& args) {
  const auto at = [](const void* pointer) { return static_cast<const bf16*>(pointer); };
  return {at(args.q),      at(args.k),      at(args.v),     at(args.b),  at(args.a),     args.dt_bias,
          args.a_log,      args.cu_seqlens, args.sequences, args.tokens, args.key_heads, args.value_heads,
          args.qkv_stride, args.ba_stride};
}

/// Values of a chunk's tokens for a value head. Past a sequence's end: the sum of its last token, zeros.
struct alignas(16) DeltaSteps {
  float sum[delta_chunk];  // of g from the chunk's first token on
  float beta[delta_chunk];
  float query[delta_chunk];    // Λ q, with q and k below
  float read[delta_chunk];     // β Λ k
  float advance[delta_chunk];  // Γ_end k
};
struct DeltaTokens : DeltaSteps {
  float q[delta_chunk], k[delta_chunk];  // factors that turn q and k into q̂ and k̂
};

/// The products that do not depend on the state, [pieces, H_v]. The pairs are tiles as mma.cuh and TMA swizzle them.
struct DeltaChunks {
  DeltaTokens* tokens;
  bf16* inverse;  // (I + A)⁻¹ - I: what the ones on the diagonal multiply need not be rounded
  bf16* pairs;    // P
};
constexpr int64_t delta_chunk_bytes = sizeof(DeltaTokens) + 2 * delta_tile * sizeof(bf16);

/// Computes them in `memory`, which holds delta_chunk_bytes for each piece and value head.
DeltaChunks sm80_bf16_gated_delta_chunks(mimo_stream& stream, const DeltaInputs& in, char* memory);

/// On any GPU from sm_80 on with as much shared memory as data-centre GPUs have.
constexpr int64_t gated_delta_shared_bytes = 166400;  // of the kernel that needs most
void sm80_bf16_gated_delta_forward(mimo_stream& stream, const mimo_gated_delta_forward_args& args);
void sm80_bf16_gated_delta_backward(mimo_stream& stream, const mimo_gated_delta_backward_args& args);

/// On Hopper, up to 2^30 tokens.
void sm90_bf16_gated_delta_forward(mimo_stream& stream, const mimo_gated_delta_forward_args& args);
void sm90_bf16_gated_delta_backward(mimo_stream& stream, const mimo_gated_delta_backward_args& args);

}  // namespace mimo::cuda
