// fs_posix: contract in fs_posix.h.
//
// Facts relied on:
// - O_DIRECT is refused with EINVAL after O_CREAT has made the file, so it is set by fcntl on the
//   open descriptor instead.
// - A write lease is granted only when nobody else has the file open; a mapping keeps it open
//   (fcntl(2), "Leases").
// - io_uring fails what would block on a descriptor with O_NONBLOCK, so the flag does not stay on.
// - One POSIX_FADV_WILLNEED reads no more than the device's read-ahead window, 128 KiB by default,
//   and leaves the rest out in silence; pages that are there or under way are not read again.
// - Pages of tmpfs and ramfs are the file itself; those of tmpfs that were allocated stay so, in
//   memory or swap. hugetlbfs has no files of any size.
// - The counts that a lease is judged by are of descriptions, and a mapping holds that of its
//   descriptor: a lease through the very descriptor that was mapped says that nobody else is there.
// - MADV_COLLAPSE makes huge pages on tmpfs whatever the mount option huge= says, but "deny".
// - cachestat(2), Linux 6.5, has number 451 on every architecture.
#include "fs_posix.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <ctime>
#include <type_traits>

#include "mutex.h"

namespace statehold {
namespace {

constexpr uint64_t kAdviceBytes = uint64_t{128} << 10;
// Huge pages are made so many bytes at a time. Where memory is in pieces the kernel has to move
// what is in the way: that may take three times the processor time of small pages, once a file, for
// every restore and every later mapping gains from it.
constexpr uint64_t kCollapseBytes = uint64_t{64} << 20;
constexpr std::chrono::nanoseconds kCollapseWorth = std::chrono::milliseconds(4);
constexpr std::chrono::nanoseconds kCollapseGrace = std::chrono::milliseconds(100);

// Closes on scope exit; for the calls that keep no file open.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  bool valid() const { return fd_ >= 0; }
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

// The name of a file that is being made. Without keep(), the destructor removes the name, and the
// file's blocks with it: a caller that gets an error does not know that there is a file.
class NewName {
 public:
  NewName(const std::string& path, bool made) : path_(path), made_(made) {}
  ~NewName() {
    if (made_) static_cast<void>(::unlink(path_.c_str()));
  }
  NewName(const NewName&) = delete;
  NewName& operator=(const NewName&) = delete;

  void keep() { made_ = false; }

