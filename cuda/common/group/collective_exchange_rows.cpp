// Exchange of rows with every member, given as ranges in the tensors' memory. The bytes sent to a member form a run:
// its ranges of the tensor, then of the tensor beside it. Each round carries an equal share of every run through slots
// of its own. The first round's common slots announce the runs' lengths, and as many rounds follow as the longest run
// needs.
#include <algorithm>

#include "collective.h"
#include "row_range.h"
#include "status.h"

namespace mimo {
namespace {

struct Part {
  char* rows;
  int64_t row_bytes;
};

/// Iterates over the bytes of one member's ranges.
class Walk {
 public:
  Walk(const RowRange* ranges, int64_t count, const Part* parts) : ranges_(ranges), count_(count), parts_(parts) {}

  int64_t bytes() const {
    int64_t rows = 0;
    for (int64_t range = 0; range < count_; ++range) rows += ranges_[range].rows;
    return rows * (parts_[0].row_bytes + parts_[1].row_bytes);
  }

  /// Calls visit(address, bytes) for the next `most` bytes, or as many as remain.
  template <class Visit>
  void next(int64_t most, Visit&& visit) {
    while (most > 0 && part_ < 2) {
      const Part& part = parts_[part_];
      const int64_t whole = range_ < count_ ? ranges_[range_].rows * part.row_bytes : 0;
      if (begin_ < whole) {
        const int64_t bytes = std::min(most, whole - begin_);
        visit(part.rows + ranges_[range_].here * part.row_bytes + begin_, bytes);
        begin_ += bytes;
        most -= bytes;
      }
      if (begin_ < whole) return;
      begin_ = 0;
      if (++range_ >= count_) {
        range_ = 0;
        ++part_;
      }
    }
  }

 private:
  const RowRange* ranges_;
  int64_t count_;
  const Part* parts_;
  int32_t part_ = 0;
  int64_t range_ = 0, begin_ = 0;  // position of the next byte
};

class ExchangeRows final : public Collective {
 public:
  ExchangeRows(const Group& group, const mimo_row_exchange& rows)
      : Collective(group.memory(), MIMO_COLLECTIVE_EXCHANGE_ROWS, rows.row_bytes + rows.beside_row_bytes, rows.stage, 1),
        rows_(rows),
        share_(group.row_slot_bytes() / group.size() / 64 * 64),
        send_{part(rows.x, rows.row_bytes), part(rows.beside_x, rows.beside_row_bytes)},
        receive_{part(rows.y, rows.row_bytes), part(rows.beside_y, rows.beside_row_bytes)} {}

  // Only the lengths of all members tell whether more rounds follow.
  bool needs_thread() const override { return !finished(); }

 protected:
  void write(Group& group, int64_t r, char* slot) override {
    if (r == 0) {
      read_ranges(group);
      auto* lengths = reinterpret_cast<int64_t*>(slot);
      for (int32_t member = 0; member < group.size(); ++member) lengths[member] = going_[at(member)].bytes();
    }
    for (int32_t member = 0; member < group.size(); ++member) {
      if (member == group.rank()) continue;
      char* to = group.row_slot(group.rank(), group.round) + member * share_;
      going_[at(member)].next(share_, [&](char* from, int64_t bytes) {
        memory().fetch(to, from, bytes);
        to += bytes;
      });
    }
  }

  void read(Group& group, int64_t r, uint64_t round) override {
    if (r == 0) {
      read_lengths(group, round);
      move_own(group);
    }
    for (int32_t member = 0; member < group.size(); ++member) {
      if (member == group.rank()) continue;
      const char* from = group.row_slot(member, round) + group.rank() * share_;
      coming_[at(member)].next(share_, [&](char* to, int64_t bytes) {
        memory().store(to, from, bytes);
        from += bytes;
      });
    }
  }

 private:
  static Part part(const void* rows, int64_t row_bytes) {
    return {const_cast<char*>(static_cast<const char*>(rows)), rows == nullptr ? 0 : row_bytes};
  }
  static size_t at(int32_t member) { return static_cast<size_t>(member); }

