// Dense, grouped and sparse products, column sums.
#include "cases.h"

namespace check {
namespace {

struct Gemm {
  int64_t m, n, k, batch;
  bool transpose_a, transpose_b, bias, f32_result;
  float alpha, beta;
  int64_t pad;
};

void gemm(Run& run, const Gemm& g) {
  mimo_gemm_args args{};
  const int64_t a_rows = g.transpose_a ? g.k : g.m, a_width = g.transpose_a ? g.m : g.k;
  const int64_t b_rows = g.transpose_b ? g.n : g.k, b_width = g.transpose_b ? g.k : g.n;
  args.m = g.m, args.n = g.n, args.k = g.k, args.batch = g.batch;
  args.a_stride = a_width + g.pad, args.b_stride = b_width + g.pad, args.c_stride = g.n + g.pad;
  args.a_batch_stride = a_rows * args.a_stride, args.b_batch_stride = b_rows * args.b_stride;
  args.c_batch_stride = g.m * args.c_stride;
  args.a = run.tensor(g.batch * args.a_batch_stride);
  args.b = run.tensor(g.batch * args.b_batch_stride, 1 / std::sqrt(static_cast<double>(g.k)));
  args.bias = g.bias ? run.tensor(g.n) : nullptr;
  args.c_dtype = g.f32_result ? static_cast<int32_t>(MIMO_DTYPE_F32) : run.dtype();
  const std::vector<float> c = run.normal(g.batch * args.c_batch_stride);
  args.c = g.f32_result ? run.upload(c) : run.tensor(c);
  args.alpha = g.alpha, args.beta = g.beta;
  args.transpose_a = g.transpose_a, args.transpose_b = g.transpose_b;
  args.beside_collective = g.transpose_a && g.f32_result;  // as a weight gradient may be
  args.a_dtype = args.b_dtype = run.dtype();
  run.call("mimo_gemm", args);
  run.compare("c", args.c, g.batch * args.c_batch_stride, args.c_dtype);
}

/// f32 times bf16, as the router multiplies.
void mixed_gemm(Run& run) {
  const int64_t m = 40, n = 24, k = 56;
  mimo_gemm_args args{};
  args.m = m, args.n = n, args.k = k, args.batch = 1;
  args.a_stride = k, args.b_stride = k, args.c_stride = n;
  args.a = run.tensor(m * k);
  args.b = run.floats(n * k, 0.2);
  args.c = run.output(m * n, MIMO_DTYPE_F32);
  args.alpha = 1;
  args.transpose_b = 1;
  args.a_dtype = run.dtype();
  run.call("mimo_gemm", args);
  run.compare("c", args.c, m * n, MIMO_DTYPE_F32);
}

/// The gradients of a router: of its tokens, fp32 times the weights, and of its weights, the transpose times the tokens.
void router_gradients(Run& run, int64_t tokens, int64_t width, int64_t experts, float beta, int64_t pad) {
  mimo_gemm_args of_tokens{};
  of_tokens.m = tokens, of_tokens.n = width, of_tokens.k = experts, of_tokens.batch = 1;
  of_tokens.a_stride = experts + pad, of_tokens.b_stride = of_tokens.c_stride = width + pad;
  of_tokens.a = run.floats(tokens * of_tokens.a_stride, 0.2);
  of_tokens.b = run.tensor(experts * of_tokens.b_stride);
  of_tokens.c = run.tensor(tokens * of_tokens.c_stride);
  of_tokens.alpha = 1, of_tokens.beta = beta;
  of_tokens.a_dtype = MIMO_DTYPE_F32;
  of_tokens.b_dtype = of_tokens.c_dtype = run.dtype();
  run.call("mimo_gemm", of_tokens);
  run.compare("of tokens", of_tokens.c, tokens * of_tokens.c_stride);

  mimo_gemm_args of_weights = of_tokens;
  of_weights.m = experts, of_weights.n = width, of_weights.k = tokens;
  of_weights.b = run.tensor(tokens * of_weights.b_stride, 1 / std::sqrt(static_cast<double>(tokens)));
  of_weights.c = run.floats(experts * of_weights.c_stride);
  of_weights.transpose_a = 1;
  of_weights.c_dtype = MIMO_DTYPE_F32;
  run.call("mimo_gemm", of_weights);
  run.compare("of weights", of_weights.c, experts * of_weights.c_stride, MIMO_DTYPE_F32);
}

/// z, its GELU, and the gradient of z through the product that reads the GELU.
void gelu_gemm(Run& run, int64_t rows, int64_t inputs, int64_t outputs, bool bias, int64_t pad) {
  mimo_gelu_gemm_forward_args f{};
  f.x = run.tensor(rows * (inputs + pad));
  f.w = run.tensor(outputs * inputs, 1 / std::sqrt(static_cast<double>(inputs)));
  f.bias = bias ? run.tensor(outputs) : nullptr;
  f.z = run.output(rows * outputs);
  f.y = run.output(rows * outputs);
  f.rows = rows, f.inputs = inputs, f.outputs = outputs, f.x_stride = inputs + pad;
  f.dtype = run.dtype();
  run.call("mimo_gelu_gemm_forward", f);
  run.compare("z", f.z, rows * outputs);
  run.compare("y", f.y, rows * outputs);

  mimo_gelu_gemm_backward_args b{};
  b.dy = run.tensor(rows * (inputs + pad));
  b.w = run.tensor(inputs * outputs, 1 / std::sqrt(static_cast<double>(inputs)));
  b.z = run.tensor(rows * outputs, 2);
  b.dz = run.output(rows * outputs);
  b.rows = rows, b.inputs = outputs, b.outputs = inputs, b.dy_stride = inputs + pad;
  b.dtype = run.dtype();
  run.call("mimo_gelu_gemm_backward", b);
  run.compare("dz", b.dz, rows * outputs);
}

std::vector<int32_t> offsets_of(const std::vector<int32_t>& counts) { return cumulative(counts); }

void grouped(Run& run, const std::vector<int32_t>& counts, int64_t n, int64_t k, bool transpose_b, bool f32_result) {
  const int64_t rows = offsets_of(counts).back() + 5, groups = static_cast<int64_t>(counts.size());
  mimo_grouped_gemm_args args{};
  args.a = run.tensor(rows * k);
  args.b = run.tensor(groups * n * k, 1 / std::sqrt(static_cast<double>(k)));
  args.c_dtype = f32_result ? static_cast<int32_t>(MIMO_DTYPE_F32) : run.dtype();
  const std::vector<float> c(static_cast<size_t>(rows * n), 7.0f);
  args.c = f32_result ? run.upload(c) : run.tensor(c);  // rows past the last group stay 7
  args.offsets = run.upload(offsets_of(counts));
  args.rows = rows, args.groups = groups, args.n = n, args.k = k;
  args.transpose_b = transpose_b;
  args.a_dtype = args.b_dtype = run.dtype();
  run.call("mimo_grouped_gemm", args);
  run.compare("c", args.c, rows * n, args.c_dtype);
}

/// b in e4m3. Without `counts`: all of 333 rows are one group, without offsets.
void grouped_in_e4m3(Run& run, const std::vector<int32_t>& counts, int64_t n, int64_t k, bool transpose_b) {
  if (run.precision != MIMO_DTYPE_BF16) return;
  const bool single = counts.empty();
  const int64_t rows = single ? 333 : offsets_of(counts).back() + 5, groups = single ? 1 : static_cast<int64_t>(counts.size());
  mimo_e4m3_matrices_args m{};
  m.count = groups, m.rows = transpose_b ? n : k, m.width = transpose_b ? k : n, m.dtype = run.dtype();
  m.matrices = run.tensor(groups * n * k, 1 / std::sqrt(static_cast<double>(k)));
  m.values = run.output(groups * n * k, MIMO_DTYPE_U8);
  m.transposed = run.output(groups * n * k, MIMO_DTYPE_U8);
  m.factors = run.floats(groups * ((n + 127) / 128) * ((k + 127) / 128));
  run.call("mimo_e4m3_matrices", m);
  mimo_grouped_gemm_args args{};
  args.a = run.tensor(rows * k);
  args.b = transpose_b ? m.values : m.transposed, args.b_factors = m.factors;
  args.c = run.tensor(std::vector<float>(static_cast<size_t>(rows * n), 7.0f));  // rows past the last group stay 7
  args.offsets = single ? nullptr : run.upload(offsets_of(counts));
  args.rows = rows, args.groups = groups, args.n = n, args.k = k;
  args.transpose_b = transpose_b, args.recipe = MIMO_MLP_RECIPE_E4M3_BLOCKWISE;
  args.a_dtype = args.c_dtype = run.dtype(), args.b_dtype = MIMO_DTYPE_U8;
  run.call("mimo_grouped_gemm", args);
  run.compare("c", args.c, rows * n);
}

/// `spare` rows follow the last group.
void weight_gradient(Run& run, const std::vector<int32_t>& counts, int64_t n, int64_t k, bool accumulate,
                     int64_t spare = 5) {
  const int64_t rows = offsets_of(counts).back() + spare, groups = static_cast<int64_t>(counts.size());
  mimo_grouped_gemm_weight_gradient_args args{};
  // Values behind the last group must not reach a sum.
  const auto with_poison = [&](int64_t width) {
    std::vector<float> values = run.normal(rows * width);
    std::fill(values.end() - spare * width, values.end(), NAN);
    return run.tensor(values);
  };
  args.dy = with_poison(n);
  args.x = with_poison(k);
  // Nor may values that a written gradient replaces.
  args.dw = accumulate ? run.floats(groups * n * k) : run.upload(std::vector<float>(static_cast<size_t>(groups * n * k), NAN));
  args.accumulate = accumulate;
  args.offsets = run.upload(offsets_of(counts));
  args.rows = rows, args.groups = groups, args.n = n, args.k = k;
  args.dy_dtype = args.x_dtype = run.dtype();
  run.call("mimo_grouped_gemm_weight_gradient", args);
  run.compare("dw", args.dw, groups * n * k, MIMO_DTYPE_F32);
}

/// `single`: which operand has a single 1 in a row, in the column of the row's place in its block of 128. Then the gradient is the other
/// operand as it was rounded (of several blocks their sum), to the last bit.
enum class Single { none, dy, x };

/// `rounded`: operands come in e4m3.
void weight_gradient_in_e4m3(Run& run, const std::vector<int32_t>& counts, int64_t n, int64_t k, bool accumulate, Single single,
                             bool rounded) {
  constexpr int64_t spare = 5, block = 128;
  if (run.precision != MIMO_DTYPE_BF16) return;
  const std::vector<int32_t> offsets = offsets_of(counts);
  const int64_t live = offsets.back(), rows = live + spare, groups = static_cast<int64_t>(counts.size());
  // Sizes of rows that are far apart, so that small numbers of a block fall between the smallest of e4m3.
  const auto values = [&](int64_t width, bool ones) {
    std::vector<float> values = run.normal(rows * width);
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t row = offsets[static_cast<size_t>(group)]; row < offsets[static_cast<size_t>(group) + 1]; ++row) {
        const int64_t place = (row - offsets[static_cast<size_t>(group)]) % block;
        const float size = std::ldexp(1.0f, static_cast<int>(row * 7 % 20) - 14);
        for (int64_t i = 0; i < width; ++i) {
          float& value = values[static_cast<size_t>(row * width + i)];
          value = ones ? (i == place ? 1.0f : 0.0f) : value * size;
        }
      }
    }
    std::fill(values.end() - spare * width, values.end(), NAN);
    return run.tensor(values);
  };
  mimo_grouped_gemm_weight_gradient_args args{};
  args.dy = values(n, single == Single::dy), args.x = values(k, single == Single::x);
  args.dw = accumulate ? run.floats(groups * n * k) : run.upload(std::vector<float>(static_cast<size_t>(groups * n * k), NAN));
  args.accumulate = accumulate, args.recipe = MIMO_MLP_RECIPE_E4M3_BLOCKWISE;
  args.offsets = run.upload(offsets);
  args.rows = rows, args.groups = groups, args.n = n, args.k = k;
  args.dy_dtype = args.x_dtype = run.dtype();
  if (rounded) {
    const auto in_e4m3 = [&](const void*& x, const float*& factors, int32_t& dtype, int64_t width) {
      mimo_e4m3_rows_args r{};
      const int64_t count = (width + 127) / 128 * ((rows + 3) / 4 * 4);
      r.x = x, r.row_count = run.upload(std::vector<int32_t>{static_cast<int32_t>(live)});
      r.values = run.upload(std::vector<uint8_t>(static_cast<size_t>(rows * width), 0x7F));  // not numbers
      r.factors = run.upload(std::vector<float>(static_cast<size_t>(count), NAN));
      r.rows = rows, r.width = width, r.dtype = run.dtype();
      run.call("mimo_e4m3_rows", r);
      run.compare("rows in e4m3", r.values, live * width, MIMO_DTYPE_U8, true);
      run.compare("factors of rows", r.factors, count, MIMO_DTYPE_F32, true);
      x = r.values, factors = r.factors, dtype = MIMO_DTYPE_U8;
    };
    in_e4m3(args.dy, args.dy_factors, args.dy_dtype, n);
    in_e4m3(args.x, args.x_factors, args.x_dtype, k);
  }
  run.call("mimo_grouped_gemm_weight_gradient", args);
  run.compare("dw", args.dw, groups * n * k, MIMO_DTYPE_F32, single != Single::none);
}

