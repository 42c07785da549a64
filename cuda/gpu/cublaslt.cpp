// Algorithms are chosen once a shape (and alignment) and kept. cuBLASLt is column major: a row-major product is the
// column-major product of the transposes, operands exchanged.
#include "cublaslt.h"

#include <cublasLt.h>

#include <cstring>
#include <string>
#include <unordered_map>

#include "error.h"
#include "status.h"
#include "vendor.h"

namespace mimo::cuda {
namespace {

constexpr size_t most_workspace = 32 << 20;  // the size that NVIDIA recommends for Hopper
/// Multiprocessors of a Hopper GPU that NCCL's kernels take, one for each channel. A product that counts on all
/// multiprocessors needs another round.
constexpr int32_t collective_multiprocessors = 24;

#define MIMO_CUBLASLT(name) decltype(&::name) name = reinterpret_cast<decltype(&::name)>(vendor_symbol(library, #name))
struct Functions {
  const VendorLibrary& library = open_vendor(Vendor::cublaslt);
  MIMO_CUBLASLT(cublasLtCreate);
  MIMO_CUBLASLT(cublasLtDestroy);
  MIMO_CUBLASLT(cublasLtGetStatusString);
  MIMO_CUBLASLT(cublasLtMatmul);
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

/// Everything an algorithm depends on. No padding: compared and hashed as bytes.
struct Shape {
  int64_t m, n, k, a_stride, b_stride, c_stride, batch, a_batch_stride, b_batch_stride, c_batch_stride;
  int32_t transpose_a, transpose_b, dtype, c_dtype, with_bias, accumulates;
  int32_t a_alignment, b_alignment, c_alignment;
  int32_t multiprocessors;  // 0: all

  bool operator==(const Shape& other) const { return std::memcmp(this, &other, sizeof(Shape)) == 0; }
};

struct HashShape {
  size_t operator()(const Shape& shape) const {
    uint64_t hash = 1469598103934665603u;  // FNV-1a over 8-byte words
    uint64_t words[sizeof(Shape) / 8];
    static_assert(sizeof(words) == sizeof(Shape));
    std::memcpy(words, &shape, sizeof(Shape));
    for (const uint64_t word : words) hash = (hash ^ word) * 1099511628211u;
    return hash ^ (hash >> 29);
  }
};

struct Plan {
  cublasLtMatmulDesc_t description = nullptr;
  cublasLtMatrixLayout_t left = nullptr, right = nullptr, result = nullptr;
  cublasLtMatmulAlgo_t algorithm{};
  size_t workspace_bytes = 0;
};

/// The alignments that algorithms tell apart.
int32_t alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  for (const int32_t bytes : {256, 128, 64, 32, 16, 8, 4}) {
    if (address % static_cast<uintptr_t>(bytes) == 0) return bytes;
  }
  return 2;
}

cudaDataType_t type_of(int32_t dtype) { return dtype == MIMO_DTYPE_F32 ? CUDA_R_32F : CUDA_R_16BF; }

}  // namespace

struct CublasLt::State {
  Functions lt;
  cublasLtHandle_t handle = nullptr;
  std::unordered_map<Shape, Plan, HashShape> plans;

  cublasLtMatrixLayout_t layout(int32_t dtype, int64_t rows, int64_t columns, int64_t stride, int64_t batch,
                                int64_t batch_stride) const {
    cublasLtMatrixLayout_t made = nullptr;
    // Column major: the contiguous dimension comes first.
    lt.check(lt.cublasLtMatrixLayoutCreate(&made, type_of(dtype), static_cast<uint64_t>(columns),
                                           static_cast<uint64_t>(rows), stride < columns ? columns : stride),
             "describing a matrix");
    if (batch > 1) {
      const int32_t count = static_cast<int32_t>(batch);
      lt.check(lt.cublasLtMatrixLayoutSetAttribute(made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof(count)),
               "describing a batch");
      lt.check(lt.cublasLtMatrixLayoutSetAttribute(made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &batch_stride,
                                                   sizeof(batch_stride)),
               "describing a batch");
    }
    return made;
  }

  template <class Value>
  void set(cublasLtMatmulDesc_t description, cublasLtMatmulDescAttributes_t name, const Value& value) const {
    lt.check(lt.cublasLtMatmulDescSetAttribute(description, name, &value, sizeof(value)), "describing a product");
  }

