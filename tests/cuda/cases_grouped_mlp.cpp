// Feed-forward layers of experts as one operation, and their biases.
#include "cases.h"

namespace check {
namespace {

/// Rows that follow the last group, which no result may read or write.
constexpr int64_t spare = 5;

struct Mlp {
  std::vector<int32_t> counts;
  int64_t hidden, width;
  int32_t kind;
  int64_t interleave;
  float clamp;
  bool biases;
  int32_t recipe = MIMO_MLP_RECIPE_PLAIN;

  bool rounded() const { return recipe == MIMO_MLP_RECIPE_E4M3_BLOCKWISE; }
};

bool gated(int32_t kind) { return kind == MIMO_ACTIVATION_SWIGLU || kind == MIMO_ACTIVATION_QUICK_GEGLU; }

/// Values with NaN in the rows behind the last group.
std::vector<float> poisoned(std::vector<float> values, int64_t width) {
  std::fill(values.end() - spare * width, values.end(), NAN);
  return values;
}

template <class Args>
void describe(const Mlp& m, int32_t dtype, int64_t rows, Args& args) {
  args.rows = rows, args.groups = static_cast<int64_t>(m.counts.size());
  args.hidden = m.hidden, args.width = m.width, args.interleave = m.interleave;
  args.clamp = m.clamp, args.linear_offset = m.kind == MIMO_ACTIVATION_QUICK_GEGLU ? 0.5f : 0.0f;
  args.kind = m.kind, args.recipe = m.recipe, args.dtype = dtype;
}

/// Matrices of all groups as a pass reads them; factors of those in e4m3.
struct Matrices {
  const void* values;
  const float* factors;
};

/// Rows in e4m3.
struct RoundedRows {
  void* values;
  float* factors;
};

/// Sizes and inputs that both directions have.
struct Layer {
  Run& run;
  const Mlp& m;
  int32_t dtype;  // storage of tensors
  std::vector<int32_t> offsets = cumulative(m.counts);
  int64_t rows = offsets.back() + spare, groups = static_cast<int64_t>(m.counts.size());
  int64_t z_width = gated(m.kind) ? 2 * m.width : m.width;

  void* tensor(std::vector<float> values) { return run.typed(std::move(values), run.precision, dtype); }
  void* bias(int64_t width) { return m.biases ? tensor(run.normal(groups * width, 0.5)) : nullptr; }
  std::vector<float> weights(int64_t outputs, int64_t inputs) {
    return run.normal(groups * outputs * inputs, 1 / std::sqrt(static_cast<double>(inputs)));
  }
  std::vector<float> input(int64_t width) { return poisoned(run.normal(rows * width), width); }
  /// Stays where no row of a group is.
  std::vector<float> kept(int64_t width) { return std::vector<float>(static_cast<size_t>(rows * width), 7.0f); }
  std::vector<float> whole(int64_t count, double most) {
    std::vector<float> values = run.uniform(count, -most - 0.5, most + 0.5);
    for (float& value : values) value = std::round(value);
    return values;
  }

  /// In the other order where a backward pass reads e4m3.
  Matrices matrices(std::vector<float> values, int64_t outputs, int64_t inputs, bool transposed) {
    if (!m.rounded()) return {tensor(std::move(values)), nullptr};
    mimo_e4m3_matrices_args a{};
    const int64_t elements = groups * outputs * inputs, factors = groups * ((outputs + 127) / 128) * ((inputs + 127) / 128);
    a.matrices = tensor(std::move(values));
    a.values = run.output(elements, MIMO_DTYPE_U8);
    a.transposed = transposed ? run.output(elements, MIMO_DTYPE_U8) : nullptr;
    a.factors = run.floats(factors);
    a.count = groups, a.rows = outputs, a.width = inputs, a.dtype = dtype;
    run.call("mimo_e4m3_matrices", a);
    run.compare("values", a.values, elements, MIMO_DTYPE_U8, true);
    run.compare("factors", a.factors, factors, MIMO_DTYPE_F32, true);
    if (transposed) run.compare("transposed", a.transposed, elements, MIMO_DTYPE_U8, true);
    return {transposed ? a.transposed : a.values, a.factors};
  }

