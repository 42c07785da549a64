// Quantises matrices to e4m3 in blocks of 128 x 128 (docs/spec/moe-performance.md §1.7).
#include <algorithm>

#include "e4m3.h"

namespace mimo::MIMO_ISA {
namespace {

template <class T>
void round_block(const T* from, const mimo_e4m3_matrices_args& args, int64_t matrix, int64_t first_row, int64_t first_column,
                 float* factor) {
  const int64_t last_row = std::min(args.rows, first_row + e4m3_run), last_column = std::min(args.width, first_column + e4m3_run);
  float magnitude = 0;
  for (int64_t row = first_row; row < last_row; ++row) {
    for (int64_t column = first_column; column < last_column; ++column) {
      const float x = std::fabs(load(from[row * args.width + column]));
      magnitude = x > magnitude ? x : magnitude;
    }
  }
  const float power = magnitude < INFINITY ? e4m3_power(magnitude) : NAN;
  auto* const values = static_cast<uint8_t*>(args.values) + matrix * args.rows * args.width;
  auto* const transposed = static_cast<uint8_t*>(args.transposed);
  for (int64_t row = first_row; row < last_row; ++row) {
    for (int64_t column = first_column; column < last_column; ++column) {
      const uint8_t byte = e4m3_byte(round_to_e4m3(load(from[row * args.width + column]) * power));
      values[row * args.width + column] = byte;
      if (transposed != nullptr) transposed[(matrix * args.width + column) * args.rows + row] = byte;
    }
  }
  *factor = std::isnan(power) ? 1.0f : 1 / power;
}

}  // namespace

void e4m3_matrices(mimo_stream& stream, const mimo_e4m3_matrices_args& args) {
  MIMO_REQUIRE(args.count >= 0 && args.rows >= 1 && args.width >= 1, "e4m3_matrices");
  const int64_t down = (args.rows + e4m3_run - 1) / e4m3_run, across = (args.width + e4m3_run - 1) / e4m3_run;
  with_dtype(args.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    parallel_for(stream.device->threads, args.count * down * across, [&](int64_t block) {
      const int64_t matrix = block / (down * across), in_matrix = block % (down * across);
      round_block(static_cast<const T*>(args.matrices) + matrix * args.rows * args.width, args, matrix,
                  in_matrix / across * e4m3_run, in_matrix % across * e4m3_run, args.factors + block);
    });
  });
}

}  // namespace mimo::MIMO_ISA
