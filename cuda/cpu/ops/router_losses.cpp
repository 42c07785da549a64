// Balancing loss, z-loss and expert-bias update of the router (docs/spec/language-model.md §4.3, §4.4): E values a
// sequence.
#include "router.h"

namespace mimo::MIMO_ISA {

void router_balancing_loss(mimo_stream&, const mimo_router_balancing_loss_args& args) {
  MIMO_REQUIRE(args.dnormalised == nullptr || args.sequences == 1 || args.dnormalised_rows == args.sequences,
               "router_balancing_loss");
  const int64_t experts = args.experts;
  double loss = 0;
  for (int64_t q = 0; q < args.sequences; ++q) {
    const double tokens = static_cast<double>(args.sequence_tokens[q]) * static_cast<double>(args.sequence_shards);
    if (tokens == 0) continue;
    const double weight = args.coefficient * static_cast<double>(experts) /
                          (static_cast<double>(args.topk) * static_cast<double>(args.sequences) * tokens * tokens);
    const float* counts = args.sequence_counts + q * experts;
    const float* sums = args.sequence_score_sums + q * experts;
    for (int64_t e = 0; e < experts; ++e) loss += weight * static_cast<double>(counts[e]) * static_cast<double>(sums[e]);
    if (args.dnormalised == nullptr) continue;
    const int64_t first = args.sequences == 1 ? 0 : q, last = args.sequences == 1 ? args.dnormalised_rows : q + 1;
    for (int64_t row = first; row < last; ++row) {
      float* to = args.dnormalised + row * experts;
      for (int64_t e = 0; e < experts; ++e) {
        to[e] += static_cast<float>(args.gradient_scale * weight * static_cast<double>(counts[e]));
      }
    }
  }
  if (args.loss) *args.loss += static_cast<float>(loss);
}

void router_z_loss(mimo_stream& stream, const mimo_router_z_loss_args& args) {
  const int64_t partials = (args.tokens + rows_per_partial - 1) / rows_per_partial;
  Workspace workspace(&stream, partials * static_cast<int64_t>(sizeof(double)));
  double* partial = workspace.as<double>();
  parallel_range(stream.device->threads, args.tokens, rows_per_partial, [&](int64_t begin, int64_t end) {
    double total = 0;
    for (int64_t t = begin; t < end; ++t) {
      if (args.padding_mask && args.padding_mask[t]) continue;
      const float lse = logsumexp(args.logits + t * args.experts, args.experts);
      total += static_cast<double>(lse) * static_cast<double>(lse);
    }
    partial[begin / rows_per_partial] = total;
  });
  double total = 0;
  for (int64_t p = 0; p < partials; ++p) total += partial[p];
  *args.z_loss += static_cast<float>(total);
}

void router_bias_update(mimo_stream&, const mimo_router_bias_update_args& args) {
  int64_t total = 0;
  for (int64_t e = 0; e < args.experts; ++e) total += args.counts[e];
  for (int64_t e = 0; e < args.experts; ++e) {
    // sign(mean - count) in integers, hence exact.
    const int64_t difference = total - args.counts[e] * args.experts;
    if (difference != 0) args.bias[e] += difference > 0 ? args.rate : -args.rate;
    args.counts[e] = 0;
  }
}

}  // namespace mimo::MIMO_ISA
