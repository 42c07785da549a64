// Copies, sums, random numbers, the optimizer.
#include "cases.h"

namespace check {
namespace {

void axpby(Run& run, int64_t rows, int64_t width, int64_t x_stride, int64_t y_stride, float alpha, float beta,
           bool f32_y, int64_t live) {
  mimo_axpby_args args{};
  args.x = run.tensor(rows * x_stride);
  args.y_dtype = f32_y ? static_cast<int32_t>(MIMO_DTYPE_F32) : run.dtype();
  const std::vector<float> y = run.normal(rows * y_stride);
  args.y = f32_y ? run.upload(y) : run.tensor(y);
  args.row_count = live < rows ? run.upload(std::vector<int32_t>{static_cast<int32_t>(live)}) : nullptr;
  args.rows = rows, args.width = width, args.x_stride = x_stride, args.y_stride = y_stride;
  args.alpha = alpha, args.beta = beta;
  args.x_dtype = run.dtype();
  run.call("mimo_axpby", args);
  run.compare("y", args.y, rows * y_stride, args.y_dtype);
}

void elementwise(Run& run, int64_t elements) {
  mimo_add_args add{};
  add.a = run.tensor(elements), add.b = run.tensor(elements), add.y = run.output(elements);
  add.elements = elements, add.dtype = run.dtype();
  run.call("mimo_add", add);
  run.compare("add", add.y, elements);

  mimo_fill_args fill{};
  for (const int32_t dtype : {run.dtype(), static_cast<int32_t>(MIMO_DTYPE_I32), static_cast<int32_t>(MIMO_DTYPE_U8),
                              static_cast<int32_t>(MIMO_DTYPE_F64)}) {
    fill.y = run.output(elements, dtype);
    fill.elements = elements, fill.value = 3, fill.dtype = dtype;
    run.call("mimo_fill", fill);
    run.compare("fill", fill.y, elements, dtype, true);
  }

  mimo_scale_args scale{};
  scale.x = run.floats(elements);
  scale.factor = run.upload(std::vector<float>{0.37f});
  scale.elements = elements;
  run.call("mimo_scale", scale);
  run.compare("scale", scale.x, elements, MIMO_DTYPE_F32);

  mimo_find_nonfinite_args find{};
  find.x = add.a;
  find.flag = run.upload(std::vector<int32_t>{0});
  find.elements = elements, find.dtype = run.dtype();
  run.call("mimo_find_nonfinite", find);
  run.compare("all finite", find.flag, 1, MIMO_DTYPE_I32, true);
  std::vector<float> values = run.normal(elements);
  values[static_cast<size_t>(elements) - 1] = INFINITY;
  find.x = run.tensor(values);
  run.call("mimo_find_nonfinite", find);
  run.compare("infinity found", find.flag, 1, MIMO_DTYPE_I32, true);
}

void sums(Run& run, int64_t elements) {
  std::vector<float> values = run.normal(elements);
  for (size_t i = 0; i < values.size(); i += 7) values[i] = 0;
  float* x = run.upload(values);
  double* total = run.upload(std::vector<double>{1.5, 2.5, 3.5, 4.5});
  mimo_masked_sum_args masked{};
  masked.x = x;
  masked.mask = run.upload(run.uniform(elements, 0, 1));
  masked.sum = total, masked.count = total + 1, masked.elements = elements;
  run.call("mimo_masked_sum", masked);
  masked.mask = nullptr;
  run.call("mimo_masked_sum", masked);
  mimo_sum_of_squares_args squares{};
  squares.x = run.tensor(values);
  squares.sum = total + 2, squares.elements = elements, squares.dtype = run.dtype();
  run.call("mimo_sum_of_squares", squares);
  mimo_count_zeros_args zeros{};
  zeros.x = x, zeros.count = total + 3, zeros.elements = elements;
  run.call("mimo_count_zeros", zeros);
  run.compare("sums", total, 4, MIMO_DTYPE_F64);
  mimo_checksum_args words{};
  words.x = reinterpret_cast<const uint32_t*>(x);
  int32_t* checksum = run.upload(std::vector<int32_t>{1, 2});
  words.sum = reinterpret_cast<uint64_t*>(checksum), words.elements = elements;
  run.call("mimo_checksum", words);
  run.compare("checksum", checksum, 2, MIMO_DTYPE_I32, true);
}

void random_numbers(Run& run, bool normal, int64_t rows, int64_t width, int64_t full_width) {
  mimo_philox_fill_args fill{};
  fill.y = run.output(rows * width);
  fill.rows = rows, fill.width = width, fill.full_width = full_width;
  fill.first_row = 3, fill.first_column = full_width - width;
  fill.seed = 0x123456789ABCDEF;
  fill.a = normal ? 0.1 : -0.5, fill.b = normal ? 0.3 : 0.5;
  fill.distribution = normal ? MIMO_DISTRIBUTION_NORMAL : MIMO_DISTRIBUTION_UNIFORM;
  fill.dtype = run.dtype();
  run.call("mimo_philox_fill", fill);
  run.compare("y", fill.y, rows * width);
  mimo_dropout_args dropout{};
  dropout.x = run.tensor(rows * width);
  dropout.y = run.output(rows * width);
  dropout.rows = rows, dropout.width = width, dropout.full_width = full_width;
  dropout.first_row = 5, dropout.first_column = full_width - width;
  dropout.seed = 99, dropout.probability = 0.3f, dropout.dtype = run.dtype();
  run.call("mimo_dropout", dropout);
  run.compare("dropout", dropout.y, rows * width);
}

void optimizer(Run& run, int64_t elements, bool model, bool clip, float found) {
  float* scalars = run.upload(std::vector<float>{3e-4f, 0.1f, 0, 0, 0, found, 0});
  double* squares = run.upload(std::vector<double>{17.25});
  mimo_clip_factor_args factor{};
  factor.sum_of_squares = squares;
  factor.norm = scalars + 6, factor.clip_factor = scalars + 2, factor.found_inf = scalars + 5, factor.max_norm = 1;
  run.call("mimo_clip_factor", factor);
  int32_t* step = run.upload(std::vector<int32_t>{11});
  mimo_adam_advance_args advance{};
  advance.step = step;
  advance.bias_correction1 = scalars + 3, advance.bias_correction2 = scalars + 4, advance.found_inf = scalars + 5;
  advance.beta1 = 0.9f, advance.beta2 = 0.95f;
  if (found == 0) run.call("mimo_adam_advance", advance);
  mimo_adamw_args args{};
  args.master = run.floats(elements, 0.1);
  args.model = model ? run.output(elements) : nullptr;
  if (found != 0 && model) args.model = run.tensor(elements);
  args.gradient = run.floats(elements);
  args.exp_avg = run.floats(elements, 0.1);
  args.exp_avg_sq = run.upload(run.uniform(elements, 0, 0.5));
  args.learning_rate = scalars, args.weight_decay = scalars + 1;
  args.clip_factor = clip ? scalars + 2 : nullptr;
  args.bias_correction1 = scalars + 3, args.bias_correction2 = scalars + 4, args.found_inf = scalars + 5;
  args.elements = elements;
  args.beta1 = 0.9f, args.beta2 = 0.95f, args.epsilon = 1e-8f;
  args.weight_decay_multiplier = 1, args.learning_rate_multiplier = 0.5f;
  args.model_dtype = run.dtype();
  run.call("mimo_adamw", args);
  run.compare("scalars", scalars, 7, MIMO_DTYPE_F32);
  run.compare("step", step, 1, MIMO_DTYPE_I32, true);
  run.compare("master", args.master, elements, MIMO_DTYPE_F32);
  run.compare("exp_avg", args.exp_avg, elements, MIMO_DTYPE_F32);
  run.compare("exp_avg_sq", args.exp_avg_sq, elements, MIMO_DTYPE_F32);
  if (model) run.compare("model", args.model, elements);
}

void muon(Run& run, int64_t matrices, int64_t size, bool model, float found) {
  const int64_t elements = matrices * size;
  float* scalars = run.upload(std::vector<float>{0.02f, 0.1f, 0.5f, found});
  mimo_muon_momentum_args momentum{};
  momentum.momentum = run.floats(elements, 0.1);
  momentum.gradient = run.floats(elements);
  momentum.clip_factor = model ? scalars + 2 : nullptr, momentum.found_inf = scalars + 3;
  momentum.elements = elements, momentum.beta = 0.9f, momentum.nesterov = model ? 1 : 0;
  run.call("mimo_muon_momentum", momentum);
  run.compare("momentum", momentum.momentum, elements, MIMO_DTYPE_F32);
  run.compare("direction", momentum.gradient, elements, MIMO_DTYPE_F32);
  mimo_muon_normalize_args normalize{};
  normalize.x = momentum.gradient;
  normalize.y = run.output(elements);
  normalize.matrices = matrices, normalize.elements = size, normalize.epsilon = 1e-15f, normalize.dtype = run.dtype();
  run.call("mimo_muon_normalize", normalize);
  run.compare("y", normalize.y, elements);
  mimo_muon_update_args update{};
  update.master = run.floats(elements, 0.1);
  update.model = model ? (found != 0 ? run.tensor(elements) : run.output(elements)) : nullptr;
  update.update = momentum.gradient;
  update.learning_rate = scalars, update.weight_decay = scalars + 1, update.found_inf = scalars + 3;
  update.elements = elements, update.weight_decay_multiplier = 1, update.learning_rate_multiplier = 0.5f;
  update.model_dtype = run.dtype();
  run.call("mimo_muon_update", update);
  run.compare("master", update.master, elements, MIMO_DTYPE_F32);
  if (model) run.compare("model", update.model, elements);
}

}  // namespace

void add_elementwise(Cases& cases, bool) {
  cases.push_back({"axpby copy", [](Run& run) { axpby(run, 9, 48, 48, 48, 1, 0, false, 9); }});
  cases.push_back({"axpby accumulate in f32", [](Run& run) { axpby(run, 9, 48, 56, 48, 0.5f, 1, true, 9); }});
  cases.push_back({"axpby live rows", [](Run& run) { axpby(run, 40, 24, 24, 32, 2, 0.5f, false, 17); }});
  cases.push_back({"axpby odd", [](Run& run) { axpby(run, 11, 13, 15, 14, 1, 1, false, 11); }});
  cases.push_back({"axpby scale", [](Run& run) { axpby(run, 3, 500, 500, 500, 0, 0.25f, true, 3); }});
  cases.push_back({"elementwise", [](Run& run) { elementwise(run, 5000); }});
  cases.push_back({"elementwise odd", [](Run& run) { elementwise(run, 1237); }});
  cases.push_back({"sums", [](Run& run) { sums(run, 70000); }});
  cases.push_back({"sums odd", [](Run& run) { sums(run, 4099); }});
  cases.push_back({"philox normal", [](Run& run) { random_numbers(run, true, 7, 40, 64); }});
  cases.push_back({"philox uniform", [](Run& run) { random_numbers(run, false, 11, 13, 13); }});
  cases.push_back({"philox uniform window", [](Run& run) { random_numbers(run, false, 11, 13, 21); }});
  cases.push_back({"adamw", [](Run& run) { optimizer(run, 4096, true, true, 0); }});
  cases.push_back({"adamw odd, no model", [](Run& run) { optimizer(run, 333, false, false, 0); }});
  cases.push_back({"adamw found_inf", [](Run& run) { optimizer(run, 64, true, true, 1); }});
  cases.push_back({"muon", [](Run& run) { muon(run, 3, 70000, true, 0); }});
  cases.push_back({"muon odd, no model", [](Run& run) { muon(run, 5, 333, false, 0); }});
  cases.push_back({"muon found_inf", [](Run& run) { muon(run, 1, 64, true, 1); }});
}

}  // namespace check
