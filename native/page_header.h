// page_header: the first bytes of a page of a KV cache on storage, which prove what the others are.
//
//     0      magic "SHKVPAGE", format, length of the key, bytes of the payload, XXH3-64 of
//            payload and zeros, 8 zeros, score (a double)
//     48     identity (16 bytes), index of the page before it (8 bytes), key, zeros
//     4088   XXH3-64 of all bytes before
//
// All integers are little-endian.
//
// Invariants: a header that is torn is none. Reading one looks at kPageHeaderBytes, whatever is in
// them.
// Not here: the payload behind it (kv/page), where headers are (kv/tiers).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace statehold {

constexpr uint64_t kPageHeaderBytes = 4096;
constexpr uint64_t kPageKeyBytesMax = 1024;
constexpr uint64_t kPageIdentityBytes = 16;

struct PageHeader {
  std::string_view identity;  // into the bytes that were read
  std::string_view key;
  uint64_t bytes = 0;
  uint64_t checksum = 0;
  uint64_t before = 0;  // page_index() of the page before it; 0 for none
  double score = 0;

  // Of kPageHeaderBytes; nothing if they prove nothing.
  static std::optional<PageHeader> read(const std::byte* memory);
  // Throws std::invalid_argument if the key or the identity does not fit.
  void write(std::byte* memory) const;
};

// The 64 bits by which a page is found. They are a hint: the header has the whole key.
uint64_t page_index(std::string_view identity, std::string_view key);

}  // namespace statehold
