// Send and receive: every ordered pair of members that talks has a channel of its own, two pieces deep, made by the
// member that needs it first. Messages of a channel arrive in order, independent of the group's collectives.
#include <algorithm>

#include "collective.h"
#include "status.h"

namespace mimo {

/// In shared memory. Sender and receiver wait on the doorbells of their places.
struct ChannelHead {
  alignas(64) std::atomic<uint64_t> written;  // pieces
  alignas(64) std::atomic<uint64_t> read;
  struct alignas(64) Piece {
    int64_t sequence;
    int64_t bytes;  // of the whole message
  } piece[2];
};

constexpr int64_t piece_bytes = 64 << 10;

ChannelHead& Channel::head() const { return *reinterpret_cast<ChannelHead*>(area_.address()); }

char* Channel::piece(uint64_t index) const {
  return area_.address() + sizeof(ChannelHead) + static_cast<int64_t>(index & 1) * piece_bytes;
}

int64_t Channel::area_bytes() { return static_cast<int64_t>(sizeof(ChannelHead)) + 2 * piece_bytes; }

namespace {

class Message : public Call {
 public:
  bool finished() const final { return moved_ >= bytes() && pieces_ > 0; }
  bool needs_thread() const final { return !finished() && (kind() == MIMO_COLLECTIVE_SEND || bytes() > piece_bytes); }
  std::vector<int32_t> missing(const Group&) const final { return {peer_}; }

 protected:
  Message(int32_t kind, int64_t bytes, int32_t peer, Channel& channel)
      : Call(kind, bytes), peer_(peer), channel_(channel) {}
  int64_t next() const { return std::min(piece_bytes, bytes() - moved_); }
  void advance_piece() {
    moved_ += next();
    ++pieces_;
  }
  int32_t peer_;
  Channel& channel_;
  int64_t moved_ = 0;
  int64_t pieces_ = 0;
};

class Send final : public Message {
 public:
  Send(const char* x, int64_t bytes, int32_t to, Channel& channel)
      : Message(MIMO_COLLECTIVE_SEND, bytes, to, channel), x_(x) {}

  bool advance(Group& group) override {
    ChannelHead& head = channel_.head();
    const uint64_t index = head.written.load(std::memory_order_relaxed);
    if (index - head.read.load(std::memory_order_acquire) >= 2) return false;
    head.piece[index & 1] = {sequence, bytes()};
    group.memory().fetch(channel_.piece(index), x_ + moved_, next());
    group.memory().settle();
    head.written.store(index + 1, std::memory_order_release);
    group.ring(peer_);
    advance_piece();
    return true;
  }

 private:
  const char* x_;
};

class Receive final : public Message {
 public:
  Receive(char* x, int64_t bytes, int32_t from, Channel& channel)
      : Message(MIMO_COLLECTIVE_RECEIVE, bytes, from, channel), x_(x) {}

  bool advance(Group& group) override {
    ChannelHead& head = channel_.head();
    const uint64_t index = head.read.load(std::memory_order_relaxed);
    if (head.written.load(std::memory_order_acquire) == index) return false;
    const ChannelHead::Piece& piece = head.piece[index & 1];
    if (piece.bytes != bytes() || piece.sequence != sequence) {
      throw Error(MIMO_ERROR_PEER, "In " + group.describe(*this) + " rank " +
                                       std::to_string(group.ranks()[static_cast<size_t>(peer_)]) + " sends message " +
                                       std::to_string(piece.sequence) + " of " + std::to_string(piece.bytes) +
                                       " bytes, but " + std::to_string(bytes()) + " bytes are expected.");
    }
    group.memory().store(x_ + moved_, channel_.piece(index), next());
    group.memory().settle();
    head.read.store(index + 1, std::memory_order_release);
    group.ring(peer_);
    advance_piece();
    return true;
  }

 private:
  char* x_;
};

}  // namespace

std::unique_ptr<Call> make_send(Group& group, const void* x, int64_t bytes, int32_t to) {
  MIMO_REQUIRE(bytes >= 0, "mimo_group_send");
  return std::make_unique<Send>(static_cast<const char*>(x), bytes, to, group.channel(group.rank(), to));
}

std::unique_ptr<Call> make_receive(Group& group, void* x, int64_t bytes, int32_t from) {
  MIMO_REQUIRE(bytes >= 0, "mimo_group_receive");
  return std::make_unique<Receive>(static_cast<char*>(x), bytes, from, group.channel(from, group.rank()));
}

}  // namespace mimo
