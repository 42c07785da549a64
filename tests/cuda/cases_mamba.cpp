// The causal convolution, the state space scan, and the gated delta rule with its gate.
#include "cases.h"

namespace check {
namespace {

void conv1d(Run& run, const std::vector<int32_t>& lengths, int64_t channels, int64_t width, int64_t pad, bool biased = true) {
  const std::vector<int32_t> cu_seqlens = cumulative(lengths);
  const int64_t tokens = cu_seqlens.back(), stride = channels + pad;
  mimo_causal_conv1d_forward_args f{};
  f.x = run.tensor(tokens * stride);
  f.weight = run.tensor(channels * width, 0.5);
  f.bias = biased ? run.tensor(channels) : nullptr;
  f.y = run.output(tokens * channels);
  f.cu_seqlens = run.upload(cu_seqlens);
  f.sequences = static_cast<int64_t>(lengths.size()), f.tokens = tokens, f.channels = channels, f.width = width;
  f.x_stride = stride, f.y_stride = channels;
  f.dtype = f.weight_dtype = run.dtype();
  run.call("mimo_causal_conv1d_forward", f);
  run.compare("y", f.y, tokens * channels);
  mimo_causal_conv1d_backward_args b{};
  b.dy = run.tensor(tokens * stride);
  b.x = f.x, b.weight = f.weight, b.bias = f.bias;
  b.dx = run.output(tokens * channels);
  b.dweight = run.floats(channels * width);
  b.dbias = biased ? run.floats(channels) : nullptr;
  b.cu_seqlens = f.cu_seqlens;
  b.sequences = f.sequences, b.tokens = tokens, b.channels = channels, b.width = width;
  b.dy_stride = stride, b.x_stride = stride, b.dx_stride = channels;
  b.dtype = b.weight_dtype = run.dtype();
  run.call("mimo_causal_conv1d_backward", b);
  run.compare("dx", b.dx, tokens * channels);
  run.compare("dweight", b.dweight, channels * width, MIMO_DTYPE_F32);
  if (biased) run.compare("dbias", b.dbias, channels, MIMO_DTYPE_F32);
}

void conv1d_step(Run& run, int64_t sequences, int64_t channels, int64_t width, bool biased = true) {
  const int64_t stride = channels + 8, slots = sequences + 2, kept = slots * (width - 1) * channels;
  mimo_causal_conv1d_step_args f{};
  f.x = run.tensor(sequences * stride);
  f.weight = run.tensor(channels * width, 0.5);
  f.bias = biased ? run.tensor(channels) : nullptr;
  f.state = run.tensor(kept);
  std::vector<int32_t> order;
  for (int64_t s = 0; s < sequences; ++s) order.push_back(static_cast<int32_t>(slots - 1 - s));
  f.slots = run.upload(order);
  f.y = run.output(sequences * channels);
  f.sequences = sequences, f.channels = channels, f.width = width, f.x_stride = stride, f.y_stride = channels;
  f.dtype = f.weight_dtype = run.dtype();
  run.call("mimo_causal_conv1d_step", f);
  run.compare("y", f.y, sequences * channels);
  run.compare("window", f.state, kept);
}

struct Ssd {
  std::vector<int32_t> lengths;
  int64_t heads, head_dim, groups, state_dim, chunk;
  float dt_minimum;
  bool masked = false;  // z
};

void ssd(Run& run, const Ssd& s) {
  const std::vector<int32_t> cu_seqlens = cumulative(s.lengths);
  const int64_t tokens = cu_seqlens.back(), inner = s.heads * s.head_dim, states = s.groups * s.state_dim;
  // As after the projection: z | x | B | C | dt.
  const int64_t width = 2 * inner + 2 * states + s.heads, element = bytes_of(run.dtype());
  const auto part = [&](void* row, int64_t column) { return static_cast<char*>(row) + column * element; };
  std::vector<float> values = run.normal(tokens * width);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t h = 0; h < s.heads; ++h) values[static_cast<size_t>((t + 1) * width - s.heads + h)] *= 0.5f;
  }
  void* all = run.tensor(values);
  mimo_ssd_forward_args f{};
  f.z = all, f.x = part(all, inner), f.b = part(all, 2 * inner), f.c = part(all, 2 * inner + states);
  f.dt = part(all, 2 * inner + 2 * states);
  f.dt_bias = run.upload(run.uniform(s.heads, -4, -1));
  f.a_log = run.upload(run.uniform(s.heads, 0, 2));
  f.d = run.floats(s.heads);
  f.z_factors = s.masked ? run.upload(run.uniform(inner, 0, 1)) : nullptr;
  f.o = run.output(tokens * inner);
  f.y = run.output(tokens * inner);
  const int64_t final_floats = static_cast<int64_t>(s.lengths.size()) * inner * s.state_dim;
  f.final_state = static_cast<float*>(run.output(final_floats, MIMO_DTYPE_F32));
  f.cu_seqlens = run.upload(cu_seqlens);
  f.sequences = static_cast<int64_t>(s.lengths.size()), f.tokens = tokens, f.heads = s.heads, f.head_dim = s.head_dim;
  f.groups = s.groups, f.state_dim = s.state_dim, f.chunk_size = s.chunk;
  f.xbc_stride = f.z_stride = f.dt_stride = width;
  f.dt_minimum = s.dt_minimum, f.dtype = run.dtype();
  run.call("mimo_ssd_forward", f);
  run.compare("o", f.o, tokens * inner);
  run.compare("y", f.y, tokens * inner);
  run.compare("final states", f.final_state, final_floats, MIMO_DTYPE_F32);

