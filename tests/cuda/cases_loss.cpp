// Embedding and cross-entropy.
#include "cases.h"

namespace check {
namespace {

void embedding(Run& run, int64_t tokens, int64_t width, int64_t rows, bool few, float scale = 1,
               int32_t padding = -1) {
  std::vector<int32_t> ids = run.integers(tokens, 90, 110 + rows);
  if (few) {
    for (size_t i = 0; i < ids.size(); ++i) {
      if (i % 5 != 0) ids[i] = 105;
    }
  }
  mimo_embedding_forward_args f{};
  f.table = run.tensor(rows * width);
  f.ids = run.upload(ids);
  f.y = run.output(tokens * width);
  f.tokens = tokens, f.width = width, f.vocabulary_start = 100, f.vocabulary_rows = rows;
  f.scale = scale, f.dtype = run.dtype();
  run.call("mimo_embedding_forward", f);
  run.compare("y", f.y, tokens * width);
  mimo_embedding_backward_args b{};
  b.dy = run.tensor(tokens * width);
  b.ids = f.ids;
  b.dtable = run.floats(rows * width);
  b.tokens = tokens, b.width = width, b.vocabulary_start = 100, b.vocabulary_rows = rows;
  b.scale = scale, b.padding_id = padding, b.dtype = run.dtype();
  run.call("mimo_embedding_backward", b);
  run.compare("dtable", b.dtable, rows * width, MIMO_DTYPE_F32);
}

void cross_entropy(Run& run, int64_t tokens, int64_t rows, int64_t live, float z_loss, bool round) {
  const int64_t shards = 2, start = 50;
  const void* logits = run.tensor(tokens * rows, 3);
  std::vector<int32_t> labels = run.integers(tokens, start - 5, start + live);
  labels[0] = -100;
  const int32_t* device_labels = run.upload(labels);
  float* maximum = run.floats(shards * tokens);
  float* sum_exp = run.upload(run.uniform(shards * tokens, 1, 3));
  float* target = run.floats(shards * tokens);
  int32_t* found = run.upload(std::vector<int32_t>(static_cast<size_t>(shards * tokens), 0));
  mimo_cross_entropy_statistics_args s{};
  s.logits = logits, s.labels = device_labels;
  s.maximum = maximum, s.sum_exp = sum_exp, s.target_logit = target, s.found = found;
  s.tokens = tokens, s.vocabulary_start = start, s.vocabulary_rows = rows, s.vocabulary_live = live;
  s.dtype = run.dtype();
  run.call("mimo_cross_entropy_statistics", s);
  run.compare("maximum", maximum, tokens, MIMO_DTYPE_F32);
  run.compare("sum_exp", sum_exp, tokens, MIMO_DTYPE_F32);
  run.compare("target", target, tokens, MIMO_DTYPE_F32);
  run.compare("found", found, tokens, MIMO_DTYPE_I32, true);
  mimo_cross_entropy_loss_args l{};
  l.maximum = maximum, l.sum_exp = sum_exp, l.target_logit = target, l.found = found;
  l.loss = static_cast<float*>(run.output(tokens, MIMO_DTYPE_F32));
  l.lse = static_cast<float*>(run.output(tokens, MIMO_DTYPE_F32));
  l.tokens = tokens, l.shards = shards, l.z_loss = z_loss;
  run.call("mimo_cross_entropy_loss", l);
  run.compare("loss", l.loss, tokens, MIMO_DTYPE_F32);
  run.compare("lse", l.lse, tokens, MIMO_DTYPE_F32);
  std::vector<float> dloss = run.uniform(tokens, 0, 1);
  dloss[1] = 0;
  mimo_cross_entropy_backward_args b{};
  b.logits = logits, b.labels = device_labels, b.lse = l.lse;
  b.dloss = run.upload(dloss);
  b.dlogits = run.output(tokens * rows);
  b.tokens = tokens, b.vocabulary_start = start, b.vocabulary_rows = rows, b.vocabulary_live = live;
  b.z_loss = z_loss, b.round_bf16 = 0, b.dtype = run.dtype();
  run.call("mimo_cross_entropy_backward", b);
  run.compare("dlogits", b.dlogits, tokens * rows);
  if (!round) return;
  b.round_bf16 = 1;
  b.dlogits = const_cast<void*>(logits);
  run.call("mimo_cross_entropy_backward", b);
  // Rounding may fall either way: compared as bf16 is.
  if (run.precision == MIMO_DTYPE_BF16) run.compare("dlogits rounded in place", b.dlogits, tokens * rows);
}

}  // namespace

void add_loss(Cases& cases, bool large) {
  cases.push_back({"embedding", [](Run& run) { embedding(run, 200, 72, 40, false); }});
  cases.push_back({"embedding, most tokens alike", [](Run& run) { embedding(run, 300, 40, 16, true); }});
  cases.push_back({"embedding scaled, padding", [](Run& run) { embedding(run, 200, 72, 40, true, 33.5f, 105); }});
  cases.push_back({"embedding odd", [](Run& run) { embedding(run, 65, 13, 9, true); }});
  cases.push_back({"cross_entropy", [](Run& run) { cross_entropy(run, 21, 512, 500, 0, true); }});
  cases.push_back({"cross_entropy z_loss, odd", [](Run& run) { cross_entropy(run, 9, 67, 61, 1e-3f, true); }});
  if (large) {
    cases.push_back({"embedding large", [](Run& run) { embedding(run, 8192, 2688, 1000, true); }});
    cases.push_back({"cross_entropy large", [](Run& run) { cross_entropy(run, 512, 65536, 65500, 1e-4f, false); }});
  }
}

}  // namespace check
