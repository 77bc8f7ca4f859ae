// job: what a write and a read have in common, and what they share with the engine.
//
// A job is a state machine. Under Shared::mutex it offers units of work (take), which the engine's
// workers run without the mutex (run). A job never blocks a worker: what needs a buffer is only
// offered while one is free.
//
// After the first failure (or cancel) a job offers nothing more; it is quiet once no worker is in
// it. A wait that raises does so only then: the memory of the caller is no longer touched. Its
// transfers may still be in flight; their buffers come back with their completions.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "buffers.h"
#include "fs.h"
#include "segment.h"

namespace statehold {

class Job;

// The order in which workers look for work.
enum class Rank : uint8_t { settle, read, eager, fill };

struct Work {
  std::shared_ptr<Job> job;
  int kind = 0;  // the job's own
  uint64_t block = 0;
};

// What the engine and its jobs share; outlives the engine while a job is still referenced.
struct Shared {
  Shared(uint64_t buffer_count, uint64_t buffer_bytes)
      : memory(std::make_shared<StagingMemory>(buffer_count, buffer_bytes)), pool(buffer_count) {}

  std::mutex mutex;
  std::condition_variable runnable;  // for workers: take() may succeed now
  std::condition_variable changed;   // for waits: a job has moved on
  std::shared_ptr<StagingMemory> memory;
  std::shared_ptr<Fs> fs;  // reset when the engine is closed and all threads are gone
  std::vector<int> slots;  // per buffer: where the Fs has registered it, or -1
  BufferPool pool;         // guarded by mutex, as all below
  std::vector<std::shared_ptr<Job>> jobs;  // not retired yet, oldest first
  Status poison;                           // not ok: every job fails with it

  std::byte* address(Lease lease) const { return memory->buffer(lease.index); }
  void release(Lease lease);
  void fail_all(const Status& status);
  void drop_retired();
};

// nullopt waits for ever.
using Deadline = std::optional<std::chrono::steady_clock::time_point>;

class Job : public std::enable_shared_from_this<Job> {
 public:
  explicit Job(std::shared_ptr<Shared> shared, uint64_t block_bytes);
  virtual ~Job() = default;
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  // For the engine. With the mutex: offers work of this rank.
  virtual bool take(Rank rank, Work& work) = 0;
  // For the engine. Without the mutex; throws only CheckFailed and bad_alloc.
  virtual void run(const Work& work) = 0;
  // With the mutex.
  void fail(const Status& status);
  bool retired() const;
  virtual void drop_files() = 0;           // called once, when retired
  virtual bool wants_buffers() const = 0;  // with the mutex
  void enter() { ++workers_inside_; }
  void leave() { --workers_inside_; }
  bool quiet() const { return workers_inside_ == 0; }
  bool idle() const { return workers_inside_ == 0 && in_flight_ == 0; }

  // Fails the job with Status::closed, unless it is complete; quiet on return.
  void cancel();

 protected:
  using Lock = std::unique_lock<std::mutex>;

  virtual bool complete() const = 0;  // with the mutex
  virtual void drop_queued() = 0;     // with the mutex: give back buffers that nobody uses

  bool failed() const { return !error_.ok(); }
  // Cheap and without the mutex: stop between two pieces.
  bool stopped() const { return stopped_.load(std::memory_order_relaxed); }
  // Starts a transfer of a buffer; afterwards `landed` is called with the mutex.
  void transfer(IoRequest request, uint64_t block);
  virtual void landed(uint64_t block, Status status) = 0;

  // Waits until predicate() or the deadline; returns predicate(). Throws the error of a job that
  // has failed and is quiet.
  template <class Predicate>
  bool wait(Deadline deadline, Predicate predicate);
  void wake_all();
  int slot(Lease lease) const { return shared_->slots[lease.index]; }

  const std::shared_ptr<Shared> shared_;
  const uint64_t block_bytes_;

 private:
  Status error_;
  std::atomic<bool> stopped_{false};
  int workers_inside_ = 0;
  int in_flight_ = 0;
};

template <class Predicate>
bool Job::wait(Deadline deadline, Predicate predicate) {
  Lock lock(shared_->mutex);
  const auto over = [&] { return failed() ? quiet() : predicate(); };
  if (deadline) {
    shared_->changed.wait_until(lock, *deadline, over);
  } else {
    shared_->changed.wait(lock, over);
  }
  if (!failed()) return predicate();
  if (quiet()) throw Failure(error_);
  return false;
}

}  // namespace statehold