  mimo_ssd_backward_args b{};
  b.d_o = run.tensor(tokens * inner);
  b.x = f.x, b.b = f.b, b.c = f.c, b.z = f.z, b.dt = f.dt;
  b.y = run.shared("y", f.y, tokens * inner);
  b.dt_bias = f.dt_bias, b.a_log = f.a_log, b.d = f.d;
  void* gradient = run.output(tokens * width);
  b.dz = gradient, b.dx = part(gradient, inner), b.db = part(gradient, 2 * inner);
  b.dc = part(gradient, 2 * inner + states), b.ddt = part(gradient, 2 * inner + 2 * states);
  b.z_factors = f.z_factors;
  b.dz_factors = s.masked ? run.floats(inner) : nullptr;
  b.ddt_bias = run.floats(s.heads), b.da_log = run.floats(s.heads), b.dd = run.floats(s.heads);
  b.cu_seqlens = f.cu_seqlens;
  b.sequences = f.sequences, b.tokens = tokens, b.heads = s.heads, b.head_dim = s.head_dim, b.groups = s.groups;
  b.state_dim = s.state_dim, b.chunk_size = s.chunk;
  b.xbc_stride = b.z_stride = b.dt_stride = b.dxbc_stride = b.dz_stride = b.ddt_stride = width;
  b.dt_minimum = s.dt_minimum, b.dtype = run.dtype();
  run.call("mimo_ssd_backward", b);
  const std::vector<double> rows = run.fetch(gradient, tokens * width, run.dtype());
  const auto columns = [&](const char* name, int64_t first, int64_t count) {
    Output output{name, {}, false};
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t i = 0; i < count; ++i) output.values.push_back(rows[static_cast<size_t>(t * width + first + i)]);
    }
    run.outputs.push_back(output);
  };
  columns("dz", 0, inner);
  columns("dx", inner, inner);
  columns("db", 2 * inner, states);
  columns("dc", 2 * inner + states, states);
  columns("ddt", 2 * inner + 2 * states, s.heads);
  run.compare("ddt_bias", b.ddt_bias, s.heads, MIMO_DTYPE_F32);
  run.compare("da_log", b.da_log, s.heads, MIMO_DTYPE_F32);
  run.compare("dd", b.dd, s.heads, MIMO_DTYPE_F32);
  if (s.masked) run.compare("dz_factors", b.dz_factors, inner, MIMO_DTYPE_F32);

  f.o = run.output(tokens * inner);
  f.y = nullptr, f.final_state = nullptr;
  run.call("mimo_ssd_forward", f);
  run.compare("o alone", f.o, tokens * inner);
}

