// The C ABI of a run: mimo_run_* on one host.
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "run.h"
#include "status.h"

using mimo::guard;

extern "C" {

int32_t mimo_run_create(int32_t ranks, int32_t supervised, int64_t timeout_ms, char* path, mimo_run** run) {
  return guard([&] {
    auto made = std::make_unique<mimo_run>(ranks, supervised != 0, timeout_ms);
    mimo::copy_string(path, MIMO_RUN_PATH_BYTES, made->run.path().c_str());
    *run = made.release();
  });
}

int32_t mimo_run_open(const char* path, mimo_run** run) {
  return guard([&] { *run = new mimo_run(std::string(path)); });
}

int32_t mimo_run_close(mimo_run* run) {
  return guard([&] { delete run; });
}

int32_t mimo_run_set_backend(mimo_run* run, mimo_device* device, int32_t backend) {
  return guard([&] {
    run->run.device = device;
    MIMO_REQUIRE(backend == MIMO_BACKEND_NCCL || backend == MIMO_BACKEND_SHM, "mimo_run_set_backend");
    run->run.backend = backend;
  });
}

int32_t mimo_run_join(mimo_run* run, int32_t rank, int32_t exit_code) {
  return guard([&] { run->run.join(rank, exit_code); });
}

int32_t mimo_run_describe(mimo_run* run, int32_t rank, const char* module, const char* coordinates) {
  return guard([&] {
    mimo::RankRegion& of = run->run.region(rank);
    mimo::copy_string(of.module, sizeof(of.module), module);
    mimo::copy_string(of.coordinates, sizeof(of.coordinates), coordinates);
  });
}

int32_t mimo_run_progress(mimo_run* run, int64_t step) {
  return guard([&] {
    mimo::RankRegion& own = run->run.region(run->run.rank());
    own.step = step;
    own.progress.fetch_add(1);
    own.progress_time = mimo::monotonic_nanoseconds();
  });
}

int32_t mimo_run_leave(mimo_run* run) {
  return guard([&] { run->run.leave(); });
}

int32_t mimo_run_fail(mimo_run* run, int32_t rank, const char* sentence) {
  return guard([&] { run->run.fail(rank, sentence); });
}

int32_t mimo_run_expect(mimo_run* run, int32_t rank, int32_t pid) {
  return guard([&] { run->run.expect(rank, pid); });
}

int32_t mimo_run_watch(mimo_run* run, int32_t* failed, int32_t* rank, char* reason) {
  return guard([&] {
    // In a process that has joined, the heartbeat thread checks the ranks.
    if (!run->run.joined()) run->run.supervise();
    *failed = run->run.failed() ? 1 : 0;
    if (*failed == 0) return;
    *rank = run->run.header().failed_rank;
    mimo::copy_string(reason, MIMO_SENTENCE_BYTES, run->run.header().reason);
  });
}

int32_t mimo_run_claim_diagnosis(mimo_run* run, int32_t* claimed) {
  return guard([&] { *claimed = run->run.claim_diagnosis() ? 1 : 0; });
}

int32_t mimo_run_print_to(mimo_run* run, int32_t file) {
  return guard([&] { run->run.print_to(file); });
}

int32_t mimo_run_conclude(mimo_run* run, int32_t exit_code) {
  return guard([&] { run->run.conclude(exit_code); });
}

int32_t mimo_run_diagnose(mimo_run* run, char* text, int64_t capacity) {
  return guard([&] {
    MIMO_REQUIRE(run->run.failed() && capacity > 0, "mimo_run_diagnose");
    mimo::copy_string(text, static_cast<size_t>(capacity), mimo::diagnosis_of(run->run).c_str());
  });
}

int32_t mimo_run_record(mimo_run* run, const char* path) {
  return guard([&] { run->run.record_to(path); });
}

int32_t mimo_run_record_rank(mimo_run* run, int32_t rank, const char* path) {
  return guard([&] { run->run.record_rank(rank, path); });
}

int32_t mimo_run_read_recordings(const char* paths, int32_t count, int32_t* ranks, mimo_run** run) {
  return guard([&] {
    std::vector<std::string> all;
    for (int32_t i = 0; i < count; ++i) {
      all.emplace_back(paths);
      paths += all.back().size() + 1;
    }
    MIMO_REQUIRE(count > 0, "mimo_run_read_recordings");
    *ranks = mimo::recorded_ranks(all[0]);
    auto made = std::make_unique<mimo_run>(*ranks, true, 60'000);
    mimo::read_recordings(all, made->run);
    *run = made.release();
  });
}

int32_t mimo_run_rank_state(mimo_run* run, int32_t rank, mimo_rank_state* state) {
  return guard([&] {
    const mimo::RankRegion& of = run->run.region(rank);
    std::memset(state, 0, sizeof(*state));
    mimo::copy_string(state->host, sizeof(state->host), of.host);
    mimo::copy_string(state->module, sizeof(state->module), of.module);
    mimo::copy_string(state->coordinates, sizeof(state->coordinates), of.coordinates);
    mimo::copy_string(state->error, sizeof(state->error), of.error);
    state->phase = of.phase;
    state->pid = of.pid;
    state->heartbeat = of.heartbeat;
    state->progress = of.progress;
    state->progress_time = of.progress_time;
    state->step = of.step;
    state->calls = of.calls;
    state->waiting_call = of.waiting_call;
  });
}

int32_t mimo_run_calls(mimo_run* run, int32_t rank, mimo_call_record* records, int32_t capacity, int32_t* count) {
  return guard([&] {
    const std::vector<const mimo_call_record*> calls = run->run.calls_of(rank);
    *count = std::min(static_cast<int32_t>(calls.size()), capacity);
    for (int32_t i = 0; i < *count; ++i) records[i] = *calls[static_cast<size_t>(i)];
  });
}

int32_t mimo_end_with_parent(int32_t parent, int32_t signal, int32_t exit_code) {
  return guard([&] {
    if (prctl(PR_SET_PDEATHSIG, signal) != 0) {
      throw mimo::Error(MIMO_ERROR_DEVICE, std::string("The system refused to end this process with its launcher: ") +
                                               std::strerror(errno) + ".");
    }
    // The parent may have ended before prctl().
    if (getppid() != parent) _exit(exit_code);
  });
}

}  // extern "C"
