// Programmatic dependent launch (Hopper and later): a kernel starts while the previous kernel of the stream still runs,
// which hides its launch latency, about 1 µs: noticeable for small and memory-bound operations.
#pragma once
#include "kernel.cuh"

namespace mimo::cuda {

/// Queues a kernel with programmatic stream serialisation: it may start before any previous kernel of the stream has
/// ended. Its threads must call previous_is_done() before they read memory that another kernel may have written, and
/// before any write.
template <class... Parameters, class... Arguments>
void launch_early(mimo_stream& stream, void (*kernel)(Parameters...), dim3 grid, dim3 block, int64_t shared_bytes,
                  Arguments... arguments) {
  if (stream.device->compute_major < 9) {
    launch(stream, kernel, grid, block, shared_bytes, arguments...);
    return;
  }
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  if (shared_bytes > 48 * 1024) {
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared_bytes)),
          "asking for shared memory");
  }
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream.handle(), config.attrs = &early, config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), "launching a kernel");
}

/// griddepcontrol.wait: returns when all previous kernels have ended and their writes are visible. To be called in
/// kernels launched with launch_early().
__device__ __forceinline__ void previous_is_done() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// griddepcontrol.launch_dependents: the next kernel, if launched early, may start once all blocks have called this or
/// exited.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Σ value[i * stride] over i = first, first + step, … below `count`, in that order. Eight loads are in flight at a
/// time, those of the remainder too.
__device__ __forceinline__ float strided_sum(const float* value, int64_t count, int64_t stride, int first, int step) {
  constexpr int at_once = 8;
  float sum = 0;
  for (int64_t i = first; i < count; i += at_once * step) {
    float read[at_once];
#pragma unroll
    for (int j = 0; j < at_once; ++j) read[j] = i + j * step < count ? value[(i + j * step) * stride] : 0.0f;
#pragma unroll
    for (int j = 0; j < at_once; ++j) sum += read[j];
  }
  return sum;
}

}  // namespace mimo::cuda
