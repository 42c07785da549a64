// The common part of all collectives, and those that only move bytes: all-gather and broadcast.
#include "collective.h"

#include <algorithm>

#include "status.h"

namespace mimo {

bool Collective::may_write(const Group& group) const {
  for (int32_t member = 0; member < group.size(); ++member) {
    if (group.place(member).read.load(std::memory_order_acquire) + 2 < group.round) return false;
  }
  return true;
}

bool Collective::waits_for(const Group& group, int32_t member) const {
  return member != group.rank() && needs(group, member) &&
         group.place(member).written.load(std::memory_order_acquire) < group.round;
}

bool Collective::advance(Group& group) {
  Place& own = group.place(group.rank());
  bool moved = false;
  if (!written_) {
    if (!may_write(group)) return false;
    SlotHeader& header = group.slot_header(group.rank(), group.round);
    header = {sequence, bytes(), kind(), detail_};
    write(group, done_, group.slot(group.rank(), group.round));
    memory_.settle();
    own.written.store(group.round, std::memory_order_release);
    group.ring_others();
    written_ = moved = true;
  }
  for (int32_t member = 0; member < group.size(); ++member) {
    if (waits_for(group, member)) return moved;
  }
  if (done_ == 0) check_agreement(group);
  read(group, done_, group.round);
  memory_.settle();
  own.read.store(group.round, std::memory_order_release);
  group.ring_others();
  ++group.round;
  ++done_;
  written_ = false;
  return true;
}

void Collective::check_agreement(const Group& group) const {
  for (int32_t member = 0; member < group.size(); ++member) {
    if (member == group.rank() || !needs(group, member)) continue;
    const SlotHeader& theirs = group.slot_header(member, group.round);
    if (theirs.kind == kind() && theirs.detail == detail_ && theirs.bytes == bytes() && theirs.sequence == sequence)
      continue;
    const auto text = [](int64_t call, int32_t what, int64_t size, int32_t detail) {
      return std::string(collective_name(what)) + " " + std::to_string(call) + " of " + std::to_string(size) +
             " bytes (type or root " + std::to_string(detail) + ")";
    };
    throw Error(MIMO_ERROR_PEER,
                "The members of " + group.name() + " call different collectives: rank " +
                    std::to_string(group.ranks()[static_cast<size_t>(group.rank())]) + " " +
                    text(sequence, kind(), bytes(), detail_) + ", rank " +
                    std::to_string(group.ranks()[static_cast<size_t>(member)]) + " " +
                    text(theirs.sequence, theirs.kind, theirs.bytes, theirs.detail) + ".");
  }
}

std::vector<int32_t> Collective::missing(const Group& group) const {
  std::vector<int32_t> members;
  for (int32_t member = 0; member < group.size(); ++member) {
    const bool reads = group.place(member).read.load(std::memory_order_acquire) + 2 >= group.round;
    if (written_ ? waits_for(group, member) : !reads) members.push_back(member);
  }
  return members;
}

namespace {

int64_t rounds_of(int64_t bytes, int64_t bytes_per_round) {
  return bytes == 0 ? 1 : (bytes + bytes_per_round - 1) / bytes_per_round;
}

class AllGather final : public Collective {
 public:
  AllGather(const Group& group, const void* x, void* y, int64_t bytes, int32_t kind)
      : Collective(kind == MIMO_COLLECTIVE_ALL_GATHER ? group.memory() : host_memory(), kind, bytes, 0,
                   rounds_of(bytes, group.slot_bytes())),
        x_(static_cast<const char*>(x)),
        y_(static_cast<char*>(y)) {
    if (y_ != nullptr || bytes == 0) return;
    // No caller waits for this call, so the caller's memory may be freed before it is written.
    given_.assign(x_, x_ + bytes);
    x_ = given_.data();
  }

 protected:
  /// A member that only contributes does not read.
  bool needs(const Group&, int32_t) const override { return y_ != nullptr || bytes() == 0; }
  void write(Group& group, int64_t r, char* slot) override {
    if (r == 0 && bytes() > 0 && y_ != nullptr && y_ + group.rank() * bytes() != x_) {
      memory().move(y_ + group.rank() * bytes(), x_, bytes());
    }
    const int64_t begin = r * group.slot_bytes();
    memory().fetch(slot, x_ + begin, std::min(group.slot_bytes(), bytes() - begin));
  }
  void read(Group& group, int64_t r, uint64_t round) override {
    for (int32_t member = 0; member < group.size(); ++member) {
      if (member == group.rank() || !needs(group, member)) continue;
      const int64_t begin = r * group.slot_bytes();
      memory().store(y_ + member * bytes() + begin, group.slot(member, round),
                     std::min(group.slot_bytes(), bytes() - begin));
    }
  }

 private:
  const char* x_;
  char* y_;
  std::vector<char> given_;
};

class Broadcast final : public Collective {
 public:
  Broadcast(const Group& group, void* x, int64_t bytes, int32_t root)
      : Collective(group.memory(), MIMO_COLLECTIVE_BROADCAST, bytes, root, rounds_of(bytes, group.slot_bytes())),
        x_(static_cast<char*>(x)),
        root_(root) {}

 protected:
  bool needs(const Group&, int32_t member) const override { return member == root_; }
  void write(Group& group, int64_t r, char* slot) override {
    if (group.rank() == root_) memory().fetch(slot, x_ + r * group.slot_bytes(), part(group, r));
  }
  void read(Group& group, int64_t r, uint64_t round) override {
    if (group.rank() != root_) memory().store(x_ + r * group.slot_bytes(), group.slot(root_, round), part(group, r));
  }

 private:
  int64_t part(const Group& group, int64_t r) const {
    return std::min(group.slot_bytes(), bytes() - r * group.slot_bytes());
  }
  char* x_;
  int32_t root_;
};

}  // namespace

std::unique_ptr<Call> make_all_gather(const Group& group, const void* x, void* y, int64_t bytes, int32_t kind) {
  return std::make_unique<AllGather>(group, x, y, bytes, kind);
}

std::unique_ptr<Call> make_broadcast(const Group& group, void* x, int64_t bytes, int32_t root) {
  MIMO_REQUIRE(root >= 0 && root < group.size(), "mimo_group_broadcast");
  return std::make_unique<Broadcast>(group, x, bytes, root);
}

void barrier(Group& group) {
  group.wait(group.start(Group::collectives, make_all_gather(group, nullptr, nullptr, 0, MIMO_COLLECTIVE_BARRIER)));
}

void exchange(Group& group, const void* x, void* y, int64_t bytes) {
  auto call = make_all_gather(group, x, y, bytes, MIMO_COLLECTIVE_EXCHANGE);
  const int64_t ticket = group.start(Group::collectives, std::move(call));
  if (y != nullptr) group.wait(ticket);
}

}  // namespace mimo
