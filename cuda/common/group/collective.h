// Collectives in rounds (see group.h). A collective implements write() to its own slot and read() from the others'
// slots; waiting, publishing and checking that the members agree are common to all.
#pragma once
#include "group.h"

namespace mimo {

class Collective : public Call {
 public:
  /// `detail` and `bytes` must be equal at every member.
  Collective(TensorMemory& memory, int32_t kind, int64_t bytes, int32_t detail, int64_t rounds)
      : Call(kind, bytes), memory_(memory), detail_(detail), rounds_(rounds) {}

  bool advance(Group& group) final;
  bool finished() const final { return done_ == rounds_; }
  bool needs_thread() const override { return !finished() && (rounds_ > 1 || !written_); }
  std::vector<int32_t> missing(const Group& group) const final;

 protected:
  /// Writes this member's part of round `r`, counted from 0.
  virtual void write(Group& group, int64_t r, char* slot) = 0;
  /// Reads its part from the others' slots; `at(member)` is a member's slot.
  virtual void read(Group& group, int64_t r, uint64_t round) = 0;
  /// Whether it reads the slot of `member`.
  virtual bool needs(const Group&, int32_t /*member*/) const { return true; }
  void add_rounds(int64_t count) { rounds_ += count; }
  /// The memory of its tensors. Copies by write() and read() may be asynchronous until settle().
  TensorMemory& memory() const { return memory_; }

 private:
  bool may_write(const Group& group) const;
  void check_agreement(const Group& group) const;
  bool waits_for(const Group& group, int32_t member) const;

  TensorMemory& memory_;
  int32_t detail_;
  int64_t rounds_;
  int64_t done_ = 0;
  bool written_ = false;  // in the current round
};

/// x = reduction of every member's x.
std::unique_ptr<Call> make_all_reduce(const Group& group, void* x, int64_t elements, int32_t dtype, int32_t reduction);
std::unique_ptr<Call> make_reduce_scatter(const Group& group, const void* x, void* y, int64_t elements, int32_t dtype);
/// `kind`: all-gather, or exchange or barrier (0 bytes) of host memory. An exchange with `y` null only contributes: it
/// is done once its part is written, and `x` may be freed before.
std::unique_ptr<Call> make_all_gather(const Group& group, const void* x, void* y, int64_t bytes, int32_t kind);
std::unique_ptr<Call> make_broadcast(const Group& group, void* x, int64_t bytes, int32_t root);
/// `rows` [4, size]: send offsets, send counts, receive offsets, receive counts; copied.
std::unique_ptr<Call> make_all_to_all(const Group& group, const void* x, void* y, const int32_t* rows,
                                      int64_t row_bytes);

/// mimo_group_exchange_rows. The ranges are read when the call starts to move data.
std::unique_ptr<Call> make_exchange_rows(Group& group, const mimo_row_exchange& rows);

/// Returns when all members have called it.
void barrier(Group& group);
/// y [size, bytes] = every member's x, both in host memory. With y null it only contributes and does not wait.
void exchange(Group& group, const void* x, void* y, int64_t bytes);

std::unique_ptr<Call> make_send(Group& group, const void* x, int64_t bytes, int32_t to);
std::unique_ptr<Call> make_receive(Group& group, void* x, int64_t bytes, int32_t from);

}  // namespace mimo
