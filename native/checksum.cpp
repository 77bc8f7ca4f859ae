// checksum: contract in checksum.h.
#include "checksum.h"

#include "checksum_kernel.h"

namespace statehold {

const ChecksumKernel kChecksumPlain = kChecksumOfThisFile;

namespace {

const ChecksumKernel& kernel() {
#ifdef STATEHOLD_HAVE_AVX2
  static const ChecksumKernel& chosen =
      __builtin_cpu_supports("avx2") ? kChecksumAvx2 : kChecksumPlain;
  return chosen;
#else
  return kChecksumPlain;
#endif
}

}  // namespace

uint64_t xxh3_64(const std::byte* data, uint64_t bytes) { return kernel().whole(data, bytes); }

Xxh3::Xxh3() {
  static_assert(sizeof(state_) >= sizeof(XXH3_state_t));
  static_assert(alignof(XXH3_state_t) <= 64);
  kernel().reset(state_);
}

void Xxh3::update(const std::byte* data, uint64_t bytes) { kernel().update(state_, data, bytes); }

uint64_t Xxh3::digest() const { return kernel().digest(state_); }

}  // namespace statehold
