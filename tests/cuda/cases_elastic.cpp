// Masks of elastic models, and the divergence of a student from a teacher.
#include "cases.h"

namespace check {
namespace {

void mask_factors(Run& run, int64_t batch, int64_t values, int64_t factors) {
  std::vector<int32_t> sources, members, starts(static_cast<size_t>(values + 1));
  for (int64_t i = 0; i < factors; ++i) sources.push_back(static_cast<int32_t>(i * 5 % (values + 1)) - 1);
  for (int64_t v = 0; v < values; ++v) {
    starts[static_cast<size_t>(v)] = static_cast<int32_t>(members.size());
    for (int64_t i = 0; i < factors; ++i) {
      if (sources[static_cast<size_t>(i)] == v) members.push_back(static_cast<int32_t>(i));
    }
  }
  starts.back() = static_cast<int32_t>(members.size());
  mimo_mask_factors_forward_args f{};
  f.values = run.floats(batch * values);
  f.sources = run.upload(sources);
  f.factors = run.floats(batch * factors);
  f.batch = batch, f.value_count = values, f.factor_count = factors;
  run.call("mimo_mask_factors_forward", f);
  run.compare("factors", f.factors, batch * factors, MIMO_DTYPE_F32);
  mimo_mask_factors_backward_args b{};
  b.dfactors = f.factors;
  b.members = run.upload(members), b.starts = run.upload(starts);
  b.dvalues = run.floats(batch * values);
  b.batch = batch, b.value_count = values, b.factor_count = factors;
  run.call("mimo_mask_factors_backward", b);
  run.compare("dvalues", b.dvalues, batch * values, MIMO_DTYPE_F32);
}

/// A factor for every column, some of them 0 or 1.
const float* some_factors(Run& run, int64_t width) {
  std::vector<float> factors = run.uniform(width, 0, 1);
  for (int64_t c = 0; c < width; c += 3) factors[static_cast<size_t>(c)] = static_cast<float>(c % 2);
  return run.upload(factors);
}

enum class Masks { columns, scale, both };

const float* factors_of(Run& run, Masks masks, int64_t width) {
  return masks == Masks::scale ? nullptr : some_factors(run, width);
}
const float* scale_of(Run& run, Masks masks) {
  return masks == Masks::columns ? nullptr : run.upload(std::vector<float>{0.7f});
}

/// Gradients of the parts that there are.
template <class Args>
void add_mask_gradients(Run& run, Args& b, int64_t width) {
  b.dfactors = b.factors == nullptr ? nullptr : run.floats(width);
  b.dscale = b.scale == nullptr ? nullptr : run.floats(width);
}
template <class Args>
void compare_mask_gradients(Run& run, const Args& b, int64_t width) {
  if (b.dfactors != nullptr) run.compare("dfactors", b.dfactors, width, MIMO_DTYPE_F32);
  if (b.dscale != nullptr) run.compare("dscale", b.dscale, width, MIMO_DTYPE_F32);
}

void mask_columns(Run& run, int64_t rows, int64_t width, int64_t stride, int64_t live, Masks masks, bool addend,
                  bool accumulate) {
  mimo_mask_columns_forward_args f{};
  f.x = run.tensor(rows * stride);
  f.addend = addend ? run.tensor(rows * stride) : nullptr;
  f.factors = factors_of(run, masks, width), f.scale = scale_of(run, masks);
  f.y = run.tensor(rows * width);
  f.row_count = live < rows ? run.upload(std::vector<int32_t>{static_cast<int32_t>(live)}) : nullptr;
  f.rows = rows, f.width = width, f.x_stride = stride, f.addend_stride = stride, f.y_stride = width;
  f.dtype = run.dtype();
  run.call("mimo_mask_columns_forward", f);
  run.compare("y", f.y, rows * width);

  mimo_mask_columns_backward_args b{};
  b.dy = run.tensor(rows * width);
  b.x = f.x, b.factors = f.factors, b.scale = f.scale, b.row_count = f.row_count;
  b.dx = run.tensor(rows * stride);
  add_mask_gradients(run, b, width);
  b.rows = rows, b.width = width;
  b.dy_stride = width, b.x_stride = stride, b.dx_stride = stride;
  b.accumulate = accumulate;
  b.x_dtype = b.gradient_dtype = run.dtype();
  run.call("mimo_mask_columns_backward", b);
  run.compare("dx", b.dx, rows * stride);
  compare_mask_gradients(run, b, width);
}

/// A weight's gradient: fp32 whatever the weight's type.
void masked_weight(Run& run, int64_t elements) {
  mimo_mask_columns_backward_args b{};
  b.dy = run.floats(elements);
  b.x = run.tensor(elements);
  b.factors = some_factors(run, elements);
  b.dx = run.floats(elements);
  b.dfactors = run.floats(elements);
  b.rows = 1, b.width = elements;
  b.dy_stride = b.x_stride = b.dx_stride = elements;
  b.accumulate = 1;
  b.x_dtype = run.dtype();
  b.gradient_dtype = MIMO_DTYPE_F32;
  run.call("mimo_mask_columns_backward", b);
  run.compare("dx", b.dx, elements, MIMO_DTYPE_F32);
  run.compare("dfactors", b.dfactors, elements, MIMO_DTYPE_F32);
}

void masked_rms_norm(Run& run, int64_t rows, int64_t width, int64_t group, Masks masks, bool residual) {
  mimo_masked_rms_norm_forward_args f{};
  f.x = run.tensor(rows * width);
  f.weight = run.tensor(run.normal(width, 0.2, 1));
  f.factors = factors_of(run, masks, width), f.scale = scale_of(run, masks);
  f.y = run.output(rows * width);
  f.rstd = static_cast<float*>(run.output(rows * (width / group), MIMO_DTYPE_F32));
  f.rows = rows, f.width = width, f.group_size = group, f.x_stride = width, f.y_stride = width;
  f.epsilon = 1e-5f;
  f.dtype = f.weight_dtype = run.dtype();
  run.call("mimo_masked_rms_norm_forward", f);
  run.compare("y", f.y, rows * width);
  run.compare("rstd", f.rstd, rows * (width / group), MIMO_DTYPE_F32);

  mimo_masked_rms_norm_backward_args b{};
  b.dy = run.tensor(rows * width);
  b.x = f.x, b.weight = f.weight, b.factors = f.factors, b.scale = f.scale, b.rstd = f.rstd;
  b.dresidual = residual ? run.tensor(rows * width) : nullptr;
  b.dx = run.output(rows * width);
  b.dweight = run.floats(width);
  add_mask_gradients(run, b, width);
  b.rows = rows, b.width = width, b.group_size = group, b.dy_stride = width, b.x_stride = width, b.dx_stride = width;
  b.dtype = b.weight_dtype = run.dtype();
  run.call("mimo_masked_rms_norm_backward", b);
  run.compare("dx", b.dx, rows * width);
  run.compare("dweight", b.dweight, width, MIMO_DTYPE_F32);
  compare_mask_gradients(run, b, width);
}

/// The norm of residual + x: `of_x` masks x, and `masks` the sum that is normalised.
void masked_residual_norm(Run& run, int64_t rows, int64_t width, int64_t group, Masks of_x, Masks masks) {
  mimo_masked_rms_norm_forward_args f{};
  f.x = run.tensor(rows * width);
  f.residual = run.tensor(rows * width);
  f.x_factors = factors_of(run, of_x, width), f.x_scale = scale_of(run, of_x);
  f.weight = run.tensor(run.normal(width, 0.2, 1));
  f.factors = factors_of(run, masks, width), f.scale = scale_of(run, masks);
  f.sum = run.output(rows * width);
  f.y = run.output(rows * width);
  f.rstd = static_cast<float*>(run.output(rows * (width / group), MIMO_DTYPE_F32));
  f.rows = rows, f.width = width, f.group_size = group, f.x_stride = width, f.y_stride = width;
  f.epsilon = 1e-5f;
  f.dtype = f.weight_dtype = run.dtype();
  run.call("mimo_masked_rms_norm_forward", f);
  run.compare("sum", f.sum, rows * width);
  run.compare("y", f.y, rows * width);
  run.compare("rstd", f.rstd, rows * (width / group), MIMO_DTYPE_F32);
}

void masked_activation(Run& run, int32_t kind, int64_t rows, int64_t width, int64_t live, Masks masks,
                       int64_t interleave = 0) {
  const bool gated = kind == MIMO_ACTIVATION_SWIGLU || kind == MIMO_ACTIVATION_QUICK_GEGLU || kind == MIMO_ACTIVATION_GEGLU;
  const int64_t x_width = gated ? 2 * width : width;
  mimo_masked_activation_forward_args f{};
  f.x = run.tensor(rows * x_width, 2);
  f.factors = factors_of(run, masks, x_width), f.scale = scale_of(run, masks);
  f.row_probability = run.upload(run.uniform(rows, 0, 1));
  f.y = run.tensor(std::vector<float>(static_cast<size_t>(rows * width), 3.0f));
  f.row_count = live < rows ? run.upload(std::vector<int32_t>{static_cast<int32_t>(live)}) : nullptr;
  f.rows = rows, f.width = width, f.interleave = interleave, f.clamp = 1.5f, f.linear_offset = 0.5f;
  f.kind = kind, f.dtype = run.dtype();
  run.call("mimo_masked_activation_forward", f);
  run.compare("y", f.y, rows * width);

  mimo_masked_activation_backward_args b{};
  b.dy = run.tensor(rows * width);
  b.x = f.x, b.factors = f.factors, b.scale = f.scale, b.row_probability = f.row_probability;
  b.row_count = f.row_count;
  b.dx = run.tensor(std::vector<float>(static_cast<size_t>(rows * x_width), 3.0f));
  b.drow_probability = run.upload(std::vector<float>(static_cast<size_t>(rows), 2.0f));
  add_mask_gradients(run, b, x_width);
  b.rows = rows, b.width = width, b.interleave = interleave, b.clamp = 1.5f, b.linear_offset = 0.5f;
  b.kind = kind, b.dtype = run.dtype();
  run.call("mimo_masked_activation_backward", b);
  run.compare("dx", b.dx, rows * x_width);
  run.compare("drow_probability", b.drow_probability, rows, MIMO_DTYPE_F32);
  compare_mask_gradients(run, b, x_width);
}

/// `blocked`: the last experts are left out; their logits are so large that nothing else shows beside them.
void mask_scores(Run& run, int64_t tokens, int64_t experts, bool sigmoid, bool blocked) {
  std::vector<float> factors;
  for (int64_t e = 0; e < experts; ++e) factors.push_back(3 * e < experts ? 1.0f : 3 * e < 2 * experts ? 0.4f : blocked ? 0.0f : 0.1f);
  mimo_mask_scores_forward_args f{};
  f.logits = run.floats(tokens * experts, 3);
  f.factors = run.upload(factors);
  f.expert_bias = run.floats(experts);
  f.y = run.floats(tokens * experts);
  f.masked_bias = run.floats(experts);
  f.tokens = tokens, f.experts = experts;
  f.blocked_bias = -1e30f;
  f.sigmoid = sigmoid;
  run.call("mimo_mask_scores_forward", f);
  run.compare("y", f.y, tokens * experts, MIMO_DTYPE_F32, blocked && !sigmoid);
  run.compare("masked bias", f.masked_bias, experts, MIMO_DTYPE_F32);

  mimo_mask_scores_backward_args b{};
  b.dy = run.floats(tokens * experts);
  b.logits = f.logits, b.factors = f.factors;
  b.dlogits = run.floats(tokens * experts);
  b.dfactors = run.floats(experts);
  b.tokens = tokens, b.experts = experts;
  b.sigmoid = sigmoid;
  run.call("mimo_mask_scores_backward", b);
  run.compare("dlogits", b.dlogits, tokens * experts, MIMO_DTYPE_F32);
  run.compare("dfactors", b.dfactors, experts, MIMO_DTYPE_F32);
}

void divergence(Run& run, int64_t tokens, int64_t rows, int64_t live) {
  mimo_kl_statistics_args s{};
  s.student = run.tensor(tokens * rows, 3);
  s.teacher = run.tensor(tokens * rows, 3);
  float* const statistics = run.floats(5 * tokens);
  s.statistics = statistics;
  s.tokens = tokens, s.vocabulary_rows = rows, s.vocabulary_live = live;
  s.inverse_temperature = 0.8f;
  s.student_dtype = s.teacher_dtype = run.dtype();
  run.call("mimo_kl_statistics", s);

  mimo_kl_loss_args l{};
  l.statistics = statistics;
  l.loss = run.floats(tokens), l.student_lse = run.floats(tokens), l.teacher_lse = run.floats(tokens);
  l.tokens = tokens, l.shards = 1;
  run.call("mimo_kl_loss", l);
  run.compare("loss", l.loss, tokens, MIMO_DTYPE_F32);
  run.compare("student lse", l.student_lse, tokens, MIMO_DTYPE_F32);
  run.compare("teacher lse", l.teacher_lse, tokens, MIMO_DTYPE_F32);

  mimo_kl_backward_args b{};
  b.student = s.student, b.teacher = s.teacher;
  b.student_lse = l.student_lse, b.teacher_lse = l.teacher_lse;
  b.dloss = run.floats(tokens);
  b.dlogits = run.tensor(tokens * rows);
  b.tokens = tokens, b.vocabulary_rows = rows, b.vocabulary_live = live;
  b.inverse_temperature = s.inverse_temperature;
  b.student_dtype = b.teacher_dtype = run.dtype();
  run.call("mimo_kl_backward", b);
  run.compare("dlogits", b.dlogits, tokens * rows);
}

void hidden_loss(Run& run, int64_t tokens, int64_t width, bool cosine) {
  mimo_hidden_loss_forward_args f{};
  f.student = run.tensor(tokens * width, 3);
  f.teacher = run.tensor(tokens * width, 3);
  f.loss = run.floats(tokens);
  f.tokens = tokens, f.width = width;
  f.cosine = cosine;
  f.student_dtype = f.teacher_dtype = run.dtype();
  run.call("mimo_hidden_loss_forward", f);
  run.compare("loss", f.loss, tokens, MIMO_DTYPE_F32);

  mimo_hidden_loss_backward_args b{};
  b.student = f.student, b.teacher = f.teacher;
  b.dloss = run.floats(tokens);
  b.dstudent = run.tensor(tokens * width);
  b.tokens = tokens, b.width = width;
  b.factor = 0.7f;
  b.cosine = cosine;
  b.student_dtype = b.teacher_dtype = run.dtype();
  run.call("mimo_hidden_loss_backward", b);
  run.compare("dstudent", b.dstudent, tokens * width);
}

}  // namespace

void add_elastic(Cases& cases, bool large) {
  using enum Masks;
  const auto add = [&](const char* name, auto body) { cases.push_back({name, body}); };
  add("mask factors", [](Run& run) { mask_factors(run, 3, 11, 700); });
  add("mask columns", [](Run& run) { mask_columns(run, 300, 64, 64, 300, both, false, false); });
  add("mask columns odd, live rows", [](Run& run) { mask_columns(run, 33, 21, 29, 17, columns, false, false); });
  add("mask columns of one factor", [](Run& run) { mask_columns(run, 40, 72, 80, 40, scale, false, false); });
  add("mask columns added", [](Run& run) { mask_columns(run, 12, 48, 48, 12, columns, true, true); });
  add("mask columns added, odd", [](Run& run) { mask_columns(run, 200, 19, 23, 200, both, true, false); });
  add("masked rms norm", [](Run& run) { masked_rms_norm(run, 100, 96, 96, both, true); });
  add("masked rms norm of columns", [](Run& run) { masked_rms_norm(run, 33, 1024, 1024, columns, false); });
  add("masked rms norm odd", [](Run& run) { masked_rms_norm(run, 9, 37, 37, both, true); });
  add("masked rms norm grouped, scaled", [](Run& run) { masked_rms_norm(run, 70, 512, 128, scale, false); });
  add("masked rms norm of 2688", [](Run& run) { masked_rms_norm(run, 300, 2688, 2688, both, true); });
  add("masked rms norm of a sum", [](Run& run) { masked_residual_norm(run, 100, 96, 96, both, both); });
  add("masked rms norm of a sum of 2688", [](Run& run) { masked_residual_norm(run, 300, 2688, 2688, columns, both); });
  add("masked rms norm of a sum, odd", [](Run& run) { masked_residual_norm(run, 9, 37, 37, scale, columns); });
  add("masked rms norm of a sum, grouped", [](Run& run) { masked_residual_norm(run, 70, 512, 128, both, scale); });
  add("masked squared relu", [](Run& run) {
    masked_activation(run, MIMO_ACTIVATION_SQUARED_RELU, 150, 464, 150, both);
  });
  add("masked squared relu odd, live rows", [](Run& run) {
    masked_activation(run, MIMO_ACTIVATION_SQUARED_RELU, 130, 33, 71, columns);
  });
  add("masked gelu", [](Run& run) { masked_activation(run, MIMO_ACTIVATION_GELU_ERF, 40, 48, 40, scale); });
  add("masked swiglu", [](Run& run) { masked_activation(run, MIMO_ACTIVATION_SWIGLU, 70, 2064, 66, both); });
  add("masked quick geglu interleaved", [](Run& run) {
    masked_activation(run, MIMO_ACTIVATION_QUICK_GEGLU, 20, 64, 20, columns, 32);
  });
  add("masked geglu", [](Run& run) { masked_activation(run, MIMO_ACTIVATION_GEGLU, 20, 64, 20, both); });
  if (large) {
    add("mask columns large", [](Run& run) { mask_columns(run, 8192, 2688, 2688, 8192, both, true, false); });
    add("masked rms norm large", [](Run& run) { masked_rms_norm(run, 8192, 2688, 2688, both, true); });
    add("masked rms norm grouped, large", [](Run& run) { masked_rms_norm(run, 8192, 4096, 512, scale, false); });
    add("masked squared relu large", [](Run& run) {
      masked_activation(run, MIMO_ACTIVATION_SQUARED_RELU, 49152, 1856, 49152, columns);
    });
  }
  cases.push_back({"masked weight", [](Run& run) { masked_weight(run, 4 * 37); }});
  cases.push_back({"mask scores sigmoid", [](Run& run) { mask_scores(run, 300, 24, true, false); }});
  cases.push_back({"mask scores sigmoid, blocked", [](Run& run) { mask_scores(run, 40, 12, true, true); }});
  cases.push_back({"mask scores logits, blocked", [](Run& run) { mask_scores(run, 40, 12, false, true); }});
  cases.push_back({"mask scores logits", [](Run& run) { mask_scores(run, 65, 9, false, false); }});
  cases.push_back({"kl divergence", [](Run& run) { divergence(run, 40, 512, 512); }});
  cases.push_back({"kl divergence odd, padded", [](Run& run) { divergence(run, 7, 333, 301); }});
  cases.push_back({"hidden loss, cosine", [](Run& run) { hidden_loss(run, 33, 517, true); }});
  cases.push_back({"hidden loss, squares", [](Run& run) { hidden_loss(run, 7, 96, false); }});
}

}  // namespace check
