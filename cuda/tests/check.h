// Minimal test support: a check that reports its line, and the number of failures as exit code.
#pragma once
#include <cstdio>

inline int failures = 0;

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) {                                                         \
      ++failures;                                                               \
      std::printf("%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);     \
    }                                                                           \
  } while (0)