  Plan make_plan(const Shape& s) const {
    Plan plan;
    lt.check(lt.cublasLtMatmulDescCreate(&plan.description, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing a product");
    set(plan.description, CUBLASLT_MATMUL_DESC_TRANSA, s.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(plan.description, CUBLASLT_MATMUL_DESC_TRANSB, s.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    if (s.multiprocessors > 0) set(plan.description, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, s.multiprocessors);
    if (s.with_bias) set(plan.description, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    plan.left = layout(s.dtype, s.transpose_b ? s.n : s.k, s.transpose_b ? s.k : s.n, s.b_stride, s.batch,
                       s.b_batch_stride);
    plan.right = layout(s.dtype, s.transpose_a ? s.k : s.m, s.transpose_a ? s.m : s.k, s.a_stride, s.batch,
                        s.a_batch_stride);
    plan.result = layout(s.c_dtype, s.m, s.n, s.c_stride, s.batch, s.c_batch_stride);

    cublasLtMatmulPreference_t preference = nullptr;
    lt.check(lt.cublasLtMatmulPreferenceCreate(&preference), "choosing an algorithm");
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t name, auto value) {
      lt.check(lt.cublasLtMatmulPreferenceSetAttribute(preference, name, &value, sizeof(value)),
               "choosing an algorithm");
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, most_workspace);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(s.b_alignment));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(s.a_alignment));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(s.c_alignment));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(s.c_alignment));
    cublasLtMatmulHeuristicResult_t found{};
    int count = 0;
    const cublasStatus_t status = lt.cublasLtMatmulAlgoGetHeuristic(
        handle, plan.description, plan.left, plan.right, plan.result, plan.result, preference, 1, &found, &count);
    lt.cublasLtMatmulPreferenceDestroy(preference);
    if (status != CUBLAS_STATUS_SUCCESS || count == 0) {
      throw Error(MIMO_ERROR_UNSUPPORTED, "cuBLASLt has no algorithm for a product of [" + std::to_string(s.m) + ", " +
                                              std::to_string(s.k) + "] and [" + std::to_string(s.k) + ", " +
                                              std::to_string(s.n) + "] with row strides " + std::to_string(s.a_stride) +
                                              ", " + std::to_string(s.b_stride) + " and " + std::to_string(s.c_stride) +
                                              " (" + lt.cublasLtGetStatusString(status) + ").");
    }
    plan.algorithm = found.algo;
    plan.workspace_bytes = found.workspaceSize;
    return plan;
  }
};

CublasLt::CublasLt() : state_(std::make_unique<State>()) {
  state_->lt.check(state_->lt.cublasLtCreate(&state_->handle), "its start");
}

CublasLt::~CublasLt() {
  for (auto& [shape, plan] : state_->plans) {
    state_->lt.cublasLtMatmulDescDestroy(plan.description);
    for (cublasLtMatrixLayout_t layout : {plan.left, plan.right, plan.result}) {
      state_->lt.cublasLtMatrixLayoutDestroy(layout);
    }
  }
  state_->lt.cublasLtDestroy(state_->handle);
}

void CublasLt::multiply(mimo_stream& stream, const DenseProduct& p) {
  const Shape shape{p.m,
                    p.n,
                    p.k,
                    p.a_stride,
                    p.b_stride,
                    p.c_stride,
                    p.batch,
                    p.a_batch_stride,
                    p.b_batch_stride,
                    p.c_batch_stride,
                    p.transpose_a,
                    p.transpose_b,
                    p.dtype,
                    p.c_dtype,
                    p.bias != nullptr,
                    p.beta != 0,
                    alignment_of(p.a),
                    alignment_of(p.b),
                    alignment_of(p.c),
                    p.beside_collective ? stream.device->multiprocessors - collective_multiprocessors : 0};
  auto found = state_->plans.find(shape);
  if (found == state_->plans.end()) found = state_->plans.emplace(shape, state_->make_plan(shape)).first;
  const Plan& plan = found->second;
  if (p.bias != nullptr) state_->set(plan.description, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
  Workspace workspace(&stream, static_cast<int64_t>(plan.workspace_bytes));
  state_->lt.check(
      state_->lt.cublasLtMatmul(state_->handle, plan.description, &p.alpha, p.b, plan.left, p.a, plan.right, &p.beta,
                                p.c, plan.result, p.c, plan.result, &plan.algorithm, workspace.as<void>(),
                                plan.workspace_bytes, stream.handle()),
      "a product");
}

}  // namespace mimo::cuda
