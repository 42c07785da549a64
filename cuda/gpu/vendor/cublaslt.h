// Dense GEMM through cuBLASLt: fp32 in IEEE arithmetic (no TF32), bf16 with fp32 accumulation.
#pragma once
#include <cstdint>
#include <memory>

#include "device.h"

namespace mimo::cuda {

/// Function applied to the result before it is written.
enum class Epilogue : int32_t {
  none,
  bias,
  gelu,           // writes result + bias to `beside` and its tanh-GELU to c
  gelu_gradient,  // c = result times the derivative of tanh-GELU at `beside`
};

/// c = alpha op(a) op(b) + beta c + bias, row major, as in mimo_gemm_args; a and b have one storage type, bias has c's.
struct DenseProduct {
  const void* a;
  const void* b;
  void* c;
  const void* bias;  // or null
  void* beside;      // of a GELU epilogue; same layout as c
  Epilogue epilogue;
  int64_t m, n, k;
  int64_t a_stride, b_stride, c_stride;
  int64_t batch;
  int64_t a_batch_stride, b_batch_stride, c_batch_stride;
  float alpha, beta;
  bool transpose_a, transpose_b;
  int32_t dtype;  // of a and b
  int32_t c_dtype;
  bool beside_collective;
};

class Algorithms;

class CublasLt {
 public:
  CublasLt(Algorithms& algorithms, int32_t multiprocessors);
  ~CublasLt();
  /// Returns false if cuBLASLt has no algorithm for a GELU epilogue; throws if it has none for another product.
  bool multiply(mimo_stream& stream, const DenseProduct& product);
  /// Times all products so far that have no choice; returns how many could not be timed for lack of memory.
  int32_t time_algorithms(mimo_stream& stream);
  /// Makes the next call look its algorithm up again.
  void forget_plans();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace mimo::cuda
