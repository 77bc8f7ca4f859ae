// page_header: contract in page_header.h.
#include "page_header.h"

#include <cstring>
#include <stdexcept>

#include "checksum.h"

namespace statehold {
namespace {

constexpr char kMagic[] = "SHKVPAGE";
constexpr uint32_t kFormat = 1;
constexpr uint64_t kSumAt = kPageHeaderBytes - sizeof(uint64_t);

struct Fixed {
  char magic[8];
  uint32_t format;
  uint32_t key_bytes;
  uint64_t bytes;
  uint64_t checksum;
  uint64_t zeros;
  double score;
  char identity[kPageIdentityBytes];
  uint64_t before;
};
static_assert(sizeof(Fixed) == 72);

std::string_view text(const std::byte* memory, uint64_t bytes) {
  return {reinterpret_cast<const char*>(memory), bytes};
}

}  // namespace

std::optional<PageHeader> PageHeader::read(const std::byte* memory) {
  Fixed fixed;
  uint64_t sum = 0;
  std::memcpy(&fixed, memory, sizeof fixed);
  if (std::memcmp(fixed.magic, kMagic, sizeof fixed.magic) != 0) return std::nullopt;
  std::memcpy(&sum, memory + kSumAt, sizeof sum);
  if (sum != xxh3_64(memory, kSumAt) || fixed.format != kFormat) return std::nullopt;
  if (fixed.key_bytes == 0 || fixed.key_bytes > kPageKeyBytesMax) return std::nullopt;
  PageHeader header;
  header.identity = text(memory + offsetof(Fixed, identity), kPageIdentityBytes);
  header.key = text(memory + sizeof fixed, fixed.key_bytes);
  header.bytes = fixed.bytes;
  header.checksum = fixed.checksum;
  header.before = fixed.before;
  header.score = fixed.score;
  return header;
}

void PageHeader::write(std::byte* memory) const {
  if (identity.size() != kPageIdentityBytes || key.empty() || key.size() > kPageKeyBytesMax) {
    throw std::invalid_argument("a key or an identity does not fit the header of a page");
  }
  Fixed fixed{};
  std::memcpy(fixed.magic, kMagic, sizeof fixed.magic);
  fixed.format = kFormat;
  fixed.key_bytes = static_cast<uint32_t>(key.size());
  fixed.bytes = bytes;
  fixed.checksum = checksum;
  fixed.score = score;
  std::memcpy(fixed.identity, identity.data(), sizeof fixed.identity);
  fixed.before = before;
  std::memset(memory, 0, kPageHeaderBytes);
  std::memcpy(memory, &fixed, sizeof fixed);
  std::memcpy(memory + sizeof fixed, key.data(), key.size());
  const uint64_t sum = xxh3_64(memory, kSumAt);
  std::memcpy(memory + kSumAt, &sum, sizeof sum);
}

uint64_t page_index(std::string_view identity, std::string_view key) {
  std::byte both[kPageIdentityBytes + kPageKeyBytesMax];
  if (identity.size() > kPageIdentityBytes || key.empty() || key.size() > kPageKeyBytesMax) {
    throw std::invalid_argument("a key or an identity does not fit the header of a page");
  }
  std::memcpy(both, identity.data(), identity.size());
  std::memcpy(both + identity.size(), key.data(), key.size());
  return xxh3_64(both, identity.size() + key.size());
}

}  // namespace statehold
