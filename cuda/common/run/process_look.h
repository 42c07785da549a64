// Looks at a process in the system's tables.
#pragma once
#include <cstdint>
#include <string>

namespace mimo {

struct ProcessLook {
  char state = 0;        // 'T' stopped, 'Z' zombie; 0: there is no such process
  int64_t started = 0;   // clock ticks since the machine started: tells processes apart that had one number
  int32_t status = 0;    // of a zombie, as wait() has it; 0 also when this process may not know
};

ProcessLook look_at_process(int32_t pid);

/// How a process with this look has ended: "it was killed by SIGKILL".
std::string manner_of_death(const ProcessLook& look);

/// Kills process `pid` when it is still the one that started then.
void kill_process(int32_t pid, int64_t started);

}  // namespace mimo