 private:
  const std::string& path_;
  bool made_;
};

Status last_error(const char* operation, const std::string& path, int64_t offset = -1) {
  return Status::io(errno, operation, path, offset);
}

Status checked(int result, const char* operation, const std::string& path) {
  return result == 0 ? Status{} : last_error(operation, path);
}

template <class Call>
auto restarted(Call&& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

// Never one of the standard descriptors: where a process has closed them, what it (or a library)
// goes on printing would land in the file that got their number.
int open_file(const std::string& path, int flags) {
  const int fd = restarted([&] { return ::open(path.c_str(), flags | O_CLOEXEC, 0666); });
  if (fd < 0 || fd > STDERR_FILENO) return fd;
  const int moved = ::fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  const int error = errno;
  ::close(fd);
  errno = error;
  return moved;
}

// Opens a regular file of this very name. A link is not followed, and nothing waits for the other
// end of a FIFO: a run directory may hold what somebody else put there.
Result<int> open_regular(const std::string& path, int flags, const char* operation) {
  int fd = open_file(path, flags | O_NOFOLLOW | O_NONBLOCK);
  // A lease on it is being broken, so it is a regular file: wait for that.
  if (fd < 0 && errno == EWOULDBLOCK) fd = open_file(path, flags | O_NOFOLLOW);
  Descriptor file(fd);
  if (!file.valid() && (errno == ELOOP || errno == ENXIO)) {
    return {Status::irregular(operation, path)};
  }
  if (!file.valid()) return {last_error(operation, path)};
  struct stat info;
  if (::fstat(fd, &info) != 0) return {last_error(operation, path)};
  if (!S_ISREG(info.st_mode)) return {Status::irregular(operation, path)};
  const int kept = ::fcntl(fd, F_GETFL);
  if (kept < 0 || ::fcntl(fd, F_SETFL, kept & ~O_NONBLOCK) != 0) {
    return {last_error(operation, path)};
  }
  return {{}, file.release()};
}

Status write_all(int fd, std::string_view data, const std::string& path) {
  for (uint64_t done = 0; done < data.size();) {
    const ssize_t count =
        restarted([&] { return ::write(fd, data.data() + done, data.size() - done); });
    if (count < 0) return last_error("write_file", path, static_cast<int64_t>(done));
    if (count == 0) return Status::io(EIO, "write_file", path, static_cast<int64_t>(done));
    done += static_cast<uint64_t>(count);
  }
  return {};
}

bool set_direct(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  return flags >= 0 && ::fcntl(fd, F_SETFL, flags | O_DIRECT) == 0;
}

// Blocks for the whole file now: allocation in the middle of the writes would make them wait. Where
// not all are there, those that have come beyond the end of the file go again.
Status allocate(int fd, uint64_t bytes, bool reuse, const std::string& path) {
  struct stat before;
  if (::fstat(fd, &before) != 0) return last_error("stat", path);
  const auto size = static_cast<off_t>(bytes);
  if (reuse && restarted([&] { return ::ftruncate(fd, size); }) != 0) {
    return last_error("truncate", path);
  }
  if (bytes == 0) return {};
  if (restarted([&] { return ::fallocate(fd, 0, 0, size); }) == 0) return {};
  if (errno == EOPNOTSUPP || errno == ENOSYS) return {};
  Status status = last_error("allocate", path);
  static_cast<void>(restarted([&] { return ::ftruncate(fd, before.st_size); }));
  return status;
}

bool is_memory(const struct statfs& info) {
  return info.f_type == TMPFS_MAGIC || info.f_type == RAMFS_MAGIC;
}

bool is_memory(int fd) {
  struct statfs info;
  return restarted([&] { return ::fstatfs(fd, &info); }) == 0 && is_memory(info);
}

// All of it, so that storing cannot run out of memory. A file that has all its pages is left alone:
// to look at each of them takes half the time of a copy.
Status allocate_pages(int fd, uint64_t bytes, const std::string& path) {
  struct stat info;
  if (::fstat(fd, &info) != 0) return last_error("stat", path);
  const auto size = static_cast<off_t>(bytes);
  constexpr uint64_t unit = 512;  // of st_blocks
  const bool whole =
      info.st_size >= size && static_cast<uint64_t>(info.st_blocks) * unit >=
                                  align_up(static_cast<uint64_t>(info.st_size), kPageBytes);
  if (!whole) return allocate(fd, bytes, true, path);
  return info.st_size == size ? Status{} : checked(::ftruncate(fd, size), "truncate", path);
}

std::chrono::nanoseconds processor_time() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

bool has_room(int fd, uint64_t bytes) {
  struct statfs info;
  if (restarted([&] { return ::fstatfs(fd, &info); }) != 0) return false;
  return info.f_bavail >= bytes / static_cast<uint64_t>(info.f_bsize);
}

// A new file in memory gets huge pages where the kernel has them, although tmpfs makes none by
// itself: they are made in half the time, and whoever maps or reads the file later finds its pages
// by the hundred. Only ever a gain of time, so no failure: the rest gets ordinary pages.
void allocate_huge_pages(int fd, uint64_t bytes, const std::string& path) {
  if (bytes < kHugePageBytes || !has_room(fd, bytes)) return;
  if (restarted([&] { return ::ftruncate(fd, static_cast<off_t>(bytes)); }) != 0) return;
  const Result<Mapping> mapping = Mapping::of(fd, bytes, Mapping::Access::write, path);
  if (!mapping.ok()) return;
  const uint64_t end = align_down(bytes, kHugePageBytes);
  const auto began = processor_time();
  for (uint64_t at = 0; at < end; at += kCollapseBytes) {
    const uint64_t part = std::min(kCollapseBytes, end - at);
    for (uint64_t page = at; page < at + part; page += kHugePageBytes) {
      if (::fallocate(fd, 0, static_cast<off_t>(page), kPageBytes) != 0) return;
    }
    if (!mapping.value.collapse(at, part)) return;
    const auto worth = kCollapseGrace + (at + part) / kHugePageBytes * kCollapseWorth;
    if (processor_time() - began > worth) return;
  }
}

// Of an open file: regular, ours, one name, and no other description of it.
bool is_ours_alone(int fd) {
  struct stat info;
  if (::fstat(fd, &info) != 0) return false;
  if (info.st_nlink != 1 || info.st_uid != ::geteuid()) return false;
  // A lease break sends SIGIO, which kills by default; SIGURG is ignored by default.
  if (::fcntl(fd, F_SETSIG, SIGURG) != 0) return false;
  return ::fcntl(fd, F_SETLEASE, F_WRLCK) == 0 && ::fcntl(fd, F_SETLEASE, F_UNLCK) == 0;
}

// A file with another name is not to be written.
Status one_name(int fd, const char* operation, const std::string& path) {
  struct stat info;
  if (::fstat(fd, &info) != 0) return last_error(operation, path);
  return info.st_nlink > 1 ? Status::io(EMLINK, operation, path) : Status{};
}

Result<std::shared_ptr<File>> map_file(Descriptor& file, const std::string& path, uint64_t bytes,
                                       Mapping::Access access) {
  Result<Mapping> mapping = Mapping::of(file.get(), bytes, access, path);
  if (!mapping.ok()) return {mapping.status, {}};
  if (access == Mapping::Access::read) {
    return {{}, std::make_shared<ViewedFile>(file.release(), path, std::move(mapping.value))};
  }
  return {{},
          std::make_shared<MappedFile>(file.release(), path, std::move(mapping.value), bytes, 0)};
}

// The file at `path` again, with the mapping it has; null where there is nothing to go on with.
std::shared_ptr<MappedFile> renewed(const std::string& path, uint64_t bytes,
                                    const std::shared_ptr<File>& kept) {
  auto* mapped = dynamic_cast<MappedFile*>(kept.get());
  const bool usable = mapped != nullptr && kept.use_count() == 1 && mapped->is_at(path);
  return usable ? mapped->renewed(path, bytes) : nullptr;
}

}  // namespace

// All files of the process: a forked child closes them. Links the files themselves, so nothing here
// needs memory.
class OpenFiles {
 public:
  constexpr OpenFiles() = default;

