// RMSNorm, LayerNorm and activations.
#include "cases.h"

namespace check {
namespace {

void rms_norm(Run& run, int64_t rows, int64_t width, int64_t group, bool residual, int64_t pad, bool f32_weight,
              float offset = 0) {
  const int64_t stride = width + pad;
  const int32_t weight_dtype = f32_weight ? static_cast<int32_t>(MIMO_DTYPE_F32) : run.dtype();
  const std::vector<float> weights = run.normal(width, 0.2, 1 - offset);
  const void* weight = f32_weight ? run.upload(weights) : run.tensor(weights);
  mimo_rms_norm_forward_args f{};
  f.x = run.tensor(rows * stride);
  f.residual = residual ? run.tensor(rows * stride) : nullptr;
  f.weight = weight;
  f.sum = residual ? run.output(rows * width) : nullptr;
  f.y = run.output(rows * width);
  f.rstd = static_cast<float*>(run.output(rows * (width / group), MIMO_DTYPE_F32));
  f.rows = rows, f.width = width, f.group_size = group, f.x_stride = stride, f.y_stride = width;
  f.epsilon = 1e-5f, f.weight_offset = offset;
  f.dtype = run.dtype(), f.weight_dtype = weight_dtype;
  run.call("mimo_rms_norm_forward", f);
  run.compare("y", f.y, rows * width);
  run.compare("rstd", f.rstd, rows * (width / group), MIMO_DTYPE_F32);
  if (residual) run.compare("sum", f.sum, rows * width);

  mimo_rms_norm_backward_args b{};
  b.dy = run.tensor(rows * stride);
  b.x = f.x;
  b.weight = weight;
  b.rstd = f.rstd;
  b.dresidual = residual ? run.tensor(rows * width) : nullptr;
  b.dx = run.output(rows * width);
  b.dweight = run.floats(width);
  b.rows = rows, b.width = width, b.group_size = group, b.dy_stride = stride, b.x_stride = stride, b.dx_stride = width;
  b.weight_offset = offset;
  b.dtype = run.dtype(), b.weight_dtype = weight_dtype;
  if (residual) return;  // rstd belongs to the sum then, not to x
  run.call("mimo_rms_norm_backward", b);
  run.compare("dx", b.dx, rows * width);
  run.compare("dweight", b.dweight, width, MIMO_DTYPE_F32);
  b.dresidual = run.tensor(rows * width);
  b.dweight = nullptr;
  run.call("mimo_rms_norm_backward", b);
  run.compare("dx with residual", b.dx, rows * width);
}

void head_norm(Run& run, int64_t rows, int64_t queries, int64_t head_dim, float offset, bool f32_weight) {
  const int64_t width = (queries + 2) * head_dim;
  const auto weights = [&] {
    const std::vector<float> values = run.normal(head_dim, 0.2, 1 - offset);
    return f32_weight ? static_cast<void*>(run.upload(values)) : run.tensor(values);
  };
  mimo_head_norm_forward_args f{};
  f.x = run.tensor(rows * width), f.query_weight = weights(), f.key_weight = weights();
  f.y = run.output(rows * width);
  f.rstd = static_cast<float*>(run.output((queries + 1) * rows, MIMO_DTYPE_F32));
  f.rows = rows, f.width = width, f.head_dim = head_dim, f.epsilon = 1e-5f, f.weight_offset = offset;
  f.dtype = run.dtype(), f.weight_dtype = f32_weight ? static_cast<int32_t>(MIMO_DTYPE_F32) : run.dtype();
  run.call("mimo_head_norm_forward", f);
  run.compare("y", f.y, rows * width);
  run.compare("rstd", f.rstd, (queries + 1) * rows, MIMO_DTYPE_F32);

  mimo_head_norm_backward_args b{};
  b.dy = run.tensor(rows * width), b.x = f.x, b.query_weight = f.query_weight, b.key_weight = f.key_weight, b.rstd = f.rstd;
  b.dx = run.output(rows * width);
  b.dquery_weight = run.floats(head_dim), b.dkey_weight = run.floats(head_dim);
  b.rows = rows, b.width = width, b.head_dim = head_dim, b.weight_offset = offset;
  b.dtype = f.dtype, b.weight_dtype = f.weight_dtype;
  run.call("mimo_head_norm_backward", b);
  run.compare("dx", b.dx, rows * width);
  run.compare("dquery_weight", b.dquery_weight, head_dim, MIMO_DTYPE_F32);
  run.compare("dkey_weight", b.dkey_weight, head_dim, MIMO_DTYPE_F32);
  b.dquery_weight = nullptr;
  run.call("mimo_head_norm_backward", b);
  run.compare("dkey_weight alone", b.dkey_weight, head_dim, MIMO_DTYPE_F32);
}

void layer_norm(Run& run, int64_t rows, int64_t width, bool f32_weight, bool residual = false) {
  const int32_t weight_dtype = f32_weight ? static_cast<int32_t>(MIMO_DTYPE_F32) : run.dtype();
  const auto weights = [&](double mean) {
    const std::vector<float> values = run.normal(width, 0.2, mean);
    return f32_weight ? static_cast<void*>(run.upload(values)) : run.tensor(values);
  };
  mimo_layer_norm_forward_args f{};
  f.x = run.tensor(run.normal(rows * width, 1, 0.5));
  f.weight = weights(1);
  f.bias = weights(0);
  f.y = run.output(rows * width);
  f.mean = static_cast<float*>(run.output(rows, MIMO_DTYPE_F32));
  f.rstd = static_cast<float*>(run.output(rows, MIMO_DTYPE_F32));
  f.rows = rows, f.width = width, f.epsilon = 1e-6f;
  f.dtype = run.dtype(), f.weight_dtype = weight_dtype;
  if (residual) {
    f.residual = run.tensor(rows * width);
    f.sum = run.output(rows * width);
  }
  run.call("mimo_layer_norm_forward", f);
  if (residual) run.compare("sum", f.sum, rows * width);
  run.compare("y", f.y, rows * width);
  run.compare("mean", f.mean, rows, MIMO_DTYPE_F32);
  run.compare("rstd", f.rstd, rows, MIMO_DTYPE_F32);
  if (residual) return;  // mean and rstd belong to the sum then, not to x
  mimo_layer_norm_backward_args b{};
  b.dy = run.tensor(rows * width);
  b.x = f.x, b.weight = f.weight, b.mean = f.mean, b.rstd = f.rstd;
  b.dx = run.output(rows * width);
  b.dweight = run.floats(width);
  b.dbias = run.floats(width);
  b.rows = rows, b.width = width;
  b.dtype = run.dtype(), b.weight_dtype = weight_dtype;
  run.call("mimo_layer_norm_backward", b);
  run.compare("dx", b.dx, rows * width);
  run.compare("dweight", b.dweight, width, MIMO_DTYPE_F32);
  run.compare("dbias", b.dbias, width, MIMO_DTYPE_F32);
  b.dresidual = run.tensor(rows * width);
  b.dweight = b.dbias = nullptr;
  run.call("mimo_layer_norm_backward", b);
  run.compare("dx with residual", b.dx, rows * width);
}

void activation(Run& run, int32_t kind, int64_t rows, int64_t width, int64_t live, bool probability, float clamp,
                int64_t interleave = 0) {
  const bool gated = kind == MIMO_ACTIVATION_SWIGLU || kind == MIMO_ACTIVATION_QUICK_GEGLU || kind == MIMO_ACTIVATION_GEGLU;
  const int64_t x_width = gated ? 2 * width : width;
  mimo_activation_forward_args f{};
  f.x = run.tensor(rows * x_width, 2);
  f.row_probability = probability ? run.upload(run.uniform(rows, 0, 1)) : nullptr;
  f.y = run.tensor(std::vector<float>(static_cast<size_t>(rows * width), 3.0f));
  f.row_count = live < rows ? run.upload(std::vector<int32_t>{static_cast<int32_t>(live)}) : nullptr;
  f.rows = rows, f.width = width, f.interleave = interleave, f.clamp = clamp, f.linear_offset = 0.5f;
  f.kind = kind, f.dtype = run.dtype();
  run.call("mimo_activation_forward", f);
  run.compare("y", f.y, rows * width);
  mimo_activation_backward_args b{};
  b.dy = run.tensor(rows * width);
  b.x = f.x, b.row_probability = f.row_probability, b.row_count = f.row_count;
  b.dx = run.tensor(std::vector<float>(static_cast<size_t>(rows * x_width), 3.0f));
  b.drow_probability = probability ? run.upload(std::vector<float>(static_cast<size_t>(rows), 2.0f)) : nullptr;
  b.rows = rows, b.width = width, b.interleave = interleave, b.clamp = clamp, b.linear_offset = 0.5f;
  b.kind = kind, b.dtype = run.dtype();
  run.call("mimo_activation_backward", b);
  run.compare("dx", b.dx, rows * x_width);
  if (probability) run.compare("drow_probability", b.drow_probability, rows, MIMO_DTYPE_F32);
}

}  // namespace

void add_norms(Cases& cases, bool large) {
  cases.push_back({"rms_norm", [](Run& run) { rms_norm(run, 37, 96, 96, false, 0, false); }});
  cases.push_back({"rms_norm f32 weight, strided", [](Run& run) { rms_norm(run, 40, 160, 160, false, 8, true); }});
  cases.push_back({"rms_norm groups", [](Run& run) { rms_norm(run, 70, 256, 64, false, 0, false); }});
  cases.push_back({"rms_norm residual", [](Run& run) { rms_norm(run, 5, 320, 320, true, 0, false); }});
  cases.push_back({"rms_norm wide", [](Run& run) { rms_norm(run, 29, 2688, 2688, false, 0, false); }});
  cases.push_back({"rms_norm wide residual", [](Run& run) { rms_norm(run, 7, 2688, 2688, true, 0, true); }});
  cases.push_back({"rms_norm wider", [](Run& run) { rms_norm(run, 11, 5120, 5120, false, 0, false); }});
  cases.push_back({"rms_norm zero-centred", [](Run& run) { rms_norm(run, 37, 96, 96, false, 0, false, 1); }});
  cases.push_back({"rms_norm zero-centred residual", [](Run& run) { rms_norm(run, 5, 320, 320, true, 0, true, 1); }});
  cases.push_back({"rms_norm odd", [](Run& run) { rms_norm(run, 19, 33, 11, false, 3, false); }});
  cases.push_back({"head_norm", [](Run& run) { head_norm(run, 70, 4, 128, 0, false); }});
  cases.push_back({"head_norm zero-centred of 256", [](Run& run) { head_norm(run, 67, 8, 256, 1, false); }});
  cases.push_back({"head_norm of 64, f32 weight", [](Run& run) { head_norm(run, 33, 1, 64, 0, true); }});
  cases.push_back({"head_norm of 80", [](Run& run) { head_norm(run, 300, 2, 80, 0, false); }});
  cases.push_back({"head_norm odd", [](Run& run) { head_norm(run, 19, 2, 11, 0, false); }});
  cases.push_back({"layer_norm", [](Run& run) { layer_norm(run, 37, 1280, false); }});
  cases.push_back({"layer_norm wide", [](Run& run) { layer_norm(run, 13, 3072, false); }});
  cases.push_back({"layer_norm narrow", [](Run& run) { layer_norm(run, 50, 384, true); }});
  cases.push_back({"layer_norm odd, f32 weight", [](Run& run) { layer_norm(run, 21, 45, true); }});
  cases.push_back({"layer_norm residual", [](Run& run) { layer_norm(run, 37, 1280, false, true); }});
  cases.push_back({"layer_norm wide residual", [](Run& run) { layer_norm(run, 13, 3072, true, true); }});
  cases.push_back({"layer_norm odd residual", [](Run& run) { layer_norm(run, 21, 45, false, true); }});
  if (large) {
    cases.push_back({"head_norm large", [](Run& run) { head_norm(run, 16384, 8, 128, 0, false); }});
    cases.push_back({"rms_norm large residual", [](Run& run) { rms_norm(run, 4096, 2688, 2688, true, 0, false); }});
    cases.push_back({"layer_norm large residual", [](Run& run) { layer_norm(run, 4096, 1280, false, true); }});
    cases.push_back({"rms_norm large", [](Run& run) { rms_norm(run, 4096, 2688, 2688, false, 0, false); }});
    cases.push_back({"rms_norm large groups", [](Run& run) { rms_norm(run, 2048, 4096, 512, false, 0, true); }});
    cases.push_back({"layer_norm large", [](Run& run) { layer_norm(run, 4096, 1280, false); }});
  }
  const std::pair<const char*, int32_t> kinds[] = {{"squared_relu", MIMO_ACTIVATION_SQUARED_RELU},
                                                   {"swiglu", MIMO_ACTIVATION_SWIGLU},
                                                   {"quick_geglu", MIMO_ACTIVATION_QUICK_GEGLU},
                                                   {"geglu", MIMO_ACTIVATION_GEGLU},
                                                   {"gelu_tanh", MIMO_ACTIVATION_GELU_TANH},
                                                   {"gelu_erf", MIMO_ACTIVATION_GELU_ERF}};
  for (const auto& [name, kind] : kinds) {
    const int32_t of = kind;
    cases.push_back({std::string("activation ") + name, [=](Run& run) { activation(run, of, 33, 72, 33, false, INFINITY); }});
    cases.push_back(
        {std::string("activation expert ") + name, [=](Run& run) { activation(run, of, 40, 21, 29, true, 1.5f); }});
    cases.push_back({std::string("activation interleaved ") + name,
                     [=](Run& run) { activation(run, of, 40, 96, 29, true, 1.5f, 32); }});
  }
}

}  // namespace check
