// Starts threads with an error for the user if the system refuses.
#pragma once
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "status.h"

namespace mimo {

/// Starts a thread that runs `body`. Throws MIMO_ERROR_DEVICE if the system gives this process no more threads.
template <class Body>
std::thread start_thread(Body&& body) {
  try {
    return std::thread(std::forward<Body>(body));
  } catch (const std::system_error& error) {
    throw Error(MIMO_ERROR_DEVICE, std::string("The system gives this process no more threads (") + error.what() +
                                       "): see ulimit -u and, in a container, its limits of processes and memory.");
  }
}

}  // namespace mimo
