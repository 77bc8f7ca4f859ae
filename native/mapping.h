// mapping: a file in memory as memory. Only for files whose pages are the file itself (tmpfs): of a
// file on a disk, an error of the device would arrive as SIGBUS instead of a Status.
//
// Owns one shared mapping; unmapped with its owner. Not inherited by fork: a child of the trainer
// would keep the memory of deleted files from being freed.
// Not here: whether a file may be mapped, and that all of it is allocated (fs_posix.h).
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "status.h"

namespace statehold {

// What one entry of a page table covers at most, on x86-64 and on arm64 with pages of 4 KiB. Others
// refuse to collapse.
inline constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;

// The unit in which this kernel maps and counts memory: 4 KiB, or up to 64 KiB on arm64.
uint64_t system_page_bytes();

class Mapping {
 public:
  enum class Access : uint8_t { read, write };

  Mapping() = default;
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&&) = delete;

  static Result<Mapping> of(int fd, uint64_t bytes, Access access, const std::string& path);

  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  // Makes pages present, so that no copy pays for page faults; not all of them, and no failure,
  // where the kernel cannot: then the copy pays.
  Status populate(uint64_t begin, uint64_t bytes, const std::string& path) const;
  // Puts a range of the file, in units of kHugePageBytes that each have a page, into huge pages,
  // holes included; false where the kernel cannot, or will not, for some of it.
  bool collapse(uint64_t begin, uint64_t bytes) const;
  // Whether most of a range is mapped by huge pages; where it is not, to map its pages takes longer
  // than to read them. One small page of each then becomes present. False where the kernel does not
  // say.
  bool has_huge_pages(uint64_t begin, uint64_t bytes) const;

 private:
  Mapping(std::byte* data, uint64_t bytes) : data_(data), bytes_(bytes), process_(::getpid()) {}

  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
  pid_t process_ = 0;
};

}  // namespace statehold
