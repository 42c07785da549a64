/* Rows on their way to experts and back. */
#pragma once

#include "../stream.h"

/* Order in which token copies are processed: rows sorted by (expert, token). A slot is token * K + choice. */
typedef struct mimo_moe_sort_args {
  const int32_t* expert_index; /* [T, K]; -1 (anything outside 0 .. E-1) = dropped */
  int32_t* offsets;            /* [E + 1] first row of every expert; the last is the number of rows */
  int32_t* row_of_slot;        /* [T K]; -1 for a dropped slot */
  int32_t* slot_of_row;        /* [T K] */
  int64_t tokens;
  int64_t topk;
  int64_t experts;
} mimo_moe_sort_args;
MIMO_API int32_t mimo_moe_sort(mimo_stream* stream, const mimo_moe_sort_args* args);

/* Where the rows of an exchange between the ranks that hold experts come from and go to. Members are in expert-parallel order, the
 * `expert_tensor` members of an expert side by side; expert e is local expert e mod local_experts of the members of
 * e / local_experts. Rows lie in expert order where their tokens are; where their expert is, by (local expert, member, row).
 * Ranges are what mimo_group_exchange_rows reads: first row here, first row at the member, rows; one for each local expert of the
 * receiver of the way out. On the way back rows of the p-th member of an expert come to rows p * region_rows and on.
 * A member has room for `capacity` rows: the last rows, which do not fit, stay away, in both directions. */
typedef struct mimo_expert_exchange_plan_args {
  const int32_t* offsets;    /* [members, experts + 1]: every member's first rows of all experts */
  int32_t* out_send;         /* [members, local_experts, 3] */
  int32_t* out_receive;      /* [members, local_experts, 3] */
  int32_t* back_send;        /* [members, local_experts, 3] */
  int32_t* back_receive;     /* [members, local_experts, 3] */
  int32_t* local_offsets;    /* [local_experts + 1]: first row of each expert of this member */
  int32_t* overflow;         /* [2], or null: the most rows that this member was sent and had no room for, and its room then */
  int64_t members;
  int64_t member; /* this one */
  int64_t expert_tensor;
  int64_t local_experts;
  int64_t capacity;
  int64_t region_rows;
} mimo_expert_exchange_plan_args;
MIMO_API int32_t mimo_expert_exchange_plan(mimo_stream* stream, const mimo_expert_exchange_plan_args* args);

/* The nodes that hold a token's experts, each once: a token's row goes to each of them once, whatever the number of its experts
 * there. Expert e lies on node e / node_experts. Beside the row goes its routing, from which the node finds its own experts. */
typedef struct mimo_moe_token_nodes_args {
  const int32_t* expert_index; /* [T, K]; outside 0 .. nodes node_experts - 1 = dropped */
  const float* probabilities;  /* [T, K] */
  int32_t* node_index;         /* [T, W]: in the order of the first choice that lies there, then -1 */
  float* routing;              /* [T, 2 K]: experts as numbers, -1 = dropped; then probabilities */
  int64_t tokens;
  int64_t topk;
  int64_t nodes;
  int64_t node_experts;
  int64_t node_slots; /* W, at least the smaller of K and nodes */
} mimo_moe_token_nodes_args;
MIMO_API int32_t mimo_moe_token_nodes(mimo_stream* stream, const mimo_moe_token_nodes_args* args);

/* Experts of one node in the routing that came beside rows. */
typedef struct mimo_moe_node_experts_args {
  const float* routing;     /* [R, 2 K] of mimo_moe_token_nodes */
  const int32_t* row_count; /* rows that are live, or null = R */
  int32_t* expert_index;    /* [R, K] counted from first_expert; -1: of another node, dropped, or of a row that is not live */
  float* probabilities;     /* [R, K]; 0 where the index is -1 */
  int64_t rows;
  int64_t topk;
  int64_t first_expert;
  int64_t experts;
} mimo_moe_node_experts_args;
MIMO_API int32_t mimo_moe_node_experts(mimo_stream* stream, const mimo_moe_node_experts_args* args);

/* rows[r] = x[slot_of_row[r] / K], row_probability[r] = probabilities[slot_of_row[r]]. Backward of moe_unpermute. The rows may be
 * written in e4m3 too, as e4m3_rows rounds them, or in e4m3 alone. */
typedef struct mimo_moe_permute_args {
  const void* x;              /* [T, width] */
  const float* probabilities; /* [T, K], or null */
  const int32_t* slot_of_row; /* [T K] */
  const int32_t* row_count;   /* offsets + E, or null = T K */
  void* rows;                 /* [T K, width]; or null, where e4m3 is given */
  float* row_probability;     /* [T K], or null */
  void* e4m3;                 /* [T K, width] a byte an element, or null; GPUs: bf16, width a multiple of 16 */
  float* e4m3_factors;        /* [ceil(width / 128), T K rounded up to 4] what a run's bytes are multiplied by; or null */
  int64_t tokens;
  int64_t topk;
  int64_t width;
  int32_t dtype;
} mimo_moe_permute_args;
MIMO_API int32_t mimo_moe_permute(mimo_stream* stream, const mimo_moe_permute_args* args);

/* y[t] = Σ_k rows[row_of_slot[t, k]], fp32 sum, one rounding; probabilities[slot] = row_probability[row_of_slot[slot]]
 * (0 for a dropped slot). Backward of moe_permute. */
typedef struct mimo_moe_unpermute_args {
  const void* rows;             /* [T K, width] */
  const float* row_probability; /* or null */
  const int32_t* row_of_slot;
  void* y;              /* [T, width] */
  float* probabilities; /* [T, K], or null */
  int64_t tokens;
  int64_t topk;
  int64_t width;
  int32_t dtype;
} mimo_moe_unpermute_args;
MIMO_API int32_t mimo_moe_unpermute(mimo_stream* stream, const mimo_moe_unpermute_args* args);
