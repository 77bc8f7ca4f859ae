// Files that are memory: what is refused, what is allocated, who keeps a mapping, what goes on.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "folder.h"
#include "fs_sim.h"
#include "fs_threads.h"
#include "mapping.h"
#include "test.h"

using namespace statehold;
using statehold::test::Folder;
using statehold::test::kMemory;

namespace {

constexpr uint64_t kBytes = 3 * kPageBytes + 5;

struct Fixture {
  Folder folder{kMemory};
  std::shared_ptr<Fs> fs = std::make_shared<ThreadsFs>(1, "");
  std::string path = folder.path + "/f";

  std::shared_ptr<File> open(uint64_t bytes = kBytes, bool reuse = false,
                             std::shared_ptr<File> kept = nullptr) {
    return must(fs->open_mapped(path, bytes, reuse, std::move(kept)));
  }
};

// Whether children lack what they should: QEMU does not follow that advice.
bool heeds_dontfork(const char* name) {
  void* page = ::mmap(nullptr, system_page_bytes(), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  EXPECT(page != MAP_FAILED);
  static_cast<void>(::madvise(page, system_page_bytes(), MADV_DONTFORK));
  const pid_t child = ::fork();
  unsigned char resident = 0;
  if (child == 0) ::_exit(::mincore(page, 1, &resident) != 0 ? 0 : 1);
  int status = -1;
  EXPECT(::waitpid(child, &status, 0) == child);
  ::munmap(page, system_page_bytes());
  if (status != 0) std::printf("skip  %s: children get what MADV_DONTFORK keeps\n", name);
  return status == 0;
}

}  // namespace

#define IN_MEMORY(name)                                             \
  static void name##_in_memory(Fixture& f);                         \
  TEST(name) {                                                      \
    Fixture f;                                                      \
    if (!f.folder.is_memory()) return statehold::test::skip(#name); \
    name##_in_memory(f);                                            \
  }                                                                 \
  static void name##_in_memory(Fixture& f)

IN_MEMORY(what_is_stored_is_in_the_file) {
  const auto file = f.open();
  EXPECT(file->mapped());
  EXPECT(!file->direct());
  EXPECT(file->memory().size() == kBytes);
  must(file->populate(0, kBytes));
  file->memory()[kBytes - 1] = std::byte{'z'};
  const std::string data = must(f.fs->read_file(f.path, kBytes));
  EXPECT(data.size() == kBytes);
  EXPECT(data.back() == 'z');
}

IN_MEMORY(all_of_it_is_allocated) {
  const auto allocated = [&] {
    struct stat info;
    EXPECT(::stat(f.path.c_str(), &info) == 0);
    return static_cast<uint64_t>(info.st_blocks) * 512;
  };
  auto file = f.open();
  EXPECT(allocated() >= 4 * kPageBytes);
  // A hole, in a file of the right size: only looking at the blocks finds it.
  const int fd = ::open(f.path.c_str(), O_RDWR);
  EXPECT(::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, kPageBytes) == 0);
  ::close(fd);
  EXPECT(allocated() == 3 * kPageBytes || allocated() > 4 * kPageBytes);  // huge pages stay whole
  file = f.open(kBytes, true, std::move(file));
  EXPECT(allocated() >= 4 * kPageBytes);
  file = f.open(9 * kPageBytes, true, std::move(file));
  EXPECT(allocated() >= 9 * kPageBytes);
}

// Of huge pages where the kernel has them, and of small ones at its end in any case.
IN_MEMORY(a_large_file_is_whole) {
  constexpr uint64_t bytes = 3 * kHugePageBytes + kPageBytes + 5;
  const auto file = f.open(bytes);
  struct stat info;
  EXPECT(::stat(f.path.c_str(), &info) == 0);
  EXPECT(info.st_size == static_cast<off_t>(bytes));
  EXPECT(static_cast<uint64_t>(info.st_blocks) * 512 == align_up(bytes, kPageBytes));
  const std::span<std::byte> memory = file->memory();
  EXPECT(reinterpret_cast<uint64_t>(memory.data()) % kHugePageBytes == 0);
  EXPECT(std::ranges::all_of(memory, [](std::byte each) { return each == std::byte{0}; }));
  must(file->populate(0, bytes));
  for (const uint64_t at : {uint64_t{0}, kHugePageBytes, bytes - 1}) memory[at] = std::byte{'x'};
  const auto viewed = must(f.fs->open_view(f.path, bytes));
  EXPECT(std::ranges::count(viewed->view(), std::byte{'x'}) == 3);
  EXPECT(must(f.fs->read_file(f.path, bytes)).back() == 'x');
}

IN_MEMORY(no_space_is_a_status) {
  const auto refused = f.fs->open_mapped(f.path, uint64_t{1} << 45, false, nullptr);
  EXPECT(refused.status.code == Code::io);
  EXPECT(refused.status.error == ENOSPC);
  EXPECT(refused.value == nullptr);
}

IN_MEMORY(names_are_as_for_any_file) {
  EXPECT(f.fs->open_mapped(f.path, 1, true, nullptr).status.error == ENOENT);
  f.open();
  EXPECT(f.fs->open_mapped(f.path, 1, false, nullptr).status.error == EEXIST);
  must(f.fs->mkdir(f.folder.path + "/d"));
  EXPECT(f.fs->open_mapped(f.folder.path + "/d", 1, true, nullptr).status.code != Code::ok);
}

IN_MEMORY(an_empty_file_is_mapped_too) {
  const auto file = f.open(0);
  EXPECT(file->mapped());
  EXPECT(file->memory().empty());
  must(file->populate(0, 0));
  EXPECT(must(f.fs->open_view(f.path, 0))->view().empty());
}

IN_MEMORY(a_mapping_goes_on) {
  auto file = f.open(3 * kPageBytes);
  const std::byte* before = file->memory().data();
  file->memory()[0] = std::byte{'a'};
  const std::string other = f.folder.path + "/g";
  must(f.fs->rename(f.path, other));
  f.path = other;
  file = f.open(2 * kPageBytes + 1, true, std::move(file));  // within the pages it has
  EXPECT(file->memory().data() == before);
  EXPECT(file->memory().size() == 2 * kPageBytes + 1);
  EXPECT(file->path() == other);
  EXPECT(file->memory()[0] == std::byte{'a'});
  file = f.open(20 * kPageBytes, true, std::move(file));  // more
  EXPECT(file->memory().size() == 20 * kPageBytes);
  std::memset(file->memory().data(), 1, 20 * kPageBytes);
  EXPECT(must(f.fs->stat_bytes(other)) == 20 * kPageBytes);
}

IN_MEMORY(a_mapping_of_another_file_does_not) {
  auto file = f.open();
  must(f.fs->unlink(f.path));
  f.open();
  std::memset(file->memory().data(), 'x', kBytes);  // still there for its owner
  file = f.open(kBytes, true, std::move(file));
  EXPECT(file->memory()[0] == std::byte{0});
}

IN_MEMORY(reuse_needs_to_be_alone) {
  auto file = f.open();
  EXPECT(!f.fs->can_reuse(f.path));
  EXPECT(f.fs->can_reuse_kept(f.path, file));
  const auto shared = file;  // as a job or a view of Python would
  EXPECT(!f.fs->can_reuse_kept(f.path, file));
  const std::byte* before = file->memory().data();
  file = f.open(kBytes, true, std::move(file));
  EXPECT(file->memory().data() != before);
  EXPECT(shared->memory().data() == before);
}

IN_MEMORY(reuse_is_refused_while_viewed) {
  const auto file = f.open();
  auto viewed = must(f.fs->open_view(f.path, kBytes));
  EXPECT(!f.fs->can_reuse_kept(f.path, file));
  viewed.reset();
  EXPECT(f.fs->can_reuse_kept(f.path, file));
  EXPECT(!f.fs->can_reuse_kept(f.folder.path, file));
  EXPECT(!f.fs->can_reuse_kept(f.path, nullptr));
  EXPECT(::link(f.path.c_str(), (f.path + "2").c_str()) == 0);
  EXPECT(!f.fs->can_reuse_kept(f.path, file));
}

IN_MEMORY(a_view_is_of_the_whole_file) {
  f.open()->memory()[1] = std::byte{'v'};
  const auto viewed = must(f.fs->open_view(f.path, kBytes));
  EXPECT(viewed->view().size() == kBytes);
  EXPECT(viewed->view()[1] == std::byte{'v'});
  EXPECT(!viewed->mapped());
  must(f.fs->unlink(f.path));
  EXPECT(viewed->view()[1] == std::byte{'v'});
  EXPECT(f.fs->open_view(f.path, kBytes).status.code == Code::missing);
  f.open();
  for (const uint64_t wrong : {kBytes - 1, kBytes + 1}) {
    const Status status = f.fs->open_view(f.path, wrong).status;
    EXPECT(status.code == Code::truncated);
    EXPECT(status.offset_bytes == static_cast<int64_t>(kBytes));
  }
}

// A child has neither the mapping nor, when it lets go of the File, an effect on its own memory.
IN_MEMORY(a_fork_does_not_inherit_it) {
  if (!heeds_dontfork("a_fork_does_not_inherit_it")) return;
  auto file = f.open();
  const pid_t child = ::fork();
  if (child == 0) {
    const std::byte* at = file->memory().data();
    unsigned char resident = 0;
    const bool gone = ::mincore(const_cast<std::byte*>(at), kPageBytes, &resident) != 0;
    void* mine = ::mmap(const_cast<std::byte*>(at), kPageBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    file.reset();
    const bool kept = ::mincore(mine, kPageBytes, &resident) == 0;
    ::_exit(gone && kept ? 0 : 1);
  }
  int status = -1;
  EXPECT(::waitpid(child, &status, 0) == child);
  EXPECT(status == 0);
  EXPECT(f.fs->can_reuse_kept(f.path, file));
}

TEST(disks_are_refused) {
  SimFs sim({.seed = 1});
  EXPECT(sim.open_mapped("f", 1, false, nullptr).status.error == EOPNOTSUPP);
  EXPECT(sim.open_view("f", 1).status.error == EOPNOTSUPP);
  EXPECT(must(sim.stat_bytes("f")) == -1);
  const Folder folder(".");
  if (folder.is_memory()) return;
  ThreadsFs fs(1, "");
  const std::string path = folder.path + "/f";
  EXPECT(fs.open_mapped(path, 1, false, nullptr).status.error == EOPNOTSUPP);
  EXPECT(must(fs.stat_bytes(path)) == -1);  // nothing was left behind
  must(fs.write_file(path, "x"));
  EXPECT(fs.open_mapped(path, 1, true, nullptr).status.error == EOPNOTSUPP);
  EXPECT(fs.open_view(path, 1).status.error == EOPNOTSUPP);
}

// A data-loading worker, say, which lives on.
TEST(a_child_keeps_no_file_open) {
  for (const auto& parent : {std::filesystem::temp_directory_path().string(), kMemory}) {
    const Folder folder(parent);
    const bool in_memory = folder.is_memory();
    if (in_memory && !heeds_dontfork("a_child_keeps_no_file_open")) continue;
    const auto fs = std::make_shared<ThreadsFs>(1, "");
    const std::string path = folder.path + "/f";
    std::shared_ptr<File> file = must(in_memory ? fs->open_mapped(path, kPageBytes, false, nullptr)
                                                : fs->open_write(path, kPageBytes, false));
    std::array<int, 2> ends{};
    EXPECT(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) == 0);
    const pid_t child = ::fork();
    EXPECT(child >= 0);
    const int mine = ends[child == 0 ? 1 : 0];
    ::close(ends[child == 0 ? 0 : 1]);
    char byte = 0;
    if (child == 0) {
      static_cast<void>(!::write(mine, &byte, 1));  // it runs
      static_cast<void>(!::read(mine, &byte, 1));   // until the parent has seen what it wants
      ::_exit(0);
    }
    EXPECT(::read(mine, &byte, 1) == 1);
    must(file->truncate(kPageBytes));  // it is still open here
    file.reset();
    const bool is_free = fs->can_reuse(path);
    ::close(mine);
    EXPECT(::waitpid(child, nullptr, 0) == child);
    EXPECT(fs->can_reuse(path));
    EXPECT(is_free);
  }
}

TEST_MAIN
