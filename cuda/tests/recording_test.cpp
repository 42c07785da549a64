// Recordings that a rank left on disk: whatever a damaged one holds, reading it ends in an error or in a diagnosis.
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>

#include "check.h"
#include "run.h"
#include "status.h"

namespace {

/// The bytes of a recording of rank 0 of 2, which waits in a collective.
std::string record(const std::string& path) {
  mimo::Run run(2, true, 60'000);
  mimo::Run rank(run.path());
  rank.join(0, 1);
  const int64_t number = rank.begin_call("language.tp", 1, MIMO_COLLECTIVE_ALL_GATHER, 4096);
  rank.region(0).waiting_call = number;
  rank.fail_call(number, {1});
  run.record_rank(0, path);
  rank.leave();
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// The diagnosis of a recording with these bytes; "" if they are not a recording.
std::string diagnose(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
  try {
    mimo::Run run(mimo::recorded_ranks(path), true, 60'000);
    mimo::read_recordings({path}, run);
    return mimo::diagnosis_of(run);
  } catch (const mimo::Error&) {
    return "";
  }
}

bool holds(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

int main() {
  const std::string path = std::filesystem::temp_directory_path() / ("mimo-recording-" + std::to_string(getpid()));
  const std::string whole = record(path);
  CHECK(holds(diagnose(path, whole), "in language.tp all_gather 1 (4096 bytes) for rank 1"));
  CHECK(diagnose(path, whole.substr(0, whole.size() - 1)).empty());

  const size_t call = offsetof(mimo::Recording, own_state) + offsetof(mimo::Recording::Recorded, flight);
  for (const int64_t kind : {int64_t{-1}, int64_t{10}, int64_t{1} << 30, INT64_MAX}) {
    std::string damaged = whole;
    std::memcpy(&damaged[call + offsetof(mimo_call_record, kind)], &kind, sizeof(kind));
    CHECK(holds(diagnose(path, damaged), "in language.tp call of an unknown kind 1 (4096 bytes)"));
  }

  // No string has an end.
  std::string endless = whole;
  endless.replace(offsetof(mimo::Recording, written), std::string::npos,
                  std::string(whole.size() - offsetof(mimo::Recording, written), '\xff'));
  const std::string said = diagnose(path, endless);
  CHECK(!said.empty() && said.size() < sizeof(mimo::Recording));

  std::mt19937 random(7);
  for (int32_t round = 0; round < 300; ++round) {
    std::string damaged = whole;
    // The number of ranks stays: it must fit the size of the file.
    const size_t first = offsetof(mimo::Recording, rank), until = call + sizeof(mimo_call_record);
    for (int32_t i = 0; i < 40; ++i) damaged[first + random() % (until - first)] = static_cast<char>(random());
    diagnose(path, damaged);
  }
  unlink(path.c_str());
  return failures == 0 ? 0 : 1;
}
