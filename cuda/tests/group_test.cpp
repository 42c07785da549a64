// A rank that exits delivers everything that others still have to read, and row ranges outside their tensors are
// refused.
#include "group.h"

#include <unistd.h>

#include <array>
#include <climits>
#include <memory>
#include <string>
#include <thread>

#include "check.h"
#include "collective.h"
#include "status.h"

namespace {

using mimo::Group;

/// Contributes more than one member's slots hold and then exits as a rank does, before the reader has read anything.
void give(const std::string& path, int32_t count) {
  mimo::Run run(path);
  run.join(0, 1);
  auto group = std::make_unique<Group>(run, "pair", std::vector<int32_t>{0, 1});
  for (int32_t value = 1; value <= count; ++value) mimo::exchange(*group, &value, nullptr, sizeof(value));
  run.leave();
}

/// Reads after the writer has exited.
void read(const std::string& path, int32_t count) {
  mimo::Run run(path);
  run.join(1, 1);
  Group group(run, "pair", {0, 1});
  usleep(100'000);
  for (int32_t value = 1; value <= count; ++value) {
    int32_t everyone[2] = {};
    mimo::exchange(group, &value, everyone, sizeof(value));
    CHECK(everyone[0] == value && everyone[1] == value);
  }
  run.leave();
}

/// Ranges come from device memory, which a fault elsewhere may have overwritten.
void refuse_ranges(int32_t here, int32_t rows) {
  mimo::Run run(2, true, 60'000);
  mimo::Run rank(run.path());
  rank.join(0, 1);
  Group group(rank, "pair", {0, 1});
  const std::array<int32_t, 6> nothing{}, send{here, 0, rows, 0, 0, 0};
  std::array<char, 64> x{}, y{};
  mimo_row_exchange exchange{};
  exchange.x = x.data(), exchange.y = y.data();
  exchange.send_ranges = send.data(), exchange.receive_ranges = nothing.data();
  exchange.ranges = 1, exchange.x_rows = exchange.y_rows = 4, exchange.row_bytes = 16;
  exchange.stage = MIMO_ROW_STAGE_SENDER;
  std::string sentence;
  try {
    group.start(Group::collectives, mimo::make_exchange_rows(group, exchange));
  } catch (const mimo::Error& error) {
    sentence = error.what();
  }
  CHECK(sentence == "In pair exchange_rows 1 rows " + std::to_string(here) + " to " +
                        std::to_string(int64_t{here} + rows) + " are to be sent, of 4.");
  rank.leave();
}

}  // namespace

int main() {
  refuse_ranges(3, 2);
  refuse_ranges(-1, 1);
  refuse_ranges(INT_MAX, 2);
  for (int32_t count = 1; count <= 6; ++count) {
    mimo::Run run(2, true, 60'000);
    const std::string path = run.path();
    std::thread giver([&] { give(path, count); });
    read(path, count);
    giver.join();
  }
  return failures;
}
