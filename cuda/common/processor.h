// Instruction sets that the processor and the operating system support.
#pragma once
#include <cstdint>
#include <string>

namespace mimo {

// MIMO_CPU_INSTRUCTIONS=avx2 or =sse2 limits the instruction sets; with sse2 the library refuses to load, as on a
// processor without AVX2.
/// AVX2, FMA and BMI2, which the CPU library needs.
bool processor_has_avx2();
/// AVX-512 F, BW, DQ and VL.
bool processor_has_avx512();
/// The name in /proc/cpuinfo.
std::string processor_name();
/// Number of cores that this process may use.
int32_t usable_cores();

}  // namespace mimo
