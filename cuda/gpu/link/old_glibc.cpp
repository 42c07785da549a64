// What g++'s libstdc++ takes from a C library younger than the one that a release is linked for.

// Tells libstdc++ (glibc 2.32) that counters of shared pointers need no atomic instructions; false is always right.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;
