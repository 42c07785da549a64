// Distance of a student's hidden states from a teacher's (docs/spec/elastic.md §11). One block a token.
#include "kernel.cuh"

namespace mimo::cuda {
namespace {

constexpr int threads = 256;
/// Added to squared norms, as in torch's cosine_embedding_loss.
constexpr float epsilon = 1e-12f;

/// Sums of products of a token, of the student with the teacher, itself, and of the teacher with itself; of every thread.
template <class S, class T>
__device__ __forceinline__ void products_of(const S* student, const T* teacher, int64_t width, float (&sum)[3]) {
  __shared__ float shared[3 * 32];
  for (int64_t i = threadIdx.x; i < width; i += threads) {
    const float s = load(student + i), t = load(teacher + i);
    sum[0] += s * t;
    sum[1] += s * s;
    sum[2] += t * t;
  }
  block_sum(sum, shared);
  sum[1] += epsilon;
  sum[2] += epsilon;
}

template <class S, class T>
__global__ void forward_kernel(mimo_hidden_loss_forward_args args) {
  const int64_t token = blockIdx.x;
  const S* const student = static_cast<const S*>(args.student) + token * args.width;
  const T* const teacher = static_cast<const T*>(args.teacher) + token * args.width;
  if (args.cosine) {
    float sum[3] = {};
    products_of(student, teacher, args.width, sum);
    if (threadIdx.x == 0) args.loss[token] = 1.0f - sum[0] / (sqrtf(sum[1]) * sqrtf(sum[2]));
    return;
  }
  __shared__ float shared[32];
  float sum[1] = {};
  for (int64_t i = threadIdx.x; i < args.width; i += threads) {
    const float difference = load(student + i) - load(teacher + i);
    sum[0] += difference * difference;
  }
  block_sum(sum, shared);
  if (threadIdx.x == 0) args.loss[token] = sum[0] / static_cast<float>(args.width);
}

template <class S, class T>
__global__ void backward_kernel(mimo_hidden_loss_backward_args args) {
  const int64_t token = blockIdx.x;
  const S* const student = static_cast<const S*>(args.student) + token * args.width;
  const T* const teacher = static_cast<const T*>(args.teacher) + token * args.width;
  S* const to = static_cast<S*>(args.dstudent) + token * args.width;
  const float weight = args.factor * args.dloss[token];
  float of_student = 2.0f * weight / static_cast<float>(args.width), of_teacher = -of_student;
  if (args.cosine) {
    float sum[3] = {};
    products_of(student, teacher, args.width, sum);
    of_teacher = -weight / (sqrtf(sum[1]) * sqrtf(sum[2]));
    of_student = -of_teacher * sum[0] / sum[1];
  }
  for (int64_t i = threadIdx.x; i < args.width; i += threads) {
    store(to + i, of_student * load(student + i) + of_teacher * load(teacher + i));
  }
}

template <class Body>
void with_two_dtypes(int32_t student, int32_t teacher, Body&& body) {
  with_dtype(student, [&](auto* s) { with_dtype(teacher, [&](auto* t) { body(s, t); }); });
}

}  // namespace

void hidden_loss_forward(mimo_stream& stream, const mimo_hidden_loss_forward_args& args) {
  MIMO_REQUIRE(args.tokens >= 0 && args.width > 0, "hidden_loss_forward");
  with_two_dtypes(args.student_dtype, args.teacher_dtype, [&](auto* s, auto* t) {
    launch(stream, forward_kernel<std::remove_pointer_t<decltype(s)>, std::remove_pointer_t<decltype(t)>>,
           grid_of(args.tokens), dim3(threads), 0, args);
  });
}

void hidden_loss_backward(mimo_stream& stream, const mimo_hidden_loss_backward_args& args) {
  MIMO_REQUIRE(args.tokens >= 0 && args.width > 0, "hidden_loss_backward");
  with_two_dtypes(args.student_dtype, args.teacher_dtype, [&](auto* s, auto* t) {
    launch(stream, backward_kernel<std::remove_pointer_t<decltype(s)>, std::remove_pointer_t<decltype(t)>>,
           grid_of(args.tokens), dim3(threads), 0, args);
  });
}

}  // namespace mimo::cuda