  void add(PosixFile& file) {
    close_in_children();
    const Lock lock(mutex_);
    file.after_ = first_;
    if (first_ != nullptr) first_->before_ = &file;
    first_ = &file;
  }

  void remove(PosixFile& file) {
    const Lock lock(mutex_);
    (file.before_ != nullptr ? file.before_->after_ : first_) = file.after_;
    if (file.after_ != nullptr) file.after_->before_ = file.before_;
  }

 private:
  static void close_in_children();

  void close_all() REQUIRES(mutex_) {
    for (PosixFile* file = first_; file != nullptr; file = file->after_) file->close();
  }

  Mutex mutex_;
  PosixFile* first_ GUARDED_BY(mutex_) = nullptr;  // and the links
};

// Exists before the first file, and after the last: files may be closed after all destructors.
static constinit OpenFiles open_files;
static_assert(std::is_trivially_destructible_v<OpenFiles>);

// The mutex is held from before the fork until after it, in the parent and in the child.
void OpenFiles::close_in_children() {
  static const int error = ::pthread_atfork([]() NOT_ANALYSED { open_files.mutex_.lock(); },
                                            []() NOT_ANALYSED { open_files.mutex_.unlock(); },
                                            []() NOT_ANALYSED {
                                              open_files.close_all();
                                              open_files.mutex_.unlock();
                                            });
  if (error != 0) throw Failure(Status::io(error, "prepare for forks", {}));
}

PosixFile::PosixFile(int fd, std::string path, bool direct)
    : File(std::move(path), direct), fd_(fd) {
  open_files.add(*this);
}

PosixFile::~PosixFile() {
  open_files.remove(*this);
  PosixFile::close();
}

void PosixFile::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

Result<uint64_t> PosixFile::size_bytes() {
  struct stat info;
  if (::fstat(fd_, &info) != 0) return {last_error("stat", path())};
  return {{}, static_cast<uint64_t>(info.st_size)};
}

Status PosixFile::truncate(uint64_t bytes) {
  return checked(restarted([&] { return ::ftruncate(fd_, static_cast<off_t>(bytes)); }), "truncate",
                 path());
}

Status PosixFile::sync() {
  return checked(restarted([&] { return ::fdatasync(fd_); }), "sync", path());
}

Status PosixFile::read(std::byte* memory, uint64_t bytes, uint64_t offset) {
  for (uint64_t done = 0; done < bytes;) {
    const uint64_t at = offset + done;
    const ssize_t count = restarted(
        [&] { return ::pread(fd_, memory + done, bytes - done, static_cast<off_t>(at)); });
    if (count < 0) return last_error("read", path(), static_cast<int64_t>(at));
    if (count == 0) return Status::truncated("read", path(), at);
    done += static_cast<uint64_t>(count);
  }
  return {};
}

bool PosixFile::cached(uint64_t offset, uint64_t bytes) {
  constexpr long cachestat_number = 451;
  struct {
    uint64_t offset, bytes;
  } range{offset, bytes};
  struct {
    uint64_t cached, dirty, writeback, evicted, recently_evicted;
  } pages{};
  if (::syscall(cachestat_number, fd_, &range, &pages, 0) != 0) return false;
  const uint64_t page = system_page_bytes();
  const uint64_t first = align_down(offset, page);
  return pages.cached >= (align_up(offset + bytes, page) - first) / page;
}

void PosixFile::read_ahead(uint64_t offset, uint64_t bytes) {
  for (uint64_t at = offset; at < offset + bytes; at += kAdviceBytes) {
    const uint64_t part = std::min(kAdviceBytes, offset + bytes - at);
    // Advice that is refused costs time, not correctness: the read follows anyway.
    static_cast<void>(::posix_fadvise(fd_, static_cast<off_t>(at), static_cast<off_t>(part),
                                      POSIX_FADV_WILLNEED));
  }
}

Status MappedFile::populate(uint64_t begin, uint64_t bytes) {
  const uint64_t present = present_.load(std::memory_order_relaxed);
  if (begin + bytes <= present) return {};
  Status status = mapping_.populate(begin, bytes, path());
  const bool extends = status.ok() && begin <= present;
  if (extends) present_.store(begin + bytes, std::memory_order_relaxed);
  return status;
}

std::shared_ptr<MappedFile> MappedFile::renewed(const std::string& path, uint64_t bytes) {
  if (bytes > align_up(mapping_.bytes(), kPageBytes)) return nullptr;
  return std::make_shared<MappedFile>(release(), path, std::move(mapping_), bytes, bytes);
}

bool MappedFile::is_at(const std::string& path) const {
  struct stat mine;
  struct stat named;
  return ::fstat(fd(), &mine) == 0 && ::lstat(path.c_str(), &named) == 0 &&
         mine.st_dev == named.st_dev && mine.st_ino == named.st_ino;
}

Status PosixFs::mkdir(const std::string& path) {
  return checked(::mkdir(path.c_str(), 0777), "mkdir", path);
}

Status PosixFs::rename(const std::string& from, const std::string& to) {
  return checked(::rename(from.c_str(), to.c_str()), "rename", from);
}

Status PosixFs::exchange(const std::string& a, const std::string& b) {
  return checked(::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE), "exchange",
                 a);
}

Status PosixFs::link(const std::string& from, const std::string& to) {
  return checked(::link(from.c_str(), to.c_str()), "link", from);
}

Status PosixFs::unlink(const std::string& path) {
  return checked(::unlink(path.c_str()), "unlink", path);
}

Status PosixFs::rmdir(const std::string& path) {
  return checked(::rmdir(path.c_str()), "rmdir", path);
}

Result<std::vector<DirEntry>> PosixFs::listdir(const std::string& path) {
  Descriptor opened(open_file(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  if (!opened.valid()) return {last_error("listdir", path)};
  std::unique_ptr<DIR, int (*)(DIR*)> dir(::fdopendir(opened.get()), ::closedir);
  if (!dir) return {last_error("listdir", path)};
  static_cast<void>(opened.release());  // it is the stream's now
  std::vector<DirEntry> entries;
  // No other thread has this stream. NOLINTNEXTLINE(concurrency-mt-unsafe)
  for (errno = 0; const dirent* entry = ::readdir(dir.get()); errno = 0) {
    const std::string name = entry->d_name;
    if (name == "." || name == "..") continue;
    bool directory = entry->d_type == DT_DIR;
    if (entry->d_type == DT_UNKNOWN) {  // some file systems leave it to stat
      struct stat info;
      directory = ::fstatat(::dirfd(dir.get()), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) == 0 &&
                  S_ISDIR(info.st_mode);
    }
    entries.push_back({name, directory});
  }
  if (errno != 0) return {last_error("listdir", path)};
  std::ranges::sort(entries, {}, &DirEntry::name);
  return {{}, std::move(entries)};
}

Result<int64_t> PosixFs::stat_bytes(const std::string& path) {
  struct stat info;
  if (::lstat(path.c_str(), &info) == 0) {
    return {{}, S_ISDIR(info.st_mode) ? 0 : static_cast<int64_t>(info.st_size)};
  }
  if (errno == ENOENT) return {{}, -1};
  return {last_error("stat", path)};
}

Result<bool> PosixFs::is_dir(const std::string& path) {
  struct stat info;
  if (::lstat(path.c_str(), &info) == 0) return {{}, S_ISDIR(info.st_mode)};
  if (errno == ENOENT || errno == ENOTDIR) return {{}, false};
  return {last_error("stat", path)};
}

Status PosixFs::sync_dir(const std::string& path) {
  const Descriptor dir(open_file(path, O_RDONLY | O_DIRECTORY));
  if (!dir.valid()) return last_error("sync_dir", path);
  return checked(restarted([&] { return ::fsync(dir.get()); }), "sync_dir", path);
}

Status PosixFs::write_file(const std::string& path, std::string_view data) {
  // Cut after it is written, not before: blocks that were allocated for it are not given back.
  const Result<int> opened = open_regular(path, O_WRONLY | O_CREAT, "write_file");
  if (!opened.ok()) return opened.status;
  const Descriptor file(opened.value);
  if (Status status = one_name(file.get(), "write_file", path); !status.ok()) return status;
  if (Status status = write_all(file.get(), data, path); !status.ok()) return status;
  const auto size = static_cast<off_t>(data.size());
  if (restarted([&] { return ::ftruncate(file.get(), size); }) != 0) {
    return last_error("write_file", path);
  }
  return checked(restarted([&] { return ::fsync(file.get()); }), "write_file", path);
}

Result<std::string> PosixFs::read_file(const std::string& path, uint64_t bytes_max) {
  const Result<int> opened = open_regular(path, O_RDONLY, "read_file");
  if (!opened.ok()) return {opened.status};
  const Descriptor file(opened.value);
  struct stat info;
  if (::fstat(file.get(), &info) != 0) return {last_error("read_file", path)};
  if (static_cast<uint64_t>(info.st_size) > bytes_max) {
    return {Status::io(EFBIG, "read_file", path)};
  }
  std::string data(static_cast<size_t>(info.st_size), '\0');
  for (size_t done = 0; done < data.size();) {
    const ssize_t count =
        restarted([&] { return ::read(file.get(), data.data() + done, data.size() - done); });
    if (count < 0) return {last_error("read_file", path, static_cast<int64_t>(done))};
    if (count == 0) return {Status::truncated("read_file", path, done)};
    done += static_cast<size_t>(count);
  }
  return {{}, std::move(data)};
}

Result<std::shared_ptr<File>> PosixFs::open_write(const std::string& path, uint64_t bytes,
                                                  bool reuse) {
  const int flags = O_WRONLY | (reuse ? 0 : O_CREAT | O_EXCL);
  const Result<int> opened = open_regular(path, flags, "open_write");
  if (!opened.ok()) return {opened.status};
  Descriptor file(opened.value);
  NewName name(path, !reuse);
  if (Status status = one_name(file.get(), "open_write", path); !status.ok()) return {status};
  const bool direct = set_direct(file.get());
  const uint64_t allocated = direct ? align_up(bytes, kPageBytes) : bytes;
  if (Status status = allocate(file.get(), allocated, reuse, path); !status.ok()) return {status};
  auto written = std::make_shared<PosixFile>(file.release(), path, direct);
  name.keep();
  return {{}, std::move(written)};
}

Result<std::shared_ptr<File>> PosixFs::open_read(const std::string& path, bool direct) {
  const Result<int> file = open_regular(path, O_RDONLY | (direct ? O_DIRECT : 0), "open_read");
  if (file.status.error == ENOENT) return {Status::missing("open_read", path)};
  if (!file.ok()) return {file.status};
  return {{}, std::make_shared<PosixFile>(file.value, path, direct)};
}

bool PosixFs::can_reuse(const std::string& path) {
  const Result<int> opened = open_regular(path, O_RDONLY, "can_reuse");
  if (!opened.ok()) return false;
  const Descriptor file(opened.value);
  return is_ours_alone(file.get());
}

Result<std::shared_ptr<File>> PosixFs::open_mapped(const std::string& path, uint64_t bytes,
                                                   bool reuse, const std::shared_ptr<File>& kept) {
  if (auto file = reuse ? renewed(path, bytes, kept) : nullptr) {
    Status status = one_name(file->fd(), "open_write", path);
    if (status.ok()) status = allocate_pages(file->fd(), bytes, path);
    return {std::move(status), std::move(file)};
  }
  const int flags = O_RDWR | (reuse ? 0 : O_CREAT | O_EXCL);
  const Result<int> opened = open_regular(path, flags, "open_write");
  if (!opened.ok()) return {opened.status, {}};
  Descriptor file(opened.value);
  NewName name(path, !reuse);
  if (!is_memory(file.get())) return Fs::open_mapped(path, bytes, reuse, nullptr);
  if (Status status = one_name(file.get(), "open_write", path); !status.ok()) return {status, {}};
  if (!reuse) allocate_huge_pages(file.get(), bytes, path);
  if (Status status = allocate_pages(file.get(), bytes, path); !status.ok()) return {status, {}};
  auto mapped = map_file(file, path, bytes, Mapping::Access::write);
  if (mapped.ok()) name.keep();
  return mapped;
}

bool PosixFs::can_reuse_kept(const std::string& path, const std::shared_ptr<File>& kept) {
  const auto* mapped = dynamic_cast<const MappedFile*>(kept.get());
  return mapped != nullptr && kept.use_count() == 1 && mapped->is_at(path) &&
         is_ours_alone(mapped->fd());
}

// Each takes up to three descriptors, there may be several readers, and the program has files, too.
uint64_t PosixFs::files_at_once() const {
  rlimit limit;
  return ::getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur / 16 : Fs::files_at_once();
}

Result<std::shared_ptr<File>> PosixFs::open_view(const std::string& path, uint64_t bytes) {
  const Result<int> opened = open_regular(path, O_RDONLY, "open_view");
  if (opened.status.error == ENOENT) return {Status::missing("open_view", path), {}};
  if (!opened.ok()) return {opened.status, {}};
  Descriptor file(opened.value);
  if (!is_memory(file.get())) return Fs::open_view(path, bytes);
  struct stat info;
  if (::fstat(file.get(), &info) != 0) return {last_error("open_view", path), {}};
  const auto size = static_cast<uint64_t>(info.st_size);
  if (size != bytes) return {Status::truncated("open_view", path, size), {}};
  return map_file(file, path, bytes, Mapping::Access::read);
}

}  // namespace statehold
