// Sums of parts that GPUs have put into each other's memory (peer_rows.h).
#include "kernel.cuh"
#include "peer_rows_kernels.h"

namespace mimo::cuda {
namespace {

constexpr int sum_threads = 256;

template <class T, int Width>
__global__ void __launch_bounds__(sum_threads)
    sum_kernel(const T* window, const T* own, T* y, int64_t elements, int size, int rank) {
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * sum_threads + threadIdx.x) * Width;
  if (at >= elements) return;
  float sum[Width] = {};
  for (int member = 0; member < size; ++member) {
    float part[Width];
    read((member == rank ? own : window + member * elements) + at, part);
#pragma unroll
    for (int i = 0; i < Width; ++i) sum[i] = member == 0 ? part[i] : sum[i] + part[i];
  }
  write(y + at, sum);
}

}  // namespace

void add_peer_parts(const PeerTable& peers, const void* own, void* y, int64_t bytes, int32_t dtype, cudaStream_t stream) {
  if (bytes == 0) return;
  with_dtype(dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const int64_t elements = bytes / static_cast<int64_t>(sizeof(T));
    const T* const window = reinterpret_cast<const T*>(peers.windows[peers.rank]);
    const T* const mine = static_cast<const T*>(own);
    T* const sum = static_cast<T*>(y);
    constexpr int wide = vector_width<T>;
    const auto fits = [&](const void* pointer) { return packs_fit<T>(pointer, elements, elements, wide); };
    with_width<wide>(fits(window) && fits(mine) && fits(sum), [&](auto w) {
      sum_kernel<T, w><<<grid_of(ceil_div(ceil_div(elements, w), sum_threads)), sum_threads, 0, stream>>>(
          window, mine, sum, elements, peers.size, peers.rank);
      check(cudaGetLastError(), "launching a kernel");
    });
  });
}

}  // namespace mimo::cuda
