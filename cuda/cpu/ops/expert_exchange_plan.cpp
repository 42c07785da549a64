// Source and destination of each row range in the exchange between ranks that hold experts (docs/spec/language-model.md
// §4.5), computed from all members' expert offsets alone, so that every member gets the same plan.
#include "kernel.h"
#include "row_range.h"

namespace mimo::MIMO_ISA {
namespace {

int32_t lower(int64_t a, int64_t b) { return static_cast<int32_t>(a < b ? a : b); }
int32_t higher(int64_t a, int64_t b) { return static_cast<int32_t>(a < b ? b : a); }

/// Appends ranges to an array.
struct Ranges {
  RowRange* at;
  explicit Ranges(int32_t* to) : at(reinterpret_cast<RowRange*>(to)) {}
  void add(int64_t here, int64_t there, int64_t rows) {
    *at++ = {static_cast<int32_t>(here), static_cast<int32_t>(there), static_cast<int32_t>(rows)};
  }
};

}  // namespace

void expert_exchange_plan(mimo_stream& stream, const mimo_expert_exchange_plan_args& args) {
  const int64_t members = args.members, locals = args.local_experts, parts = args.expert_tensor, own = args.member;
  MIMO_REQUIRE(members > 0 && own >= 0 && own < members && parts > 0 && members % parts == 0, "expert_exchange_plan");
  const int64_t experts = members / parts * locals;
  MIMO_REQUIRE(args.capacity >= 0 && args.capacity <= INT32_MAX, "expert_exchange_plan");
  MIMO_REQUIRE(parts * args.region_rows <= INT32_MAX, "expert_exchange_plan");
  const auto first_row = [&](int64_t member, int64_t expert) -> int64_t {
    return args.offsets[member * (experts + 1) + expert];
  };
  const auto rows_of = [&](int64_t member, int64_t expert) {
    return first_row(member, expert + 1) - first_row(member, expert);
  };
  // place[source][expert]: first row of a source among the rows of the expert's owner; then the number of rows that
  // fit.
  Workspace workspace(&stream, 2 * members * experts * static_cast<int64_t>(sizeof(int32_t)));
  int32_t* const place = workspace.as<int32_t>();
  int32_t* const fits = place + members * experts;
  for (int64_t first = 0; first < experts; first += locals) {
    int64_t row = 0;
    for (int64_t expert = first; expert < first + locals; ++expert) {
      if (first == own / parts * locals) args.local_offsets[expert - first] = lower(row, args.capacity);
      for (int64_t source = 0; source < members; ++source) {
        const int64_t rows = rows_of(source, expert);
        place[source * experts + expert] = lower(row, args.capacity);
        fits[source * experts + expert] = lower(higher(args.capacity - row, 0), rows);
        row += rows;
      }
    }
    if (first != own / parts * locals) continue;
    args.local_offsets[locals] = lower(row, args.capacity);
    if (args.overflow && row > args.capacity && row > args.overflow[0]) {
      args.overflow[0] = static_cast<int32_t>(row);
      args.overflow[1] = static_cast<int32_t>(args.capacity);
    }
  }
  Ranges out_send{args.out_send}, out_receive{args.out_receive}, back_send{args.back_send}, back_receive{args.back_receive};
  for (int64_t member = 0; member < members; ++member) {
    for (int64_t local = 0; local < locals; ++local) {
      const int64_t theirs = own * experts + member / parts * locals + local;  // this member's rows for their experts
      const int64_t sent = first_row(own, member / parts * locals + local);
      out_send.add(sent, place[theirs], fits[theirs]);
      back_receive.add(member % parts * args.region_rows + sent, place[theirs], fits[theirs]);
      const int64_t ours = member * experts + own / parts * locals + local;  // their rows for this member's experts
      const int64_t come = first_row(member, own / parts * locals + local);
      out_receive.add(place[ours], come, fits[ours]);
      back_send.add(place[ours], own % parts * args.region_rows + come, fits[ours]);
    }
  }
}

}  // namespace mimo::MIMO_ISA
