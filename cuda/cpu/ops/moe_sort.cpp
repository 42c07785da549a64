// MoE sort: stable counting sort of the routed slots by expert (docs/spec/language-model.md §4.5).
#include "kernel.h"

namespace mimo::MIMO_ISA {
namespace {

constexpr int64_t slots_per_run = 8192;

}  // namespace

void moe_sort(mimo_stream& stream, const mimo_moe_sort_args& args) {
  const int64_t slots = args.tokens * args.topk, experts = args.experts;
  MIMO_REQUIRE(slots <= INT32_MAX, "moe_sort");
  const int64_t runs = (slots + slots_per_run - 1) / slots_per_run;
  // next[run][e]: first the run's number of slots of expert e, then the row of its next slot.
  Workspace workspace(&stream, runs * experts * static_cast<int64_t>(sizeof(int32_t)));
  int32_t* next = workspace.as<int32_t>();
  const auto kept = [&](int32_t expert) { return expert >= 0 && expert < experts; };

  parallel_range(stream.device->threads, slots, slots_per_run, [&](int64_t begin, int64_t end) {
    int32_t* count = next + begin / slots_per_run * experts;
    std::memset(count, 0, static_cast<size_t>(experts) * sizeof(int32_t));
    for (int64_t slot = begin; slot < end; ++slot) {
      const int32_t expert = args.expert_index[slot];
      if (kept(expert)) ++count[expert];
    }
  });
  int32_t row = 0;
  for (int64_t e = 0; e < experts; ++e) {
    args.offsets[e] = row;
    for (int64_t run = 0; run < runs; ++run) {
      const int32_t count = next[run * experts + e];
      next[run * experts + e] = row;
      row += count;
    }
  }
  args.offsets[experts] = row;
  parallel_range(stream.device->threads, slots, slots_per_run, [&](int64_t begin, int64_t end) {
    int32_t* to = next + begin / slots_per_run * experts;
    for (int64_t slot = begin; slot < end; ++slot) {
      const int32_t expert = args.expert_index[slot];
      args.row_of_slot[slot] = kept(expert) ? to[expert] : -1;
      if (kept(expert)) args.slot_of_row[to[expert]++] = static_cast<int32_t>(slot);
    }
  });
}

}  // namespace mimo::MIMO_ISA
