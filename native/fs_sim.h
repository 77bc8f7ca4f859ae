// fs_sim: an Fs in memory, for tests: seeded faults, and crashes that lose what was not synced
// (model in sim_tree.h).
//
// Faults: short, failing, slow, reordered and misdirected transfers; a full disk; bit rot; errors
// of any operation, after which a sync may have lost what it was to save and write_file may have
// left half of it; power that goes off in the middle. Every state in between can be recorded, and
// crashed in every way there is.
//
// Whether a transfer fails is a function of the seed, the path, the offset and how often it was
// tried, so threads cannot change it; only the order of completions depends on timing. hold()
// leaves that order to the caller, too: every transfer then waits until complete(). Faults that
// fired are counted, because a fault that did not fire tests nothing.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "fs.h"
#include "mutex.h"
#include "sim_tree.h"

namespace statehold {

struct SimOptions {
  uint64_t seed = 0;
  double short_io = 0;  // probabilities, per transfer
  bool reorder = true;  // transfers complete in any order
  double eio = 0;
  std::optional<uint64_t> capacity_bytes;
  double torn = 0;         // probability, per unsynced sector at a crash
  double misdirected = 0;  // per write: it lands somewhere else, and is reported as done
  double slow = 0;         // per transfer: it takes up to a millisecond
};

// The disk as it was just before an operation.
struct SimMoment {
  std::string operation;
  SimTree tree;
};

// The disk: everything behind one mutex. Shared by the Fs and the files opened on it.
class SimDisk {
 public:
  explicit SimDisk(const SimOptions& options, SimTree tree = {})
      : options_(options), random_(options.seed), tree_(std::move(tree)) {}

  // Loses what was not synced, at random, and turns the power on again.
  void crash();
  // The same, by these choices. Returns the arities of the choices (SimChoices).
  std::vector<int> crash(std::vector<int> choices);
  // From the next operation on, or `after` more, everything fails until crash().
  void cut_power(uint64_t after);
  // Other faults from now on; those of fail_next that did not fire are forgotten.
  void set_faults(SimOptions options);
  // Keeps the state before every change from now on.
  void record();
  std::vector<std::string> recorded();
  SimTree recorded_tree(size_t index);
  // Where files are that have bytes other than what was written.
  std::vector<std::string> damaged();
  void fail_next(const std::string& operation, int error, int count, int skip);
  void count(const std::string& fault);
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

  void lose(SimChoices choices, std::vector<int>* arities) REQUIRES(mutex_);
  void moment(const std::string& operation, const std::string& path) REQUIRES(mutex_);
  bool is_off() REQUIRES(mutex_);
  int injected(const std::string& operation) REQUIRES(mutex_);  // an errno, or 0
  bool fires(const char* kind, double probability, const std::string& path, uint64_t offset)
      REQUIRES(mutex_);
  void misdirect(const SimNodePtr& node, const std::string& path, uint64_t offset,
                 std::string_view data) REQUIRES(mutex_);
  double chance(const char* kind, const std::string& path, uint64_t offset) REQUIRES(mutex_);
  bool grows_too_much(uint64_t from_bytes, uint64_t to_bytes) REQUIRES(mutex_);
  Status done(const std::string& operation, const std::string& path, int error,
              const std::string& detail = {}) REQUIRES(mutex_);

  Mutex mutex_;
  SimOptions options_ GUARDED_BY(mutex_);
  SimRandom random_ GUARDED_BY(mutex_);
  SimTree tree_ GUARDED_BY(mutex_);                        // and all its nodes
  std::optional<uint64_t> power_left_ GUARDED_BY(mutex_);  // operations until it goes off
  bool recording_ GUARDED_BY(mutex_) = false;
  std::vector<SimMoment> moments_ GUARDED_BY(mutex_);
  uint64_t epoch_ GUARDED_BY(mutex_) = 0;  // files opened before a crash are dead
  std::map<std::string, std::vector<Injection>> injections_ GUARDED_BY(mutex_);
  std::map<std::string, uint64_t> fired_ GUARDED_BY(mutex_);
  std::map<uint64_t, uint64_t> tries_ GUARDED_BY(mutex_);
  std::vector<std::string> operations_ GUARDED_BY(mutex_);
};

class SimFs : public Fs {
 public:
  explicit SimFs(const SimOptions& options, SimTree tree = {});
  ~SimFs() override;

  SimDisk& disk() { return *disk_; }

  std::string backend() const override { return "sim"; }
  std::string note() const override { return "simulated in memory"; }
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
  bool can_reuse(const std::string& path) override;
  void submit(IoRequest request) override;
  void close() override;

  // From now on a transfer waits until complete() or close().
  void hold();
  // The transfers that wait, oldest first: "write /path 0 4096" (offset, bytes).
  std::vector<std::string> waiting();
  // Does this one of them, on the caller's thread and without the fault `slow`. Throws
  // std::out_of_range.
  void complete(size_t index);

 private:
  void serve() noexcept;
  void perform(IoRequest request, bool reordered, bool may_delay) noexcept;
  IoRequest take(size_t index) REQUIRES(mutex_);
  void delay(const IoRequest& request);
  int store(const std::string& path, std::string_view data) REQUIRES(disk_->mutex_);
  void write_half(const std::string& path, std::string_view data);
  int prepare(const std::string& path, uint64_t bytes, bool reuse, SimNodePtr& node)
      REQUIRES(disk_->mutex_);
  template <class Change>
  Status name_change(const char* operation, const std::string& path, const std::string& detail,
                     Change&& change);

  const std::shared_ptr<SimDisk> disk_;
  const bool reorder_;
  Mutex mutex_;
  Condition wake_;
  std::vector<IoRequest> queue_ GUARDED_BY(mutex_);
  bool closed_ GUARDED_BY(mutex_) = false;
  bool held_ GUARDED_BY(mutex_) = false;
  SimRandom order_ GUARDED_BY(mutex_);
  std::thread thread_;
  std::once_flag closing_;
};

}  // namespace statehold
