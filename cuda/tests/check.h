// The least a test program needs: a check that names its line, and a count of failures as exit code.
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
