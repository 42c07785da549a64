/* The library itself: version, kind, statuses, errors, and the types of values. */
#pragma once

#include <stdint.h>

/* Incremented with every change of a struct's layout or of semantics: the program rejects a library of another version. */
#define MIMO_ABI_VERSION 32

/* Declares every function: exported, with C linkage. */
#ifdef __cplusplus
#define MIMO_API extern "C" __attribute__((visibility("default")))
#else
#define MIMO_API __attribute__((visibility("default")))
#endif

enum mimo_status {
  MIMO_OK = 0,
  MIMO_ERROR_ARGUMENT = 1,      /* an argument is out of range: a bug in the calling program */
  MIMO_ERROR_OUT_OF_MEMORY = 2, /* the device or the host has no memory left */
  MIMO_ERROR_UNSUPPORTED = 3,   /* this library or device cannot do it */
  MIMO_ERROR_DEVICE = 4,        /* the driver or a vendor library failed */
  MIMO_ERROR_INTERNAL = 5,      /* a C++ exception that should not have happened */
  MIMO_ERROR_PEER = 6,          /* another rank failed, was absent or disagreed */
  MIMO_ERROR_DATA = 7           /* bytes of a file are damaged or of an unknown kind */
};

/* Types of a tensor's elements. */
enum mimo_dtype { MIMO_DTYPE_F32 = 0, MIMO_DTYPE_BF16 = 1, MIMO_DTYPE_I32 = 2, MIMO_DTYPE_U8 = 3, MIMO_DTYPE_F64 = 4 };

MIMO_API int32_t mimo_abi_version(void);
/* Returns "cpu" or "cuda". */
MIMO_API const char* mimo_library_kind(void);
/* Returns a line with the embedded or loaded libraries and their versions. */
MIMO_API const char* mimo_library_versions(void);
/* Returns the error sentence of this thread's last failed call, or "". */
MIMO_API const char* mimo_last_error(void);
