// Embedding lookup in a table or a vocabulary shard of it, and the gradient of the table (docs/spec/language-model.md
// §5.1).
//
// Backward is deterministic without atomics: tokens are stably sorted by id, and blocks own runs of sorted tokens. A
// block adds the gradient of an id that lies entirely in its run; partial sums of ids that cross a run's boundary are
// stored and added by a second kernel in order.
#include "kernel.cuh"

namespace mimo::cuda {
namespace {

template <class T, int Width>
__global__ void forward_kernel(mimo_embedding_forward_args args, int64_t packs) {
  for_each_pack(args.tokens, packs, [&](int64_t token, int64_t pack) {
    const int64_t row = args.ids[token] - args.vocabulary_start;
    float value[Width] = {};
    if (row >= 0 && row < args.vocabulary_rows) {
      read(static_cast<const T*>(args.table) + row * args.width + pack * Width, value);
#pragma unroll
      for (int i = 0; i < Width; ++i) value[i] *= args.scale;
    }
    write(static_cast<T*>(args.y) + token * args.width + pack * Width, value);
  });
}

constexpr int sort_threads = 256;
constexpr int sorted_per_run = 32;

/// Table row of a token; tokens without a gradient here sort last.
__device__ __forceinline__ int32_t key_of(const mimo_embedding_backward_args& args, int64_t token) {
  const int64_t row = args.ids[token] - args.vocabulary_start, rows = args.vocabulary_rows;
  return static_cast<int32_t>(row >= 0 && row < rows && args.ids[token] != args.padding_id ? row : rows);
}

/// Counting sort: order[rank] = token and sorted_key[rank] = its row, where rank counts the tokens that precede it.
__global__ void sort_kernel(mimo_embedding_backward_args args, int32_t* order, int32_t* sorted_key) {
  __shared__ int32_t shared[sort_threads];
  const int64_t tokens = args.tokens;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * sort_threads + threadIdx.x;
  const int32_t own = token < tokens ? key_of(args, token) : 0;
  int32_t rank = 0;
  for (int64_t first = 0; first < tokens; first += sort_threads) {
    __syncthreads();
    const int64_t other = first + threadIdx.x;
    shared[threadIdx.x] = other < tokens ? key_of(args, other) : INT32_MAX;
    __syncthreads();
#pragma unroll 8
    for (int i = 0; i < sort_threads; ++i) {
      const int32_t key = shared[i];
      rank += key < own || (key == own && first + i < token) ? 1 : 0;
    }
  }
  if (token >= tokens) return;
  order[rank] = static_cast<int32_t>(token);
  sorted_key[rank] = own;
}

/// Sums the runs of sorted tokens. head[run]: partial sum of the id that began in an earlier run; tail[run]: of the id
/// that continues in the next. A run that lies inside one id has a head only.
template <class T, int Width>
__global__ void add_runs_kernel(const T* dy, const int32_t* order, const int32_t* sorted_key, int64_t tokens,
                                int64_t rows, int64_t width, float scale, float* head, float* tail, float* dtable) {
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * Width;
  if (column >= width) return;
  const int64_t run = blockIdx.y;
  const int64_t begin = run * sorted_per_run, end = smaller(begin + sorted_per_run, tokens);
  float sum[Width] = {};
  bool from_before = begin > 0 && sorted_key[begin - 1] == sorted_key[begin];
  for (int64_t at = begin; at < end; ++at) {
    const int32_t key = sorted_key[at];
    if (key == rows) break;
    float value[Width];
    read(dy + order[at] * width + column, value);
#pragma unroll
    for (int i = 0; i < Width; ++i) sum[i] += scale * value[i];
    const bool goes_on = at + 1 < tokens && sorted_key[at + 1] == key;
    if (goes_on && at + 1 < end) continue;
    if (from_before) {
      write(head + run * width + column, sum);
    } else if (goes_on) {
      write(tail + run * width + column, sum);
    } else {
      float before[Width];
      float* to = dtable + key * width + column;
      read(to, before);
#pragma unroll
      for (int i = 0; i < Width; ++i) before[i] += sum[i];
      write(to, before);
    }
    from_before = false;
#pragma unroll
    for (int i = 0; i < Width; ++i) sum[i] = 0;
  }
}

/// dtable += the sum of each id that begins in one run and ends in a later one.
__global__ void add_borders_kernel(const int32_t* sorted_key, int64_t tokens, int64_t rows, int64_t width,
                                   const float* head, const float* tail, float* dtable) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t run = blockIdx.y, last = (run + 1) * sorted_per_run - 1;
  if (column >= width || last + 1 >= tokens) return;
  const int32_t key = sorted_key[last];
  if (key == rows || sorted_key[last + 1] != key) return;
  // Only the run in which the id begins adds its sum.
  const int64_t begin = run * sorted_per_run;
  if (begin > 0 && sorted_key[begin] == key && sorted_key[begin - 1] == key) return;
  float sum = tail[run * width + column];
  for (int64_t next = run + 1; next * sorted_per_run < tokens && sorted_key[next * sorted_per_run] == key; ++next) {
    sum += head[next * width + column];
  }
  dtable[key * width + column] += sum;
}

}  // namespace

