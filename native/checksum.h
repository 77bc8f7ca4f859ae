// checksum: XXH3-64, as recorded in the manifest. The fastest kernel that the processor has is
// chosen at run time; all kernels give the same value.
#pragma once

#include <cstddef>
#include <cstdint>

namespace statehold {

uint64_t xxh3_64(const std::byte* data, uint64_t bytes);

// The same over data that arrives in parts.
class Xxh3 {
 public:
  Xxh3();
  void update(const std::byte* data, uint64_t bytes);
  uint64_t digest() const;

 private:
  alignas(64) std::byte state_[640];
};

}  // namespace statehold
