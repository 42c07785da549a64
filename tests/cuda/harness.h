// Runs the same operation on the CPU library and on the CUDA library and compares the outputs.
//
// A case is a function of a Run. It is called twice: with the CPU library in fp32 (the reference), then with the
// library under test in the case's precision. Both get the same numbers: seeded, and rounded to bf16 beforehand where
// the precision is bf16. Outputs are poisoned before the operation, so that elements that are not written show.
#pragma once
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "../../cuda/include/mimo.h"

namespace check {

struct Library {
  std::string path;
  void* handle;
  mimo_device* device = nullptr;
  mimo_stream* stream = nullptr;
  /// 128 bytes, where every operation is followed by a copy: graphs begin at two.
  char* scratch = nullptr;

  template <class F>
  F* symbol(const char* name) const {
    void* address = dlsym(handle, name);
    if (address == nullptr) {
      std::fprintf(stderr, "%s has no %s\n", path.c_str(), name);
      std::exit(2);
    }
    return reinterpret_cast<F*>(address);
  }
  void require(int32_t status, const char* what) const {
    if (status == MIMO_OK) return;
    std::fprintf(stderr, "%s failed in %s: %s\n", what, path.c_str(), symbol<const char*()>("mimo_last_error")());
    std::exit(2);
  }
};

#define MIMO_CHECK_CALL(library, name, ...) (library).require((library).symbol<decltype(name)>(#name)(__VA_ARGS__), #name)

inline Library open_library(const std::string& path) {
  Library library{path, dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)};
  if (library.handle == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    std::exit(2);
  }
  MIMO_CHECK_CALL(library, mimo_device_open, 0, 2, &library.device);
  MIMO_CHECK_CALL(library, mimo_stream_create, library.device, 0, &library.stream);
  return library;
}

