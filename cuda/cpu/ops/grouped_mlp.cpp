// MLP of the experts (docs/spec/moe-performance.md §1): both grouped products, the activation between them, and the
// biases. Products stay fp32 until their bias is added, and so do the gradients of activations.
#include "activation.h"
#include "e4m3_product.h"
#include "grouped.h"

namespace mimo::MIMO_ISA {
namespace {

constexpr int64_t float_bytes = static_cast<int64_t>(sizeof(float));

int64_t bytes_of(int32_t dtype) { return dtype == MIMO_DTYPE_F32 ? 4 : 2; }

/// An operand: rows as stored and, if given, their e4m3 copy.
struct Operand {
  const void* rows;
  const void* e4m3 = nullptr;
  const float* factors = nullptr;
};

/// The groups' rows and the widths, shared by forward and backward.
template <class Args>
struct Layer {
  mimo_stream& stream;
  const Args& args;

  bool in_e4m3() const { return args.recipe == MIMO_MLP_RECIPE_E4M3_BLOCKWISE; }
  int64_t live() const { return args.offsets[args.groups]; }
  int64_t z_width() const { return is_gated(args.kind) ? 2 * args.width : args.width; }

  void require_legal() const {
    MIMO_REQUIRE(args.groups >= 1 && args.hidden >= 1 && args.width >= 1, "grouped_mlp");
    MIMO_REQUIRE(args.dtype == MIMO_DTYPE_F32 || args.dtype == MIMO_DTYPE_BF16, "grouped_mlp");
    MIMO_REQUIRE(args.offsets[0] >= 0 && live() <= args.rows, "grouped_mlp");
    MIMO_REQUIRE(args.recipe == MIMO_MLP_RECIPE_PLAIN || args.recipe == MIMO_MLP_RECIPE_E4M3_BLOCKWISE, "grouped_mlp");
  }

  /// c [rows, n] = a [rows, k] times the groups' matrices b: [n, k], or [k, n] if backward. e4m3 matrices are [n, k] in
  /// both.
  void product(const Operand& a, const void* b, const float* b_factors, bool backward, int64_t n, int64_t k, void* c,
               int32_t c_dtype) const {
    if (in_e4m3()) {
      return e4m3_grouped_product(
          stream, {a.rows, static_cast<const uint8_t*>(a.e4m3), a.factors, static_cast<const uint8_t*>(b), b_factors, backward, c,
                   args.offsets, args.rows, args.groups, n, k, args.dtype, c_dtype});
    }
    mimo_grouped_gemm_args p{};
    p.a = a.rows, p.b = b, p.c = c, p.offsets = args.offsets;
    p.rows = args.rows, p.groups = args.groups, p.n = n, p.k = k;
    p.transpose_b = !backward, p.a_dtype = p.b_dtype = args.dtype, p.c_dtype = c_dtype;
    grouped_gemm(stream, p);
  }

  /// y [rows, n] = a bᵀ + factor * bias, rounded once.
  void project(const Operand& a, const void* b, const float* b_factors, const void* bias, const float* factor, int64_t n, int64_t k,
               void* y) const {
    if (bias == nullptr) return product(a, b, b_factors, false, n, k, y, args.dtype);
    if (args.dtype == MIMO_DTYPE_F32) {
      product(a, b, b_factors, false, n, k, y, MIMO_DTYPE_F32);
      mimo_grouped_bias_forward_args f{};
      f.bias = bias, f.factor = factor, f.offsets = args.offsets, f.y = y;
      f.rows = args.rows, f.groups = args.groups, f.width = n, f.dtype = MIMO_DTYPE_F32;
      return grouped_bias_forward(stream, f);
    }
    Workspace sums(&stream, live() * n * float_bytes);
    product(a, b, b_factors, false, n, k, sums.as<float>(), MIMO_DTYPE_F32);
    each_row([&](int64_t row, int64_t group) {
      const float* sum = sums.as<float>() + row * n;
      const bf16* of_group = static_cast<const bf16*>(bias) + group * n;
      const float weight = factor == nullptr ? 1.0f : factor[row];
      bf16* to = static_cast<bf16*>(y) + row * n;
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) store(&to[i], sum[i] + weight * load(of_group[i]));
    });
  }

  /// Quantises rows to e4m3 unless `values` is null.
  void round(const void* from, int64_t columns, void* values, float* factors) const {
    if (values == nullptr) return;
    e4m3_rows(stream, {from, args.offsets + args.groups, values, factors, args.rows, columns, args.dtype});
  }

  /// Calls body(row, group) for each row of each group on the pool's threads.
  template <class Body>
  void each_row(Body&& body) const {
    const int64_t first = args.offsets[0];
    parallel_range(stream.device->threads, live() - first, rows_per_partial, [&](int64_t from, int64_t to) {
      int64_t group = 0;
      for (int64_t row = first + from; row < first + to; ++row) {
        while (row >= args.offsets[group + 1]) ++group;
        body(row, group);
      }
    });
  }

  float probability(int64_t row) const { return args.row_probability == nullptr ? 1.0f : args.row_probability[row]; }

