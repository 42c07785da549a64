// A rank that has done its work leaves nothing behind that another still has to read.
#include "group.h"

#include <unistd.h>

#include <memory>
#include <thread>

#include "check.h"
#include "collective.h"

namespace {

using mimo::Group;

/// Gives more than the slots of one member hold, then ends as a rank does, while the reader has read nothing.
void give(const std::string& path, int32_t count) {
  mimo::Run run(path);
  run.join(0, 1);
  auto group = std::make_unique<Group>(run, "pair", std::vector<int32_t>{0, 1});
  for (int32_t value = 1; value <= count; ++value) mimo::exchange(*group, &value, nullptr, sizeof(value));
  run.leave();
}

/// Comes late.
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

}  // namespace

int main() {
  for (int32_t count = 1; count <= 6; ++count) {
    mimo::Run run(2, true, 60'000);
    const std::string path = run.path();
    std::thread giver([&] { give(path, count); });
    read(path, count);
    giver.join();
  }
  return failures;
}
