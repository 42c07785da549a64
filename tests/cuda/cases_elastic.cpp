// Masks of elastic models, and the divergence of a student from a teacher.
#include "cases.h"

namespace check {
namespace {

void mask_columns(Run& run, int64_t rows, int64_t width, int64_t stride, int64_t live, bool ringed, bool accumulate) {
  const std::vector<float> values{0.9f, 0.35f, 0.0f};
  std::vector<int32_t> rings;
  for (int64_t c = 0; c < width; ++c) rings.push_back(static_cast<int32_t>(c * 7 % 4) - 1);
  mimo_mask_columns_forward_args f{};
  f.x = run.tensor(rows * stride);
  f.rings = ringed ? run.upload(rings) : nullptr;
  f.values = run.upload(values);
  f.y = run.tensor(rows * width);
  f.row_count = live < rows ? run.upload(std::vector<int32_t>{static_cast<int32_t>(live)}) : nullptr;
  f.rows = rows, f.width = width, f.x_stride = stride, f.y_stride = width;
  f.dtype = run.dtype();
  run.call("mimo_mask_columns_forward", f);
  run.compare("y", f.y, rows * width);

  mimo_mask_columns_backward_args b{};
  b.dy = run.tensor(rows * width);
  b.x = f.x, b.rings = f.rings, b.values = f.values, b.row_count = f.row_count;
  b.dx = run.tensor(rows * stride);
  b.dvalues = run.floats(3);
  b.rows = rows, b.width = width, b.ring_count = 3;
  b.dy_stride = width, b.x_stride = stride, b.dx_stride = stride;
  b.accumulate = accumulate;
  b.x_dtype = b.gradient_dtype = run.dtype();
  run.call("mimo_mask_columns_backward", b);
  run.compare("dx", b.dx, rows * stride);
  run.compare("dvalues", b.dvalues, 3, MIMO_DTYPE_F32);
}

/// A weight's gradient: fp32 whatever the weight's type.
void masked_weight(Run& run, int64_t elements) {
  std::vector<int32_t> rings;
  for (int64_t c = 0; c < elements; ++c) rings.push_back(static_cast<int32_t>(c / 4 % 3) - 1);
  mimo_mask_columns_backward_args b{};
  b.dy = run.floats(elements);
  b.x = run.tensor(elements);
  b.rings = run.upload(rings);
  b.values = run.upload(std::vector<float>{0.7f, 0.2f});
  b.dx = run.floats(elements);
  b.dvalues = run.floats(2);
  b.rows = 1, b.width = elements, b.ring_count = 2;
  b.dy_stride = b.x_stride = b.dx_stride = elements;
  b.accumulate = 1;
  b.x_dtype = run.dtype();
  b.gradient_dtype = MIMO_DTYPE_F32;
  run.call("mimo_mask_columns_backward", b);
  run.compare("dx", b.dx, elements, MIMO_DTYPE_F32);
  run.compare("dvalues", b.dvalues, 2, MIMO_DTYPE_F32);
}

/// `blocked`: the last experts are left out; their logits are so large that nothing else shows beside them.
void mask_scores(Run& run, int64_t tokens, int64_t experts, bool sigmoid, bool blocked) {
  std::vector<int32_t> rings;
  for (int64_t e = 0; e < experts; ++e) rings.push_back(static_cast<int32_t>(3 * e / experts));
  mimo_mask_scores_forward_args f{};
  f.logits = run.floats(tokens * experts, 3);
  f.rings = run.upload(rings);
  f.values = run.upload(std::vector<float>{1.0f, 0.4f, blocked ? 0.0f : 0.1f});
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
  b.logits = f.logits, b.rings = f.rings, b.values = f.values;
  b.dlogits = run.floats(tokens * experts);
  b.dvalues = run.floats(3);
  b.tokens = tokens, b.experts = experts, b.ring_count = 3;
  b.sigmoid = sigmoid;
  run.call("mimo_mask_scores_backward", b);
  run.compare("dlogits", b.dlogits, tokens * experts, MIMO_DTYPE_F32);
  run.compare("dvalues", b.dvalues, 3, MIMO_DTYPE_F32);
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

}  // namespace

void add_elastic(Cases& cases, bool) {
  cases.push_back({"mask columns", [](Run& run) { mask_columns(run, 300, 64, 64, 300, true, false); }});
  cases.push_back({"mask columns odd, live rows", [](Run& run) { mask_columns(run, 33, 21, 29, 17, true, false); }});
  cases.push_back({"mask columns of one factor", [](Run& run) { mask_columns(run, 40, 72, 80, 40, false, false); }});
  cases.push_back({"mask columns added", [](Run& run) { mask_columns(run, 12, 48, 48, 12, true, true); }});
  cases.push_back({"masked weight", [](Run& run) { masked_weight(run, 4 * 37); }});
  cases.push_back({"mask scores sigmoid", [](Run& run) { mask_scores(run, 300, 24, true, false); }});
  cases.push_back({"mask scores sigmoid, blocked", [](Run& run) { mask_scores(run, 40, 12, true, true); }});
  cases.push_back({"mask scores logits, blocked", [](Run& run) { mask_scores(run, 40, 12, false, true); }});
  cases.push_back({"mask scores logits", [](Run& run) { mask_scores(run, 65, 9, false, false); }});
  cases.push_back({"kl divergence", [](Run& run) { divergence(run, 40, 512, 512); }});
  cases.push_back({"kl divergence odd, padded", [](Run& run) { divergence(run, 7, 333, 301); }});
}

}  // namespace check
