// Attention and rotary embedding.
#include "cases.h"

namespace check {
namespace {

struct Attention {
  std::vector<int32_t> lengths;
  int64_t query_heads, key_heads, head_dim;
  bool causal;
  float dropout;
  int64_t window = 0;
  bool sinks = false;
  int64_t value_dim = 0;  // 0: head_dim
};

void attention(Run& run, const Attention& a) {
  const std::vector<int32_t> cu_seqlens = cumulative(a.lengths);
  const int64_t tokens = cu_seqlens.back(), per_group = a.query_heads / a.key_heads, d = a.head_dim;
  const int64_t e = a.value_dim > 0 ? a.value_dim : d;
  const int64_t group_stride = (per_group + 1) * d + e, token_stride = a.key_heads * group_stride;
  const int64_t longest = *std::max_element(a.lengths.begin(), a.lengths.end());
  const int64_t element = bytes_of(run.dtype()), width = a.query_heads * e;
  const auto part = [&](void* qkv, int64_t column) { return static_cast<char*>(qkv) + column * element; };
  void* qkv = run.tensor(tokens * token_stride);
  mimo_attention_forward_args f{};
  f.q = qkv, f.k = part(qkv, per_group * d), f.v = part(qkv, (per_group + 1) * d);
  f.o = run.output(tokens * width);
  f.lse = static_cast<float*>(run.output(tokens * a.query_heads, MIMO_DTYPE_F32));
  f.cu_seqlens = run.upload(cu_seqlens);
  f.sequences = static_cast<int64_t>(a.lengths.size()), f.tokens = tokens, f.max_seqlen = longest;
  f.query_heads = a.query_heads, f.key_heads = a.key_heads, f.head_dim = d, f.value_dim = e;
  f.token_stride = token_stride, f.group_stride = group_stride;
  f.dropout_seed = 1234, f.first_token = 17, f.first_head = 2, f.full_heads = a.query_heads + 3;
  f.softmax_scale = 1 / std::sqrt(static_cast<float>(d)), f.dropout = a.dropout, f.window = a.window;
  f.mask = a.causal ? MIMO_ATTENTION_CAUSAL : MIMO_ATTENTION_FULL;
  f.dtype = run.dtype();
  run.call("mimo_attention_forward", f);
  run.compare("o", f.o, tokens * width);
  run.compare("lse", f.lse, tokens * a.query_heads, MIMO_DTYPE_F32);
  mimo_attention_sinks_forward_args sinks{};
  if (a.sinks) {
    sinks.o = run.shared("o before sinks", f.o, tokens * width);
    sinks.lse = static_cast<float*>(run.shared("lse before sinks", f.lse, tokens * a.query_heads, true));
    sinks.sinks = run.tensor(a.query_heads);
    sinks.tokens = tokens, sinks.heads = a.query_heads, sinks.head_dim = e, sinks.dtype = run.dtype();
    run.call("mimo_attention_sinks_forward", sinks);
    f.o = sinks.o, f.lse = sinks.lse;
    run.compare("o with sinks", f.o, tokens * width);
    run.compare("lse with sinks", f.lse, tokens * a.query_heads, MIMO_DTYPE_F32);
  }
  mimo_attention_backward_args b{};
  b.d_o = run.tensor(tokens * (width + 8));
  b.q = f.q, b.k = f.k, b.v = f.v;
  b.o = run.shared("o", f.o, tokens * width);
  b.lse = static_cast<float*>(run.shared("lse", f.lse, tokens * a.query_heads, true));
  void* dqkv = run.output(tokens * token_stride);
  b.dq = dqkv, b.dk = part(dqkv, per_group * d), b.dv = part(dqkv, (per_group + 1) * d);
  b.cu_seqlens = f.cu_seqlens;
  b.sequences = f.sequences, b.tokens = tokens, b.max_seqlen = longest;
  b.query_heads = a.query_heads, b.key_heads = a.key_heads, b.head_dim = d, b.value_dim = e;
  b.token_stride = token_stride, b.group_stride = group_stride, b.d_o_stride = width + 8;
  b.d_token_stride = token_stride;
  b.dropout_seed = f.dropout_seed, b.first_token = f.first_token, b.first_head = f.first_head;
  b.full_heads = f.full_heads, b.softmax_scale = f.softmax_scale, b.dropout = f.dropout, b.mask = f.mask;
  b.window = f.window;
  b.dtype = run.dtype();
  run.call("mimo_attention_backward", b);
  run.compare("dq, dk, dv", dqkv, tokens * token_stride);
  if (!a.sinks) return;
  mimo_attention_sinks_backward_args s{};
  s.d_o = b.d_o, s.o = b.o, s.lse = b.lse, s.sinks = sinks.sinks;
  s.dsinks = run.floats(a.query_heads);
  s.tokens = tokens, s.heads = a.query_heads, s.head_dim = e, s.d_o_stride = b.d_o_stride, s.dtype = run.dtype();
  run.call("mimo_attention_sinks_backward", s);
  run.compare("dsinks", s.dsinks, a.query_heads, MIMO_DTYPE_F32);
}

/// One more token of sequences that have so many, in rows with gaps.
void attention_step(Run& run, const std::vector<int32_t>& lengths, int64_t query_heads, int64_t key_heads, int64_t d,
                    int64_t window, bool sinks) {
  const int64_t sequences = static_cast<int64_t>(lengths.size()), per_group = query_heads / key_heads;
  const int64_t group_stride = (per_group + 2) * d, token_stride = key_heads * group_stride + 8;
  const int64_t element = bytes_of(run.dtype()), width = query_heads * d;
  std::vector<int32_t> first_rows;
  int32_t rows = 0;
  for (const int32_t length : lengths) {
    first_rows.push_back(rows);
    rows += length + 3;
  }
  void* qkv = run.tensor(sequences * token_stride);
  const auto part = [&](int64_t column) { return static_cast<char*>(qkv) + column * element; };
  mimo_attention_step_args f{};
  f.q = qkv, f.k = part(per_group * d), f.v = part((per_group + 1) * d);
  f.keys = run.tensor(key_heads * rows * d);
  f.values = run.tensor(key_heads * rows * d);
  f.first_rows = run.upload(first_rows);
  f.lengths = run.upload(lengths);
  if (sinks) f.sinks = run.tensor(query_heads);
  f.o = run.output(sequences * width);
  f.sequences = sequences, f.rows = rows, f.query_heads = query_heads, f.key_heads = key_heads, f.head_dim = f.value_dim = f.value_stride = d;
  f.max_length = *std::max_element(lengths.begin(), lengths.end()) + 100;
  f.token_stride = token_stride, f.group_stride = group_stride;
  f.softmax_scale = 1 / std::sqrt(static_cast<float>(d));
  f.window = window, f.dtype = run.dtype();
  run.call("mimo_attention_step", f);
  run.compare("o", f.o, sequences * width);
  run.compare("keys", f.keys, key_heads * rows * d);
  run.compare("values", f.values, key_heads * rows * d);
}

/// A step of latent attention: one key head for all queries, whose first `rank` columns are the value.
void latent_step(Run& run, const std::vector<int32_t>& lengths, int64_t heads, int64_t rank, int64_t position) {
  const int64_t sequences = static_cast<int64_t>(lengths.size()), d = rank + position, token_stride = heads * d;
  std::vector<int32_t> first_rows;
  int32_t rows = 0;
  for (const int32_t length : lengths) {
    first_rows.push_back(rows);
    rows += length + 3;
  }
  mimo_attention_step_args f{};
  f.q = run.tensor(sequences * token_stride);
  f.k = f.v = run.tensor(sequences * token_stride);
  f.keys = f.values = run.tensor(rows * d);
  f.first_rows = run.upload(first_rows);
  f.lengths = run.upload(lengths);
  f.o = run.output(sequences * heads * rank);
  f.sequences = sequences, f.rows = rows, f.max_length = *std::max_element(lengths.begin(), lengths.end());
  f.query_heads = heads, f.key_heads = 1, f.head_dim = d, f.value_dim = rank;
  f.token_stride = f.group_stride = token_stride, f.value_stride = d;
  f.softmax_scale = 1 / std::sqrt(static_cast<float>(d));
  f.dtype = run.dtype();
  run.call("mimo_attention_step", f);
  run.compare("o", f.o, sequences * heads * rank);
  run.compare("keys", f.keys, rows * d);
}

void latent_heads(Run& run, int64_t tokens, int64_t heads, int64_t content, int64_t position, int64_t value) {
  const int64_t query = content + position, whole = heads * (2 * query + value);
  mimo_latent_heads_forward_args f{};
  f.q = run.tensor(tokens * heads * query);
  f.kv = run.tensor(tokens * heads * (content + value));
  f.position = run.tensor(tokens * (position + 5));
  f.y = run.output(tokens * whole);
  f.tokens = tokens, f.heads = heads, f.content_dim = content, f.position_dim = position, f.value_dim = value;
  f.position_stride = position + 5, f.dtype = run.dtype();
  run.call("mimo_latent_heads_forward", f);
  run.compare("y", f.y, tokens * whole);
  mimo_latent_heads_backward_args b{};
  b.dy = run.tensor(tokens * whole);
  b.dq = run.output(tokens * heads * query);
  b.dkv = run.output(tokens * heads * (content + value));
  b.dposition = run.output(tokens * position);
  b.tokens = tokens, b.heads = heads, b.content_dim = content, b.position_dim = position, b.value_dim = value;
  b.position_stride = position, b.dtype = run.dtype();
  run.call("mimo_latent_heads_backward", b);
  run.compare("dq", b.dq, tokens * heads * query);
  run.compare("dkv", b.dkv, tokens * heads * (content + value));
  run.compare("dposition", b.dposition, tokens * position);
}

void rope(Run& run, int64_t head_dim, int64_t rotary_dim, float scale, bool later = false, bool table = false,
          float amplitude = 1, int64_t first_column = 0, int32_t interleaved = 0, int64_t pad = 3) {
  const std::vector<int32_t> cu_seqlens = cumulative({30, 0, 41});
  const int64_t tokens = 71, groups = 2, heads = 4, width = groups * heads * head_dim;
  mimo_rope_forward_args args{};
  args.x = run.tensor(tokens * (width + pad));
  args.y = run.output(tokens * width);
  args.cu_seqlens = run.upload(cu_seqlens);
  if (later) args.first_positions = run.upload(std::vector<int32_t>{7, 3, 100});
  std::vector<double> frequencies;
  for (int64_t i = 0; i < rotary_dim / 2; ++i) frequencies.push_back(1.0 / static_cast<double>(1 + 3 * i));
  if (table) args.frequencies = run.upload(frequencies);
  args.sequences = 3, args.tokens = tokens, args.max_seqlen = 41;
  args.groups = groups, args.heads_per_group = heads, args.rotated_per_group = 3;
  args.head_dim = head_dim, args.rotary_dim = rotary_dim, args.x_stride = width + pad, args.y_stride = width;
  args.base = 10000, args.angle_scale = scale, args.amplitude = amplitude;
  args.first_column = first_column, args.interleaved = interleaved;
  args.dtype = run.dtype();
  run.call("mimo_rope_forward", args);
  run.compare("y", args.y, tokens * width);
}

}  // namespace

void add_attention(Cases& cases, bool large) {
  const auto add = [&](const char* name, Attention a) {
    cases.push_back({std::string("attention ") + name, [a](Run& run) { attention(run, a); }});
  };
  add("causal", {{70}, 4, 2, 32, true, 0});
  add("packed causal", {{70, 1, 0, 33}, 4, 2, 64, true, 0});
  add("packed full", {{40, 65}, 3, 3, 80, false, 0});
  // Around Hopper's tiles of 64, 112, 128 and 192 tokens, and sequences far shorter.
  add("packed vision", {{300, 1, 0, 77, 128, 129, 400}, 3, 3, 80, false, 0});
  add("vision tiles", {{112, 113, 191, 192, 193, 224}, 2, 2, 80, false, 0});
  add("short vision", {{0, 5, 1, 1, 33, 0, 2, 64, 65, 0}, 2, 2, 80, false, 0});
  // Around pieces of 256 queries: of equal lengths, of others, and of more sequences than a warp has lanes.
  add("equal vision", {{256, 256, 256}, 3, 3, 80, false, 0});
  add("vision pieces", {{255, 256, 257, 0, 511, 513, 65}, 2, 2, 80, false, 0});
  std::vector<int32_t> many;
  for (int32_t i = 0; i < 70; ++i) many.push_back(i * 37 % 90);
  add("many vision", {many, 2, 2, 80, false, 0});
  add("one token", {{1}, 1, 1, 80, false, 0});
  add("equal lengths", {{64, 64}, 4, 1, 72, true, 0});
  add("wide heads", {{50}, 2, 1, 128, true, 0});
  add("very wide heads", {{37}, 2, 2, 160, false, 0});
  add("odd heads", {{33, 20}, 3, 1, 13, true, 0});
  add("narrower values", {{70, 1, 0, 33}, 4, 4, 24, true, 0, 0, false, 20});
  add("wider values", {{45, 30}, 4, 2, 40, false, 0, 0, false, 72});
  add("widths of DeepSeek", {{150, 1, 0, 77}, 4, 4, 192, true, 0, 0, false, 128});
  // Around tiles of 128 queries and keys, more of them than a block has stages, and many short sequences between.
  add("grouped queries", {{300, 1, 0, 129, 128, 127, 900}, 8, 2, 128, true, 0});
  add("grouped queries, full", {{300, 1, 0, 129, 128, 127, 900}, 6, 2, 128, false, 0});
  add("one key head of 128", {{512, 512}, 4, 1, 128, true, 0});
  add("as many key heads of 128", {{700}, 3, 3, 128, true, 0});
  std::vector<int32_t> mixed(40, 20);
  mixed.push_back(6000), mixed.push_back(130);
  add("short and long sequences of 128", {mixed, 2, 1, 128, true, 0});
  add("heads of 256", {{150, 1, 0, 77}, 4, 2, 256, true, 0});
  add("heads of 256, one sequence", {{300}, 4, 2, 256, true, 0});
  add("heads of 256, equal sequences", {{256, 256}, 4, 2, 256, true, 0});
  add("heads of 256, equal, in a window", {{320, 320}, 4, 4, 256, true, 0, 100});
  add("heads of 136", {{150, 1, 0, 77}, 2, 2, 136, true, 0});
  add("heads of 192, full", {{150, 77}, 2, 1, 192, false, 0});
  std::vector<int32_t> short_ones(40, 20);
  short_ones.push_back(400);
  add("heads of 256, more padding than tokens", {short_ones, 2, 1, 256, true, 0});
  add("heads of 256, full", {{256, 256}, 2, 2, 256, false, 0});
  add("heads of 256 in a window", {{300, 2, 40}, 4, 2, 256, true, 0, 100});
  add("a window of 128 in equal sequences", {{512, 512}, 8, 1, 64, true, 0, 128});
  add("a window longer than the sequences", {{200, 300}, 4, 2, 128, true, 0, 300});
  add("dropout", {{45, 30}, 4, 2, 32, true, 0.2f});
  add("window", {{300, 1, 0, 77}, 4, 2, 64, true, 0, 50});
  add("window of a token", {{70}, 2, 1, 32, true, 0, 1});
  add("window and dropout", {{200, 30}, 2, 1, 96, true, 0.2f, 65});
  add("sinks", {{300, 1, 0, 77}, 4, 2, 64, true, 0, 0, true});
  add("sinks, window and dropout", {{200, 30}, 3, 1, 13, true, 0.2f, 65, true});
  if (large) {
    add("large window", {{2048, 100}, 8, 2, 128, true, 0, 512});
    add("large causal", {{2048}, 8, 2, 128, true, 0});
    add("large packed", {{1000, 3, 700, 345}, 8, 2, 128, true, 0});
    add("large vision", {{1024, 1024}, 4, 4, 80, false, 0});
    add("large short vision", {std::vector<int32_t>(64, 256), 8, 8, 80, false, 0});
    add("large unequal vision", {{320, 192, 256, 300, 129, 256, 64, 250, 640, 1}, 16, 16, 80, false, 0});
    add("large packed vision", {{1500, 0, 256, 900, 1, 1391}, 8, 8, 80, false, 0});
    add("large 64", {{900, 124}, 4, 4, 64, true, 0});
    add("large 72", {{512}, 4, 4, 72, false, 0});
  }
  cases.push_back({"rope", [](Run& run) { rope(run, 32, 32, 1); }});
  const auto step = [&](const char* name, std::vector<int32_t> lengths, int64_t queries, int64_t keys, int64_t d,
                        int64_t window = 0, bool sinks = false) {
    cases.push_back({std::string("attention step ") + name,
                     [=](Run& run) { attention_step(run, lengths, queries, keys, d, window, sinks); }});
  };
  step("small", {0, 1, 70}, 4, 2, 32);
  step("runs of keys", {126, 127, 128, 129, 700}, 6, 2, 64);
  step("many queries a key", {300, 5}, 32, 2, 128);
  step("odd heads", {255, 256, 257}, 3, 1, 13);
  step("window", {0, 69, 70, 129, 700}, 4, 2, 64, 70);
  step("sinks", {0, 69, 70, 129, 700}, 4, 2, 64, 70, true);
  cases.push_back({"attention step latent", [](Run& run) { latent_step(run, {0, 126, 300}, 16, 512, 64); }});
  cases.push_back({"attention step latent, odd", [](Run& run) { latent_step(run, {5, 127, 128}, 45, 13, 6); }});
  cases.push_back({"latent heads", [](Run& run) { latent_heads(run, 37, 16, 128, 64, 128); }});
  cases.push_back({"latent heads, odd", [](Run& run) { latent_heads(run, 71, 3, 5, 2, 7); }});
  if (large) step("large", {9000, 3000, 1, 600}, 32, 2, 128);
  cases.push_back({"rope from later positions", [](Run& run) { rope(run, 32, 32, 1, true); }});
  cases.push_back({"rope of given frequencies", [](Run& run) { rope(run, 32, 24, 1, true, true); }});
  cases.push_back({"rope in packs", [](Run& run) { rope(run, 128, 128, 1, false, false, 1, 0, 0, 8); }});
  cases.push_back({"rope in packs of parts", [](Run& run) { rope(run, 80, 32, -1, true, true, 1.35f, 16, 0, 16); }});
  cases.push_back({"rope part, back", [](Run& run) { rope(run, 24, 16, -1); }});
  cases.push_back({"rope of neighbours", [](Run& run) { rope(run, 24, 16, 1, true, false, 1, 0, 1); }});
  cases.push_back({"rope of last columns", [](Run& run) { rope(run, 24, 10, -1, false, true, 1, 14, 1); }});
  cases.push_back({"rope of last halves", [](Run& run) { rope(run, 24, 10, 1, false, false, 1, 14); }});
  cases.push_back({"rope of amplitude 1.35", [](Run& run) { rope(run, 32, 24, 1, false, true, 1.35f); }});
}

}  // namespace check
