/* MoE dispatch: sort and permute rows by expert, plan of the exchange between ranks, hierarchical exchange over nodes. */
#pragma once

#include "../stream.h"

/* Sorts the routed token copies into rows ordered by (expert, token). A slot is token * K + choice. */
typedef struct mimo_moe_sort_args {
  const int32_t* expert_index; /* [T, K]; a number outside 0 .. E - 1, such as -1, drops the slot */
  int32_t* offsets;            /* [E + 1]: the first row of each expert; the last element is the number of rows */
  int32_t* row_of_slot;        /* [T K]; -1 for a dropped slot */
  int32_t* slot_of_row;        /* [T K]; undefined from offsets[E] on */
  int64_t tokens;
  int64_t topk;
  int64_t experts;
} mimo_moe_sort_args;
MIMO_API int32_t mimo_moe_sort(mimo_stream* stream, const mimo_moe_sort_args* args);

/* Source and destination of the rows in the exchange between the ranks that hold experts: out (dispatch) and back (combine).
 * Members are in expert-parallel order, with the `expert_tensor` members that share experts consecutive; expert e is local
 * expert e mod local_experts of the e / local_experts-th such set of members. At the tokens' member rows are ordered by expert,
 * at the expert's member by (local expert, member, row). The ranges [first row here, first row at the member, number of rows]
 * are the input of mimo_group_exchange_rows, one for each local expert of the member that holds the expert. In combine, rows of
 * the p-th member of a set are received from row p * region_rows on. A member holds at most `capacity` rows: rows beyond, in
 * its order, are dropped in both directions. */
typedef struct mimo_expert_exchange_plan_args {
  const int32_t* offsets; /* [members, E + 1]: `offsets` of moe_sort of every member */
  int32_t* out_send;      /* [members, local_experts, 3] */
  int32_t* out_receive;   /* [members, local_experts, 3] */
  int32_t* back_send;     /* [members, local_experts, 3] */
  int32_t* back_receive;  /* [members, local_experts, 3] */
  int32_t* local_offsets; /* [local_experts + 1]: the first row of each expert of this member, and the number of rows */
  int32_t* overflow;      /* [2], raised to (number of rows, capacity) if more than `capacity` rows arrive; or null */
  int64_t members;
  int64_t member;        /* index of this member */
  int64_t expert_tensor; /* divides members */
  int64_t local_experts;
  int64_t capacity;
  int64_t region_rows;
} mimo_expert_exchange_plan_args;
MIMO_API int32_t mimo_expert_exchange_plan(mimo_stream* stream, const mimo_expert_exchange_plan_args* args);

/* The distinct nodes that hold a token's experts: the token's row is sent to a node once, however many of its experts are
 * there (docs/spec/moe-performance.md §2.3). Expert e is on node e / node_experts. The routing travels with the row, and a node
 * selects its own experts from it (moe_node_experts). */
typedef struct mimo_moe_token_nodes_args {
  const int32_t* expert_index; /* [T, K]; outside 0 .. nodes node_experts - 1 = dropped */
  const float* probabilities;  /* [T, K] */
  int32_t* node_index;         /* [T, W]: nodes in the order of the choices, then -1 */
  float* routing;              /* [T, 2 K]: K expert indices as floats, -1 = dropped; then K probabilities */
  int64_t tokens;
  int64_t topk;
  int64_t nodes;
  int64_t node_experts;
  int64_t node_slots; /* W, at least the smaller of K and nodes */
} mimo_moe_token_nodes_args;
MIMO_API int32_t mimo_moe_token_nodes(mimo_stream* stream, const mimo_moe_token_nodes_args* args);

/* This node's experts in the routing received with R rows. Unlike other operations it also writes rows beyond row_count. */
typedef struct mimo_moe_node_experts_args {
  const float* routing;     /* [R, 2 K], of moe_token_nodes */
  const int32_t* row_count; /* or null = R */
  int32_t* expert_index;    /* [R, K], relative to first_expert; -1: on another node, dropped, or in a row beyond row_count */
  float* probabilities;     /* [R, K]; 0 where the index is -1 */
  int64_t rows;             /* R */
  int64_t topk;
  int64_t first_expert; /* the node's first expert */
  int64_t experts;      /* number of the node's experts */
} mimo_moe_node_experts_args;
MIMO_API int32_t mimo_moe_node_experts(mimo_stream* stream, const mimo_moe_node_experts_args* args);

/* rows[r] = x[slot_of_row[r] / K], row_probability[r] = probabilities[slot_of_row[r]]: copies tokens into the order of
 * moe_sort; also the gradient of moe_unpermute. Rows may also, or only, be written in e4m3, as by e4m3_rows. */
typedef struct mimo_moe_permute_args {
  const void* x;              /* [T, width] */
  const float* probabilities; /* [T, K], or null */
  const int32_t* slot_of_row; /* [T K], of moe_sort */
  const int32_t* row_count;   /* offsets + E of moe_sort, or null = T K */
  void* rows;                 /* [T K, width]; or null, where e4m3 is given */
  float* row_probability;     /* [T K]; null where probabilities is */
  void* e4m3;                 /* [T K, width], one byte an element; or null. On GPUs: dtype bf16, width a multiple of 16 */
  float* e4m3_factors;        /* as `factors` of e4m3_rows for T K rows; null where e4m3 is */
  int64_t tokens;
  int64_t topk;
  int64_t width;
  int32_t dtype; /* of x and rows, f32 or bf16 */
} mimo_moe_permute_args;
MIMO_API int32_t mimo_moe_permute(mimo_stream* stream, const mimo_moe_permute_args* args);

/* y[t] = Σ_k rows[row_of_slot[t, k]], summed in fp32 and rounded once; probabilities[slot] =
 * row_probability[row_of_slot[slot]], 0 for a dropped slot: sums the rows of each token; also the gradient of
 * moe_permute. */
typedef struct mimo_moe_unpermute_args {
  const void* rows;             /* [T K, width] */
  const float* row_probability; /* [T K], or null */
  const int32_t* row_of_slot;   /* [T K], of moe_sort */
  void* y;                      /* [T, width] */
  float* probabilities;         /* [T, K]; null where row_probability is */
  int64_t tokens;
  int64_t topk;
  int64_t width;
  int32_t dtype;
} mimo_moe_unpermute_args;
MIMO_API int32_t mimo_moe_unpermute(mimo_stream* stream, const mimo_moe_unpermute_args* args);
