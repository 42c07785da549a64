// The router and the moves of rows to experts and back.
#include "cases.h"

namespace check {
namespace {

struct Router {
  int64_t tokens, experts, topk, groups, group_topk;
  bool softmax, pre_softmax, bias, padding;
  float z_loss;
  bool offsets = false;
};

void router(Run& run, const Router& r) {
  const std::vector<int32_t> cu_seqlens =
      cumulative({static_cast<int32_t>(r.tokens / 3), 0, static_cast<int32_t>(r.tokens - r.tokens / 3)});
  const int64_t sequences = static_cast<int64_t>(cu_seqlens.size()) - 1;
  mimo_router_forward_args f{};
  f.logits = run.floats(r.tokens * r.experts, 1.5);
  f.expert_bias = r.bias ? run.floats(r.experts, 0.1) : nullptr;
  f.logit_offsets = r.offsets ? run.floats(r.experts, 2) : nullptr;
  std::vector<uint8_t> padding(static_cast<size_t>(r.tokens), 0);
  for (size_t t = 0; t < padding.size(); t += 4) padding[t] = 1;
  f.padding_mask = r.padding ? run.upload(padding) : nullptr;
  f.cu_seqlens = run.upload(cu_seqlens);
  const auto floats = [&](int64_t count) { return static_cast<float*>(run.output(count, MIMO_DTYPE_F32)); };
  f.scores = floats(r.tokens * r.experts);
  f.probabilities = floats(r.tokens * r.topk);
  f.expert_index = static_cast<int32_t*>(run.output(r.tokens * r.topk, MIMO_DTYPE_I32));
  f.tokens_per_expert = run.upload(std::vector<int32_t>(static_cast<size_t>(r.experts), 2));
  f.sequence_counts = floats(sequences * r.experts);
  f.sequence_score_sums = floats(sequences * r.experts);
  f.sequence_tokens = floats(sequences);
  f.sequences = sequences, f.tokens = r.tokens, f.experts = r.experts, f.topk = r.topk;
  f.expert_groups = r.groups, f.group_topk = r.group_topk, f.group_score_topk = 2;
  f.scaling_factor = 2.5f;
  f.score_function = r.softmax ? MIMO_SCORE_SOFTMAX : MIMO_SCORE_SIGMOID;
  f.pre_softmax = r.pre_softmax;
  run.call("mimo_router_forward", f);
  run.compare("scores", f.scores, r.tokens * r.experts, MIMO_DTYPE_F32);
  run.compare("probabilities", f.probabilities, r.tokens * r.topk, MIMO_DTYPE_F32);
  run.compare("expert_index", f.expert_index, r.tokens * r.topk, MIMO_DTYPE_I32, true);
  run.compare("tokens_per_expert", f.tokens_per_expert, r.experts, MIMO_DTYPE_I32, true);
  run.compare("sequence_counts", f.sequence_counts, sequences * r.experts, MIMO_DTYPE_F32, true);
  run.compare("sequence_score_sums", f.sequence_score_sums, sequences * r.experts, MIMO_DTYPE_F32);
  run.compare("sequence_tokens", f.sequence_tokens, sequences, MIMO_DTYPE_F32, true);

  mimo_router_balancing_loss_args l{};
  l.sequence_counts = f.sequence_counts, l.sequence_score_sums = f.sequence_score_sums;
  l.sequence_tokens = f.sequence_tokens;
  l.dnormalised = run.floats(sequences * r.experts, 1e-3);
  l.loss = run.upload(std::vector<float>{0.25f});
  l.dnormalised_rows = sequences, l.sequences = sequences, l.experts = r.experts, l.topk = r.topk;
  l.sequence_shards = 2, l.coefficient = 1e-1f, l.gradient_scale = 0.5f;
  run.call("mimo_router_balancing_loss", l);
  run.compare("balancing loss", l.loss, 1, MIMO_DTYPE_F32);
  run.compare("dnormalised", l.dnormalised, sequences * r.experts, MIMO_DTYPE_F32);

  mimo_router_z_loss_args z{};
  z.logits = f.logits, z.padding_mask = f.padding_mask;
  z.z_loss = run.upload(std::vector<float>{0.5f});
  z.tokens = r.tokens, z.experts = r.experts;
  run.call("mimo_router_z_loss", z);
  run.compare("z loss", z.z_loss, 1, MIMO_DTYPE_F32);

  mimo_router_backward_args b{};
  b.logits = f.logits, b.scores = f.scores, b.probabilities = f.probabilities, b.expert_index = f.expert_index;
  b.dprobabilities = run.floats(r.tokens * r.topk);
  b.dnormalised = l.dnormalised, b.padding_mask = f.padding_mask, b.cu_seqlens = f.cu_seqlens;
  b.dlogits = floats(r.tokens * r.experts);
  b.sequences = sequences, b.tokens = r.tokens, b.experts = r.experts, b.topk = r.topk;
  b.scaling_factor = 2.5f, b.z_loss_scale = r.z_loss;
  b.score_function = f.score_function, b.pre_softmax = f.pre_softmax;
  run.call("mimo_router_backward", b);
  run.compare("dlogits", b.dlogits, r.tokens * r.experts, MIMO_DTYPE_F32);

  mimo_router_bias_update_args u{};
  u.bias = run.floats(r.experts), u.counts = f.tokens_per_expert, u.experts = r.experts, u.rate = 1e-3f;
  run.call("mimo_router_bias_update", u);
  run.compare("bias", u.bias, r.experts, MIMO_DTYPE_F32);
  run.compare("counts", u.counts, r.experts, MIMO_DTYPE_I32, true);
}

/// Equal, infinite and undefined logits; in groups they are compared in fp64.
void ties(Run& run, int64_t groups, bool pre_softmax) {
  const int64_t tokens = 4, experts = 40, topk = 3;
  std::vector<float> logits(static_cast<size_t>(tokens * experts), 0.5f);
  logits[7] = NAN;
  for (size_t e = 0; e < 39; ++e) logits[40 + e] = -INFINITY;
  for (size_t e = 0; e < 40; e += 3) logits[80 + e] = 1.0f;
  mimo_router_forward_args f{};
  f.logits = run.upload(logits);
  f.scores = static_cast<float*>(run.output(tokens * experts, MIMO_DTYPE_F32));
  f.probabilities = static_cast<float*>(run.output(tokens * topk, MIMO_DTYPE_F32));
  f.expert_index = static_cast<int32_t*>(run.output(tokens * topk, MIMO_DTYPE_I32));
  f.tokens = tokens, f.experts = experts, f.topk = topk, f.expert_groups = groups;
  f.group_topk = f.group_score_topk = 2;
  f.scaling_factor = 1, f.score_function = MIMO_SCORE_SOFTMAX, f.pre_softmax = pre_softmax;
  run.call("mimo_router_forward", f);
  run.compare("expert_index", f.expert_index, tokens * topk, MIMO_DTYPE_I32, true);
}

/// Scores with biases that are equal, closer than fp32 can tell, infinite and undefined.
void near_ties(Run& run) {
  const int64_t tokens = 6, experts = 128, topk = 6;
  std::vector<float> logits = run.normal(tokens * experts), bias(static_cast<size_t>(experts));
  for (size_t e = 0; e < bias.size(); ++e) bias[e] = e % 2 == 0 ? 0x1p-20f : 0.0f;
  for (size_t e = 0; e < bias.size(); ++e) {
    logits[e] = 0.5f;
    logits[128 + e] = 0.5f + static_cast<float>(e) * 0x1p-23f;
    logits[256 + e] = -INFINITY;
    logits[384 + e] = 90.0f + static_cast<float>(e);
  }
  logits[256 + 77] = INFINITY, logits[256 + 3] = NAN, logits[256 + 100] = 0.25f;
  logits[512 + 9] = NAN;
  mimo_router_forward_args f{};
  f.logits = run.upload(logits), f.expert_bias = run.upload(bias);
  f.scores = static_cast<float*>(run.output(tokens * experts, MIMO_DTYPE_F32));
  f.probabilities = static_cast<float*>(run.output(tokens * topk, MIMO_DTYPE_F32));
  f.expert_index = static_cast<int32_t*>(run.output(tokens * topk, MIMO_DTYPE_I32));
  f.tokens = tokens, f.experts = experts, f.topk = topk, f.expert_groups = f.group_topk = f.group_score_topk = 1;
  f.scaling_factor = 1, f.score_function = MIMO_SCORE_SIGMOID;
  run.call("mimo_router_forward", f);
  run.compare("expert_index", f.expert_index, tokens * topk, MIMO_DTYPE_I32, true);
  run.compare("scores", f.scores, 2 * experts, MIMO_DTYPE_F32);
}

void moves(Run& run, int64_t tokens, int64_t topk, int64_t experts, int64_t width, int64_t dropped) {
  std::vector<int32_t> index = run.integers(tokens * topk, 0, experts);
  for (int64_t i = 0; i < dropped; ++i) index[static_cast<size_t>(i * 3 % (tokens * topk))] = -1;
  mimo_moe_sort_args s{};
  s.expert_index = run.upload(index);
  s.offsets = static_cast<int32_t*>(run.output(experts + 1, MIMO_DTYPE_I32));
  s.row_of_slot = static_cast<int32_t*>(run.output(tokens * topk, MIMO_DTYPE_I32));
  s.slot_of_row = run.upload(std::vector<int32_t>(static_cast<size_t>(tokens * topk), 0));
  s.tokens = tokens, s.topk = topk, s.experts = experts;
  run.call("mimo_moe_sort", s);
  run.compare("offsets", s.offsets, experts + 1, MIMO_DTYPE_I32, true);
  run.compare("row_of_slot", s.row_of_slot, tokens * topk, MIMO_DTYPE_I32, true);
  run.compare("slot_of_row", s.slot_of_row, tokens * topk, MIMO_DTYPE_I32, true);
  mimo_moe_permute_args p{};
  p.x = run.tensor(tokens * width);
  p.probabilities = run.floats(tokens * topk);
  p.slot_of_row = s.slot_of_row;
  p.row_count = s.offsets + experts;
  p.rows = run.tensor(std::vector<float>(static_cast<size_t>(tokens * topk * width), 4.0f));
  p.row_probability = run.upload(std::vector<float>(static_cast<size_t>(tokens * topk), 4.0f));
  p.tokens = tokens, p.topk = topk, p.width = width, p.dtype = run.dtype();
  run.call("mimo_moe_permute", p);
  run.compare("rows", p.rows, tokens * topk * width, run.dtype(), true);
  run.compare("row_probability", p.row_probability, tokens * topk, MIMO_DTYPE_F32, true);
  if (run.precision == MIMO_DTYPE_BF16 && width % 16 == 0 && width > 0) {
    const int64_t factors = (width + 127) / 128 * ((tokens * topk + 3) / 4 * 4);
    p.rows = run.tensor(std::vector<float>(static_cast<size_t>(tokens * topk * width), 4.0f));
    p.e4m3 = run.output(tokens * topk * width, MIMO_DTYPE_U8);
    p.e4m3_factors = static_cast<float*>(run.output(factors, MIMO_DTYPE_F32));
    run.call("mimo_moe_permute", p);
    run.compare("rows beside e4m3", p.rows, tokens * topk * width, run.dtype(), true);
    run.compare("rows in e4m3", p.e4m3, tokens * topk * width, MIMO_DTYPE_U8, true);
    run.compare("factors", p.e4m3_factors, factors, MIMO_DTYPE_F32, true);
    p.rows = nullptr;
    p.e4m3 = run.output(tokens * topk * width, MIMO_DTYPE_U8);
    p.e4m3_factors = static_cast<float*>(run.output(factors, MIMO_DTYPE_F32));
    run.call("mimo_moe_permute", p);
    run.compare("rows in e4m3 alone", p.e4m3, tokens * topk * width, MIMO_DTYPE_U8, true);
    run.compare("factors of rows in e4m3 alone", p.e4m3_factors, factors, MIMO_DTYPE_F32, true);
  }
  mimo_moe_unpermute_args u{};
  u.rows = run.tensor(tokens * topk * width);
  u.row_probability = p.row_probability;
  u.row_of_slot = s.row_of_slot;
  u.y = run.output(tokens * width);
  u.probabilities = static_cast<float*>(run.output(tokens * topk, MIMO_DTYPE_F32));
  u.tokens = tokens, u.topk = topk, u.width = width, u.dtype = run.dtype();
  run.call("mimo_moe_unpermute", u);
  run.compare("y", u.y, tokens * width);
  run.compare("probabilities", u.probabilities, tokens * topk, MIMO_DTYPE_F32, true);
}

/// The plan of an exchange among `members`, as each of them has it. `capacity` may be too small for some.
void exchange(Run& run, int64_t members, int64_t expert_tensor, int64_t local_experts, int64_t most_rows, int64_t capacity) {
  const int64_t experts = members / expert_tensor * local_experts;
  std::vector<int32_t> offsets;
  for (int64_t member = 0; member < members; ++member) {
    const std::vector<int32_t> rows = run.integers(experts, 0, most_rows);
    offsets.push_back(0);
    // Every third member has no tokens, and every fifth expert of the others no rows.
    for (int64_t e = 0; e < experts; ++e) {
      offsets.push_back(offsets.back() + (member % 3 == 2 || e % 5 == 4 ? 0 : rows[static_cast<size_t>(e)]));
    }
  }
  const int64_t ranges = members * local_experts * 3;
  for (int64_t member = 0; member < members; ++member) {
    mimo_expert_exchange_plan_args p{};
    p.offsets = run.upload(offsets);
    int32_t** const tables[] = {&p.out_send, &p.out_receive, &p.back_send, &p.back_receive};
    for (int32_t** table : tables) *table = static_cast<int32_t*>(run.output(ranges, MIMO_DTYPE_I32));
    p.local_offsets = static_cast<int32_t*>(run.output(local_experts + 1, MIMO_DTYPE_I32));
    p.overflow = run.upload(std::vector<int32_t>{3, 2});
    p.members = members, p.member = member, p.expert_tensor = expert_tensor, p.local_experts = local_experts;
    p.capacity = capacity, p.region_rows = experts * most_rows;
    run.call("mimo_expert_exchange_plan", p);
    for (int32_t** table : tables) run.compare("ranges", *table, ranges, MIMO_DTYPE_I32, true);
    run.compare("local_offsets", p.local_offsets, local_experts + 1, MIMO_DTYPE_I32, true);
    run.compare("overflow", p.overflow, 2, MIMO_DTYPE_I32, true);
  }
}

/// The nodes that tokens go to, and the experts that each node finds in the routing of all of them; some tokens are not live.
void nodes(Run& run, int64_t tokens, int64_t topk, int64_t count, int64_t node_experts, int64_t dropped) {
  std::vector<int32_t> index = run.integers(tokens * topk, 0, count * node_experts);
  for (int64_t i = 0; i < dropped; ++i) index[static_cast<size_t>(i * 3 % (tokens * topk))] = i % 2 == 0 ? -1 : 1 << 20;
  const int64_t slots = std::min(topk, count);
  mimo_moe_token_nodes_args t{};
  t.expert_index = run.upload(index);
  t.probabilities = run.floats(tokens * topk);
  t.node_index = static_cast<int32_t*>(run.output(tokens * slots, MIMO_DTYPE_I32));
  t.routing = static_cast<float*>(run.output(tokens * 2 * topk, MIMO_DTYPE_F32));
  t.tokens = tokens, t.topk = topk, t.nodes = count, t.node_experts = node_experts, t.node_slots = slots;
  run.call("mimo_moe_token_nodes", t);
  run.compare("node_index", t.node_index, tokens * slots, MIMO_DTYPE_I32, true);
  run.compare("routing", t.routing, tokens * 2 * topk, MIMO_DTYPE_F32, true);
  mimo_moe_node_experts_args e{};
  e.routing = t.routing;
  e.row_count = run.upload(std::vector<int32_t>{static_cast<int32_t>(tokens - tokens / 4)});
  e.expert_index = static_cast<int32_t*>(run.output(tokens * topk, MIMO_DTYPE_I32));
  e.probabilities = static_cast<float*>(run.output(tokens * topk, MIMO_DTYPE_F32));
  e.rows = tokens, e.topk = topk, e.first_expert = (count - 1) * node_experts, e.experts = node_experts;
  run.call("mimo_moe_node_experts", e);
  run.compare("expert_index", e.expert_index, tokens * topk, MIMO_DTYPE_I32, true);
  run.compare("probabilities", e.probabilities, tokens * topk, MIMO_DTYPE_F32, true);
}

}  // namespace

void add_experts(Cases& cases, bool large) {
  const auto add = [&](const char* name, Router r) {
    cases.push_back({std::string("router ") + name, [r](Run& run) { router(run, r); }});
  };
  add("sigmoid", {70, 16, 3, 1, 1, false, false, true, false, 0});
  add("sigmoid groups, padding, z-loss", {65, 64, 6, 8, 3, false, false, true, true, 0.3f});
  add("softmax by offset logits", {70, 64, 3, 1, 1, true, true, false, true, 0, true});
  add("sigmoid top 1 by offset logits", {33, 12, 1, 1, 1, false, false, false, false, 0, true});
  add("sigmoid top 1", {33, 8, 1, 1, 1, false, false, false, false, 0});
  add("softmax", {70, 24, 4, 1, 1, true, false, false, true, 0.1f});
  add("softmax before", {40, 24, 4, 1, 1, true, true, false, false, 0});
  add("of 128", {41, 128, 6, 1, 1, false, false, false, true, 0});
  add("of 128, bias", {43, 128, 6, 1, 1, false, false, true, true, 0});
  add("softmax of 64", {50, 64, 4, 1, 1, true, false, false, false, 0});
  add("of 64, top 1, bias", {9, 64, 1, 1, 1, false, false, true, false, 0});
  add("softmax before, of 256", {35, 256, 7, 1, 1, true, true, false, true, 0});
  add("of 256, bias", {37, 256, 8, 1, 1, false, false, true, false, 0});
  add("softmax of 256, groups", {35, 256, 8, 8, 4, true, false, false, false, 0});
  add("softmax before, groups", {61, 40, 4, 5, 2, true, true, false, true, 0.1f});
  add("softmax before, of 256, groups", {35, 256, 8, 8, 4, true, true, false, false, 0});
  add("softmax before, of 600, groups", {19, 600, 10, 12, 5, true, true, false, true, 0});
  add("softmax, groups", {61, 40, 4, 5, 2, true, false, false, true, 0});
  add("sigmoid groups, no bias", {61, 40, 4, 5, 2, false, false, false, false, 0});
  add("of 300, bias", {21, 300, 10, 1, 1, false, false, true, false, 0});
  add("of 600, groups", {19, 600, 10, 12, 5, false, false, true, true, 0});
  if (large) add("large", {8192, 128, 6, 1, 1, false, false, true, true, 1e-3f});
  cases.push_back({"router ties", [](Run& run) { ties(run, 1, false); }});
  cases.push_back({"router ties, groups", [](Run& run) { ties(run, 4, false); }});
  cases.push_back({"router ties, groups, softmax before", [](Run& run) { ties(run, 4, true); }});
  cases.push_back({"router near ties", [](Run& run) { near_ties(run); }});
  cases.push_back({"moe moves", [](Run& run) { moves(run, 50, 3, 7, 40, 0); }});
  cases.push_back({"moe moves, dropped, odd", [](Run& run) { moves(run, 501, 6, 33, 13, 100); }});
  cases.push_back({"moe moves, runs of e4m3", [](Run& run) { moves(run, 77, 2, 5, 272, 20); }});
  cases.push_back({"moe moves, one run", [](Run& run) { moves(run, 301, 1, 4, 16, 0); }});
  cases.push_back({"moe moves, wide", [](Run& run) { moves(run, 37, 3, 6, 3088, 9); }});
  cases.push_back({"moe moves, many experts", [](Run& run) { moves(run, 900, 3, 1100, 8, 5); }});
  cases.push_back({"moe moves, no rows", [](Run& run) { moves(run, 30, 2, 9, 0, 10); }});
  cases.push_back({"moe nodes", [](Run& run) { nodes(run, 50, 6, 2, 8, 0); }});
  cases.push_back({"moe nodes, dropped, odd", [](Run& run) { nodes(run, 333, 3, 5, 7, 90); }});
  cases.push_back({"moe nodes, many, top 1", [](Run& run) { nodes(run, 701, 1, 64, 4, 20); }});
  cases.push_back({"expert exchange", [](Run& run) { exchange(run, 4, 1, 8, 50, 1 << 20); }});
  cases.push_back({"expert exchange, tensor parallel", [](Run& run) { exchange(run, 6, 2, 5, 9, 1 << 20); }});
  cases.push_back({"expert exchange, one expert each", [](Run& run) { exchange(run, 5, 1, 1, 7, 1 << 20); }});
  cases.push_back({"expert exchange without room", [](Run& run) { exchange(run, 4, 2, 16, 30, 300); }});
  cases.push_back({"expert exchange of many", [](Run& run) { exchange(run, 16, 1, 70, 400, 40000); }});
  if (large) cases.push_back({"moe moves large", [](Run& run) { moves(run, 8192, 6, 128, 672, 1000); }});
  if (large) cases.push_back({"moe moves, many slots", [](Run& run) { moves(run, 24000, 6, 130, 8, 1000); }});
}

}  // namespace check