/// One more token of as many sequences as there are lengths.
void ssd_step(Run& run, const Ssd& s) {
  const int64_t sequences = static_cast<int64_t>(s.lengths.size()), inner = s.heads * s.head_dim;
  const int64_t states = s.groups * s.state_dim, width = 2 * inner + 2 * states + s.heads, slots = sequences + 1;
  const int64_t element = bytes_of(run.dtype()), floats = slots * inner * s.state_dim;
  void* all = run.tensor(sequences * width);
  const auto part = [&](int64_t column) { return static_cast<char*>(all) + column * element; };
  mimo_ssd_step_args f{};
  f.z = all, f.x = part(inner), f.b = part(2 * inner), f.c = part(2 * inner + states), f.dt = part(2 * inner + 2 * states);
  f.dt_bias = run.upload(run.uniform(s.heads, -4, -1));
  f.a_log = run.upload(run.uniform(s.heads, 0, 2));
  f.d = run.floats(s.heads);
  f.state = run.floats(floats);
  std::vector<int32_t> order;
  for (int64_t i = 0; i < sequences; ++i) order.push_back(static_cast<int32_t>(slots - 1 - i));
  f.slots = run.upload(order);
  f.o = run.output(sequences * inner);
  f.sequences = sequences, f.heads = s.heads, f.head_dim = s.head_dim, f.groups = s.groups, f.state_dim = s.state_dim;
  f.xbc_stride = f.z_stride = f.dt_stride = width;
  f.dt_minimum = s.dt_minimum, f.dtype = run.dtype();
  run.call("mimo_ssd_step", f);
  run.compare("o", f.o, sequences * inner);
  run.compare("states", f.state, floats, MIMO_DTYPE_F32);
}

struct Delta {
  std::vector<int32_t> lengths;
  int64_t key_heads, key_dim, value_heads, value_dim;

  int64_t width() const { return 2 * key_heads * key_dim + value_heads * value_dim + 2 * value_heads; }
  int64_t state() const { return value_heads * key_dim * value_dim; }
};

/// Points at the parts of rows q | k | v | b | a, and gives the sizes.
template <class Args>
void delta_inputs(Run& run, const Delta& s, void* rows, Args& f) {
  const int64_t keys = s.key_heads * s.key_dim, values = s.value_heads * s.value_dim, element = bytes_of(run.dtype());
  const auto part = [&](int64_t column) { return static_cast<char*>(rows) + column * element; };
  f.q = rows, f.k = part(keys), f.v = part(2 * keys), f.b = part(2 * keys + values);
  f.a = part(2 * keys + values + s.value_heads);
  f.dt_bias = run.upload(run.uniform(s.value_heads, -4, 0));
  f.a_log = run.upload(run.uniform(s.value_heads, -1, 2));
  f.key_heads = s.key_heads, f.key_dim = s.key_dim, f.value_heads = s.value_heads, f.value_dim = s.value_dim;
  f.qkv_stride = f.ba_stride = s.width();
  f.dtype = run.dtype();
}

