// Dense products through cuBLASLt: fp32 in IEEE arithmetic (no TF32), bf16 with fp32 sums.
#pragma once
#include <cstdint>
#include <memory>

#include "device.h"

namespace mimo::cuda {

/// Function that a product applies to its result before writing it.
enum class Epilogue : int32_t {
  none,
  bias,
  gelu,           // result + bias is written beside c, c is its GELU by tanh
  gelu_gradient,  // c is the result times the slope of that GELU at `beside`
};

/// c = alpha op(a) op(b) + beta c + bias, row major, as mimo_gemm_args says; a and b of one storage type, bias of c's.
struct DenseProduct {
  const void* a;
  const void* b;
  void* c;
  const void* bias;  // or null
  void* beside;      // of a GELU; lies as c does
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
  /// False where cuBLASLt has no algorithm for a GELU's product; without any for another it throws.
  bool multiply(mimo_stream& stream, const DenseProduct& product);
  /// Times the algorithms of all products so far that have no choice; returns how many there was no memory for.
  int32_t time_algorithms(mimo_stream& stream);
  /// Algorithms are looked up again.
  void forget_plans();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace mimo::cuda
