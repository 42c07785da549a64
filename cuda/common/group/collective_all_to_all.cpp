// All-to-all with row counts that only sender and receiver know. The first round carries all counts, and the rows of
// members whose rows fit beside them; the following rounds, as many as the largest message needs, carry the rest.
#include <algorithm>

#include "collective.h"
#include "status.h"

namespace mimo {
namespace {

class AllToAll final : public Collective {
 public:
  AllToAll(const Group& group, const char* x, char* y, const int32_t* rows, int64_t row_bytes, int64_t sent)
      : Collective(group.memory(), MIMO_COLLECTIVE_ALL_TO_ALL, row_bytes, 0, 1),
        x_(x),
        y_(y),
        rows_(rows, rows + 4 * group.size()),
        size_(group.size()),
        row_bytes_(row_bytes),
        sent_(sent),
        share_(group.slot_bytes() / group.size() / 64 * 64) {}

  // Only the counts of all members tell whether more rounds follow.
  bool needs_thread() const override { return !finished(); }

 protected:
  void write(Group& group, int64_t r, char* slot) override {
    if (r > 0) {
      for (int32_t member = 0; member < size_; ++member) {
        if (member != group.rank() && !fits(group, sent_)) copy_piece(slot + member * share_, member, r - 1);
      }
      return;
    }
    auto* counts = reinterpret_cast<int64_t*>(slot);
    for (int32_t member = 0; member < size_; ++member) counts[member] = row(1, member);
    counts[size_] = sent_;
    if (!fits(group, sent_)) return;
    char* at = slot + head_bytes();
    for (int32_t member = 0; member < size_; ++member) {
      if (member == group.rank()) continue;
      const int64_t bytes = row(1, member) * row_bytes_;
      memory().fetch(at, x_ + row(0, member) * row_bytes_, bytes);
      at += bytes;
    }
  }

  void read(Group& group, int64_t r, uint64_t round) override {
    if (r == 0) read_counts(group, round);
    for (int32_t member = 0; member < size_; ++member) {
      const int64_t bytes = row(3, member) * row_bytes_;
      char* to = y_ + row(2, member) * row_bytes_;
      if (member == group.rank()) {
        if (r == 0) memory().move(to, x_ + row(0, member) * row_bytes_, bytes);
        continue;
      }
      const char* slot = group.slot(member, round);
      const bool whole = inline_[static_cast<size_t>(member)] != 0;
      if (r == 0) {
        if (whole) memory().store(to, slot + start_[static_cast<size_t>(member)], bytes);
      } else if (!whole) {
        const int64_t begin = (r - 1) * share_;
        memory().store(to + begin, slot + group.rank() * share_, std::min(share_, bytes - begin));
      }
    }
  }

 private:
  int64_t row(int32_t table, int32_t member) const { return rows_[static_cast<size_t>(table * size_ + member)]; }
  int64_t head_bytes() const { return (size_ + 1) * static_cast<int64_t>(sizeof(int64_t)); }
  bool fits(const Group& group, int64_t sent) const { return sent <= group.slot_bytes() - head_bytes(); }

  void copy_piece(char* to, int32_t member, int64_t piece) const {
    const int64_t begin = piece * share_;
    memory().fetch(to, x_ + row(0, member) * row_bytes_ + begin,
                   std::min(share_, row(1, member) * row_bytes_ - begin));
  }

  void read_counts(const Group& group, uint64_t round) {
    inline_.resize(static_cast<size_t>(size_));
    start_.resize(static_cast<size_t>(size_));
    int64_t largest = 0;
    for (int32_t from = 0; from < size_; ++from) {
      const auto* counts = reinterpret_cast<const int64_t*>(group.slot(from, round));
      const int64_t expected = row(3, from);
      if (counts[group.rank()] != expected) {
        const auto rank = [&](int32_t member) { return std::to_string(group.ranks()[static_cast<size_t>(member)]); };
        throw Error(MIMO_ERROR_PEER, "In " + group.describe(*this) + " rank " + rank(from) + " sends " +
                                         std::to_string(counts[group.rank()]) + " rows to rank " + rank(group.rank()) +
                                         ", which expects " + std::to_string(expected) + ".");
      }
      const bool whole = fits(group, counts[size_]);
      inline_[static_cast<size_t>(from)] = whole ? 1 : 0;
      int64_t start = head_bytes();
      for (int32_t to = 0; to < size_; ++to) {
        if (to == from) continue;
        if (to < group.rank()) start += counts[to] * row_bytes_;
        if (!whole) largest = std::max(largest, counts[to] * row_bytes_);
      }
      start_[static_cast<size_t>(from)] = start;
    }
    add_rounds((largest + share_ - 1) / share_);
  }

  const char* x_;
  char* y_;
  std::vector<int32_t> rows_;  // [4, size]
  int32_t size_;
  int64_t row_bytes_;
  int64_t sent_;  // bytes sent to others
  int64_t share_;
  std::vector<char> inline_;    // by member: whether its rows come with its counts
  std::vector<int64_t> start_;  // by member: offset of its rows for this member
};

}  // namespace

std::unique_ptr<Call> make_all_to_all(const Group& group, const void* x, void* y, const int32_t* rows,
                                      int64_t row_bytes) {
  MIMO_REQUIRE(row_bytes >= 0, "mimo_group_all_to_all");
  int64_t sent = 0;
  for (int32_t i = 0; i < 4 * group.size(); ++i) MIMO_REQUIRE(rows[i] >= 0, "mimo_group_all_to_all");
  for (int32_t member = 0; member < group.size(); ++member) {
    if (member != group.rank()) sent += rows[group.size() + member] * row_bytes;
  }
  return std::make_unique<AllToAll>(group, static_cast<const char*>(x), static_cast<char*>(y), rows, row_bytes, sent);
}

}  // namespace mimo