void column_sum(Run& run, int64_t rows, int64_t width, int64_t stride, int64_t live) {
  mimo_column_sum_args args{};
  args.dy = run.tensor(rows * stride);
  args.dbias = run.floats(width);
  args.row_count = live < rows ? run.upload(std::vector<int32_t>{static_cast<int32_t>(live)}) : nullptr;
  args.rows = rows, args.width = width, args.stride = stride;
  args.dtype = run.dtype();
  run.call("mimo_column_sum", args);
  run.compare("dbias", args.dbias, width, MIMO_DTYPE_F32);
}

void spmm(Run& run, int64_t width, bool accumulate, bool values) {
  const std::vector<int32_t> offsets{0, 2, 2, 5, 6};
  mimo_spmm_args args{};
  args.rows = 4, args.width = width, args.x_stride = width + 8, args.y_stride = width;
  args.x = run.tensor(9 * args.x_stride);
  args.offsets = run.upload(offsets);
  args.columns = run.upload(std::vector<int32_t>{3, 0, 8, 8, 1, 5});
  args.values = values ? run.floats(6) : nullptr;
  args.y = run.tensor(4 * width);
  args.accumulate = accumulate;
  args.x_dtype = args.y_dtype = run.dtype();
  run.call("mimo_spmm", args);
  run.compare("y", args.y, 4 * width);
}

}  // namespace