void delta(Run& run, const Delta& s) {
  const std::vector<int32_t> cu_seqlens = cumulative(s.lengths);
  const int64_t tokens = cu_seqlens.back(), width = s.width(), values = s.value_heads * s.value_dim;
  const int64_t keys = s.key_heads * s.key_dim, states = static_cast<int64_t>(s.lengths.size()) * s.state();
  mimo_gated_delta_forward_args f{};
  delta_inputs(run, s, run.tensor(tokens * width), f);
  f.o = run.output(tokens * values);
  f.final_state = static_cast<float*>(run.output(states, MIMO_DTYPE_F32));
  f.cu_seqlens = run.upload(cu_seqlens);
  f.sequences = static_cast<int64_t>(s.lengths.size()), f.tokens = tokens;
  run.call("mimo_gated_delta_forward", f);
  run.compare("o", f.o, tokens * values);
  run.compare("final states", f.final_state, states, MIMO_DTYPE_F32);

  mimo_gated_delta_backward_args b{};
  b.d_o = run.tensor(tokens * values);
  b.q = f.q, b.k = f.k, b.v = f.v, b.b = f.b, b.a = f.a, b.dt_bias = f.dt_bias, b.a_log = f.a_log;
  void* gradient = run.output(tokens * width);
  const auto part = [&](int64_t column) { return static_cast<char*>(gradient) + column * bytes_of(run.dtype()); };
  b.dq = gradient, b.dk = part(keys), b.dv = part(2 * keys), b.db = part(2 * keys + values);
  b.da = part(2 * keys + values + s.value_heads);
  b.ddt_bias = run.floats(s.value_heads), b.da_log = run.floats(s.value_heads);
  b.cu_seqlens = f.cu_seqlens;
  b.sequences = f.sequences, b.tokens = tokens, b.key_heads = s.key_heads, b.value_heads = s.value_heads;
  b.key_dim = s.key_dim, b.value_dim = s.value_dim;
  b.qkv_stride = b.ba_stride = b.dqkv_stride = b.dba_stride = width;
  b.dtype = run.dtype();
  run.call("mimo_gated_delta_backward", b);
  const std::vector<double> rows = run.fetch(gradient, tokens * width, run.dtype());
  const auto columns = [&](const char* name, int64_t first, int64_t count) {
    Output output{name, {}, false};
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t i = 0; i < count; ++i) output.values.push_back(rows[static_cast<size_t>(t * width + first + i)]);
    }
    run.outputs.push_back(output);
  };
  columns("dq", 0, keys);
  columns("dk", keys, keys);
  columns("dv", 2 * keys, values);
  columns("db", 2 * keys + values, s.value_heads);
  columns("da", 2 * keys + values + s.value_heads, s.value_heads);
  run.compare("ddt_bias", b.ddt_bias, s.value_heads, MIMO_DTYPE_F32);
  run.compare("da_log", b.da_log, s.value_heads, MIMO_DTYPE_F32);
}

/// One more token of as many sequences as there are lengths.
void delta_step(Run& run, const Delta& s) {
  const int64_t sequences = static_cast<int64_t>(s.lengths.size()), slots = sequences + 1;
  mimo_gated_delta_step_args f{};
  delta_inputs(run, s, run.tensor(sequences * s.width()), f);
  f.state = run.floats(slots * s.state());
  std::vector<int32_t> order;
  for (int64_t i = 0; i < sequences; ++i) order.push_back(static_cast<int32_t>(slots - 1 - i));
  f.slots = run.upload(order);
  f.o = run.output(sequences * s.value_heads * s.value_dim);
  f.sequences = sequences;
  run.call("mimo_gated_delta_step", f);
  run.compare("o", f.o, sequences * s.value_heads * s.value_dim);
  run.compare("states", f.state, slots * s.state(), MIMO_DTYPE_F32);
}

void gate(Run& run, int64_t rows, int64_t width, int64_t pad, int32_t kind) {
  const int64_t stride = width + pad;
  mimo_gate_forward_args f{};
  f.x = run.tensor(rows * stride), f.gate = run.tensor(rows * stride), f.y = run.output(rows * width);
  f.rows = rows, f.width = width, f.x_stride = f.gate_stride = stride, f.y_stride = width;
  f.kind = kind, f.dtype = run.dtype();
  run.call("mimo_gate_forward", f);
  run.compare("y", f.y, rows * width);
  mimo_gate_backward_args b{};
  b.dy = run.tensor(rows * stride), b.x = f.x, b.gate = f.gate;
  b.dx = run.output(rows * width), b.dgate = run.output(rows * width);
  b.rows = rows, b.width = width, b.dy_stride = b.x_stride = b.gate_stride = stride, b.dx_stride = b.dgate_stride = width;
  b.kind = kind, b.dtype = run.dtype();
  run.call("mimo_gate_backward", b);
  run.compare("dx", b.dx, rows * width);
  run.compare("dgate", b.dgate, rows * width);
}

}  // namespace

