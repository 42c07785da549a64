// Dense GEMM through cuBLASLt. The algorithm of each shape (and alignment) is chosen once and cached. cuBLASLt is
// column major: a row-major product is computed as the product of the transposes, with operands exchanged.
#include "cublaslt.h"

#include "cublaslt_plans.h"
#include "error.h"

namespace mimo::cuda {
namespace {

constexpr size_t most_workspace = 32 << 20;  // NVIDIA's recommendation for Hopper
/// SMs of a Hopper GPU that NCCL's kernels occupy, one for each channel. A GEMM tuned for all SMs would need another
/// wave.
constexpr int32_t collective_multiprocessors = 24;

/// The pointer alignments that algorithm selection distinguishes.
int32_t alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  for (const int32_t bytes : {256, 128, 64, 32, 16, 8, 4}) {
    if (address % static_cast<uintptr_t>(bytes) == 0) return bytes;
  }
  return 2;
}

cublasLtEpilogue_t epilogue_of(Epilogue epilogue) {
  switch (epilogue) {
    case Epilogue::bias:
      return CUBLASLT_EPILOGUE_BIAS;
    case Epilogue::gelu:
      return CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    case Epilogue::gelu_gradient:
      return CUBLASLT_EPILOGUE_DGELU;
    default:
      return CUBLASLT_EPILOGUE_DEFAULT;
  }
}

bool has_gelu(Epilogue epilogue) { return epilogue == Epilogue::gelu || epilogue == Epilogue::gelu_gradient; }

cudaDataType_t type_of(int32_t dtype) { return dtype == MIMO_DTYPE_F32 ? CUDA_R_32F : CUDA_R_16BF; }

cublasLtMatrixLayout_t layout(const CublasLtFunctions& lt, int32_t dtype, int64_t rows, int64_t columns, int64_t stride,
                              int64_t batch, int64_t batch_stride) {
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
void set(const CublasLtFunctions& lt, cublasLtMatmulDesc_t description, cublasLtMatmulDescAttributes_t name,
         const Value& value) {
  lt.check(lt.cublasLtMatmulDescSetAttribute(description, name, &value, sizeof(value)), "describing a product");
}

}  // namespace

ProductPlan CublasLt::State::make_plan(const ProductShape& s) const {
  ProductPlan plan;
  lt.check(lt.cublasLtMatmulDescCreate(&plan.description, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing a product");
  set(lt, plan.description, CUBLASLT_MATMUL_DESC_TRANSA, s.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(lt, plan.description, CUBLASLT_MATMUL_DESC_TRANSB, s.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  if (s.multiprocessors > 0) set(lt, plan.description, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, s.multiprocessors);
  set(lt, plan.description, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(s.epilogue));
  if (has_gelu(s.epilogue)) set(lt, plan.description, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, s.c_stride);
  plan.left = layout(lt, s.dtype, s.transpose_b ? s.n : s.k, s.transpose_b ? s.k : s.n, s.b_stride, s.batch,
                     s.b_batch_stride);
  plan.right = layout(lt, s.dtype, s.transpose_a ? s.k : s.m, s.transpose_a ? s.m : s.k, s.a_stride, s.batch,
                      s.a_batch_stride);
  plan.result = layout(lt, s.c_dtype, s.m, s.n, s.c_stride, s.batch, s.c_batch_stride);

  if (const std::string* choice = algorithms.find(text_of(s))) {
    if (read_algorithm(*choice, &plan.algorithm) && fits(plan, plan.algorithm, &plan.workspace_bytes)) return plan;
    throw Error(MIMO_ERROR_UNSUPPORTED, "This cuBLASLt does not take the chosen algorithm of " + text_of(s) +
                                            ": choose again with this GPU, driver and cuBLASLt.");
  }
  const auto found = answers(s, plan, 1, CUBLASLT_REDUCTION_SCHEME_MASK, most_workspace);
  plan.exists = !found.empty();
  if (!plan.exists && has_gelu(s.epilogue)) return plan;
  if (!plan.exists) {
    throw Error(MIMO_ERROR_UNSUPPORTED, "cuBLASLt has no algorithm for a product of [" + std::to_string(s.m) + ", " +
                                            std::to_string(s.k) + "] and [" + std::to_string(s.k) + ", " +
                                            std::to_string(s.n) + "] with row strides " + std::to_string(s.a_stride) +
                                            ", " + std::to_string(s.b_stride) + " and " + std::to_string(s.c_stride) + ".");
  }
  plan.algorithm = found[0].algo;
  plan.workspace_bytes = found[0].workspaceSize;
  return plan;
}

std::vector<cublasLtMatmulHeuristicResult_t> CublasLt::State::answers(const ProductShape& s, const ProductPlan& plan,
                                                                      int wanted, uint32_t reductions,
                                                                      size_t workspace_bytes) const {
  cublasLtMatmulPreference_t preference = nullptr;
  lt.check(lt.cublasLtMatmulPreferenceCreate(&preference), "choosing an algorithm");
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t name, auto value) {
    lt.check(lt.cublasLtMatmulPreferenceSetAttribute(preference, name, &value, sizeof(value)),
             "choosing an algorithm");
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(s.b_alignment));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(s.a_alignment));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(s.c_alignment));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(s.c_alignment));
  std::vector<cublasLtMatmulHeuristicResult_t> found(static_cast<size_t>(wanted));
  int count = 0;
  const cublasStatus_t status = lt.cublasLtMatmulAlgoGetHeuristic(
      handle, plan.description, plan.left, plan.right, plan.result, plan.result, preference, wanted, found.data(), &count);
  lt.cublasLtMatmulPreferenceDestroy(preference);
  if (status != CUBLAS_STATUS_SUCCESS) count = 0;
  found.resize(static_cast<size_t>(count));
  return found;
}

bool CublasLt::State::fits(const ProductPlan& plan, const cublasLtMatmulAlgo_t& algorithm, size_t* workspace_bytes) const {
  cublasLtMatmulHeuristicResult_t result{};
  const cublasStatus_t status = lt.cublasLtMatmulAlgoCheck(handle, plan.description, plan.left, plan.right, plan.result,
                                                           plan.result, &algorithm, &result);
  *workspace_bytes = result.workspaceSize;
  return status == CUBLAS_STATUS_SUCCESS && result.state == CUBLAS_STATUS_SUCCESS;
}

void CublasLt::State::launch(mimo_stream& stream, const ProductPlan& plan, const ProductOperands& operands, float alpha,
                             float beta) const {
  if (operands.bias != nullptr) set(lt, plan.description, CUBLASLT_MATMUL_DESC_BIAS_POINTER, operands.bias);
  if (operands.beside != nullptr) set(lt, plan.description, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, operands.beside);
  Workspace workspace(&stream, static_cast<int64_t>(plan.workspace_bytes));
  lt.check(lt.cublasLtMatmul(handle, plan.description, &alpha, operands.left, plan.left, operands.right, plan.right, &beta,
                             operands.result, plan.result, operands.result, plan.result, &plan.algorithm,
                             workspace.as<void>(), plan.workspace_bytes, stream.handle()),
           "a product");
}

void CublasLt::State::destroy_plans() {
  for (auto& [shape, plan] : plans) {
    lt.cublasLtMatmulDescDestroy(plan.description);
    for (cublasLtMatrixLayout_t layout : {plan.left, plan.right, plan.result}) lt.cublasLtMatrixLayoutDestroy(layout);
  }
  plans.clear();
}

CublasLt::CublasLt(Algorithms& algorithms, int32_t multiprocessors)
    : state_(std::make_unique<State>(algorithms, multiprocessors)) {
  state_->lt.check(state_->lt.cublasLtCreate(&state_->handle), "its start");
}

CublasLt::~CublasLt() {
  state_->destroy_plans();
  state_->lt.cublasLtDestroy(state_->handle);
}

void CublasLt::forget_plans() { state_->destroy_plans(); }

int32_t CublasLt::time_algorithms(mimo_stream& stream) { return state_->time_algorithms(stream); }

bool CublasLt::multiply(mimo_stream& stream, const DenseProduct& p) {
  const ProductShape shape{p.m,
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
                    p.epilogue == Epilogue::none && p.bias != nullptr ? Epilogue::bias : p.epilogue,
                    p.beta != 0,
                    alignment_of(p.a),
                    alignment_of(p.b),
                    alignment_of(p.c),
                    p.beside_collective ? stream.device->multiprocessors - collective_multiprocessors : 0};
  auto found = state_->plans.find(shape);
  if (found == state_->plans.end()) found = state_->plans.emplace(shape, state_->make_plan(shape)).first;
  if (!found->second.exists) return false;
  state_->launch(stream, found->second, {p.b, p.a, p.c, p.bias, p.beside}, p.alpha, p.beta);
  return true;
}

}  // namespace mimo::cuda
