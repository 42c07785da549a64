// Symbols that g++'s libstdc++ takes from a C library younger than the one that a release is linked for.
#include <dlfcn.h>
#include <pthread.h>
#include <time.h>

// Tells libstdc++ (glibc 2.32) that counters of shared pointers need no atomic instructions; false is always right.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;

// Waits until a time of any clock (glibc 2.30); on an older C library, as long by the clock of the day. Hidden by exports.map.
extern "C" int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                                      const timespec* until) {
  using Wait = int (*)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*);
  static const Wait newer = reinterpret_cast<Wait>(dlsym(RTLD_NEXT, "pthread_cond_clockwait"));
  if (newer != nullptr) return newer(condition, mutex, clock, until);
  constexpr long second = 1'000'000'000;
  timespec now, end;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &end);
  end.tv_sec += until->tv_sec - now.tv_sec;
  end.tv_nsec += until->tv_nsec - now.tv_nsec;
  for (; end.tv_nsec < 0; end.tv_nsec += second) --end.tv_sec;
  for (; end.tv_nsec >= second; end.tv_nsec -= second) ++end.tv_sec;
  return pthread_cond_timedwait(condition, mutex, &end);
}
