// MLP of the experts (docs/spec/moe-performance.md §1) composed of grouped GEMM, activation and bias kernels; e4m3 is
// delegated to sm90_e4m3_grouped_mlp.
#include "activation.cuh"
#include "activation_backward.h"
#include "grouped_bias.h"
#include "grouped_mlp.h"
#include "kernel.cuh"
#include "operations.h"

namespace mimo::cuda {
namespace {

int64_t bytes_of(int32_t dtype) { return dtype == MIMO_DTYPE_F32 ? 4 : 2; }

template <class Args>
struct Layer {
  mimo_stream& stream;
  const Args& args;

  bool in_e4m3() const { return args.recipe == MIMO_MLP_RECIPE_E4M3_BLOCKWISE; }
  bool gated() const { return is_gated(args.kind); }
  int64_t z_width() const { return gated() ? 2 * args.width : args.width; }

  void require_legal() const {
    MIMO_REQUIRE(args.groups >= 1 && args.hidden >= 1 && args.width >= 1 && args.rows >= 0, "grouped_mlp");
    if (in_e4m3() && !sm90_e4m3_grouped_mlp_fits(stream, args)) {
      fail(MIMO_ERROR_UNSUPPORTED,
           "Experts in e4m3 need a Hopper GPU (sm_90), storage in bf16, hidden size and width in steps of 16, and halves or "
           "blocks of rows in steps of 8.");
    }
  }

  void product(const void* a, const void* b, bool transpose_b, int64_t n, int64_t k, void* c, int32_t c_dtype) const {
    mimo_grouped_gemm_args p{};
    p.a = a, p.b = b, p.c = c, p.offsets = args.offsets;
    p.rows = args.rows, p.groups = args.groups, p.n = n, p.k = k;
    p.transpose_b = transpose_b, p.a_dtype = p.b_dtype = args.dtype, p.c_dtype = c_dtype;
    grouped_gemm(stream, p);
  }

  /// y [rows, n] = a bᵀ + factor * bias, rounded once.
  void project(const void* a, const void* b, const void* bias, const float* factor, int64_t n, int64_t k, void* y) const {
    if (bias == nullptr) return product(a, b, true, n, k, y, args.dtype);
    mimo_grouped_bias_forward_args f{};
    f.bias = bias, f.factor = factor, f.offsets = args.offsets, f.y = y;
    f.rows = args.rows, f.groups = args.groups, f.width = n, f.dtype = args.dtype;
    if (args.dtype == MIMO_DTYPE_F32) {
      product(a, b, true, n, k, y, MIMO_DTYPE_F32);
      return grouped_bias_forward(stream, f);
    }
    Workspace sums(&stream, args.rows * n * static_cast<int64_t>(sizeof(float)));
    product(a, b, true, n, k, sums.as<float>(), MIMO_DTYPE_F32);
    grouped_bias_of_sums(stream, f, sums.as<float>());
  }

  /// hs = p * activation(z).
  void activate(const void* z, void* hs) const {
    mimo_activation_forward_args f{};
    f.x = z, f.row_probability = args.row_probability, f.y = hs, f.row_count = args.offsets + args.groups;
    f.rows = args.rows, f.width = args.width, f.interleave = args.interleave;
    f.clamp = args.clamp, f.linear_offset = args.linear_offset, f.kind = args.kind, f.dtype = args.dtype;
    activation_forward(stream, f);
  }

  void add_bias_gradient(const void* dy, int64_t width, const float* factor, float* dbias) const {
    if (dbias == nullptr) return;
    mimo_grouped_bias_backward_args b{};
    b.dy = dy, b.factor = factor, b.offsets = args.offsets, b.dbias = dbias;
    b.rows = args.rows, b.groups = args.groups, b.width = width, b.dtype = args.dtype;
    grouped_bias_backward(stream, b);
  }
};

}  // namespace

void grouped_mlp_forward(mimo_stream& stream, const mimo_grouped_mlp_forward_args& args) {
  const Layer<mimo_grouped_mlp_forward_args> layer{stream, args};
  layer.require_legal();
  MIMO_REQUIRE(args.x != nullptr || (args.x_e4m3 != nullptr && layer.in_e4m3()), "grouped_mlp_forward");
  if (args.rows == 0) return;
  if (layer.in_e4m3()) return sm90_e4m3_grouped_mlp_forward(stream, args);
  const int64_t z_width = layer.z_width(), element = bytes_of(args.dtype);
  Workspace z_copy(&stream, args.z == nullptr ? args.rows * z_width * element : 0);
  Workspace hs(&stream, args.rows * args.width * element);
  void* z = args.z == nullptr ? z_copy.as<char>() : args.z;
  layer.project(args.x, args.w1, args.b1, nullptr, z_width, args.hidden, z);
  layer.activate(z, hs.as<char>());
  layer.project(hs.as<char>(), args.w2, args.b2, args.row_probability, args.hidden, args.width, args.y);
}

void grouped_mlp_backward(mimo_stream& stream, const mimo_grouped_mlp_backward_args& args) {
  const Layer<mimo_grouped_mlp_backward_args> layer{stream, args};
  layer.require_legal();
  const bool reads_dy = args.db2 != nullptr || (args.b2 != nullptr && args.drow_probability != nullptr);
  MIMO_REQUIRE(args.dy != nullptr || (args.dy_e4m3 != nullptr && layer.in_e4m3() && !reads_dy), "grouped_mlp_backward");
  MIMO_REQUIRE(args.dz != nullptr || (args.dz_e4m3 != nullptr && layer.in_e4m3() && args.db1 == nullptr), "grouped_mlp_backward");
  MIMO_REQUIRE(layer.in_e4m3() || (args.dz_e4m3 == nullptr && args.hs_e4m3 == nullptr), "grouped_mlp_backward");
  if (args.rows == 0) return;
  if (layer.in_e4m3()) {
    sm90_e4m3_grouped_mlp_backward(stream, args);
  } else {
    Workspace dhs(&stream, args.rows * args.width * bytes_of(args.dtype));
    layer.product(args.dy, args.w2, false, args.width, args.hidden, dhs.as<char>(), args.dtype);
    mimo_activation_backward_args b{};
    b.dy = dhs.as<char>(), b.x = args.z, b.row_probability = args.row_probability, b.dx = args.dz;
    b.drow_probability = args.drow_probability, b.row_count = args.offsets + args.groups;
    b.rows = args.rows, b.width = args.width, b.interleave = args.interleave;
    b.clamp = args.clamp, b.linear_offset = args.linear_offset, b.kind = args.kind, b.dtype = args.dtype;
    activation_backward_and_forward(stream, b, args.hs);
    if (args.dx != nullptr) layer.product(args.dz, args.w1, false, args.hidden, layer.z_width(), args.dx, args.dtype);
  }
  layer.add_bias_gradient(args.dz, layer.z_width(), nullptr, args.db1);
  layer.add_bias_gradient(args.dy, args.hidden, args.row_probability, args.db2);
  if (args.b2 == nullptr || args.drow_probability == nullptr) return;
  mimo_grouped_bias_backward_args b{};
  b.dy = args.dy, b.bias = args.b2, b.offsets = args.offsets, b.dfactor = args.drow_probability;
  b.rows = args.rows, b.groups = args.groups, b.width = args.hidden, b.accumulate_dfactor = 1, b.dtype = args.dtype;
  grouped_bias_backward(stream, b);
}

}  // namespace mimo::cuda
