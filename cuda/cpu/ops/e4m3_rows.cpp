// Quantises rows to e4m3 in runs of 128 columns (docs/spec/moe-performance.md §1.7).
#include "e4m3.h"

namespace mimo::MIMO_ISA {

void e4m3_rows(mimo_stream& stream, const mimo_e4m3_rows_args& args) {
  MIMO_REQUIRE(args.rows >= 0 && args.width >= 1, "e4m3_rows");
  round_rows_to_e4m3(stream, args.x, args.dtype, live_rows(args.rows, args.row_count), args.width,
                     {static_cast<uint8_t*>(args.values), args.factors, e4m3_factor_stride(args.rows)});
}

}  // namespace mimo::MIMO_ISA
