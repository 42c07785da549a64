// Forwards the cuDNN functions that its front end calls to the library loaded at run time. (The front end can load them
// itself, but then needs the CUDA runtime as a shared library too.)
#include <cudnn.h>
#include <nvrtc.h>

#include "vendor.h"

namespace mimo::cuda {
namespace {

template <class Function>
Function* cudnn_function(const char* name) {
  return reinterpret_cast<Function*>(vendor_symbol(open_vendor(Vendor::cudnn), name));
}

}  // namespace
}  // namespace mimo::cuda

#define MIMO_CUDNN(type, name, parameters, arguments)                                      \
  type name parameters {                                                                   \
    static decltype(name)* const function = mimo::cuda::cudnn_function<decltype(name)>(#name); \
    return function arguments;                                                             \
  }

extern "C" {

MIMO_CUDNN(cudnnStatus_t, cudnnCreate, (cudnnHandle_t * handle), (handle))
MIMO_CUDNN(cudnnStatus_t, cudnnDestroy, (cudnnHandle_t handle), (handle))
MIMO_CUDNN(cudnnStatus_t, cudnnSetStream, (cudnnHandle_t handle, cudaStream_t stream), (handle, stream))
MIMO_CUDNN(cudnnStatus_t, cudnnGetStream, (cudnnHandle_t handle, cudaStream_t* stream), (handle, stream))
MIMO_CUDNN(size_t, cudnnGetVersion, (void), ())
MIMO_CUDNN(const char*, cudnnGetErrorString, (cudnnStatus_t status), (status))
MIMO_CUDNN(void, cudnnGetLastErrorString, (char* message, size_t size), (message, size))
MIMO_CUDNN(cudnnStatus_t, cudnnBackendCreateDescriptor,
           (cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t* descriptor), (type, descriptor))
MIMO_CUDNN(cudnnStatus_t, cudnnBackendDestroyDescriptor, (cudnnBackendDescriptor_t descriptor), (descriptor))
MIMO_CUDNN(cudnnStatus_t, cudnnBackendFinalize, (cudnnBackendDescriptor_t descriptor), (descriptor))
MIMO_CUDNN(cudnnStatus_t, cudnnBackendSetAttribute,
           (cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
            int64_t count, const void* elements),
           (descriptor, name, type, count, elements))
MIMO_CUDNN(cudnnStatus_t, cudnnBackendGetAttribute,
           (cudnnBackendDescriptor_t const descriptor, cudnnBackendAttributeName_t name,
            cudnnBackendAttributeType_t type, int64_t wanted, int64_t* count, void* elements),
           (descriptor, name, type, wanted, count, elements))
MIMO_CUDNN(cudnnStatus_t, cudnnBackendExecute,
           (cudnnHandle_t handle, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t variant),
           (handle, plan, variant))

const char* nvrtcGetErrorString(nvrtcResult) { return "NVRTC is not used"; }
nvrtcResult nvrtcVersion(int*, int*) { return NVRTC_ERROR_INTERNAL_ERROR; }
nvrtcResult nvrtcCreateProgram(nvrtcProgram*, const char*, const char*, int, const char* const*, const char* const*) {
  return NVRTC_ERROR_INTERNAL_ERROR;
}
nvrtcResult nvrtcDestroyProgram(nvrtcProgram*) { return NVRTC_ERROR_INTERNAL_ERROR; }
nvrtcResult nvrtcCompileProgram(nvrtcProgram, int, const char* const*) { return NVRTC_ERROR_INTERNAL_ERROR; }
nvrtcResult nvrtcGetPTXSize(nvrtcProgram, size_t*) { return NVRTC_ERROR_INTERNAL_ERROR; }
nvrtcResult nvrtcGetPTX(nvrtcProgram, char*) { return NVRTC_ERROR_INTERNAL_ERROR; }
nvrtcResult nvrtcGetCUBINSize(nvrtcProgram, size_t*) { return NVRTC_ERROR_INTERNAL_ERROR; }
nvrtcResult nvrtcGetCUBIN(nvrtcProgram, char*) { return NVRTC_ERROR_INTERNAL_ERROR; }
nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram, size_t*) { return NVRTC_ERROR_INTERNAL_ERROR; }
nvrtcResult nvrtcGetProgramLog(nvrtcProgram, char*) { return NVRTC_ERROR_INTERNAL_ERROR; }

}  // extern "C"
