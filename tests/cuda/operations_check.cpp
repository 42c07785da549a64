// Every operation of mimo.h: the CPU library against the CUDA library, in fp32 and bf16.
//
//   g++ -std=c++20 -O1 tests/cuda/*.cpp -o operations_check -ldl
//   [compute-sanitizer --target-processes all] operations_check libmimo_cpu.so libmimo_cuda.so [--large] [--only NAME] [--repeat] [--timed] [--graphs] [--part I/N]
//
// --large adds sizes of real models; --repeat runs every case twice on the CUDA library in deterministic mode and wants the
// same bytes; --timed first times the algorithms that vendor libraries offer for the case, and checks those;
// --graphs runs every case with CUDA graphs on, until every operation was launched by one, and wants the same bytes; then all
// cases in turn, at addresses that change;
// --part 0/8 takes every eighth case from the first on, for several GPUs or processes at once.
// Prints a line an output that is off, a line a case, and last "N checks, N failed". A failed CUDA call ends the process
// that made it: the rest goes on in another one.
#include <malloc.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cases.h"

using namespace check;

namespace {

/// fp32: a few units in the last place. bf16: half a unit in the last place of bf16 is 2^-9 of a value; its largest difference may be
/// that of a value that cancelled.
Limits limits_of(int32_t precision) {
  return precision == MIMO_DTYPE_F32 ? Limits{2e-6, 5e-5} : Limits{1.0 / 256, 1.0 / 32};
}

struct Outcome {
  int checks = 0, failures = 0;
};

/// Makes the library take the fastest of the algorithms that are offered for a case.
void take_timed_algorithms(const Case& one, int32_t precision, const Library& cuda) {
  std::map<std::string, std::vector<float>> kept;
  const uint64_t seed = std::hash<std::string>{}(one.name);
  {
    // Results of the reference that are handed on come from this library here.
    Run reference(cuda, true, precision, seed, kept), run(cuda, false, precision, seed, kept);
    one.body(reference);
    one.body(run);
  }
  int32_t left_out = 0;
  MIMO_CHECK_CALL(cuda, mimo_device_time_algorithms, cuda.device, cuda.stream, &left_out);
  int64_t bytes = 0;
  MIMO_CHECK_CALL(cuda, mimo_device_timed_algorithms, cuda.device, nullptr, 0, &bytes);
  std::string choices(static_cast<size_t>(bytes), ' ');
  MIMO_CHECK_CALL(cuda, mimo_device_timed_algorithms, cuda.device, choices.data(), bytes, &bytes);
  MIMO_CHECK_CALL(cuda, mimo_device_set_algorithms, cuda.device, choices.c_str());
}

void run_case(const Case& one, int32_t precision, const Library& cpu, const Library& cuda, bool repeat, Outcome& outcome) {
  std::map<std::string, std::vector<float>> kept;
  const uint64_t seed = std::hash<std::string>{}(one.name);
  Run reference(cpu, true, precision, seed, kept), actual(cuda, false, precision, seed, kept);
  one.body(reference);
  one.body(actual);
  const Limits limits = limits_of(precision);
  Difference worst;
  const char* kind = precision == MIMO_DTYPE_F32 ? "f32" : "bf16";
  for (size_t i = 0; i < reference.outputs.size(); ++i) {
    const Output& output = reference.outputs[i];
    const Difference d = compare(actual.outputs[i].values, output.values);
    const bool good = d.wrong == 0 && (output.exact ? d.largest == 0 : d.rms <= limits.rms && d.largest <= limits.largest);
    outcome.checks++;
    if (!good) {
      outcome.failures++;
      std::printf("  WRONG %-36s %-5s %-16s rms %.2e  largest %.2e  not finite %lld\n", one.name.c_str(), kind,
                  output.name.c_str(), d.rms, d.largest, static_cast<long long>(d.wrong));
    }
    if (!output.exact) {
      worst.rms = std::max(worst.rms, d.rms);
      worst.largest = std::max(worst.largest, d.largest);
    }
  }
  std::printf("%-42s %-5s rms %.2e  largest %.2e\n", one.name.c_str(), kind, worst.rms, worst.largest);
  if (repeat) {
    Run again(cuda, false, precision, seed, kept);
    one.body(again);
    for (size_t i = 0; i < again.outputs.size(); ++i) {
      outcome.checks++;
      if (std::memcmp(again.outputs[i].values.data(), actual.outputs[i].values.data(), again.outputs[i].values.size() * 8) != 0) {
        outcome.failures++;
        std::printf("  WRONG %-36s %-5s %-16s differs between two runs\n", one.name.c_str(), kind,
                    again.outputs[i].name.c_str());
      }
    }
  }
  std::fflush(stdout);
}

/// The case again and again with graphs on: from the second time on its memory has the same addresses, so the third is
/// recorded. All give the bytes that one by one gave.
void run_in_graphs(const Case& one, int32_t precision, const Library& cpu, const Library& cuda, Outcome& outcome) {
  std::map<std::string, std::vector<float>> kept;
  const uint64_t seed = std::hash<std::string>{}(one.name);
  const auto statistics = [&] {
    mimo_graph_statistics now{};
    MIMO_CHECK_CALL(cuda, mimo_stream_graph_statistics, cuda.stream, &now);
    return now;
  };
  {
    Run reference(cpu, true, precision, seed, kept);
    one.body(reference);
  }
  std::vector<Output> expected;
  for (int round = 0; round < 4; ++round) {
    if (round == 1) MIMO_CHECK_CALL(cuda, mimo_stream_set_graphs, cuda.stream, 1);
    const mimo_graph_statistics before = statistics();
    Run run(cuda, false, precision, seed, kept);
    one.body(run);
    const mimo_graph_statistics after = statistics();
    if (round == 0) expected = run.outputs;
    bool same = true;
    for (size_t i = 0; i < expected.size(); ++i) {
      same = same && std::memcmp(run.outputs[i].values.data(), expected[i].values.data(), expected[i].values.size() * 8) == 0;
    }
    const bool in_graphs = round < 3 || expected.empty() || (after.operations_alone == before.operations_alone &&
                                                            after.operations_in_graphs > before.operations_in_graphs);
    outcome.checks += 2;
    outcome.failures += !same + !in_graphs;
    if (!same) std::printf("  WRONG %-36s differs in graphs, round %d\n", one.name.c_str(), round);
    if (!in_graphs) std::printf("  WRONG %-36s is not launched as graphs\n", one.name.c_str());
  }
  MIMO_CHECK_CALL(cuda, mimo_stream_set_graphs, cuda.stream, 0);
}

/// All cases in turn with graphs on, so that recordings of many shapes share the temporary memory. Their tensors move once in
/// between, and the pool returns its memory once. Returns the cases that gave other bytes than one by one.
std::vector<std::string> differing_in_turns(const Cases& all, int32_t precision, const Library& cpu, const Library& cuda) {
  std::vector<std::map<std::string, std::vector<float>>> kept(all.size());
  std::vector<std::vector<Output>> expected;
  const auto run = [&](size_t at, const Library& library) {
    Run one(library, &library == &cpu, precision, std::hash<std::string>{}(all[at].name), kept[at]);
    all[at].body(one);
    return std::move(one.outputs);
  };
  for (size_t at = 0; at < all.size(); ++at) {
    run(at, cpu);
    expected.push_back(run(at, cuda));
  }
  std::vector<std::string> differing;
  std::vector<void*> displacing;
  MIMO_CHECK_CALL(cuda, mimo_stream_set_graphs, cuda.stream, 1);
  constexpr int rounds = 8, moves_at = 3, trims_at = 6;
  for (int round = 0; round < rounds; ++round) {
    if (round == moves_at) {
      for (int64_t bytes = 64; bytes <= int64_t{1} << 24; bytes *= 2) {
        displacing.emplace_back();
        MIMO_CHECK_CALL(cuda, mimo_memory_allocate, cuda.stream, bytes, MIMO_TAG_DATA, &displacing.back());
      }
    }
    if (round == trims_at) MIMO_CHECK_CALL(cuda, mimo_memory_trim, cuda.device);
    for (size_t at = 0; at < all.size(); ++at) {
      const std::vector<Output> outputs = run(at, cuda);
      for (size_t i = 0; i < outputs.size(); ++i) {
        const std::vector<double>&is = outputs[i].values, &was = expected[at][i].values;
        if (std::memcmp(is.data(), was.data(), was.size() * sizeof(double)) != 0) {
          differing.push_back(all[at].name + " " + outputs[i].name + ", round " + std::to_string(round));
        }
      }
    }
  }
  MIMO_CHECK_CALL(cuda, mimo_stream_set_graphs, cuda.stream, 0);
  for (void* address : displacing) MIMO_CHECK_CALL(cuda, mimo_memory_free, cuda.stream, address);
  return differing;
}

/// Memory that the processes share.
struct Progress {
  Outcome outcome;
  size_t next;  // case and precision that come next
};

/// Runs the remaining cases in a process of its own. Returns whether it came to the end.
template <class Body>
bool in_a_process(Body&& body) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    body();
    std::fflush(stdout);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) {
    std::fprintf(stderr, "operations_check CPU_LIBRARY CUDA_LIBRARY [--large] [--only NAME] [--repeat] [--timed] [--graphs] [--part I/N]\n");
    return 2;
  }
  bool large = false, repeat = false, graphs = false, timed = false;
  std::string only;
  size_t part = 0, parts = 1;
  for (int i = 3; i < count; ++i) {
    const std::string flag = arguments[i];
    if (flag == "--large") large = true;
    if (flag == "--repeat") repeat = true;
    if (flag == "--graphs") graphs = true;
    if (flag == "--timed") timed = true;
    if (flag == "--only" && i + 1 < count) only = arguments[++i];
    if (flag == "--part" && i + 1 < count && std::sscanf(arguments[++i], "%zu/%zu", &part, &parts) != 2) parts = 0;
    if (parts == 0) return 2;
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  // A graph that reads freed memory of the host gives other bytes.
  mallopt(M_PERTURB, 0xA5);
  Cases wanted;
  for (size_t number = 0; Case& one : cases(large)) {
    if (number++ % parts == part && one.name.find(only) != std::string::npos) wanted.push_back(std::move(one));
  }
  constexpr int32_t precisions[] = {MIMO_DTYPE_F32, MIMO_DTYPE_BF16};
  auto* progress = static_cast<Progress*>(
      mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  *progress = {};
  const auto open_cuda = [&] {
    Library cuda = open_library(arguments[2]);
    if (graphs) {
      void* scratch = nullptr;
      MIMO_CHECK_CALL(cuda, mimo_memory_allocate, cuda.stream, 128, MIMO_TAG_DATA, &scratch);
      cuda.scratch = static_cast<char*>(scratch);
    }
    if (repeat || graphs) MIMO_CHECK_CALL(cuda, mimo_device_set_deterministic, cuda.device, 1);
    return cuda;
  };
  while (progress->next < 2 * wanted.size()) {
    const bool whole = in_a_process([&] {
      const Library cpu = open_library(arguments[1]), cuda = open_cuda();
      if (progress->next == 0) std::printf("%s\n", cuda.symbol<const char*()>("mimo_library_versions")());
      for (; progress->next < 2 * wanted.size(); ++progress->next) {
        const Case& one = wanted[progress->next / 2];
        const int32_t precision = precisions[progress->next % 2];
        if (timed) take_timed_algorithms(one, precision, cuda);
        if (graphs) {
          run_in_graphs(one, precision, cpu, cuda, progress->outcome);
        } else {
          run_case(one, precision, cpu, cuda, repeat, progress->outcome);
        }
      }
    });
    if (whole) break;
    progress->outcome.checks++;
    progress->outcome.failures++;
    std::printf("  WRONG %-36s %-5s ended the process\n", wanted[progress->next / 2].name.c_str(),
                progress->next % 2 == 0 ? "f32" : "bf16");
    progress->next++;
  }
  for (const int32_t precision : precisions) {
    if (!graphs) break;
    progress->outcome.checks++;
    const bool whole = in_a_process([&] {
      const std::vector<std::string> differing = differing_in_turns(wanted, precision, open_library(arguments[1]), open_cuda());
      for (const std::string& name : differing) std::printf("  WRONG %s: differs in graphs of several cases\n", name.c_str());
      progress->outcome.failures += !differing.empty();
    });
    const char* const dtype = precision == MIMO_DTYPE_F32 ? "f32" : "bf16";
    std::printf(whole ? "all cases in turn %s\n" : "  WRONG all cases in turn %s ended the process\n", dtype);
    progress->outcome.failures += !whole;
  }
  std::printf("%d checks, %d failed\n", progress->outcome.checks, progress->outcome.failures);
  return progress->outcome.failures == 0 ? 0 : 1;
}
