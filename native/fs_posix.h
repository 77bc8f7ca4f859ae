// fs_posix: files and names through system calls, for both real implementations of Fs.
// Invariants: a descriptor is closed, and a mapping undone, with the last owner of its file. A
// child of fork() has neither: it would keep the space of deleted files from being freed, and files
// from being reused, for as long as it lives. Leaves the data plane (submit, close) to fs_uring.h
// and fs_threads.h.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fs.h"
#include "mapping.h"

namespace statehold {

class PosixFile : public File {
 public:
  PosixFile(int fd, std::string path, bool direct);
  ~PosixFile() override;

  int fd() const { return fd_; }
  Result<uint64_t> size_bytes() override;
  Status truncate(uint64_t bytes) override;
  Status sync() override;
  Status read(std::byte* memory, uint64_t bytes, uint64_t offset) override;
  bool cached(uint64_t offset, uint64_t bytes) override;
  void read_ahead(uint64_t offset, uint64_t bytes) override;
  void close() override;

 protected:
  int release() { return std::exchange(fd_, -1); }

 private:
  friend class OpenFiles;

  int fd_;
  PosixFile* before_ = nullptr;  // in the list of OpenFiles
  PosixFile* after_ = nullptr;
};

// A file in memory. Never transferred: what is stored in its memory is in the file.
class MappedFile final : public PosixFile {
 public:
  // The first `present` bytes are in the page table already.
  MappedFile(int fd, std::string path, Mapping mapping, uint64_t bytes, uint64_t present)
      : PosixFile(fd, std::move(path), false),
        mapping_(std::move(mapping)),
        bytes_(bytes),
        present_(present) {}

  bool mapped() const override { return true; }
  std::span<std::byte> memory() override { return {mapping_.data(), bytes_}; }
  std::span<const std::byte> view() const override { return {mapping_.data(), bytes_}; }
  Status populate(uint64_t begin, uint64_t bytes) override;

  // The same file by another name and size; null, and nothing has changed, if the mapping is too
  // small. This one is closed then.
  std::shared_ptr<MappedFile> renewed(const std::string& path, uint64_t bytes);
  bool is_at(const std::string& path) const;

 private:
  Mapping mapping_;  // at least bytes_
  const uint64_t bytes_;
  std::atomic<uint64_t> present_;  // at least; to look at each page again is half a copy
};

// A file in memory that is only read.
class ViewedFile final : public PosixFile {
 public:
  ViewedFile(int fd, std::string path, Mapping mapping)
      : PosixFile(fd, std::move(path), false), mapping_(std::move(mapping)) {}

  std::span<const std::byte> view() const override { return {mapping_.data(), mapping_.bytes()}; }
  bool view_is_fast(uint64_t begin, uint64_t bytes) const override {
    return mapping_.has_huge_pages(begin, bytes);
  }

 private:
  const Mapping mapping_;
};

class PosixFs : public Fs {
 public:
  Status mkdir(const std::string& path) override;
  Status rename(const std::string& from, const std::string& to) override;
  Status exchange(const std::string& a, const std::string& b) override;
  Status link(const std::string& from, const std::string& to) override;
  Status unlink(const std::string& path) override;
  Status rmdir(const std::string& path) override;
  Result<std::vector<DirEntry>> listdir(const std::string& path) override;
  Result<int64_t> stat_bytes(const std::string& path) override;
  Result<bool> is_dir(const std::string& path) override;
  Status sync_dir(const std::string& path) override;
  Status write_file(const std::string& path, std::string_view data) override;
  Result<std::string> read_file(const std::string& path, uint64_t bytes_max) override;
  Result<std::shared_ptr<File>> open_write(const std::string& path, uint64_t bytes,
                                           bool reuse) override;
  Result<std::shared_ptr<File>> open_read(const std::string& path, bool direct) override;
  uint64_t files_at_once() const override;
  bool can_reuse(const std::string& path) override;
  Result<std::shared_ptr<File>> open_mapped(const std::string& path, uint64_t bytes, bool reuse,
                                            const std::shared_ptr<File>& kept) override;
  bool can_reuse_kept(const std::string& path, const std::shared_ptr<File>& kept) override;
  Result<std::shared_ptr<File>> open_view(const std::string& path, uint64_t bytes) override;
};

}  // namespace statehold
