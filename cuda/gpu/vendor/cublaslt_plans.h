// Plans of cublaslt.cpp and the timing of their algorithms (cublaslt_algorithms.cpp).
#pragma once
#include <cublasLt.h>

#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include "algorithms.h"
#include "cublaslt.h"
#include "status.h"
#include "vendor.h"

namespace mimo::cuda {

#define MIMO_CUBLASLT(name) decltype(&::name) name = reinterpret_cast<decltype(&::name)>(vendor_symbol(library, #name))
struct CublasLtFunctions {
  const VendorLibrary& library = open_vendor(Vendor::cublaslt);
  MIMO_CUBLASLT(cublasLtCreate);
  MIMO_CUBLASLT(cublasLtDestroy);
  MIMO_CUBLASLT(cublasLtGetStatusString);
  MIMO_CUBLASLT(cublasLtMatmul);
  MIMO_CUBLASLT(cublasLtMatmulAlgoCheck);
  MIMO_CUBLASLT(cublasLtMatmulAlgoConfigSetAttribute);
  MIMO_CUBLASLT(cublasLtMatmulAlgoGetHeuristic);
  MIMO_CUBLASLT(cublasLtMatmulDescCreate);
  MIMO_CUBLASLT(cublasLtMatmulDescDestroy);
  MIMO_CUBLASLT(cublasLtMatmulDescSetAttribute);
  MIMO_CUBLASLT(cublasLtMatmulPreferenceCreate);
  MIMO_CUBLASLT(cublasLtMatmulPreferenceDestroy);
  MIMO_CUBLASLT(cublasLtMatmulPreferenceSetAttribute);
  MIMO_CUBLASLT(cublasLtMatrixLayoutCreate);
  MIMO_CUBLASLT(cublasLtMatrixLayoutDestroy);
  MIMO_CUBLASLT(cublasLtMatrixLayoutSetAttribute);

  void check(cublasStatus_t status, const char* what) const {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    throw Error(MIMO_ERROR_DEVICE, std::string("cuBLASLt failed at ") + what + ": " + cublasLtGetStatusString(status) + ".");
  }
};
#undef MIMO_CUBLASLT

/// Everything that the choice of an algorithm depends on. Without padding: compared and hashed as bytes.
struct ProductShape {
  int64_t m, n, k, a_stride, b_stride, c_stride, batch, a_batch_stride, b_batch_stride, c_batch_stride;
  int32_t transpose_a, transpose_b, dtype, c_dtype;
  Epilogue epilogue;
  int32_t accumulates;
  int32_t a_alignment, b_alignment, c_alignment;
  int32_t multiprocessors;  // 0: all

  bool operator==(const ProductShape& other) const { return std::memcmp(this, &other, sizeof(ProductShape)) == 0; }
};

struct HashProductShape {
  size_t operator()(const ProductShape& shape) const {
    uint64_t hash = 1469598103934665603u;  // FNV-1a over 8-byte words
    uint64_t words[sizeof(ProductShape) / 8];
    static_assert(sizeof(words) == sizeof(ProductShape));
    std::memcpy(words, &shape, sizeof(ProductShape));
    for (const uint64_t word : words) hash = (hash ^ word) * 1099511628211u;
    return hash ^ (hash >> 29);
  }
};

/// Operands and outputs in cuBLASLt's order: a row-major b comes first.
struct ProductOperands {
  const void *left, *right;
  void* result;
  const void* bias;
  void* beside;
};

struct ProductPlan {
  cublasLtMatmulDesc_t description = nullptr;
  cublasLtMatrixLayout_t left = nullptr, right = nullptr, result = nullptr;
  cublasLtMatmulAlgo_t algorithm{};
  size_t workspace_bytes = 0;
  bool exists = true;  // false: no algorithm supports it
};

struct CublasLt::State {
  State(Algorithms& of_device, int32_t multiprocessors_of_device)
      : algorithms(of_device), multiprocessors(multiprocessors_of_device) {}

  CublasLtFunctions lt;
  Algorithms& algorithms;
  const int32_t multiprocessors;
  cublasLtHandle_t handle = nullptr;
  std::unordered_map<ProductShape, ProductPlan, HashProductShape> plans;

  ProductPlan make_plan(const ProductShape& s) const;
  void destroy_plans();
  /// Up to `wanted` of cuBLASLt's heuristic results, best first; empty when cuBLASLt knows no algorithm.
  /// `reductions`: split-K reduction schemes allowed (cublasLtReductionScheme_t).
  std::vector<cublasLtMatmulHeuristicResult_t> answers(const ProductShape& s, const ProductPlan& plan, int wanted,
                                                       uint32_t reductions, size_t workspace_bytes) const;
  /// Whether an algorithm supports the plan; sets `workspace_bytes` to what it needs.
  bool fits(const ProductPlan& plan, const cublasLtMatmulAlgo_t& algorithm, size_t* workspace_bytes) const;
  void launch(mimo_stream& stream, const ProductPlan& plan, const ProductOperands& operands, float alpha, float beta) const;
  int32_t time_algorithms(mimo_stream& stream);
  /// The plans worth timing for a shape, one for each algorithm, `first` in front. They share its descriptors.
  std::vector<ProductPlan> candidates(const ProductShape& s, const ProductPlan& first) const;
  void time_product(mimo_stream& stream, const ProductShape& s, const ProductPlan& first);
};

/// The key under which `Algorithms` stores a choice.
std::string text_of(const ProductShape& shape);
/// The algorithm's bytes, which the same version of cuBLASLt can read back.
std::string text_of(const cublasLtMatmulAlgo_t& algorithm);
/// Returns false if the text is not an algorithm's.
bool read_algorithm(const std::string& text, cublasLtMatmulAlgo_t* algorithm);

}  // namespace mimo::cuda