void add_mamba(Cases& cases, bool large) {
  cases.push_back({"conv1d", [](Run& run) { conv1d(run, {70, 2, 0, 130}, 24, 4, 8); }});
  cases.push_back({"conv1d odd", [](Run& run) { conv1d(run, {5, 67}, 13, 3, 0); }});
  cases.push_back({"conv1d wide", [](Run& run) { conv1d(run, {140}, 8, 6, 0); }});
  cases.push_back({"conv1d without bias", [](Run& run) { conv1d(run, {70, 61}, 24, 4, 8, false); }});
  cases.push_back({"conv1d step without bias", [](Run& run) { conv1d_step(run, 3, 40, 4, false); }});
  cases.push_back({"conv1d step", [](Run& run) { conv1d_step(run, 3, 600, 4); }});
  cases.push_back({"conv1d step odd", [](Run& run) { conv1d_step(run, 2, 13, 2); }});
  const auto add = [&](const char* name, Ssd s) {
    cases.push_back({std::string("ssd ") + name, [s](Run& run) { ssd(run, s); }});
    cases.push_back({std::string("ssd step ") + name, [s](Run& run) { ssd_step(run, s); }});
  };
  cases.push_back({"ssd masked, odd", [](Run& run) { ssd(run, {{37, 0, 1, 150}, 3, 5, 1, 7, 16, 0, true}); }});
  cases.push_back({"ssd masked", [](Run& run) { ssd(run, {{150, 40}, 4, 64, 2, 128, 128, 0, true}); }});
  add("small", {{70, 9}, 4, 16, 2, 16, 32, 0});
  add("odd", {{37, 0, 1, 50}, 3, 5, 1, 7, 16, 0});
  add("minimum step", {{50}, 2, 8, 2, 16, 128, 0.2f});
  add("model sizes", {{150, 40}, 4, 64, 2, 128, 128, 0});
  // Many heads, so that chance does not decide the sums of few that rounding leaves.
  const std::vector<int32_t> uneven = {37, 0, 1, 150, 64, 128, 65};
  add("minimum step of model sizes", {{128, 1}, 64, 64, 8, 128, 64, 0.2f});
  // More chunks than a pipeline has stages.
  const std::vector<int32_t> several = {37, 0, 1, 400, 64, 130, 65};
  for (const int64_t head_dim : {72, 80, 96, 120, 128}) {
    for (const int64_t state_dim : {64, 128}) {
      for (const bool masked : {false, true}) {
        const std::string sizes = "heads of " + std::to_string(head_dim) + ", state of " + std::to_string(state_dim);
        cases.push_back({(masked ? "ssd masked, " : "ssd ") + sizes,
                         [=](Run& run) { ssd(run, {several, 16, head_dim, 4, state_dim, 64, 0, masked}); }});
      }
    }
  }
  add("many heads of 80", {uneven, 64, 80, 8, 64, 64, 0.2f});
  add("state of 64", {uneven, 64, 64, 8, 64, 64, 0});
  cases.push_back({"ssd masked, state of 64", [uneven](Run& run) { ssd(run, {uneven, 64, 64, 8, 64, 128, 0, true}); }});
  const auto add_delta = [&](const char* name, Delta s) {
    cases.push_back({std::string("gated_delta ") + name, [s](Run& run) { delta(run, s); }});
    cases.push_back({std::string("gated_delta step ") + name, [s](Run& run) { delta_step(run, s); }});
  };
  add_delta("small", {{70, 9}, 2, 16, 4, 24});
  add_delta("odd", {{37, 0, 1, 130}, 1, 5, 3, 7});
  add_delta("wide values", {{40}, 1, 32, 2, 160});
  add_delta("model sizes", {{150, 40}, 4, 128, 8, 128});
  cases.push_back({"gate sigmoid", [](Run& run) { gate(run, 70, 96, 8, MIMO_GATE_SIGMOID); }});
  cases.push_back({"gate silu odd", [](Run& run) { gate(run, 33, 13, 0, MIMO_GATE_SILU); }});
  if (large) {
    add_delta("long", {{4097, 63, 129}, 16, 128, 32, 128});
    add("long", {{4097, 63, 129}, 32, 64, 4, 128, 128, 0});
    add("long, heads of 80", {{4097, 63, 129}, 32, 80, 4, 128, 128, 0});
    add("long, heads of 128", {{4097, 63, 129}, 32, 128, 4, 128, 128, 0});
    add("large", {{1024, 300, 700}, 16, 64, 8, 128, 128, 0});
    cases.push_back({"conv1d large", [](Run& run) { conv1d(run, {1500, 548}, 6144, 4, 0); }});
  }
}

}  // namespace check
