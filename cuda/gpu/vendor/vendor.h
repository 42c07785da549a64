// cuBLASLt, cuDNN and NCCL are loaded when first needed; the library does not link them.
#pragma once
#include <string>

namespace mimo::cuda {

enum class Vendor { cublaslt, cudnn, nccl };

struct VendorLibrary {
  void* handle;
  std::string path;
};

/// Loads a library once per process; throws MIMO_ERROR_UNSUPPORTED with the package to install if it is not found.
const VendorLibrary& open_vendor(Vendor vendor);

/// Address of a function in a loaded library; throws if it is missing.
void* vendor_symbol(const VendorLibrary& library, const char* name);

}  // namespace mimo::cuda
