// Source and destination of each row range in the exchange between ranks that hold experts (docs/spec/language-model.md
// §4.5), computed from all members' expert offsets alone, so that every member gets the same plan. A single block:
// there are as many ranges as experts, not as rows.
#include "early.cuh"
#include "row_range.h"

namespace mimo::cuda {
namespace {

constexpr int threads = 512;

__global__ void __launch_bounds__(threads) plan_kernel(mimo_expert_exchange_plan_args args, int experts) {
  extern __shared__ int32_t shared[];
  int32_t* const total = shared;            // [experts] rows of all members
  int32_t* const start = shared + experts;  // [experts] first row of the expert among the rows of its owner
  previous_is_done();
  let_next_start();
  const int members = static_cast<int>(args.members), own = static_cast<int>(args.member);
  const int parts = static_cast<int>(args.expert_tensor), locals = static_cast<int>(args.local_experts);
  const int capacity = static_cast<int>(args.capacity), region = static_cast<int>(args.region_rows);
  const auto first_row = [&](int member, int expert) { return args.offsets[member * (experts + 1) + expert]; };
  const auto rows_of = [&](int member, int expert) { return first_row(member, expert + 1) - first_row(member, expert); };
  for (int expert = threadIdx.x; expert < experts; expert += threads) {
    int sum = 0;
    for (int member = 0; member < members; ++member) sum += rows_of(member, expert);
    total[expert] = sum;
  }
  __syncthreads();
  for (int group = threadIdx.x; group < members / parts; group += threads) {
    const bool here = group == own / parts;
    int row = 0;
    for (int local = 0; local < locals; ++local) {
      start[group * locals + local] = row;
      if (here) args.local_offsets[local] = min(row, capacity);
      row += total[group * locals + local];
    }
    if (!here) continue;
    args.local_offsets[locals] = min(row, capacity);
    if (args.overflow != nullptr && row > capacity && row > args.overflow[0]) {
      args.overflow[0] = row;
      args.overflow[1] = capacity;
    }
  }
  __syncthreads();
  /// First row of a source among the rows of the expert's owner, and how many rows fit.
  const auto place = [&](int source, int expert) {
    int row = start[expert];
    for (int member = 0; member < source; ++member) row += rows_of(member, expert);
    return make_int2(min(row, capacity), min(max(capacity - row, 0), rows_of(source, expert)));
  };
  for (int i = threadIdx.x; i < members * locals; i += threads) {
    const int member = i / locals, local = i % locals;
    const int theirs = member / parts * locals + local;
    const int2 sent = place(own, theirs);
    const int from = first_row(own, theirs);
    reinterpret_cast<RowRange*>(args.out_send)[i] = {from, sent.x, sent.y};
    reinterpret_cast<RowRange*>(args.back_receive)[i] = {member % parts * region + from, sent.x, sent.y};
    const int ours = own / parts * locals + local;
    const int2 come = place(member, ours);
    const int there = first_row(member, ours);
    reinterpret_cast<RowRange*>(args.out_receive)[i] = {come.x, there, come.y};
    reinterpret_cast<RowRange*>(args.back_send)[i] = {come.x, own % parts * region + there, come.y};
  }
}

}  // namespace

void expert_exchange_plan(mimo_stream& stream, const mimo_expert_exchange_plan_args& args) {
  const int64_t members = args.members, parts = args.expert_tensor;
  MIMO_REQUIRE(members > 0 && args.member >= 0 && args.member < members && parts > 0 && members % parts == 0,
               "expert_exchange_plan");
  MIMO_REQUIRE(args.capacity >= 0 && args.capacity <= INT32_MAX, "expert_exchange_plan");
  MIMO_REQUIRE(parts * args.region_rows <= INT32_MAX, "expert_exchange_plan");
  const int64_t experts = members / parts * args.local_experts;
  const int64_t shared_bytes = 2 * experts * static_cast<int64_t>(sizeof(int32_t));
  MIMO_REQUIRE(shared_bytes <= 48 * 1024, "expert_exchange_plan");
  launch_early(stream, plan_kernel, dim3(1), dim3(threads), shared_bytes, args, static_cast<int>(experts));
}

}  // namespace mimo::cuda
