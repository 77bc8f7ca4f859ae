// checksum_kernel: the XXH3 functions of one instruction set. Each .cpp that includes this is
// compiled with other flags; everything here has internal linkage, and nothing of the standard
// library is included, so code for a newer processor cannot leak into the rest of the program.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace statehold {

struct ChecksumKernel {
  uint64_t (*whole)(const void* data, size_t bytes);
  void (*reset)(void* state);
  void (*update)(void* state, const void* data, size_t bytes);
  uint64_t (*digest)(const void* state);
};

extern const ChecksumKernel kChecksumPlain;
extern const ChecksumKernel kChecksumAvx2;

namespace {

inline constexpr ChecksumKernel kChecksumOfThisFile = {
    [](const void* data, size_t bytes) -> uint64_t { return XXH3_64bits(data, bytes); },
    [](void* state) { XXH3_64bits_reset(static_cast<XXH3_state_t*>(state)); },
    [](void* state, const void* data, size_t bytes) {
      XXH3_64bits_update(static_cast<XXH3_state_t*>(state), data, bytes);
    },
    [](const void* state) -> uint64_t {
      return XXH3_64bits_digest(static_cast<const XXH3_state_t*>(state));
    },
};

}  // namespace
}  // namespace statehold
