// Send and receive through shared memory. Every ordered pair of members that communicates has a channel with two chunks, made by
// the member that needs it first. Messages of a channel arrive in order, independently of the group's collectives.
#include <algorithm>

#include "collective.h"
#include "status.h"

namespace mimo {

/// Start of a channel's shared memory, before its two chunks. A member that waits sleeps on its doorbell.
struct ChannelHead {
  alignas(64) std::atomic<uint64_t> written;  // chunks so far
  alignas(64) std::atomic<uint64_t> read;
  struct alignas(64) Chunk {
    int64_t sequence;
    int64_t bytes;  // of the whole message
  } chunks[2];
};

constexpr int64_t chunk_bytes = 64 << 10;

ChannelHead& Channel::head() const { return *reinterpret_cast<ChannelHead*>(area_.address()); }

char* Channel::chunk(uint64_t index) const {
  return area_.address() + sizeof(ChannelHead) + static_cast<int64_t>(index & 1) * chunk_bytes;
}

int64_t Channel::area_bytes() { return static_cast<int64_t>(sizeof(ChannelHead)) + 2 * chunk_bytes; }

namespace {

class Message : public Call {
 public:
  bool finished() const final { return moved_ >= bytes() && chunks_ > 0; }
  bool needs_thread() const final { return !finished() && (kind() == MIMO_COLLECTIVE_SEND || bytes() > chunk_bytes); }
  std::vector<int32_t> missing(const Group&) const final { return {peer_}; }

 protected:
  Message(int32_t kind, int64_t bytes, int32_t peer, Channel& channel)
      : Call(kind, bytes), peer_(peer), channel_(channel) {}
  int64_t next() const { return std::min(chunk_bytes, bytes() - moved_); }
  void advance_chunk() {
    moved_ += next();
    ++chunks_;
  }
  int32_t peer_;
  Channel& channel_;
  int64_t moved_ = 0;
  int64_t chunks_ = 0;
};

class Send final : public Message {
 public:
  Send(const char* x, int64_t bytes, int32_t to, Channel& channel)
      : Message(MIMO_COLLECTIVE_SEND, bytes, to, channel), x_(x) {}

  bool advance(Group& group) override {
    ChannelHead& head = channel_.head();
    const uint64_t index = head.written.load(std::memory_order_relaxed);
    if (index - head.read.load(std::memory_order_acquire) >= 2) return false;
    head.chunks[index & 1] = {sequence, bytes()};
    group.memory().fetch(channel_.chunk(index), x_ + moved_, next());
    group.memory().settle();
    head.written.store(index + 1, std::memory_order_release);
    group.ring(peer_);
    advance_chunk();
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
    const ChannelHead::Chunk& chunk = head.chunks[index & 1];
    if (chunk.bytes != bytes() || chunk.sequence != sequence) {
      throw Error(MIMO_ERROR_PEER, "In " + group.describe(*this) + " rank " +
                                       std::to_string(group.ranks()[static_cast<size_t>(peer_)]) + " sends message " +
                                       std::to_string(chunk.sequence) + " of " + std::to_string(chunk.bytes) +
                                       " bytes, but " + std::to_string(bytes()) + " bytes are expected.");
    }
    group.memory().store(x_ + moved_, channel_.chunk(index), next());
    group.memory().settle();
    head.read.store(index + 1, std::memory_order_release);
    group.ring(peer_);
    advance_chunk();
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
