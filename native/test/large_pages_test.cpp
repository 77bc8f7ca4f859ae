// Mappings on a kernel with pages of 64 KiB, as arm64 may have: this one refuses what that would.
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "folder.h"
#include "fs_threads.h"
#include "mapping.h"
#include "test.h"

using namespace statehold;

namespace {

constexpr uint64_t kLargePage = 64 << 10;
int unmapped = 0;
int advised = 0;
int refused = 0;

bool is_refused(const void* begin) {
  const bool is_one = reinterpret_cast<uint64_t>(begin) % kLargePage != 0;
  refused += is_one ? 1 : 0;
  if (is_one) errno = EINVAL;
  return is_one;
}

}  // namespace

extern "C" {

long sysconf(int name) noexcept {
  const auto real = reinterpret_cast<long (*)(int)>(::dlsym(RTLD_NEXT, "sysconf"));
  return name == _SC_PAGESIZE ? static_cast<long>(kLargePage) : real(name);
}

void* mmap(void* at, size_t bytes, int access, int flags, int fd, off_t offset) noexcept {
  if (at == nullptr) {  // anywhere, so where a page begins
    const auto found = static_cast<uint64_t>(::syscall(
        SYS_mmap, nullptr, bytes + kLargePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    at = reinterpret_cast<void*>(align_up(found, kLargePage));
    flags |= MAP_FIXED;
  }
  return reinterpret_cast<void*>(::syscall(SYS_mmap, at, bytes, access, flags, fd, offset));
}

int munmap(void* begin, size_t bytes) noexcept {
  ++unmapped;
  if (is_refused(begin)) return -1;
  return static_cast<int>(::syscall(SYS_munmap, begin, align_up(bytes, kLargePage)));
}

int madvise(void* begin, size_t bytes, int advice) noexcept {
  ++advised;
  return is_refused(begin) ? -1 : static_cast<int>(::syscall(SYS_madvise, begin, bytes, advice));
}
}

TEST(a_mapping_is_made_populated_and_gone) {
  const statehold::test::Folder folder(statehold::test::kMemory);
  if (!folder.is_memory()) return statehold::test::skip("a_mapping_is_made_populated_and_gone");
  EXPECT(system_page_bytes() == kLargePage);
  const auto fs = std::make_shared<ThreadsFs>(1, "");
  constexpr uint64_t bytes = kHugePageBytes + 3 * kPageBytes;
  const auto file = must(fs->open_mapped(folder.path + "/f", bytes, false, nullptr));
  const int mapped = advised;
  must(file->populate(17 * kPageBytes, bytes - 17 * kPageBytes));
  EXPECT(advised > mapped);
  const int before = unmapped;
  for (int n = 0; n < 3; ++n) must(fs->open_view(folder.path + "/f", bytes));
  EXPECT(unmapped >= before + 3);
  EXPECT(refused == 0);
}

TEST_MAIN
