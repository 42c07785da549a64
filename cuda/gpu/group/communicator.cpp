#include "communicator.h"

#include <unistd.h>

#include <string>
#include <utility>

#include "error.h"
#include "status.h"
#include "vendor.h"

namespace mimo::cuda {

NcclFunctions::NcclFunctions() {
  const VendorLibrary& library = open_vendor(Vendor::nccl);
#define MIMO_NCCL(name) name = reinterpret_cast<decltype(name)>(vendor_symbol(library, "nccl" #name))
  MIMO_NCCL(GetUniqueId);
  MIMO_NCCL(CommInitRankConfig);
  MIMO_NCCL(CommGetAsyncError);
  MIMO_NCCL(CommFinalize);
  MIMO_NCCL(CommDestroy);
  MIMO_NCCL(CommAbort);
  MIMO_NCCL(GetErrorString);
  MIMO_NCCL(GetLastError);
  MIMO_NCCL(GroupStart);
  MIMO_NCCL(GroupEnd);
  MIMO_NCCL(AllReduce);
  MIMO_NCCL(ReduceScatter);
  MIMO_NCCL(AllGather);
  MIMO_NCCL(Broadcast);
  MIMO_NCCL(Send);
  MIMO_NCCL(Recv);
#undef MIMO_NCCL
}

const NcclFunctions& nccl() {
  static const NcclFunctions functions;
  return functions;
}

namespace {

/// Longer than the watch needs for a silent rank or host (5 s).
constexpr int64_t time_to_find_failed_rank = 8'000'000'000;

[[noreturn]] void fail_nccl(ncclComm_t comm, ncclResult_t result, const char* what) {
  // NCCL reports a full device as an unhandled error of CUDA.
  size_t free = 0, total = 0;
  if (result == ncclUnhandledCudaError && cudaMemGetInfo(&free, &total) == cudaSuccess && free < communicator_bytes / 2) {
    throw Error(MIMO_ERROR_OUT_OF_MEMORY, std::string("Out of device memory: NCCL has no room for its buffers at ") + what +
                                              ", with " + std::to_string(free >> 20) + " of " +
                                              std::to_string(total >> 20) + " MiB free.");
  }
  const char* more = nccl().GetLastError(comm);
  throw Error(MIMO_ERROR_DEVICE, std::string("NCCL failed at ") + what + ": " + nccl().GetErrorString(result) +
                                     (more == nullptr || more[0] == 0 ? "" : std::string(" (") + more + ")") + ".");
}

}  // namespace

ncclUniqueId new_unique_id() {
  ncclUniqueId id;
  const ncclResult_t result = nccl().GetUniqueId(&id);
  if (result != ncclSuccess) fail_nccl(nullptr, result, "making an identifier");
  return id;
}

void abort_communicator(ncclComm_t handle) {
  if (handle != nullptr) nccl().CommAbort(handle);
}

Communicator::Communicator(const Run& run, const ncclUniqueId& id, int32_t size, int32_t rank, int32_t channels)
    : run_(run) {
  ncclConfig_t configuration = NCCL_CONFIG_INITIALIZER;
  configuration.blocking = 0;
  if (channels > 0) configuration.maxCTAs = channels;
  int lowest = 0, highest = 0;
  check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "reading stream priorities");
  check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, highest), "creating a stream");
  settle(nccl().CommInitRankConfig(&handle_, size, id, rank, &configuration), "meeting the other ranks");
}

Communicator::~Communicator() {
  abort_communicator(give_up());
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

void Communicator::begin_finish() {
  if (handle_ == nullptr || run_.failed() || cudaStreamSynchronize(stream_) != cudaSuccess) return;
  finishing_ = nccl().CommFinalize(handle_);
}

void Communicator::finish() {
  if (handle_ == nullptr) return;
  const int64_t end = monotonic_nanoseconds() + 5'000'000'000;
  while (finishing_ == ncclInProgress && !run_.failed() && monotonic_nanoseconds() < end) {
    usleep(100);
    if (nccl().CommGetAsyncError(handle_, &finishing_) != ncclSuccess) return;
  }
  // A communicator that has not finished is leaked: destroying it would wait for the same members.
  if (finishing_ == ncclSuccess) nccl().CommDestroy(handle_);
  if (finishing_ == ncclSuccess || finishing_ == ncclInProgress) handle_ = nullptr;
}

ncclComm_t Communicator::give_up() { return std::exchange(handle_, nullptr); }

/// NCCL's sockets notice the death of a peer before the run's watch, which finds the rank to blame: waits for it.
void Communicator::fail(ncclResult_t result, const char* what) const {
  const int64_t end = monotonic_nanoseconds() + time_to_find_failed_rank;
  while (result == ncclRemoteError && monotonic_nanoseconds() < end) {
    run_.require_alive();
    usleep(1000);
  }
  fail_nccl(handle_, result, what);
}

void Communicator::settle(ncclResult_t result, const char* what) {
  while (result == ncclInProgress) {
    run_.require_alive();
    usleep(20);
    const ncclResult_t asked = nccl().CommGetAsyncError(handle_, &result);
    if (asked != ncclSuccess) result = asked;
  }
  if (result != ncclSuccess) fail(result, what);
}

void Communicator::queue(const char* what, const std::function<ncclResult_t(ncclComm_t, cudaStream_t)>& body) {
  run_.require_alive();
  if (handle_ == nullptr) throw Error(MIMO_ERROR_PEER, "The run has failed: its communication was ended.");
  const ncclResult_t started = nccl().GroupStart();
  if (started != ncclSuccess) fail(started, what);
  const ncclResult_t queued = body(handle_, stream_);
  const ncclResult_t ended = nccl().GroupEnd();
  if (queued != ncclSuccess && queued != ncclInProgress) fail(queued, what);
  settle(ended, what);
}

}  // namespace mimo::cuda
