// Locates the vendor libraries, in this order: the folders of MIMO_CUDA_LIBRARIES (colon separated), the loader's
// search path, CUDA_HOME, and the nvidia/*/lib folders of the active Python environment. All of cuDNN comes from one
// folder: its parts refuse parts of another version.
#include "vendor.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <glob.h>
#include <link.h>
#include <unistd.h>

#include <cstdlib>
#include <mutex>
#include <vector>

#include "mimo.h"
#include "status.h"

namespace mimo::cuda {
namespace {

struct Description {
  const char* name;
  const char* file;
  const char* package;  // on PyPI
};

const Description descriptions[] = {{"cuBLASLt", "libcublasLt.so.13", "nvidia-cublas"},
                                    {"cuDNN", "libcudnn.so.9", "nvidia-cudnn-cu13"},
                                    {"NCCL", "libnccl.so.2", "nvidia-nccl-cu13"}};

const char* const cudnn_parts[] = {"libcudnn_graph.so.9",
                                   "libcudnn_ops.so.9",
                                   "libcudnn_cnn.so.9",
                                   "libcudnn_adv.so.9",
                                   "libcudnn_engines_precompiled.so.9",
                                   "libcudnn_engines_runtime_compiled.so.9",
                                   "libcudnn_heuristic.so.9"};

const Description& description_of(Vendor vendor) { return descriptions[static_cast<int>(vendor)]; }

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin < list.size();) {
    size_t end = list.find(':', begin);
    if (end == std::string::npos) end = list.size();
    if (end > begin) parts.push_back(list.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

void add_matches(const std::string& pattern, std::vector<std::string>& folders) {
  glob_t found{};
  if (glob(pattern.c_str(), 0, nullptr, &found) == 0) {
    for (size_t i = 0; i < found.gl_pathc; ++i) folders.push_back(found.gl_pathv[i]);
  }
  globfree(&found);
}

/// Folders of NVIDIA's Python wheels: of the active environment, then of the python3 on the PATH.
std::vector<std::string> python_folders() {
  std::vector<std::string> prefixes;
  for (const char* name : {"VIRTUAL_ENV", "CONDA_PREFIX"}) {
    const std::string prefix = environment(name);
    if (!prefix.empty()) prefixes.push_back(prefix);
  }
  for (const std::string& folder : split(environment("PATH"))) {
    if (access((folder + "/python3").c_str(), X_OK) == 0) {
      prefixes.push_back(folder + "/..");
      break;
    }
  }
  std::vector<std::string> folders;
  for (const std::string& prefix : prefixes) {
    add_matches(prefix + "/lib/python3*/site-packages/nvidia/*/lib", folders);
    add_matches(prefix + "/lib/python3*/dist-packages/nvidia/*/lib", folders);
  }
  return folders;
}

/// Paths to try; a bare name uses the loader's search path.
std::vector<std::string> candidates(const std::string& file) {
  std::vector<std::string> paths;
  for (const std::string& folder : split(environment("MIMO_CUDA_LIBRARIES"))) paths.push_back(folder + "/" + file);
  paths.push_back(file);
  const std::string home = environment("CUDA_HOME");
  if (!home.empty()) {
    for (const char* folder : {"/lib64/", "/lib/", "/targets/x86_64-linux/lib/"}) paths.push_back(home + folder + file);
  }
  for (const std::string& folder : python_folders()) paths.push_back(folder + "/" + file);
  return paths;
}

std::string path_of(void* handle) {
  link_map* map = nullptr;
  return dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr ? map->l_name : "";
}

VendorLibrary find(Vendor vendor) {
  const Description& wanted = description_of(vendor);
  std::string reason;
  for (const std::string& path : candidates(wanted.file)) {
    const bool named = path.find('/') != std::string::npos;
    if (named && access(path.c_str(), R_OK) != 0) continue;
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) return {handle, path_of(handle)};
    if (named) reason = dlerror();
  }
  throw Error(MIMO_ERROR_UNSUPPORTED,
              std::string(wanted.name) + " (" + wanted.file + ") was not found" +
                  (reason.empty() ? "" : "; " + reason) + ". Install the Python package " + wanted.package +
                  " or the CUDA toolkit's, or name its folder in MIMO_CUDA_LIBRARIES.");
}

VendorLibrary open(Vendor vendor) {
  VendorLibrary library = find(vendor);
  if (vendor == Vendor::cudnn) {
    // libcudnn opens its parts by bare name: loading them from its own folder first decides which ones it gets.
    const std::string folder = library.path.substr(0, library.path.rfind('/') + 1);
    for (const char* part : cudnn_parts) dlopen((folder + part).c_str(), RTLD_NOW | RTLD_LOCAL);
  }
  return library;
}

std::string version_text(int version, int major_unit, int minor_unit) {
  return std::to_string(version / major_unit) + "." + std::to_string(version % major_unit / minor_unit) + "." +
         std::to_string(version % minor_unit);
}

std::string version_of(Vendor vendor, const VendorLibrary& library) {
  switch (vendor) {
    case Vendor::cublaslt: {
      const auto version = reinterpret_cast<size_t (*)()>(vendor_symbol(library, "cublasLtGetVersion"));
      return version_text(static_cast<int>(version()), 10000, 100);
    }
    case Vendor::cudnn: {
      const auto version = reinterpret_cast<size_t (*)()>(vendor_symbol(library, "cudnnGetVersion"));
      return version_text(static_cast<int>(version()), 10000, 100);
    }
    default: {
      const auto get = reinterpret_cast<int (*)(int*)>(vendor_symbol(library, "ncclGetVersion"));
      int version = 0;
      get(&version);
      return version_text(version, 10000, 100);
    }
  }
}

std::string describe(Vendor vendor) {
  try {
    const VendorLibrary& library = open_vendor(vendor);
    return std::string(description_of(vendor).name) + " " + version_of(vendor, library) + " (" + library.path + ")";
  } catch (const Error& error) {
    return error.what();
  }
}

std::string describe_all() {
  int runtime = 0, driver = 0;
  cudaRuntimeGetVersion(&runtime);
  cudaDriverGetVersion(&driver);
  const auto text = [](int version) {
    return version == 0 ? std::string("none")
                        : std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  };
  return "CUDA runtime " + text(runtime) + ", driver's CUDA " + text(driver) + "; " + describe(Vendor::cublaslt) + "; " +
         describe(Vendor::cudnn) + "; " + describe(Vendor::nccl);
}

}  // namespace

const VendorLibrary& open_vendor(Vendor vendor) {
  static std::mutex mutex;
  static VendorLibrary opened[3];
  std::lock_guard<std::mutex> lock(mutex);
  VendorLibrary& library = opened[static_cast<int>(vendor)];
  if (library.handle == nullptr) library = open(vendor);
  return library;
}

void* vendor_symbol(const VendorLibrary& library, const char* name) {
  void* address = dlsym(library.handle, name);
  if (address == nullptr) {
    throw Error(MIMO_ERROR_UNSUPPORTED, library.path + " has no function " + name + ": a newer version is needed.");
  }
  return address;
}

}  // namespace mimo::cuda

extern "C" const char* mimo_library_versions(void) {
  static const std::string line = mimo::cuda::describe_all();
  return line.c_str();
}