  /// Rows [rows, hidden] as a permutation writes them that leaves them in place.
  RoundedRows rounded(const void* x) {
    std::vector<int32_t> places(static_cast<size_t>(rows));
    for (size_t row = 0; row < places.size(); ++row) places[row] = static_cast<int32_t>(row);
    const int64_t factors = (m.hidden + 127) / 128 * ((rows + 3) / 4 * 4);
    mimo_moe_permute_args p{};
    p.x = x, p.slot_of_row = run.upload(places), p.row_count = run.upload(std::vector<int32_t>{offsets.back()});
    p.rows = run.output(rows * m.hidden, dtype);
    p.e4m3 = run.output(rows * m.hidden, MIMO_DTYPE_U8);
    p.e4m3_factors = static_cast<float*>(run.output(factors + MIMO_E4M3_SPARE_FACTORS, MIMO_DTYPE_F32));
    p.tokens = rows, p.topk = 1, p.width = m.hidden, p.dtype = dtype;
    run.call("mimo_moe_permute", p);
    run.compare("rounded rows", p.e4m3, offsets.back() * m.hidden, MIMO_DTYPE_U8, true);
    run.compare("factors of rounded rows", p.e4m3_factors, factors, MIMO_DTYPE_F32, true);
    return {p.e4m3, p.e4m3_factors};
  }
  int64_t factors_of(int64_t width) const { return (width + 127) / 128 * ((rows + 3) / 4 * 4); }
  RoundedRows room(int64_t width) {
    return {run.output(rows * width, MIMO_DTYPE_U8),
            static_cast<float*>(run.output(factors_of(width) + MIMO_E4M3_SPARE_FACTORS, MIMO_DTYPE_F32))};
  }
  /// Rows in e4m3 must be what rounding the stored ones gives: notes how many bytes and factors differ.
  void same_bytes(const std::string& name, const void* stored, const RoundedRows& got, int64_t width) {
    const RoundedRows expected = room(width);
    mimo_e4m3_rows_args r{};
    r.x = stored, r.row_count = run.upload(std::vector<int32_t>{offsets.back()}), r.values = expected.values, r.factors = expected.factors;
    r.rows = rows, r.width = width, r.dtype = dtype;
    run.call("mimo_e4m3_rows", r);
    double differences = 0;
    const auto count = [&](const void* one, const void* other, int64_t elements, int32_t stored_as) {
      const std::vector<double> a = run.fetch(one, elements, stored_as), b = run.fetch(other, elements, stored_as);
      for (size_t i = 0; i < a.size(); ++i) differences += a[i] != b[i] && !(std::isnan(a[i]) && std::isnan(b[i])) ? 1 : 0;
    };
    count(expected.values, got.values, rows * width, MIMO_DTYPE_U8);
    count(expected.factors, got.factors, factors_of(width), MIMO_DTYPE_F32);
    run.outputs.push_back({name + " in e4m3", {differences}, true});
  }
  /// The bits of a result must not depend on where its rows were rounded: notes how many numbers differ.
  void same(const std::string& name, const void* one, const void* other, int64_t width) {
    const std::vector<double> a = run.fetch(one, rows * width, dtype), b = run.fetch(other, rows * width, dtype);
    double differences = 0;
    for (size_t i = 0; i < a.size(); ++i) differences += a[i] != b[i] && !(std::isnan(a[i]) && std::isnan(b[i])) ? 1 : 0;
    run.outputs.push_back({name + " of rows rounded before", {differences}, true});
  }
};

/// The reference stores what the library under test stores, since z is rounded before the activation, which may square it: an
/// error of two roundings, beside those of hs and y.
void forward(Run& run, const Mlp& m) {
  Layer layer{run, m, run.precision};
  mimo_grouped_mlp_forward_args f{};
  describe(m, layer.dtype, layer.rows, f);
  const Matrices w1 = layer.matrices(layer.weights(layer.z_width, m.hidden), layer.z_width, m.hidden, false);
  const Matrices w2 = layer.matrices(layer.weights(m.hidden, m.width), m.hidden, m.width, false);
  f.x = layer.tensor(layer.input(m.hidden));
  f.w1 = w1.values, f.w1_factors = w1.factors, f.w2 = w2.values, f.w2_factors = w2.factors;
  f.b1 = layer.bias(layer.z_width);
  f.b2 = layer.bias(m.hidden);
  f.row_probability = run.upload(poisoned(run.uniform(layer.rows, 0, 1), 1));
  f.offsets = run.upload(layer.offsets);
  f.z = layer.tensor(layer.kept(layer.z_width));
  f.y = layer.tensor(layer.kept(m.hidden));
  run.call("mimo_grouped_mlp_forward", f);
  run.compare("z", f.z, layer.rows * layer.z_width, layer.dtype);
  run.compare("y", f.y, layer.rows * m.hidden, layer.dtype);
  if (m.rounded()) {
    const RoundedRows x = layer.rounded(f.x);
    mimo_grouped_mlp_forward_args given = f;
    given.x = nullptr, given.x_e4m3 = x.values, given.x_factors = x.factors;
    given.z = layer.tensor(layer.kept(layer.z_width)), given.y = layer.tensor(layer.kept(m.hidden));
    run.call("mimo_grouped_mlp_forward", given);
    layer.same("z", f.z, given.z, layer.z_width);
    layer.same("y", f.y, given.y, m.hidden);
  }
  f.z = nullptr;
  f.y = layer.tensor(layer.kept(m.hidden));
  run.call("mimo_grouped_mlp_forward", f);
  run.compare("y without z", f.y, layer.rows * m.hidden, layer.dtype);
}

/// In e4m3, whose storage is bf16 in the reference too, inputs are small whole numbers, so that sums are exact. A dz that differs in
/// its last bit would still round to another e4m3, and dx would tell nothing: it is compared where slopes are exact.
void backward(Run& run, const Mlp& m) {
  const bool exact = m.rounded();
  Layer layer{run, m, exact ? run.precision : run.dtype()};
  const auto input = [&](int64_t width, double most) {
    return layer.tensor(exact ? poisoned(layer.whole(layer.rows * width, most), width) : layer.input(width));
  };
  const auto matrices = [&](int64_t outputs, int64_t inputs, double most) {
    std::vector<float> values =
        exact ? layer.whole(layer.groups * outputs * inputs, most) : layer.weights(outputs, inputs);
    return layer.matrices(std::move(values), outputs, inputs, true);
  };
  mimo_grouped_mlp_backward_args b{};
  describe(m, layer.dtype, layer.rows, b);
  const Matrices w1 = matrices(layer.z_width, m.hidden, 3), w2 = matrices(m.hidden, m.width, 1);
  b.dy = input(m.hidden, 1);
  b.z = input(layer.z_width, 2);
  b.w1 = w1.values, b.w1_factors = w1.factors, b.w2 = w2.values, b.w2_factors = w2.factors;
  b.b2 = layer.bias(m.hidden);
  std::vector<float> probability = run.uniform(layer.rows, 0, 1);
  for (float& p : probability) p = !exact ? p : p < 0.5f ? 0.5f : 1.0f;
  b.row_probability = run.upload(poisoned(std::move(probability), 1));
  b.offsets = run.upload(layer.offsets);
  b.dx = layer.tensor(layer.kept(m.hidden));
  b.dz = layer.tensor(layer.kept(layer.z_width));
  b.hs = layer.tensor(layer.kept(m.width));
  b.drow_probability = run.upload(layer.kept(1));
  b.db1 = m.biases ? run.floats(layer.groups * layer.z_width) : nullptr;
  b.db2 = m.biases ? run.floats(layer.groups * m.hidden) : nullptr;
  run.call("mimo_grouped_mlp_backward", b);
  if (!exact || m.kind == MIMO_ACTIVATION_SQUARED_RELU) run.compare("dx", b.dx, layer.rows * m.hidden, layer.dtype);
  run.compare("dz", b.dz, layer.rows * layer.z_width, layer.dtype);
  run.compare("hs", b.hs, layer.rows * m.width, layer.dtype);
  run.compare("dp", b.drow_probability, layer.rows, MIMO_DTYPE_F32);
  if (m.rounded()) {
    const RoundedRows dy = layer.rounded(b.dy);
    mimo_grouped_mlp_backward_args given = b;
    given.dy_e4m3 = dy.values, given.dy_factors = dy.factors, given.db1 = given.db2 = nullptr;
    given.dx = layer.tensor(layer.kept(m.hidden)), given.dz = layer.tensor(layer.kept(layer.z_width));
    given.hs = layer.tensor(layer.kept(m.width)), given.drow_probability = run.upload(layer.kept(1));
    run.call("mimo_grouped_mlp_backward", given);
    layer.same("dx", b.dx, given.dx, m.hidden);
    layer.same("dz", b.dz, given.dz, layer.z_width);
    if (!m.biases) {
      const RoundedRows dz = layer.room(layer.z_width), hs = layer.room(m.width);
      given.dy = given.dz = given.hs = nullptr, given.dx = layer.tensor(layer.kept(m.hidden));
      given.dz_e4m3 = dz.values, given.dz_factors = dz.factors, given.hs_e4m3 = hs.values, given.hs_factors = hs.factors;
      run.call("mimo_grouped_mlp_backward", given);
      layer.same("dx of rows in e4m3 alone", b.dx, given.dx, m.hidden);
      layer.same_bytes("dz", b.dz, dz, layer.z_width);
      layer.same_bytes("hs", b.hs, hs, m.width);
    }
  }
  if (!m.biases) return;
  run.compare("db1", b.db1, layer.groups * layer.z_width, MIMO_DTYPE_F32);
  run.compare("db2", b.db2, layer.groups * m.hidden, MIMO_DTYPE_F32);
}

void mlp(Run& run, const Mlp& m) {
  if (m.rounded() && run.precision != MIMO_DTYPE_BF16) return;
  forward(run, m);
  backward(run, m);
}

void bias(Run& run, const std::vector<int32_t>& counts, int64_t width, bool weighted, bool accumulate) {
  const std::vector<int32_t> offsets = cumulative(counts);
  const bool one = counts.empty();
  const int64_t rows = one ? 300 : offsets.back() + spare, groups = one ? 1 : static_cast<int64_t>(counts.size());
  const auto behind = [&](std::vector<float> values, int64_t columns) {
    return one ? values : poisoned(std::move(values), columns);
  };
  mimo_grouped_bias_forward_args f{};
  f.bias = run.tensor(groups * width);
  f.factor = weighted ? run.upload(behind(run.uniform(rows, 0, 1), 1)) : nullptr;
  f.offsets = one ? nullptr : run.upload(offsets);
  f.y = run.tensor(behind(run.normal(rows * width), width));
  f.rows = rows, f.groups = groups, f.width = width, f.dtype = run.dtype();
  run.call("mimo_grouped_bias_forward", f);
  run.compare("y", f.y, rows * width);
  mimo_grouped_bias_backward_args b{};
  b.dy = run.tensor(behind(run.normal(rows * width), width));
  b.bias = f.bias, b.factor = f.factor, b.offsets = f.offsets;
  b.dbias = run.floats(groups * width);
  b.dfactor = run.floats(rows);
  b.rows = rows, b.groups = groups, b.width = width;
  b.accumulate_dfactor = accumulate, b.dtype = run.dtype();
  run.call("mimo_grouped_bias_backward", b);
  run.compare("dbias", b.dbias, groups * width, MIMO_DTYPE_F32);
  run.compare("dfactor", b.dfactor, rows, MIMO_DTYPE_F32);
}

}  // namespace

void add_grouped_mlp(Cases& cases, bool large) {
  const auto add = [&](const std::string& name, Mlp m) {
    cases.push_back({"grouped_mlp " + name, [m](Run& run) { mlp(run, m); }});
  };
  const struct {
    const char* name;
    int32_t kind;
    float clamp;
  } kinds[] = {{"squared_relu", MIMO_ACTIVATION_SQUARED_RELU, INFINITY},
               {"swiglu", MIMO_ACTIVATION_SWIGLU, INFINITY},
               {"swiglu clamped", MIMO_ACTIVATION_SWIGLU, 1.0f},
               {"quick_geglu", MIMO_ACTIVATION_QUICK_GEGLU, INFINITY},
               {"quick_geglu clamped", MIMO_ACTIVATION_QUICK_GEGLU, 1.0f}};
  for (const auto& [name, kind, clamp] : kinds) {
    for (const bool biases : {false, true}) {
      const std::string with = std::string(name) + (biases ? " biases" : "");
      add(with, {{33, 0, 129, 7}, 64, 128, kind, 0, clamp, biases});
      add(with + " odd", {{5, 0, 70}, 27, 21, kind, gated(kind) ? 7 : 0, clamp, biases});
      if (gated(kind)) add(with + " interleaved", {{200, 1, 0, 64}, 128, 192, kind, 32, clamp, biases});
    }
  }
  add("no rows", {{0, 0, 0}, 64, 64, MIMO_ACTIVATION_SWIGLU, 32, 1.0f, true});
  add("one group", {{300}, 192, 64, MIMO_ACTIVATION_SWIGLU, 32, INFINITY, true});
  // Around the edges of tiles of 64 and 128 rows; widths that are no whole tiles; more tiles than a GPU has multiprocessors.
  const std::vector<int32_t> edges{63, 64, 65, 0, 127, 128, 129, 1, 191, 192, 193, 0, 0, 256, 257, 700};
  add("squared_relu edges", {edges, 328, 392, MIMO_ACTIVATION_SQUARED_RELU, 0, INFINITY, true});
  add("squared_relu 1856", {{3, 0, 130, 1, 64, 0, 17}, 200, 1856, MIMO_ACTIVATION_SQUARED_RELU, 0, INFINITY, true});
  add("squared_relu 344", {{130, 1}, 1024, 344, MIMO_ACTIVATION_SQUARED_RELU, 0, INFINITY, false});
  add("swiglu edges", {edges, 264, 392, MIMO_ACTIVATION_SWIGLU, 0, INFINITY, true});
  add("swiglu 176", {{130, 1}, 72, 176, MIMO_ACTIVATION_SWIGLU, 0, INFINITY, false});
  add("swiglu blocks of 32, edges", {edges, 136, 288, MIMO_ACTIVATION_SWIGLU, 32, INFINITY, true});
  add("swiglu blocks of 64", {{3, 0, 130, 1}, 136, 320, MIMO_ACTIVATION_SWIGLU, 64, INFINITY, true});
  add("tanh gelu", {{33, 0, 129, 7}, 64, 128, MIMO_ACTIVATION_GELU_TANH, 0, INFINITY, true});
  const auto add_e4m3 = [&](const std::string& name, Mlp m) {
    m.recipe = MIMO_MLP_RECIPE_E4M3_BLOCKWISE;
    add("e4m3 " + name, m);
  };
  const std::vector<int32_t> few{3, 0, 130, 1, 64, 0, 17};
  add_e4m3("squared_relu", {few, 256, 384, MIMO_ACTIVATION_SQUARED_RELU, 0, INFINITY, false});
  add_e4m3("squared_relu edges", {edges, 336, 400, MIMO_ACTIVATION_SQUARED_RELU, 0, INFINITY, true});
  add_e4m3("squared_relu narrow", {edges, 128, 16, MIMO_ACTIVATION_SQUARED_RELU, 0, INFINITY, false});
  add_e4m3("tanh gelu", {few, 144, 592, MIMO_ACTIVATION_GELU_TANH, 0, INFINITY, true});
  add_e4m3("swiglu", {edges, 256, 384, MIMO_ACTIVATION_SWIGLU, 0, INFINITY, true});
  add_e4m3("swiglu alone", {edges, 256, 384, MIMO_ACTIVATION_SWIGLU, 0, INFINITY, false});
  add_e4m3("swiglu blocks of 32 alone", {few, 128, 224, MIMO_ACTIVATION_SWIGLU, 32, INFINITY, false});
  add_e4m3("squared_relu edges alone", {edges, 336, 400, MIMO_ACTIVATION_SQUARED_RELU, 0, INFINITY, false});
  add_e4m3("swiglu 144", {few, 272, 144, MIMO_ACTIVATION_SWIGLU, 0, 1.0f, false});
  add_e4m3("swiglu blocks of 32", {few, 128, 224, MIMO_ACTIVATION_SWIGLU, 32, INFINITY, true});
  add_e4m3("no rows", {{0, 0, 0}, 64, 64, MIMO_ACTIVATION_SWIGLU, 0, INFINITY, true});
  cases.push_back({"grouped_bias", [](Run& run) { bias(run, {40, 0, 131, 1}, 72, true, false); }});
  cases.push_back({"grouped_bias odd", [](Run& run) { bias(run, {0, 300, 0}, 33, false, true); }});
  cases.push_back({"grouped_bias of one group", [](Run& run) { bias(run, {}, 64, true, true); }});
  if (!large) return;
  add_e4m3("large", {{2048, 100, 0, 4096, 1500, 777, 3000, 640}, 2688, 1856, MIMO_ACTIVATION_SQUARED_RELU, 0, INFINITY, false});
  const std::vector<int32_t> uneven{2048, 100, 0, 4096, 1500, 777, 3000, 640};
  add("large squared_relu", {uneven, 2688, 1856, MIMO_ACTIVATION_SQUARED_RELU, 0, INFINITY, false});
  add("large swiglu", {uneven, 2048, 768, MIMO_ACTIVATION_SWIGLU, 32, INFINITY, true});
  add("large swiglu halves", {uneven, 2048, 768, MIMO_ACTIVATION_SWIGLU, 0, 7.0f, false});
}

}  // namespace check