void embedding_forward(mimo_stream& stream, const mimo_embedding_forward_args& args) {
  MIMO_REQUIRE(args.tokens >= 0 && args.width > 0 && args.vocabulary_rows >= 0, "embedding_forward");
  if (args.tokens == 0) return;
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    constexpr int wide = vector_width<T>;
    const auto fits = [&](const void* pointer) { return packs_fit<T>(pointer, args.width, args.width, wide); };
    with_width<wide>(fits(args.table) && fits(args.y), [&](auto w) {
      const auto [grid, block] = cover(args.tokens, args.width / w);
      launch(stream, forward_kernel<T, w>, grid, block, 0, args, args.width / w);
    });
  });
}

void embedding_backward(mimo_stream& stream, const mimo_embedding_backward_args& args) {
  MIMO_REQUIRE(args.tokens >= 0 && args.width > 0 && args.vocabulary_rows >= 0, "embedding_backward");
  MIMO_REQUIRE(args.tokens <= 65535 * sorted_per_run && args.vocabulary_rows < INT32_MAX, "embedding_backward");
  if (args.tokens == 0) return;
  const int64_t runs = ceil_div(args.tokens, sorted_per_run);
  Workspace index_space(&stream, 2 * args.tokens * static_cast<int64_t>(sizeof(int32_t)));
  Workspace sum_space(&stream, 2 * runs * args.width * static_cast<int64_t>(sizeof(float)));
  int32_t* const order = index_space.as<int32_t>();
  int32_t* const sorted_key = order + args.tokens;
  float* const head = sum_space.as<float>();
  float* const tail = head + runs * args.width;
  launch(stream, sort_kernel, grid_of(ceil_div(args.tokens, sort_threads)), dim3(sort_threads), 0, args, order,
         sorted_key);
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    constexpr int wide = vector_width<T>;
    const bool fits = packs_fit<T>(args.dy, args.width, args.width, wide) &&
                      packs_fit<float>(args.dtable, args.width, args.width, wide);
    with_width<wide>(fits, [&](auto w) {
      launch(stream, add_runs_kernel<T, w>, grid_of(ceil_div(args.width, 128 * w), runs), dim3(128), 0,
             static_cast<const T*>(args.dy), order, sorted_key, args.tokens, args.vocabulary_rows, args.width, args.scale,
             head, tail, args.dtable);
    });
  });
  launch(stream, add_borders_kernel, grid_of(ceil_div(args.width, 128), runs), dim3(128), 0, sorted_key, args.tokens,
         args.vocabulary_rows, args.width, head, tail, args.dtable);
}

}  // namespace mimo::cuda
