// A directory for one test, gone with it; on a disk or in memory.
#pragma once

#include <linux/magic.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <string>

#include "test.h"

namespace statehold::test {

inline const std::string kMemory = "/dev/shm";

class Folder {
 public:
  explicit Folder(const std::filesystem::path& parent = std::filesystem::temp_directory_path()) {
    static int count = 0;
    const std::string name =
        "statehold-" + std::to_string(::getpid()) + "-" + std::to_string(count++);
    path = (parent / name).string();
    EXPECT(std::filesystem::create_directory(path));
  }
  ~Folder() { std::filesystem::remove_all(path); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  bool is_memory() const {
    struct statfs info;
    return ::statfs(path.c_str(), &info) == 0 && info.f_type == TMPFS_MAGIC;
  }

  std::string path;
};

inline void skip(const char* name) {
  std::printf("skip  %s: %s is not tmpfs\n", name, kMemory.c_str());
}

}  // namespace statehold::test
