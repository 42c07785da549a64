// cuBLASLt, cuDNN and NCCL are not part of the library: they are found and opened when first needed.
#pragma once
#include <string>

namespace mimo::cuda {

enum class Vendor { cublaslt, cudnn, nccl };

struct VendorLibrary {
  void* handle;
  std::string path;
};

/// Opens a library once per process; throws MIMO_ERROR_UNSUPPORTED, which names the package to install, when it is nowhere.
const VendorLibrary& open_vendor(Vendor vendor);

/// Address of a function of an opened library; throws when it has none of this name.
void* vendor_symbol(const VendorLibrary& library, const char* name);

}  // namespace mimo::cuda
