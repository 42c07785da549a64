// Status codes and the last error: conversion of C++ exceptions at the ABI.
#pragma once
#include <cstdio>
#include <stdexcept>
#include <string>

#include "mimo.h"
#include "require.h"

namespace mimo {

/// An error with its status at the ABI and one sentence for the user.
class Error : public std::runtime_error {
 public:
  Error(int32_t status, const std::string& sentence) : std::runtime_error(sentence), status_(status) {}
  int32_t status() const { return status_; }

 private:
  int32_t status_;
};

void set_last_error(const std::string& sentence);

/// Runs `body`; an exception becomes a status and the thread's last error.
template <class Body>
int32_t guard(Body&& body) noexcept {
  try {
    body();
    return MIMO_OK;
  } catch (const Error& error) {
    set_last_error(error.what());
    return error.status();
  } catch (const std::bad_alloc&) {
    set_last_error("The machine has no memory left.");
    return MIMO_ERROR_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    set_last_error(error.what());
    return MIMO_ERROR_INTERNAL;
  } catch (...) {
    set_last_error("An unknown C++ exception reached the ABI.");
    return MIMO_ERROR_INTERNAL;
  }
}

}  // namespace mimo
