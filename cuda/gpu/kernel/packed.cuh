// Packs of elements kept as raw words: loads can be issued early and the values unpacked when they are needed.
#pragma once
#include "kernel.cuh"

namespace mimo::cuda {

template <class T, int Width>
struct Packed {
  using Word = std::conditional_t<Width * sizeof(T) % 4 == 0, uint32_t, uint16_t>;
  alignas(Width * sizeof(T) < 16 ? Width * sizeof(T) : 16) Word word[Width * sizeof(T) / sizeof(Word)];

  __device__ __forceinline__ float get(int i) const {
    if constexpr (std::is_same_v<T, float>) {
      return __uint_as_float(word[i]);
    } else if constexpr (Width % 2 == 0) {
      return i % 2 == 0 ? lower_bf16(word[i / 2]) : upper_bf16(word[i / 2]);
    } else {
      return lower_bf16(word[i]);
    }
  }
};

/// Loads Width elements; `from` is aligned to their size, at most to 16 bytes.
template <int Width, class T>
__device__ __forceinline__ Packed<T, Width> read_packed(const T* from) {
  return *reinterpret_cast<const Packed<T, Width>*>(from);
}

/// exp(x). Results in bf16 use ex2.approx, whose relative error is at most 2^-21.
__device__ __forceinline__ float exp_for(const float*, float x) { return expf(x); }
__device__ __forceinline__ float exp_for(const bf16*, float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(log2_e * x));
  return power;
}

}  // namespace mimo::cuda
