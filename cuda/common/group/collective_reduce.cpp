// All-reduce and reduce-scatter. Each element is summed in rank order by exactly one member (or by all members
// identically), so results do not depend on the sizes of slots and rounds.
#include <emmintrin.h>

#include <cstring>

#include "collective.h"
#include "rank_reduction.h"
#include "status.h"

namespace mimo {
namespace {

/// Up to this size every member reduces everything itself, in one round instead of two.
constexpr int64_t one_round_bytes = 32 << 10;

int64_t dtype_bytes(int32_t dtype) {
  switch (dtype) {
    case MIMO_DTYPE_F32:
    case MIMO_DTYPE_I32:
      return 4;
    case MIMO_DTYPE_BF16:
      return 2;
    case MIMO_DTYPE_F64:
      return 8;
    default:
      fail(MIMO_ERROR_ARGUMENT, "A reduction takes f32, bf16, f64 or i32.");
  }
}

int32_t detail_of(int32_t dtype, int32_t reduction) { return dtype | reduction << 8; }

/// A member's share of a slot that is divided among all members.
int64_t share_bytes(const Group& group) { return group.slot_bytes() / group.size() / 64 * 64; }

int64_t clipped(int64_t count, int64_t left) { return left < 0 ? 0 : std::min(count, left); }

class Reducing : public Collective {
 protected:
  Reducing(TensorMemory& memory, int32_t kind, int64_t bytes, int32_t dtype, int32_t reduction, int64_t rounds)
      : Collective(memory, kind, bytes, detail_of(dtype, reduction), rounds), dtype_(dtype), reduction_(reduction) {}

  /// to = reduction over the members, in order, of `own` for this member and of the others' slots at `slot_offset`;
  /// both pointers are to host memory.
  void reduce(const Group& group, uint64_t round, int64_t slot_offset, const char* own, char* to, int64_t bytes) const {
    if (bytes <= 0) return;
    std::vector<const void*> parts(static_cast<size_t>(group.size()));
    for (int32_t member = 0; member < group.size(); ++member) {
      parts[static_cast<size_t>(member)] = member == group.rank() ? own : group.slot(member, round) + slot_offset;
    }
    reduce_ranks(dtype_, reduction_, to, parts.data(), group.size(), bytes / dtype_bytes(dtype_));
  }

 private:
  int32_t dtype_;
  int32_t reduction_;
};

class SmallAllReduce final : public Reducing {
 public:
  SmallAllReduce(const Group& group, char* x, int64_t bytes, int32_t dtype, int32_t reduction)
      : Reducing(group.memory(), MIMO_COLLECTIVE_ALL_REDUCE, bytes, dtype, reduction, 1), x_(x) {}

 protected:
  void write(Group&, int64_t, char* slot) override { memory().fetch(slot, x_, bytes()); }
  void read(Group& group, int64_t, uint64_t round) override {
    const char* own = memory().hold(x_, bytes());
    char* to = memory().room(x_);
    reduce(group, round, 0, own, to, bytes());
    memory().store(x_, to, bytes());
  }

 private:
  char* x_;
};

constexpr int64_t piece_bytes = 8 << 10;

/// Results from this size on use non-temporal stores, which leaves the caches to the slots.
constexpr int64_t streamed_bytes = 4 << 20;

void copy_past_caches(char* to, const char* from, int64_t bytes) {
  int64_t i = 0;
  for (; i < bytes && (reinterpret_cast<uintptr_t>(to + i) & 15) != 0; ++i) to[i] = from[i];
  for (; i + 64 <= bytes; i += 64) {
    const auto* source = reinterpret_cast<const __m128i*>(from + i);
    auto* target = reinterpret_cast<__m128i*>(to + i);
    for (int64_t part = 0; part < 4; ++part) _mm_stream_si128(target + part, _mm_loadu_si128(source + part));
  }
  if (i < bytes) std::memcpy(to + i, from + i, static_cast<size_t>(bytes - i));
  _mm_sfence();
}

/// x is split into chunks, and a chunk into a share for each member, which reduces it. In round r a slot holds the
/// member's contributions to the others' shares of chunk r and, in place of its own share, the result of chunk r - 1.
class LargeAllReduce final : public Reducing {
 public:
  LargeAllReduce(const Group& group, char* x, int64_t bytes, int32_t dtype, int32_t reduction)
      : LargeAllReduce(group.memory(), x, bytes, dtype, reduction, share_bytes(group),
                       share_bytes(group) * group.size()) {}

