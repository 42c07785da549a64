#include "tensor_map.h"

#include <cuda_runtime_api.h>
#include <cudaTypedefs.h>

#include "error.h"

namespace mimo::cuda {
namespace {

/// Looks the driver function up through the runtime, which has opened the driver: the library does not link libcuda.
PFN_cuTensorMapEncodeTiled_v12000 find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
        "looking for cuTensorMapEncodeTiled");
  if (found != cudaDriverEntryPointSuccess) fail(MIMO_ERROR_UNSUPPORTED, "The driver has no cuTensorMapEncodeTiled.");
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

CUtensorMap tensor_map(const void* data, CUtensorMapDataType type, CUtensorMapSwizzle swizzle, int rank,
                       const int64_t* size, const int64_t* stride, const uint32_t* box) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = find_encode();
  cuuint64_t sizes[5], strides[4];
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  for (int i = 0; i < rank; ++i) sizes[i] = static_cast<cuuint64_t>(size[i]);
  for (int i = 0; i + 1 < rank; ++i) strides[i] = static_cast<cuuint64_t>(stride[i]);
  CUtensorMap map;
  const CUresult result =
      encode(&map, type, static_cast<cuuint32_t>(rank), const_cast<void*>(data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) fail(MIMO_ERROR_DEVICE, "The driver refused to describe a tensor for the copy engine.");
  return map;
}

/// Boxes with rows of 128 bytes.
CUtensorMap matrices_of(const void* data, CUtensorMapDataType type, int64_t element, int64_t count, int64_t rows,
                        int64_t width, uint32_t box_rows) {
  const int64_t size[3] = {width, rows, count}, stride[2] = {element * width, element * width * rows};
  const uint32_t box[3] = {static_cast<uint32_t>(128 / element), box_rows, 1};
  return tensor_map(data, type, CU_TENSOR_MAP_SWIZZLE_128B, 3, size, stride, box);
}

// Dimensions 2 and 3 both step by rows: TMA checks dimension 2 against the group's end, dimension 3 moves the box to
// the group. Their coordinates together are 2^30 rows too large; dimension 4 subtracts these: 2^30 of its strides wrap
// around the 64-bit address.
CUtensorMap ragged_of(const void* data, CUtensorMapDataType type, int64_t element, int64_t width, uint32_t box_rows) {
  const int64_t row = element * width;
  const int64_t size[4] = {width, ragged_end, int64_t{1} << 31, int64_t{1} << 31};
  const int64_t stride[3] = {row, row, (int64_t{1} << 34) - row};
  const uint32_t box[4] = {static_cast<uint32_t>(128 / element), box_rows, 1, 1};
  return tensor_map(data, type, CU_TENSOR_MAP_SWIZZLE_128B, 4, size, stride, box);
}

}  // namespace

CUtensorMap matrices_map(const void* data, int64_t count, int64_t rows, int64_t width, uint32_t box_rows) {
  return matrices_of(data, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, count, rows, width, box_rows);
}

CUtensorMap byte_matrices_map(const void* data, int64_t count, int64_t rows, int64_t width, uint32_t box_rows) {
  return matrices_of(data, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, count, rows, width, box_rows);
}

CUtensorMap sums_map(float* data, int64_t count, int64_t rows, int64_t width, uint32_t box_rows) {
  const int64_t size[3] = {width, rows, count}, stride[2] = {4 * width, 4 * width * rows};
  const uint32_t box[3] = {32, box_rows, 1};
  return tensor_map(data, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CU_TENSOR_MAP_SWIZZLE_128B, 3, size, stride, box);
}

CUtensorMap ragged_map(const void* data, int64_t width, uint32_t box_rows) {
  return ragged_of(data, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, width, box_rows);
}

CUtensorMap byte_ragged_map(const void* data, int64_t width, uint32_t box_rows) {
  return ragged_of(data, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, width, box_rows);
}

CUtensorMap heads_map(const void* data, int64_t heads, int64_t head_dim, int64_t head_stride, int64_t token_stride,
                      uint32_t box_rows) {
  const int64_t row = 2 * token_stride;
  const int64_t size[5] = {head_dim, heads, ragged_end, int64_t{1} << 31, int64_t{1} << 31};
  const int64_t stride[4] = {2 * head_stride, row, row, (int64_t{1} << 34) - row};
  const uint32_t box[5] = {64, 1, box_rows, 1, 1};
  return tensor_map(data, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_SWIZZLE_128B, 5, size, stride, box);
}

CUtensorMap heads_end_map(const void* data, int64_t heads, int64_t head_stride, int64_t token_stride, uint32_t box_rows) {
  const int64_t row = 2 * token_stride;
  const int64_t size[5] = {16, heads, ragged_end, int64_t{1} << 31, int64_t{1} << 31};
  const int64_t stride[4] = {2 * head_stride, row, row, (int64_t{1} << 34) - row};
  const uint32_t box[5] = {16, 1, box_rows, 1, 1};
  return tensor_map(static_cast<const char*>(data) + 128, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_SWIZZLE_32B, 5, size,
                    stride, box);
}

}  // namespace mimo::cuda
