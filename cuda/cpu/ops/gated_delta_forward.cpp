// The gated delta rule in chunks, forward (docs/spec/families.md §2.5).
#include "gated_delta.h"

namespace mimo::MIMO_ISA {
namespace {

struct ForwardTiles {
  DeltaKeys keys;
  DeltaHead head;
  float *states, *mixed, *out;

  template <class Args>
  ForwardTiles(SsdScratch* scratch, const Args& args)
      : keys(scratch, args.key_dim),
        head(scratch, args.value_dim),
        states(scratch->take(args.value_heads / args.key_heads * args.key_dim * args.value_dim)),
        mixed(scratch->take(delta_chunk * delta_chunk)),
        out(scratch->take(delta_chunk * args.value_dim)) {}
};

template <class T>
void run_task(const mimo_gated_delta_forward_args& args, const DeltaTask& task, ForwardTiles& tiles) {
  const int64_t dk = args.key_dim, dv = args.value_dim;
  DeltaHead& own = tiles.head;
  std::memset(tiles.states, 0, static_cast<size_t>(task.heads * dk * dv) * sizeof(float));
  for (int64_t begin = task.first; begin < task.last; begin += delta_chunk) {
    const int64_t count = smaller(delta_chunk, task.last - begin);
    tiles.keys.load_keys<T>(args, task, begin, count);
    tiles.keys.load_queries<T>(args, task, begin, count);
    for (int64_t index = 0; index < task.heads; ++index) {
      const int64_t head = task.key_head * task.heads + index;
      float* const state = tiles.states + index * dk * dv;
      own.write<T>(args, tiles.keys, head, begin, count, state);
      delta_product({tiles.keys.q, dk}, {state, dv}, count, dk, dv, tiles.out, dv);
      scale_rows(tiles.out, own.from_start, count, dv, tiles.out, dv);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = i * delta_chunk;
        float* const to = tiles.mixed + row;
        const float *const pairs = tiles.keys.qk + row, *const decays = own.gamma + row;
        short_loop(count, [=](int64_t j) { to[j] = pairs[j] * decays[j]; });
      }
      delta_product({tiles.mixed, delta_chunk}, {own.written, dv}, count, count, dv, tiles.out, dv, 1, 1);
      for (int64_t i = 0; i < count; ++i) {
        T* const o = static_cast<T*>(args.o) + ((begin + i) * args.value_heads + head) * dv;
        const float* const from = tiles.out + i * dv;
        short_loop(dv, [=](int64_t c) { store(&o[c], from[c]); });
      }
      own.advance(tiles.keys, count, dk, dv, state, tiles.out);
    }
  }
  if (args.final_state == nullptr) return;
  float* const to = args.final_state + (task.sequence * args.value_heads + task.key_head * task.heads) * dk * dv;
  std::memcpy(to, tiles.states, static_cast<size_t>(task.heads * dk * dv) * sizeof(float));
}

}  // namespace

void gated_delta_forward(mimo_stream& stream, const mimo_gated_delta_forward_args& args) {
  MIMO_REQUIRE(args.key_heads > 0 && args.value_heads % args.key_heads == 0, "gated_delta_forward");
  MIMO_REQUIRE(args.key_dim > 0 && args.value_dim > 0, "gated_delta_forward");
  SsdScratch counted{nullptr};
  ForwardTiles{&counted, args};
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    ssd_run_tasks(stream, args.sequences * args.key_heads, counted.used, [&](int64_t index, float* memory) {
      SsdScratch scratch{memory};
      ForwardTiles tiles(&scratch, args);
      run_task<T>(args, delta_task(args, index), tiles);
    });
  });
}

}  // namespace mimo::MIMO_ISA
