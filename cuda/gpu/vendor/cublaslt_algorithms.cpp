// Times cuBLASLt's algorithms for a product, and for its parts under our own split-K: a product with few output tiles
// and a long sum (a thin weight gradient) is split along k. Partial results are fp32, added in a separate pass in a
// fixed order; algorithms that reduce into the bf16 result are not candidates.
#include <algorithm>
#include <cstdio>
#include <type_traits>

#include "cublaslt_plans.h"
#include "error.h"

namespace mimo::cuda {
namespace {

constexpr int wanted_answers = 16;
constexpr size_t most_workspace = 64 << 20;
constexpr uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
/// A Hopper output tile. Products of fewer than two tiles for each SM may gain from split-K.
constexpr int64_t tile_rows = 128, tile_columns = 256;
constexpr int32_t most_cut_answers = 6;
constexpr int32_t parts[] = {2, 3, 4, 6, 8};
constexpr int64_t fewest_rows_of_a_part = 512;

int64_t bytes_of(int32_t dtype) { return dtype == MIMO_DTYPE_F32 ? 4 : 2; }

/// An operand, or its part that candidates use in turn.
struct Span {
  int64_t elements, dtype, alignment;

  Span(int64_t rows, int64_t columns, int64_t stride, int64_t batch, int64_t batch_stride, int32_t dtype, int32_t alignment)
      : elements((rows - 1) * stride + columns + (batch - 1) * batch_stride), dtype(dtype), alignment(alignment) {}
  /// Bytes of one set, padded so that every set has the same alignment.
  int64_t bytes() const {
    constexpr int64_t most_alignment = 256;
    return (elements * bytes_of(static_cast<int32_t>(dtype)) + alignment + most_alignment - 1) / most_alignment *
           most_alignment;
  }
};

/// `sets` filled copies of an operand.
class Operands {
 public:
  Operands(mimo_stream& stream, const Span& span, int64_t sets, double scale)
      : span_(span), memory_(&stream, span.bytes() * sets) {
    const auto dtype = static_cast<int32_t>(span.dtype);
    fill_normal(stream, memory_.as<void>(), span.bytes() * sets / bytes_of(dtype), scale, dtype);
  }
  void* set(int64_t index) const {
    // Offsets the memory so that its alignment is no better than that of the shape's operand.
    const int64_t offset = span_.alignment < 256 ? span_.alignment : 0;
    return memory_.as<char>() + index * span_.bytes() + offset;
  }

