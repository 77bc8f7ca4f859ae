// fs_posix: files and names through system calls, for both real implementations of Fs.
// Holds: a descriptor is closed with the last owner of its PosixFile. Leaves the data plane
// (submit, close) to fs_uring.h and fs_threads.h.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fs.h"

namespace statehold {

class PosixFile final : public File {
 public:
  PosixFile(int fd, std::string path, bool direct) : File(std::move(path), direct), fd_(fd) {}
  ~PosixFile() override { close(); }

  int fd() const { return fd_; }
  Result<uint64_t> size_bytes() override;
  Status truncate(uint64_t bytes) override;
  Status sync() override;
  Status read(std::byte* memory, uint64_t bytes, uint64_t offset) override;
  bool cached(uint64_t offset, uint64_t bytes) override;
  void read_ahead(uint64_t offset, uint64_t bytes) override;
  void close() override;

 private:
  int fd_;
};

class PosixFs : public Fs {
 public:
  Status mkdir(const std::string& path) override;
  Status rename(const std::string& from, const std::string& to) override;
  Status exchange(const std::string& a, const std::string& b) override;
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
  bool can_reuse(const std::string& path) override;
};

}  // namespace statehold
