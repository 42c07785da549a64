// Reductions of collectives; see rank_reduction.h.
#include "rank_reduction.h"

#include "kernel.h"

namespace mimo::MIMO_ISA {
namespace {

/// Elements added at a time: their sums stay in the L1 cache.
constexpr int64_t block = 1024;

inline double load(double value) { return value; }
inline int32_t load(int32_t value) { return value; }
inline void store(double* to, double value) { *to = value; }
inline void store(int32_t* to, int32_t value) { *to = value; }
using MIMO_ISA::load;
using MIMO_ISA::store;

struct Sum {
  static float of(float a, float b) { return a + b; }
  static double of(double a, double b) { return a + b; }
  // Wraps around instead of overflowing.
  static int32_t of(int32_t a, int32_t b) {
    return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
  }
};

struct Max {
  template <class T>
  static T of(T a, T b) {
    return a >= b || a != a ? a : b;
  }
};

template <class Reduction, class Storage, class Accumulator>
void reduce(Storage* to, const void* const* parts, int32_t ranks, int64_t elements) {
  Accumulator sums[block];
  for (int64_t begin = 0; begin < elements; begin += block) {
    const int64_t count = elements - begin < block ? elements - begin : block;
    const Storage* first = static_cast<const Storage*>(parts[0]) + begin;
    const Storage* second = static_cast<const Storage*>(parts[1]) + begin;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) sums[i] = Reduction::of(load(first[i]), load(second[i]));
    for (int32_t rank = 2; rank < ranks; ++rank) {
      const Storage* part = static_cast<const Storage*>(parts[rank]) + begin;
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) sums[i] = Reduction::of(sums[i], load(part[i]));
    }
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) store(&to[begin + i], sums[i]);
  }
}

template <class Reduction>
void reduce_dtype(int32_t dtype, void* to, const void* const* parts, int32_t ranks, int64_t elements) {
  switch (dtype) {
    case MIMO_DTYPE_F32:
      return reduce<Reduction, float, float>(static_cast<float*>(to), parts, ranks, elements);
    case MIMO_DTYPE_BF16:
      return reduce<Reduction, bf16, float>(static_cast<bf16*>(to), parts, ranks, elements);
    case MIMO_DTYPE_F64:
      return reduce<Reduction, double, double>(static_cast<double*>(to), parts, ranks, elements);
    default:
      return reduce<Reduction, int32_t, int32_t>(static_cast<int32_t*>(to), parts, ranks, elements);
  }
}

}  // namespace

void reduce_ranks(int32_t dtype, int32_t reduction, void* to, const void* const* parts, int32_t ranks,
                  int64_t elements) {
  if (reduction == MIMO_REDUCTION_SUM) {
    reduce_dtype<Sum>(dtype, to, parts, ranks, elements);
  } else {
    reduce_dtype<Max>(dtype, to, parts, ranks, elements);
  }
}

}  // namespace mimo::MIMO_ISA
