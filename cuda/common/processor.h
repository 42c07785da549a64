// Finds the instructions that this processor and its operating system offer.
#pragma once
#include <cstdint>
#include <string>

namespace mimo {

// MIMO_CPU_INSTRUCTIONS=avx2 or =sse2 names the most that may be used; the library refuses the latter as it does a
// processor that has no more.
/// AVX2, FMA and BMI2, which the CPU library needs.
bool processor_has_avx2();
/// AVX-512 F, BW, DQ and VL.
bool processor_has_avx512();
/// As /proc/cpuinfo has it.
std::string processor_name();
/// Cores that this process may use.
int32_t usable_cores();

}  // namespace mimo