  void add_bias_gradient(const void* dy, int64_t width, const float* factor, float* dbias) const {
    if (dbias == nullptr) return;
    mimo_grouped_bias_backward_args b{};
    b.dy = dy, b.factor = factor, b.offsets = args.offsets, b.dbias = dbias;
    b.rows = args.rows, b.groups = args.groups, b.width = width, b.dtype = args.dtype;
    grouped_bias_backward(stream, b);
  }
};

/// hs = p * activation(z) with the routing probability p.
template <class T, class Args>
void forward_rows(const Layer<Args>& layer, const void* z, void* hs) {
  const Args& args = layer.args;
  with_activation(args, [&](const auto& activation) {
    layer.each_row([&](int64_t row, int64_t) {
      activation.forward(static_cast<const T*>(z) + row * activation.x_width(), layer.probability(row),
                         static_cast<T*>(hs) + row * args.width);
    });
  });
}

template <class T>
void backward_rows(const Layer<mimo_grouped_mlp_backward_args>& layer, const float* dhs) {
  const mimo_grouped_mlp_backward_args& args = layer.args;
  with_activation(args, [&](const auto& activation) {
    layer.each_row([&](int64_t row, int64_t) {
      const int64_t at = row * activation.x_width();
      const float dprobability = activation.backward(dhs + row * args.width, static_cast<const T*>(args.z) + at,
                                                     layer.probability(row), static_cast<T*>(args.dz) + at);
      if (args.drow_probability != nullptr) args.drow_probability[row] = dprobability;
    });
  });
}

}  // namespace

void grouped_mlp_forward(mimo_stream& stream, const mimo_grouped_mlp_forward_args& args) {
  const Layer<mimo_grouped_mlp_forward_args> layer{stream, args};
  layer.require_legal();
  MIMO_REQUIRE(args.x != nullptr || (args.x_e4m3 != nullptr && layer.in_e4m3()), "grouped_mlp_forward");
  const int64_t z_width = layer.z_width(), element = bytes_of(args.dtype);
  Workspace z_copy(&stream, args.z == nullptr ? layer.live() * z_width * element : 0);
  Workspace hs(&stream, layer.live() * args.width * element);
  void* z = args.z == nullptr ? z_copy.as<char>() : args.z;
  layer.project({args.x, args.x_e4m3, args.x_factors}, args.w1, args.w1_factors, args.b1, nullptr, z_width, args.hidden, z);
  with_dtype(args.dtype, [&](auto* t) { forward_rows<std::remove_pointer_t<decltype(t)>>(layer, z, hs.as<char>()); });
  layer.project({hs.as<char>()}, args.w2, args.w2_factors, args.b2, args.row_probability, args.hidden, args.width, args.y);
}

void grouped_mlp_backward(mimo_stream& stream, const mimo_grouped_mlp_backward_args& given) {
  mimo_grouped_mlp_backward_args args = given;
  const Layer<mimo_grouped_mlp_backward_args> layer{stream, args};
  layer.require_legal();
  const bool reads_dy = args.db2 != nullptr || (args.b2 != nullptr && args.drow_probability != nullptr);
  MIMO_REQUIRE(args.dy != nullptr || (args.dy_e4m3 != nullptr && layer.in_e4m3() && !reads_dy), "grouped_mlp_backward");
  MIMO_REQUIRE(args.dz != nullptr || (args.dz_e4m3 != nullptr && layer.in_e4m3() && args.db1 == nullptr), "grouped_mlp_backward");
  MIMO_REQUIRE(layer.in_e4m3() || (args.dz_e4m3 == nullptr && args.hs_e4m3 == nullptr), "grouped_mlp_backward");
  const int64_t element = bytes_of(args.dtype);
  // Buffers for rows that are returned in e4m3 only.
  Workspace dz(&stream, args.dz == nullptr ? layer.live() * layer.z_width() * element : 0);
  Workspace hs(&stream, args.hs == nullptr && args.hs_e4m3 != nullptr ? layer.live() * args.width * element : 0);
  if (args.dz == nullptr) args.dz = dz.as<char>();
  if (args.hs == nullptr && args.hs_e4m3 != nullptr) args.hs = hs.as<char>();
  {
    Workspace dhs(&stream, layer.live() * args.width * float_bytes);
    layer.product({args.dy, args.dy_e4m3, args.dy_factors}, args.w2, args.w2_factors, true, args.width, args.hidden,
                  dhs.as<float>(), MIMO_DTYPE_F32);
    with_dtype(args.dtype, [&](auto* t) {
      using T = std::remove_pointer_t<decltype(t)>;
      backward_rows<T>(layer, dhs.as<float>());
      if (args.hs != nullptr) forward_rows<T>(layer, args.z, args.hs);
    });
  }
  layer.round(args.dz, layer.z_width(), args.dz_e4m3, args.dz_factors);
  layer.round(args.hs, args.width, args.hs_e4m3, args.hs_factors);
  if (args.dx != nullptr) {
    layer.product({args.dz, args.dz_e4m3, args.dz_factors}, args.w1, args.w1_factors, true, args.hidden, layer.z_width(), args.dx, args.dtype);
  }
  layer.add_bias_gradient(args.dz, layer.z_width(), nullptr, args.db1);
  layer.add_bias_gradient(args.dy, args.hidden, args.row_probability, args.db2);
  if (args.b2 == nullptr || args.drow_probability == nullptr) return;
  mimo_grouped_bias_backward_args b{};
  b.dy = args.dy, b.bias = args.b2, b.offsets = args.offsets, b.dfactor = args.drow_probability;
  b.rows = args.rows, b.groups = args.groups, b.width = args.hidden, b.accumulate_dfactor = 1, b.dtype = args.dtype;
  grouped_bias_backward(stream, b);
}

}  // namespace mimo::MIMO_ISA
