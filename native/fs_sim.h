// fs_sim: an Fs in memory, for tests: seeded faults, and crashes that lose what was not synced
// (model in sim_tree.h).
//
// Whether a transfer fails is a function of the seed, the path, the offset and how often it was
// tried, so threads cannot change it; only the order of completions depends on timing. Faults
// that fired are counted, because a fault that did not fire tests nothing.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "fs.h"
#include "sim_tree.h"

namespace statehold {

struct SimOptions {
  uint64_t seed = 0;
  double short_io = 0;  // probabilities, per transfer
  bool reorder = true;  // transfers complete in any order
  double eio = 0;
  std::optional<uint64_t> capacity_bytes;
  double torn = 0;  // probability, per unsynced sector at a crash
};

// The disk: everything behind one mutex. Shared by the Fs and the files opened on it.
class SimDisk {
 public:
  explicit SimDisk(const SimOptions& options) : options_(options), random_(options.seed) {}

  void crash();
  void fail_next(const std::string& operation, int error, int count, int skip);
  std::map<std::string, uint64_t> fired();
  std::vector<std::string> operations();
  Status corrupt(const std::string& path, uint64_t offset, uint8_t mask);

 private:
  friend class SimFs;
  friend class SimFile;

  struct Injection {
    int error;
    int count;
    int skip;
  };

  // All with the mutex.
  int injected(const std::string& operation);  // an errno, or 0
  double chance(const char* kind, const std::string& path, uint64_t offset);
  bool grows_too_much(uint64_t from_bytes, uint64_t to_bytes);
  Status done(const std::string& operation, const std::string& path, int error,
              const std::string& detail = {});

  const SimOptions options_;
  std::mutex mutex_;
  SimRandom random_;
  SimTree tree_;
  uint64_t epoch_ = 0;  // files opened before a crash are dead
  std::map<std::string, std::vector<Injection>> injections_;
  std::map<std::string, uint64_t> fired_;
  std::map<uint64_t, uint64_t> tries_;
  std::vector<std::string> operations_;
};

class SimFs final : public Fs {
 public:
  explicit SimFs(const SimOptions& options);
  ~SimFs() override;

  SimDisk& disk() { return *disk_; }

  std::string backend() const override { return "sim"; }
  std::string note() const override { return "simulated in memory"; }
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
  void submit(IoRequest request) override;
  void close() override;

 private:
  void serve();
  IoRequest next();  // mutex_ held
  int store(const std::string& path, std::string_view data);
  int prepare(const std::string& path, uint64_t bytes, bool reuse, SimNodePtr& node);
  template <class Change>
  Status name_change(const char* operation, const std::string& path, const std::string& detail,
                     Change&& change);

  const std::shared_ptr<SimDisk> disk_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<IoRequest> queue_;  // guarded by mutex_
  bool closed_ = false;           // guarded by mutex_
  SimRandom order_;               // guarded by mutex_
  std::thread thread_;
};

}  // namespace statehold