inline float from_bf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}
inline uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((value != value ? bits | 0x400000u : bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

inline int64_t bytes_of(int32_t dtype) {
  return dtype == MIMO_DTYPE_F64 ? 8 : dtype == MIMO_DTYPE_BF16 ? 2 : dtype == MIMO_DTYPE_U8 ? 1 : 4;
}

/// splitmix64.
struct Random {
  uint64_t state;
  uint64_t next() {
    uint64_t z = state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  double normal() { return std::sqrt(-2 * std::log(1 - uniform())) * std::cos(6.283185307179586 * uniform()); }
};

struct Output {
  std::string name;
  std::vector<double> values;
  bool exact;  // indices, counts, copies
};

class Run {
 public:
  Run(const Library& library, bool reference, int32_t precision, uint64_t seed, std::map<std::string, std::vector<float>>& kept)
      : library(library), reference(reference), precision(precision), random_{seed}, kept_(kept) {}
  ~Run() {
    for (void* address : owned_) MIMO_CHECK_CALL(library, mimo_memory_free, library.stream, address);
  }

  const Library& library;
  const bool reference;
  const int32_t precision;  // of the case
  std::vector<Output> outputs;

  /// Storage type of the case's tensors in this run.
  int32_t dtype() const { return reference ? static_cast<int32_t>(MIMO_DTYPE_F32) : precision; }

  void* allocate(int64_t bytes) {
    void* address = nullptr;
    MIMO_CHECK_CALL(library, mimo_memory_allocate, library.stream, bytes, MIMO_TAG_DATA, &address);
    owned_.push_back(address);
    return address;
  }

  template <class T>
  T* upload(const std::vector<T>& values) {
    void* address = allocate(static_cast<int64_t>(values.size() * sizeof(T)));
    if (!values.empty()) {
      MIMO_CHECK_CALL(library, mimo_memory_copy_to_device, library.stream, address, values.data(),
                      static_cast<int64_t>(values.size() * sizeof(T)));
    }
    return static_cast<T*>(address);
  }

  /// Tensor of the case's precision.
  void* tensor(std::vector<float> values) { return typed(std::move(values), precision, dtype()); }
  void* tensor(int64_t count, double scale = 1) { return tensor(normal(count, scale)); }
  /// fp32 whatever the precision.
  float* floats(int64_t count, double scale = 1) { return upload(normal(count, scale)); }
  /// Rounded as `storage` would, stored so except in the reference.
  void* typed(std::vector<float> values, int32_t storage, int32_t stored) {
    if (storage == MIMO_DTYPE_BF16) {
      for (float& value : values) value = from_bf16(to_bf16(value));
    }
    if (stored != MIMO_DTYPE_BF16) return upload(values);
    std::vector<uint16_t> half(values.size());
    for (size_t i = 0; i < values.size(); ++i) half[i] = to_bf16(values[i]);
    return upload(half);
  }

  std::vector<float> normal(int64_t count, double scale = 1, double mean = 0) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = static_cast<float>(mean + scale * random_.normal());
    return values;
  }
  std::vector<float> uniform(int64_t count, double low, double high) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = static_cast<float>(low + (high - low) * random_.uniform());
    return values;
  }
  std::vector<int32_t> integers(int64_t count, int64_t low, int64_t high) {
    std::vector<int32_t> values(static_cast<size_t>(count));
    for (int32_t& value : values) value = static_cast<int32_t>(low + static_cast<int64_t>(random_.next() % static_cast<uint64_t>(high - low)));
    return values;
  }
  /// Poisoned memory for an output.
  void* output(int64_t count, int32_t stored) {
    std::vector<uint8_t> poison(static_cast<size_t>(count * bytes_of(stored)), 0xFF);
    return upload(poison);
  }
  void* output(int64_t count) { return output(count, dtype()); }

  std::vector<double> fetch(const void* address, int64_t count, int32_t stored) {
    std::vector<uint8_t> bytes(static_cast<size_t>(count * bytes_of(stored)));
    if (count > 0) {
      MIMO_CHECK_CALL(library, mimo_memory_copy_to_host, library.stream, bytes.data(), address,
                      static_cast<int64_t>(bytes.size()));
    }
    std::vector<double> values(static_cast<size_t>(count));
    for (size_t i = 0; i < values.size(); ++i) {
      if (stored == MIMO_DTYPE_F32) {
        float v;
        std::memcpy(&v, &bytes[i * 4], 4);
        values[i] = v;
      } else if (stored == MIMO_DTYPE_BF16) {
        uint16_t v;
        std::memcpy(&v, &bytes[i * 2], 2);
        values[i] = from_bf16(v);
      } else if (stored == MIMO_DTYPE_F64) {
        std::memcpy(&values[i], &bytes[i * 8], 8);
      } else if (stored == MIMO_DTYPE_U8) {
        values[i] = bytes[i];
      } else {
        int32_t v;
        std::memcpy(&v, &bytes[i * 4], 4);
        values[i] = v;
      }
    }
    return values;
  }

  void compare(const std::string& name, const void* address, int64_t count, int32_t stored, bool exact = false) {
    outputs.push_back({name, fetch(address, count, stored), exact});
  }
  void compare(const std::string& name, const void* address, int64_t count) { compare(name, address, count, dtype()); }

  /// A result of the reference, as an input of both runs: fetched in the reference, remembered for the other.
  void* shared(const std::string& name, const void* address, int64_t count, bool fp32 = false) {
    if (reference) {
      std::vector<float> values;
      for (const double value : fetch(address, count, MIMO_DTYPE_F32)) values.push_back(static_cast<float>(value));
      kept_[name] = values;
    }
    return fp32 ? static_cast<void*>(upload(kept_[name])) : tensor(kept_[name]);
  }
  std::vector<float> kept(const std::string& name) const { return kept_.at(name); }

  template <class Args>
  void call(const char* name, const Args& args) {
    const auto operation = library.symbol<int32_t(mimo_stream*, const Args*)>(name);
    library.require(operation(library.stream, &args), name);
    if (library.scratch == nullptr) return;
    MIMO_CHECK_CALL(library, mimo_memory_copy, library.stream, library.scratch, library.scratch + 64, 64);
  }

 private:
  Random random_;
  std::vector<void*> owned_;
  std::map<std::string, std::vector<float>>& kept_;
};

struct Case {
  std::string name;
  std::function<void(Run&)> body;
};

struct Limits {
  double rms, largest;
};

/// Relative to the reference's rms; largest is the largest difference over the largest reference value.
struct Difference {
  double rms = 0, largest = 0;
  int64_t wrong = 0;  // not finite where the reference is
};

inline Difference compare(const std::vector<double>& actual, const std::vector<double>& expected) {
  Difference difference;
  double squares = 0, size = 0, largest = 0, highest = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double d = actual[i] - expected[i];
    if (std::isnan(actual[i]) && std::isnan(expected[i])) continue;
    if (actual[i] == expected[i]) {
      size += std::isfinite(expected[i]) ? expected[i] * expected[i] : 0;
      highest = std::max(highest, std::isfinite(expected[i]) ? std::fabs(expected[i]) : 0.0);
      continue;
    }
    if (!std::isfinite(d)) {
      difference.wrong++;
      continue;
    }
    squares += d * d;
    size += expected[i] * expected[i];
    largest = std::max(largest, std::fabs(d));
    highest = std::max(highest, std::fabs(expected[i]));
  }
  difference.rms = squares == 0 ? 0 : std::sqrt(squares / std::max(size, 1e-30));
  difference.largest = largest == 0 ? 0 : largest / std::max(highest, 1e-30);
  return difference;
}

}  // namespace check