 private:
  Span span_;
  Workspace memory_;
};

}  // namespace

std::string text_of(const ProductShape& s) {
  std::string text = "product";
  add_values(text, "sizes", {s.m, s.n, s.k});
  add_values(text, "transposed", {s.transpose_a, s.transpose_b});
  add_values(text, "strides", {s.a_stride, s.b_stride, s.c_stride});
  if (s.batch > 1) add_values(text, "batch", {s.batch, s.a_batch_stride, s.b_batch_stride, s.c_batch_stride});
  add_values(text, "dtypes", {s.dtype, s.c_dtype});
  add_values(text, "aligned", {s.a_alignment, s.b_alignment, s.c_alignment});
  if (s.epilogue == Epilogue::bias) text += " with bias";
  if (s.epilogue == Epilogue::gelu) text += " with bias and GELU";
  if (s.epilogue == Epilogue::gelu_gradient) text += " with a GELU's gradient";
  if (s.accumulates) text += " added";
  if (s.multiprocessors > 0) add_values(text, "multiprocessors", {s.multiprocessors});
  return text;
}

std::string text_of(const cublasLtMatmulAlgo_t& algorithm) {
  static_assert(std::is_trivially_copyable_v<cublasLtMatmulAlgo_t>);
  std::string text;
  for (size_t i = 0; i < sizeof(algorithm); ++i) {
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", reinterpret_cast<const unsigned char*>(&algorithm)[i]);
    text += digits;
  }
  return text;
}

bool read_algorithm(const std::string& text, cublasLtMatmulAlgo_t* algorithm) {
  if (text.size() != 2 * sizeof(*algorithm) || text.find_first_not_of("0123456789abcdef") != std::string::npos) return false;
  for (size_t i = 0; i < sizeof(*algorithm); ++i) {
    reinterpret_cast<unsigned char*>(algorithm)[i] =
        static_cast<unsigned char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  }
  return true;
}

int32_t CublasLt::State::time_algorithms(mimo_stream& stream) {
  int32_t left_out = 0;
  for (const auto& [shape, plan] : plans) {
    if (!plan.exists || !algorithms.wanted(text_of(shape))) continue;
    try {
      time_product(stream, shape, plan);
    } catch (const Error& error) {
      if (error.status() != MIMO_ERROR_OUT_OF_MEMORY) throw;
      ++left_out;
    }
  }
  return left_out;
}

std::vector<ProductPlan> CublasLt::State::candidates(const ProductShape& s, const ProductPlan& first) const {
  std::vector<ProductPlan> found{first};
  const auto add = [&](const cublasLtMatmulAlgo_t& algorithm, size_t workspace_bytes) {
    for (const ProductPlan& known : found) {
      if (std::memcmp(&known.algorithm, &algorithm, sizeof(algorithm)) == 0) return;
    }
    found.push_back(first);
    found.back().algorithm = algorithm;
    found.back().workspace_bytes = workspace_bytes;
  };
  for (const auto& answer : answers(s, first, wanted_answers, reduction, most_workspace)) {
    if (answer.state == CUBLAS_STATUS_SUCCESS) add(answer.algo, answer.workspaceSize);
  }
  const int64_t tiles = ((s.m + tile_rows - 1) / tile_rows) * ((s.n + tile_columns - 1) / tile_columns) * s.batch;
  if (tiles >= 2 * multiprocessors) return found;
  const size_t whole = std::min<size_t>(found.size(), most_cut_answers);
  for (size_t i = 0; i < whole; ++i) {
    for (const int32_t count : parts) {
      if (s.k / count < fewest_rows_of_a_part) break;
      cublasLtMatmulAlgo_t algorithm = found[i].algorithm;
      const auto configure = [&](cublasLtMatmulAlgoConfigAttributes_t name, auto value) {
        return lt.cublasLtMatmulAlgoConfigSetAttribute(&algorithm, name, &value, sizeof(value)) == CUBLAS_STATUS_SUCCESS;
      };
      size_t workspace_bytes = 0;
      if (configure(CUBLASLT_ALGO_CONFIG_SPLITK_NUM, count) && configure(CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, reduction) &&
          fits(first, algorithm, &workspace_bytes) && workspace_bytes <= most_workspace) {
        add(algorithm, workspace_bytes);
      }
    }
  }
  return found;
}

void CublasLt::State::time_product(mimo_stream& stream, const ProductShape& s, const ProductPlan& first) {
  const Span a(s.transpose_a ? s.k : s.m, s.transpose_a ? s.m : s.k, s.a_stride, s.batch, s.a_batch_stride, s.dtype,
               s.a_alignment);
  const Span b(s.transpose_b ? s.n : s.k, s.transpose_b ? s.k : s.n, s.b_stride, s.batch, s.b_batch_stride, s.dtype,
               s.b_alignment);
  const Span c(s.m, s.n, s.c_stride, s.batch, s.c_batch_stride, s.c_dtype, s.c_alignment);
  const int64_t sets = operand_sets(stream, a.bytes() + b.bytes() + 2 * c.bytes());
  const Operands left(stream, b, sets, 0.02), right(stream, a, sets, 1), results(stream, c, sets, 1);
  const bool biased = s.epilogue == Epilogue::bias || s.epilogue == Epilogue::gelu;
  const bool with_gelu = s.epilogue == Epilogue::gelu || s.epilogue == Epilogue::gelu_gradient;
  const Operands beside(stream, with_gelu ? c : Span(1, 1, 1, 1, 0, s.c_dtype, 256), with_gelu ? sets : 1, 1);
  const Operands bias(stream, Span(1, s.n, s.n, 1, 0, s.c_dtype, 256), 1, 1);
  const std::vector<ProductPlan> plans_of_candidates = candidates(s, first);
  const float beta = s.accumulates ? 1 : 0;
  std::vector<Candidate> queued;
  std::vector<const ProductPlan*> plan_of;
  for (const ProductPlan& plan : plans_of_candidates) {
    Candidate candidate = [&, beta](int64_t turn) {
      const int64_t set = turn % sets;
      launch(stream, plan,
             {left.set(set), right.set(set), results.set(set), biased ? bias.set(0) : nullptr,
              with_gelu ? beside.set(set) : nullptr},
             1, beta);
    };
    // Also loads the kernel's code, which must not happen while the SM-occupying kernel runs: loading may wait for it.
    if (!runs(candidate)) continue;
    queued.push_back(std::move(candidate));
    plan_of.push_back(&plan);
  }
  if (queued.empty()) return;
  const OccupiedMultiprocessors occupied(*stream.device,
                                         s.multiprocessors > 0 ? stream.device->multiprocessors - s.multiprocessors : 0);
  const Timing timing = time_in_turns(stream, queued);
  algorithms.add(text_of(s), text_of(plan_of[timing.best]->algorithm), timing);
}

}  // namespace mimo::cuda
