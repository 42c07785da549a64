// Chunk-scan (SSD) backward: runs its tasks (ssd_task_backward.h) and adds their partial sums in a fixed order.
#include "masks.h"
#include "ssd_task_backward.h"

namespace mimo::MIMO_ISA {
namespace {

/// out[t][i] = Σ_block partial[block][t][i], in the order of the blocks.
template <class T>
void add_blocks(mimo_stream& stream, const float* partial, int64_t blocks, int64_t tokens, int64_t width, T* out,
                int64_t stride) {
  parallel_range(stream.device->threads, tokens, rows_per_partial, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t i = 0; i < width; ++i) {
        float sum = 0;
        for (int64_t block = 0; block < blocks; ++block) sum += partial[(block * tokens + t) * width + i];
        store(&out[t * stride + i], sum);
      }
    }
  });
}

/// dz_factors[c] += Σ over tokens of z times the gradient of the masked z.
template <class T>
void add_factor_gradients(mimo_stream& stream, const mimo_ssd_backward_args& args) {
  const int64_t width = args.heads * args.head_dim;
  const MaskFactors masks(&stream, args.z_factors, nullptr, width);
  ColumnSums sums(&stream, args.tokens, width, true);
  parallel_range(stream.device->threads, args.tokens, rows_per_partial, [&](int64_t begin, int64_t end) {
    float* const own = sums.cleared_partial(begin);
    const float* const factors = masks.product();
    for (int64_t row = begin; row < end; ++row) {
      const T* const d_o = static_cast<const T*>(args.d_o) + row * width;
      const T* const y = static_cast<const T*>(args.y) + row * width;
      const T* const z = static_cast<const T*>(args.z) + row * args.z_stride;
#pragma omp simd
      for (int64_t c = 0; c < width; ++c) {
        const float gate = factors[c] * load(z[c]), s = sigmoid(gate);
        own[c] += load(d_o[c]) * load(y[c]) * s * (1.0f + gate * (1.0f - s)) * load(z[c]);
      }
    }
  });
  masks.add_gradients(sums.total(), args.dz_factors, nullptr);
}

}  // namespace

void ssd_backward(mimo_stream& stream, const mimo_ssd_backward_args& args) {
  MIMO_REQUIRE(args.groups > 0 && args.heads % args.groups == 0, "ssd_backward");
  MIMO_REQUIRE(args.chunk_size > 0 && args.head_dim > 0 && args.state_dim > 0, "ssd_backward");
  if (args.tokens == 0 || args.heads == 0) return;
  const SsdPlan plan = ssd_plan(args);
  SsdScratch counted{nullptr};
  SsdBackwardTiles{&counted, plan};
  const int64_t tile_floats = counted.used;
  counted.take((plan.longest - 1) / plan.chunk * ssd_most_heads(plan) * plan.head_dim * plan.state_dim);
  const int64_t shared_floats = plan.blocks_per_group > 1 ? args.tokens * args.groups * plan.state_dim : 0;
  Workspace sum_space(&stream, args.sequences * args.heads * static_cast<int64_t>(sizeof(SsdHeadSums)));
  Workspace partial_space(&stream, 2 * plan.blocks_per_group * shared_floats * static_cast<int64_t>(sizeof(float)));
  SsdHeadSums* sums = sum_space.as<SsdHeadSums>();
  float *db = partial_space.as<float>(), *dc = db + plan.blocks_per_group * shared_floats;
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    ssd_run_tasks(stream, plan.tasks, counted.used, [&](int64_t index, float* memory) {
      SsdScratch scratch{memory};
      SsdBackwardTiles tiles(&scratch, plan);
      const SsdTask task = ssd_task(args, plan, index);
      const int64_t offset = task.block * shared_floats;
      const SsdGroupPartials partials =
          shared_floats > 0 ? SsdGroupPartials{db + offset, dc + offset} : SsdGroupPartials{nullptr, nullptr};
      SsdHeadSums* const own_sums = sums + index / plan.blocks * args.heads;
      SsdTaskBackward<T>{args, plan, task, tiles, memory + tile_floats, own_sums}.run(partials);
    });
    if (shared_floats > 0) {
      const int64_t width = args.groups * plan.state_dim;
      add_blocks(stream, db, plan.blocks_per_group, args.tokens, width, static_cast<T*>(args.db), args.dxbc_stride);
      add_blocks(stream, dc, plan.blocks_per_group, args.tokens, width, static_cast<T*>(args.dc), args.dxbc_stride);
    }
    if (args.dz_factors != nullptr) add_factor_gradients<T>(stream, args);
  });
  for (int64_t head = 0; head < args.heads; ++head) {
    SsdHeadSums sum{0, 0, 0};
    for (int64_t s = 0; s < args.sequences; ++s) {
      const SsdHeadSums& part = sums[s * args.heads + head];
      sum.d += part.d;
      sum.a_log += part.a_log;
      sum.dt_bias += part.dt_bias;
    }
    if (args.dd != nullptr) args.dd[head] += static_cast<float>(sum.d);
    if (args.da_log != nullptr) args.da_log[head] += static_cast<float>(sum.a_log);
    if (args.ddt_bias != nullptr) args.ddt_bias[head] += static_cast<float>(sum.dt_bias);
  }
}

}  // namespace mimo::MIMO_ISA
