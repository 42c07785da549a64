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
  args.kind = m.kind, args.recipe = MIMO_MLP_RECIPE_PLAIN, args.dtype = dtype;
}

void mlp(Run& run, const Mlp& m) {
  const std::vector<int32_t> offsets = cumulative(m.counts);
  const int64_t live = offsets.back(), rows = live + spare, groups = static_cast<int64_t>(m.counts.size());
  const int64_t z_width = gated(m.kind) ? 2 * m.width : m.width;
  const auto matrix = [&](int64_t outputs, int64_t inputs) {
    return run.tensor(groups * outputs * inputs, 1 / std::sqrt(static_cast<double>(inputs)));
  };
  const auto kept = [&](int64_t width) {  // stays where no row of a group is
    return run.tensor(std::vector<float>(static_cast<size_t>(rows * width), 7.0f));
  };
  mimo_grouped_mlp_forward_args f{};
  describe(m, run.dtype(), rows, f);
  f.x = run.tensor(poisoned(run.normal(rows * m.hidden), m.hidden));
  f.w1 = matrix(z_width, m.hidden);
  f.w2 = matrix(m.hidden, m.width);
  f.b1 = m.biases ? run.tensor(groups * z_width, 0.5) : nullptr;
  f.b2 = m.biases ? run.tensor(groups * m.hidden, 0.5) : nullptr;
  const std::vector<float> probability = poisoned(run.uniform(rows, 0, 1), 1);
  f.row_probability = run.upload(probability);
  f.offsets = run.upload(offsets);
  f.z = kept(z_width);
  f.y = kept(m.hidden);
  run.call("mimo_grouped_mlp_forward", f);
  run.compare("z", f.z, rows * z_width);
  run.compare("y", f.y, rows * m.hidden);
  const void* z = run.shared("z", f.z, rows * z_width);
  f.z = nullptr;
  f.y = kept(m.hidden);
  run.call("mimo_grouped_mlp_forward", f);
  run.compare("y without z", f.y, rows * m.hidden);

  mimo_grouped_mlp_backward_args b{};
  describe(m, run.dtype(), rows, b);
  b.dy = run.tensor(poisoned(run.normal(rows * m.hidden), m.hidden));
  b.z = z, b.w1 = f.w1, b.w2 = f.w2, b.b2 = f.b2;
  b.row_probability = f.row_probability, b.offsets = f.offsets;
  b.dx = kept(m.hidden);
  b.dz = kept(z_width);
  b.hs = kept(m.width);
  b.drow_probability = run.upload(std::vector<float>(static_cast<size_t>(rows), 7.0f));
  b.db1 = m.biases ? run.floats(groups * z_width) : nullptr;
  b.db2 = m.biases ? run.floats(groups * m.hidden) : nullptr;
  run.call("mimo_grouped_mlp_backward", b);
  run.compare("dx", b.dx, rows * m.hidden);
  run.compare("dz", b.dz, rows * z_width);
  run.compare("hs", b.hs, rows * m.width);
  run.compare("dp", b.drow_probability, rows, MIMO_DTYPE_F32);
  if (!m.biases) return;
  run.compare("db1", b.db1, groups * z_width, MIMO_DTYPE_F32);
  run.compare("db2", b.db2, groups * m.hidden, MIMO_DTYPE_F32);
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
  cases.push_back({"grouped_bias", [](Run& run) { bias(run, {40, 0, 131, 1}, 72, true, false); }});
  cases.push_back({"grouped_bias odd", [](Run& run) { bias(run, {0, 300, 0}, 33, false, true); }});
  cases.push_back({"grouped_bias of one group", [](Run& run) { bias(run, {}, 64, true, true); }});
  if (!large) return;
  const std::vector<int32_t> uneven{2048, 100, 0, 4096, 1500, 777, 3000, 640};
  add("large squared_relu", {uneven, 2688, 1856, MIMO_ACTIVATION_SQUARED_RELU, 0, INFINITY, false});
  add("large swiglu", {uneven, 2048, 768, MIMO_ACTIVATION_SWIGLU, 32, INFINITY, true});
  add("large swiglu halves", {uneven, 2048, 768, MIMO_ACTIVATION_SWIGLU, 0, 7.0f, false});
}

}  // namespace check