void add_products(Cases& cases, bool large) {
  const auto add_gemm = [&](const char* name, Gemm g) {
    cases.push_back({std::string("gemm ") + name, [g](Run& run) { gemm(run, g); }});
  };
  add_gemm("plain", {48, 40, 32, 1, false, false, false, false, 1, 0, 0});
  add_gemm("linear with bias", {64, 72, 40, 1, false, true, true, false, 1, 0, 0});
  add_gemm("input gradient", {40, 64, 72, 1, false, false, false, false, 1, 0, 8});
  add_gemm("weight gradient", {72, 40, 64, 1, true, false, false, true, 1, 1, 0});
  add_gemm("odd sizes, scaled", {7, 5, 3, 1, false, true, false, false, 0.5f, 0.25f, 2});
  add_gemm("f32 result with bias", {16, 24, 32, 1, false, true, true, true, 1, 0, 0});
  add_gemm("batched, transposed", {16, 24, 8, 5, true, true, false, false, 1, 0, 8});
  add_gemm("one row", {1, 64, 40, 1, false, true, true, false, 1, 0, 0});
  add_gemm("empty k", {4, 8, 0, 1, false, true, true, false, 1, 0.5f, 0});
  cases.push_back({"gemm mixed types", mixed_gemm});
  cases.push_back({"gemm router gradients", [](Run& run) { router_gradients(run, 300, 136, 32, 0, 0); }});
  cases.push_back({"gemm router gradients added", [](Run& run) { router_gradients(run, 1500, 72, 64, 1, 8); }});
  cases.push_back({"gemm router gradients, many experts", [](Run& run) { router_gradients(run, 129, 200, 256, 0.5f, 0); }});
  cases.push_back({"gemm router gradients, odd sizes", [](Run& run) { router_gradients(run, 37, 45, 7, 1, 3); }});
  cases.push_back({"gelu gemm", [](Run& run) { gelu_gemm(run, 100, 64, 256, true, 0); }});
  cases.push_back({"gelu gemm strided, without bias", [](Run& run) { gelu_gemm(run, 33, 48, 72, false, 8); }});
  cases.push_back({"gelu gemm odd", [](Run& run) { gelu_gemm(run, 19, 21, 35, true, 3); }});
  cases.push_back({"gelu gemm of a row", [](Run& run) { gelu_gemm(run, 1, 80, 320, true, 0); }});
  if (large) {
    add_gemm("large", {2048, 2688, 1856, 1, false, true, false, false, 1, 0, 0});
    add_gemm("large weight gradient", {2688, 1856, 4096, 1, true, false, false, true, 1, 1, 0});
  }
  const std::vector<int32_t> uneven{3, 0, 130, 1, 64, 0, 17};
  // Around the edges of tiles of 64 and 128 rows, and more tiles than a GPU has multiprocessors.
  const std::vector<int32_t> edges{63, 64, 65, 0, 127, 128, 129, 1, 191, 192, 193, 0, 0, 256, 257, 2100};
  for (const bool transpose_b : {true, false}) {
    const std::string suffix = transpose_b ? "" : " input gradient";
    cases.push_back({"grouped gemm" + suffix, [=](Run& run) { grouped(run, uneven, 72, 136, transpose_b, false); }});
    cases.push_back(
        {"grouped gemm f32 result" + suffix, [=](Run& run) { grouped(run, uneven, 136, 72, transpose_b, true); }});
    cases.push_back({"grouped gemm edges" + suffix, [=](Run& run) { grouped(run, edges, 392, 328, transpose_b, false); }});
    cases.push_back({"grouped gemm many" + suffix, [=](Run& run) { grouped(run, edges, 3000, 200, transpose_b, false); }});
    cases.push_back({"grouped gemm odd" + suffix, [=](Run& run) { grouped(run, {2, 0, 5}, 7, 5, transpose_b, false); }});
    cases.push_back({"grouped gemm wide" + suffix, [=](Run& run) { grouped(run, {129, 40}, 264, 200, transpose_b, false); }});
    for (const auto& [name, counts] : {std::pair{" e4m3", uneven}, {" e4m3 edges", edges}, {" e4m3 of one group", {}}}) {
      cases.push_back({"grouped gemm" + (name + suffix), [=](Run& run) { grouped_in_e4m3(run, counts, 400, 336, transpose_b); }});
    }
    if (large) {
      cases.push_back({"grouped gemm large" + suffix, [=](Run& run) {
                         grouped(run, {700, 0, 1, 1500, 64, 333, 2048, 90}, transpose_b ? 1856 : 2688,
                                 transpose_b ? 2688 : 1856, transpose_b, false);
                       }});
    }
  }
  for (const bool accumulate : {true, false}) {
    const std::string name = accumulate ? "grouped weight gradient" : "grouped weight gradient written";
    const auto add = [&](const char* suffix, const std::vector<int32_t>& counts, int64_t n, int64_t k) {
      cases.push_back({name + suffix, [=](Run& run) { weight_gradient(run, counts, n, k, accumulate); }});
    };
    add("", uneven, 72, 136);
    add(" edges", edges, 392, 328);
    add(" many", edges, 1000, 1000);
    add(" wide", {129, 40}, 264, 200);
    add(" odd", {2, 0, 5}, 7, 5);
    add(" of no rows", {0, 0, 0}, 264, 200);
    const auto add_e4m3 = [&](const char* suffix, const std::vector<int32_t>& counts, int64_t n, int64_t k, Single single) {
      for (const bool rounded : {false, true}) {
        cases.push_back({name + " e4m3" + suffix + (rounded ? " of rows in e4m3" : ""),
                         [=](Run& run) { weight_gradient_in_e4m3(run, counts, n, k, accumulate, single, rounded); }});
      }
    };
    add_e4m3("", {3, 0, 130, 1, 64, 0, 17}, 80, 144, Single::none);
    add_e4m3(" edges", edges, 400, 336, Single::none);
    add_e4m3(" of no rows", {0, 0, 0}, 272, 208, Single::none);
    std::vector<int32_t> few;  // more groups than a block has threads
    for (int group = 0; group < 1100; ++group) few.push_back(group % 3);
    add_e4m3(" many groups", few, 48, 32, Single::none);
    add_e4m3(" bytes of dy", edges, 272, 128, Single::x);
    add_e4m3(" bytes of x", edges, 128, 400, Single::dy);
    cases.push_back({name + " of nothing", [=](Run& run) { weight_gradient(run, {0, 0}, 72, 136, accumulate, 0); }});
    if (large) add(" large", {700, 0, 1, 1500, 64, 333, 2048, 90}, 1856, 2688);
    if (large) add_e4m3(" large", {700, 0, 1, 1500, 64, 333, 2048, 90}, 1856, 2688, Single::none);
  }
  cases.push_back({"column sum", [](Run& run) { column_sum(run, 300, 72, 80, 300); }});
  cases.push_back({"column sum live rows", [](Run& run) { column_sum(run, 300, 33, 33, 131); }});
  for (const bool accumulate : {false, true}) {
    cases.push_back({accumulate ? "spmm added" : "spmm", [=](Run& run) { spmm(run, 40, accumulate, !accumulate); }});
    cases.push_back({accumulate ? "spmm odd added" : "spmm odd", [=](Run& run) { spmm(run, 13, accumulate, true); }});
  }
}

}  // namespace check
