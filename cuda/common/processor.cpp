// Uses cpuid directly: __builtin_cpu_supports needs a run-time part that some tool chains lack.
#include "processor.h"

#include <cpuid.h>
#include <sched.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>

namespace mimo {
namespace {

constexpr uint64_t avx_state = 0x6;      // XCR0: the system saves xmm and ymm
constexpr uint64_t avx512_state = 0xe6;  // ... and zmm and mask registers

struct Features {
  bool avx2 = false, avx512 = false;
};

uint64_t saved_state() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

Features read_features() {
  Features features;
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return features;
  const bool fma = c & bit_FMA;
  if (!(c & bit_OSXSAVE)) return features;
  const uint64_t state = saved_state();
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return features;
  const auto has = [&](uint32_t bits) { return (b & bits) == bits; };
  features.avx2 = fma && (state & avx_state) == avx_state && has(bit_AVX2 | bit_BMI2);
  features.avx512 = features.avx2 && (state & avx512_state) == avx512_state &&
                    has(bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL);
  return features;
}

/// Whether MIMO_CPU_INSTRUCTIONS, an upper bound, excludes this instruction set.
bool left_out(const char* instructions) {
  const char* most = std::getenv("MIMO_CPU_INSTRUCTIONS");
  if (most == nullptr) return false;
  if (std::strcmp(most, "sse2") == 0) return true;
  return std::strcmp(most, "avx2") == 0 && std::strcmp(instructions, "avx2") != 0;
}

}  // namespace

bool processor_has_avx2() {
  static const bool there = read_features().avx2 && !left_out("avx2");
  return there;
}

bool processor_has_avx512() {
#ifdef MIMO_WITHOUT_AVX512
  return false;
#endif
  static const bool there = read_features().avx512 && !left_out("avx512");
  return there;
}

int32_t usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  // More cores than cpu_set_t holds.
  const unsigned cores = std::thread::hardware_concurrency();
  return cores == 0 ? 1 : static_cast<int32_t>(cores);
}

std::string processor_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "x86-64";
}

}  // namespace mimo
