// mapping: contract in mapping.h.
#include "mapping.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>

#include "check.h"
#include "fs.h"

namespace statehold {

uint64_t system_page_bytes() {
  static const auto bytes = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

namespace {

// One call holds the lock of the address space, and every thread of the process that maps memory
// meanwhile waits for it: a fraction of a millisecond.
constexpr uint64_t kPopulateBytes = uint64_t{1} << 20;

// By reading: the kernel then maps pages by the dozen, and those of a shared mapping without a disk
// behind it may be written at once. By writing, it takes twice as long.
int touch(std::byte* begin, uint64_t bytes) {
#ifdef MADV_POPULATE_READ
  while (::madvise(begin, bytes, MADV_POPULATE_READ) != 0) {
    if (errno != EINTR && errno != EAGAIN) return errno;
  }
#endif
  return 0;
}

// Whether a page has an entry in the page table, by the kernel's list of all (/proc/PID/pagemap).
bool is_present(int pagemap, const std::byte* page) {
  uint64_t entry = 0;
  const auto number = reinterpret_cast<uint64_t>(page) / system_page_bytes();
  const auto offset = static_cast<off_t>(number * sizeof entry);
  return ::pread(pagemap, &entry, sizeof entry, offset) == sizeof entry && (entry >> 63) == 1;
}

// Where a mapping may lie for its huge pages to be mapped as such; null, and anywhere then, if
// there are not that many addresses. It is reserved: the mapping replaces it.
std::byte* aligned(uint64_t bytes) {
  if (bytes < kHugePageBytes) return nullptr;
  const uint64_t whole = align_up(bytes, system_page_bytes());
  const uint64_t reserved = whole + kHugePageBytes;
  void* found = ::mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) return nullptr;
  auto* begin = static_cast<std::byte*>(found);
  const uint64_t before = align_up(reinterpret_cast<uint64_t>(begin), kHugePageBytes) -
                          reinterpret_cast<uint64_t>(begin);
  if (before > 0) ::munmap(begin, before);
  ::munmap(begin + before + whole, kHugePageBytes - before);
  return begin + before;
}

}  // namespace

Result<Mapping> Mapping::of(int fd, uint64_t bytes, Access access, const std::string& path) {
  if (bytes == 0) return {};  // mmap has no empty mappings
  const int protection = access == Access::write ? PROT_READ | PROT_WRITE : PROT_READ;
  std::byte* where = aligned(bytes);
  const int flags = MAP_SHARED | (where != nullptr ? MAP_FIXED : 0);
  void* data = ::mmap(where, bytes, protection, flags, fd, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    if (where != nullptr) ::munmap(where, bytes);
    return {Status::io(error, "map", path), {}};
  }
  // Refused, it costs memory in children only.
  static_cast<void>(::madvise(data, bytes, MADV_DONTFORK));
  return {{}, Mapping(static_cast<std::byte*>(data), bytes)};
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      process_(other.process_) {}

// In a forked child the address may by now be somebody else's.
Mapping::~Mapping() {
  if (data_ != nullptr && ::getpid() == process_) ::munmap(data_, bytes_);
}

Status Mapping::populate(uint64_t begin, uint64_t bytes, const std::string& path) const {
  const uint64_t end = std::min(bytes_, begin + bytes);
  for (uint64_t at = align_down(begin, system_page_bytes()); at < end; at += kPopulateBytes) {
    const int error = touch(data_ + at, std::min(kPopulateBytes, end - at));
    if (error == EINVAL) return {};  // before Linux 5.14
    if (error != 0) return Status::io(error, "populate", path, static_cast<int64_t>(at));
  }
  return {};
}

bool Mapping::collapse(uint64_t begin, uint64_t bytes) const {
  CHECK(begin % kHugePageBytes == 0 && bytes % kHugePageBytes == 0 && begin + bytes <= bytes_);
  constexpr int collapse_advice = 25;  // MADV_COLLAPSE, Linux 6.1; newer than the headers of some
  return ::madvise(data_ + begin, bytes, collapse_advice) == 0;
}

// A huge page is present as a whole once a byte of it is; of small ones, the next few are.
bool Mapping::has_huge_pages(uint64_t begin, uint64_t bytes) const {
  const uint64_t first = begin / kHugePageBytes;
  const uint64_t last = align_up(std::min(begin + bytes, bytes_), kHugePageBytes) / kHugePageBytes;
  const int pagemap = first < last ? ::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC) : -1;
  if (pagemap < 0) return false;
  uint64_t huge = 0;
  for (uint64_t i = first; i < last; ++i) {
    std::byte* page = data_ + i * kHugePageBytes;
    const bool touched = touch(page, kPageBytes) == 0;
    huge += touched && is_present(pagemap, page + kHugePageBytes / 2) ? 1 : 0;
  }
  ::close(pagemap);
  return 4 * huge >= 3 * (last - first);
}

}  // namespace statehold