  void read_ranges(const Group& group) {
    const auto count = static_cast<size_t>(group.size() * rows_.ranges);
    const auto bytes = static_cast<int64_t>(count * sizeof(RowRange));
    sent_.resize(count);
    received_.resize(count);
    memory().fetch(reinterpret_cast<char*>(sent_.data()), reinterpret_cast<const char*>(rows_.send_ranges), bytes);
    memory().fetch(reinterpret_cast<char*>(received_.data()), reinterpret_cast<const char*>(rows_.receive_ranges), bytes);
    memory().settle();
    require(group, sent_, rows_.x_rows, "sent");
    require(group, received_, rows_.y_rows, "received");
    for (int32_t member = 0; member < group.size(); ++member) {
      const size_t first = at(member) * static_cast<size_t>(rows_.ranges);
      going_.emplace_back(sent_.data() + first, rows_.ranges, send_);
      coming_.emplace_back(received_.data() + first, rows_.ranges, receive_);
    }
  }

  void require(const Group& group, const std::vector<RowRange>& ranges, int64_t rows, const char* what) const {
    for (const RowRange& range : ranges) {
      const int64_t end = int64_t{range.here} + range.rows;
      if (range.here >= 0 && range.rows >= 0 && end <= rows) continue;
      throw Error(MIMO_ERROR_ARGUMENT, "In " + group.describe(*this) + " rows " + std::to_string(range.here) + " to " +
                                           std::to_string(end) + " are to be " + what + ", of " + std::to_string(rows) + ".");
    }
  }

  void move_own(const Group& group) {
    const size_t first = at(group.rank()) * static_cast<size_t>(rows_.ranges);
    for (size_t i = first; i < first + static_cast<size_t>(rows_.ranges); ++i) {
      for (int32_t p = 0; p < 2; ++p) {
        const int64_t bytes = send_[p].row_bytes;
        if (sent_[i].rows > 0 && bytes > 0) {
          memory().move(receive_[p].rows + received_[i].here * bytes, send_[p].rows + sent_[i].here * bytes,
                        sent_[i].rows * bytes);
        }
      }
    }
  }

  void read_lengths(const Group& group, uint64_t round) {
    int64_t longest = 0;
    for (int32_t from = 0; from < group.size(); ++from) {
      const auto* lengths = reinterpret_cast<const int64_t*>(group.slot(from, round));
      const int64_t expected = coming_[at(from)].bytes();
      if (lengths[group.rank()] != expected) {
        const auto rank = [&](int32_t member) { return std::to_string(group.ranks()[at(member)]); };
        throw Error(MIMO_ERROR_PEER, "In " + group.describe(*this) + " rank " + rank(from) + " sends " +
                                         std::to_string(lengths[group.rank()]) + " bytes to rank " + rank(group.rank()) +
                                         ", which expects " + std::to_string(expected) + ".");
      }
      for (int32_t to = 0; to < group.size(); ++to) {
        if (to != from) longest = std::max(longest, lengths[to]);
      }
    }
    add_rounds(std::max<int64_t>(0, (longest + share_ - 1) / share_ - 1));
  }

  mimo_row_exchange rows_;
  int64_t share_;  // bytes to each member in a round
  Part send_[2], receive_[2];
  std::vector<RowRange> sent_, received_;  // [size, ranges]
  std::vector<Walk> going_, coming_;    // by member
};

}  // namespace

std::unique_ptr<Call> make_exchange_rows(Group& group, const mimo_row_exchange& rows) {
  MIMO_REQUIRE(rows.ranges > 0 && rows.row_bytes > 0 && rows.beside_row_bytes >= 0, "mimo_group_exchange_rows");
  MIMO_REQUIRE((rows.beside_x == nullptr) == (rows.beside_y == nullptr), "mimo_group_exchange_rows");
  MIMO_REQUIRE(rows.stage == MIMO_ROW_STAGE_SENDER || rows.stage == MIMO_ROW_STAGE_RECEIVER, "mimo_group_exchange_rows");
  group.open_row_slots();
  return std::make_unique<ExchangeRows>(group, rows);
}

}  // namespace mimo
