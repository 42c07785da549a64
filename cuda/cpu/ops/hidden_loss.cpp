// Distance of a student's hidden states from a teacher's, token by token (docs/spec/elastic.md §11).
#include "kernel.h"

namespace mimo::MIMO_ISA {
namespace {

constexpr int64_t tokens_at_once = 16;
/// Added to squared norms, as in torch's cosine_embedding_loss.
constexpr float epsilon = 1e-12f;

/// Calls body(token, student row, teacher row) for every token.
template <class Args, class Body>
void for_each_row(mimo_stream& stream, const Args& args, Body&& body) {
  with_dtype(args.student_dtype, [&](auto* a) {
    using S = std::remove_pointer_t<decltype(a)>;
    with_dtype(args.teacher_dtype, [&](auto* b) {
      using T = std::remove_pointer_t<decltype(b)>;
      parallel_range(stream.device->threads, args.tokens, tokens_at_once, [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
          const int64_t row = token * args.width;
          body(token, static_cast<const S*>(args.student) + row, static_cast<const T*>(args.teacher) + row);
        }
      });
    });
  });
}

struct Products {
  float both, student, teacher;
};

template <class S, class T>
Products products_of(const S* student, const T* teacher, int64_t width) {
  const Sums own = sums_over(width, [=](int64_t i, float& both, float& square) {
    const float s = load(student[i]);
    both = s * load(teacher[i]);
    square = s * s;
  });
  const float other = sum_over(width, [=](int64_t i) { return load(teacher[i]) * load(teacher[i]); });
  return {own.first, own.second + epsilon, other + epsilon};
}

}  // namespace

void hidden_loss_forward(mimo_stream& stream, const mimo_hidden_loss_forward_args& args) {
  MIMO_REQUIRE(args.tokens >= 0 && args.width > 0, "hidden_loss_forward");
  const int64_t width = args.width;
  for_each_row(stream, args, [&](int64_t token, const auto* student, const auto* teacher) {
    if (args.cosine) {
      const Products of = products_of(student, teacher, width);
      args.loss[token] = 1.0f - of.both / (std::sqrt(of.student) * std::sqrt(of.teacher));
      return;
    }
    const float sum = sum_over(width, [=](int64_t i) {
      const float difference = load(student[i]) - load(teacher[i]);
      return difference * difference;
    });
    args.loss[token] = sum / static_cast<float>(width);
  });
}

void hidden_loss_backward(mimo_stream& stream, const mimo_hidden_loss_backward_args& args) {
  MIMO_REQUIRE(args.tokens >= 0 && args.width > 0, "hidden_loss_backward");
  const int64_t width = args.width;
  for_each_row(stream, args, [&](int64_t token, const auto* student, const auto* teacher) {
    using S = std::remove_cv_t<std::remove_pointer_t<decltype(student)>>;
    S* const to = static_cast<S*>(args.dstudent) + token * width;
    const float weight = args.factor * args.dloss[token];
    float of_student = 2.0f * weight / static_cast<float>(width), of_teacher = -of_student;
    if (args.cosine) {
      const Products of = products_of(student, teacher, width);
      of_teacher = -weight / (std::sqrt(of.student) * std::sqrt(of.teacher));
      of_student = -of_teacher * of.both / of.student;
    }
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) store(&to[i], of_student * load(student[i]) + of_teacher * load(teacher[i]));
  });
}

}  // namespace mimo::MIMO_ISA