 protected:
  void write(Group& group, int64_t r, char* slot) override {
    for (int32_t member = 0; member < group.size(); ++member) {
      if (member != group.rank()) memory().fetch(slot + member * share_, x_ + offset(r, member), part(r, member));
    }
  }
  void read(Group& group, int64_t r, uint64_t round) override {
    const int32_t own = group.rank();
    const int64_t own_bytes = part(r, own);
    char* tensor = x_ + offset(r, own);
    const char* held = memory().hold(tensor, own_bytes);
    char* to = memory().room(tensor);
    // All members have written round r, hence read round r - 1, so the next slot is free for the result; reduced piece
    // by piece while the piece is in the L1 cache.
    char* result = group.slot(own, round + 1) + own * share_;
    for (int64_t begin = 0; begin < own_bytes; begin += piece_bytes) {
      const int64_t count = std::min(piece_bytes, own_bytes - begin);
      reduce(group, round, own * share_ + begin, held + begin, to + begin, count);
      std::memcpy(result + begin, to + begin, static_cast<size_t>(count));
    }
    memory().store(tensor, to, own_bytes);
    for (int32_t member = 0; member < group.size() && r > 0; ++member) {
      const int64_t count = member == own ? 0 : part(r - 1, member);
      const char* from = group.slot(member, round) + member * share_;
      char* there = x_ + offset(r - 1, member);
      if (bytes() >= streamed_bytes && memory().in_host()) {
        copy_past_caches(there, from, count);
      } else {
        memory().store(there, from, count);
      }
    }
  }

 private:
  LargeAllReduce(TensorMemory& memory, char* x, int64_t bytes, int32_t dtype, int32_t reduction, int64_t share,
                 int64_t chunk)
      : Reducing(memory, MIMO_COLLECTIVE_ALL_REDUCE, bytes, dtype, reduction, (bytes + chunk - 1) / chunk + 1),
        x_(x),
        share_(share),
        chunk_(chunk) {}
  int64_t offset(int64_t chunk, int32_t member) const { return chunk * chunk_ + member * share_; }
  int64_t part(int64_t chunk, int32_t member) const { return clipped(share_, bytes() - offset(chunk, member)); }

  char* x_;
  int64_t share_;
  int64_t chunk_;
};

/// In round r a slot holds, for each other member, the r-th piece of this member's contribution to that member's y.
class ReduceScatter final : public Reducing {
 public:
  ReduceScatter(const Group& group, const char* x, char* y, int64_t bytes, int32_t dtype)
      : Reducing(group.memory(), MIMO_COLLECTIVE_REDUCE_SCATTER, bytes, dtype, MIMO_REDUCTION_SUM,
                 bytes == 0 ? 1 : (bytes + share_bytes(group) - 1) / share_bytes(group)),
        x_(x),
        y_(y),
        share_(share_bytes(group)) {}

 protected:
  void write(Group& group, int64_t r, char* slot) override {
    const int64_t count = clipped(share_, bytes() - r * share_);
    for (int32_t member = 0; member < group.size(); ++member) {
      if (member != group.rank()) memory().fetch(slot + member * share_, x_ + member * bytes() + r * share_, count);
    }
  }
  void read(Group& group, int64_t r, uint64_t round) override {
    const int32_t own = group.rank();
    const int64_t count = clipped(share_, bytes() - r * share_);
    const char* held = memory().hold(x_ + own * bytes() + r * share_, count);
    char* to = memory().room(y_ + r * share_);
    reduce(group, round, own * share_, held, to, count);
    memory().store(y_ + r * share_, to, count);
  }

 private:
  const char* x_;
  char* y_;
  int64_t share_;
};

}  // namespace

std::unique_ptr<Call> make_all_reduce(const Group& group, void* x, int64_t elements, int32_t dtype, int32_t reduction) {
  MIMO_REQUIRE(elements >= 0, "mimo_group_all_reduce");
  MIMO_REQUIRE(reduction == MIMO_REDUCTION_SUM || reduction == MIMO_REDUCTION_MAX, "mimo_group_all_reduce");
  const int64_t bytes = elements * dtype_bytes(dtype);
  if (bytes <= one_round_bytes) return std::make_unique<SmallAllReduce>(group, static_cast<char*>(x), bytes, dtype, reduction);
  return std::make_unique<LargeAllReduce>(group, static_cast<char*>(x), bytes, dtype, reduction);
}

std::unique_ptr<Call> make_reduce_scatter(const Group& group, const void* x, void* y, int64_t elements, int32_t dtype) {
  MIMO_REQUIRE(elements >= 0, "mimo_group_reduce_scatter");
  return std::make_unique<ReduceScatter>(group, static_cast<const char*>(x), static_cast<char*>(y),
                                         elements * dtype_bytes(dtype), dtype);
}

}  // namespace mimo
