// job: what a write and a read have in common, and what they share with the engine.
//
// A job is a state machine. Under Shared::mutex it offers units of work (take), which the engine's
// workers run without the mutex (run). A job never blocks a worker: what needs a buffer is only
// offered when it gets one (lending.h).
//
// After the first failure (or cancel) a job offers nothing more; it is quiet once no worker is in
// it. A wait that raises does so only then: the memory of the caller is no longer touched. Its
// transfers may still be in flight; their buffers come back with their completions.
//
// No system call is made with the mutex held: a job that is over lets go of its files without it.
// Nothing that is thrown on a native thread leaves it: doubts about ourselves (a failed CHECK, no
// memory where that cannot be undone) poison the engine, which fails every job with that error.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "block.h"
#include "buffers.h"
#include "fs.h"
#include "segment.h"

namespace statehold {

class Job;

// Workers look for work in this order. `finish`: blocks that already hold a buffer.
enum class Priority : uint8_t { finish, read, eager, fill };

struct Work {
  std::shared_ptr<Job> job;
  int kind = 0;  // the job's own
  uint64_t block = 0;
};

// What the engine and its jobs share; outlives the engine while a job is still referenced.
struct Shared {
  using Lock = std::unique_lock<std::mutex>;

  Shared(uint64_t buffer_count, uint64_t buffer_bytes)
      : memory(std::make_shared<StagingMemory>(buffer_count, buffer_bytes)), pool(buffer_count) {}

  std::mutex mutex;
  std::condition_variable runnable;  // for workers: take() may succeed now
  std::condition_variable changed;   // for waits: a job has moved on
  std::shared_ptr<StagingMemory> memory;
  std::shared_ptr<Fs> fs;                // reset when the engine is closed and all threads are gone
  std::vector<int> slots;                // per buffer: where the Fs has registered it, or -1
  BufferPool pool;                       // guarded by mutex, as all below
  std::list<std::shared_ptr<Job>> jobs;  // not retired yet, oldest first
  Status poison;                         // not ok: every job fails with it

  std::byte* address(Lease lease) const { return memory->buffer(lease.index); }
  std::optional<Lease> lend(const Job& job);  // by the rule of lending.h
  void release(Lease lease);
  void fail_all(const Status& status) noexcept;
  void poison_with(const Status& status) noexcept;
  // Jobs that are over leave the engine, without the mutex while they close their files.
  void drop_retired(Lock& lock);
};

// nullopt waits for ever.
using Deadline = std::optional<std::chrono::steady_clock::time_point>;

class Job : public std::enable_shared_from_this<Job> {
 public:
  explicit Job(std::shared_ptr<Shared> shared, uint64_t block_bytes);
  virtual ~Job() = default;
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  // For the engine. With the mutex: offers work of this priority.
  virtual bool take(Priority priority, Work& work) = 0;
  // For the engine. Without the mutex; throws only CheckFailed and bad_alloc.
  virtual void run(const Work& work) = 0;
  // With the mutex.
  void fail(const Status& status) noexcept;
  bool retired() const;
  uint64_t held() const { return held_; }
  // Buffers that it may still take: never grows. And those that it would take now.
  uint64_t may_need() const { return failed() ? 0 : buffers_left(); }
  uint64_t wants_now() const { return failed() ? 0 : buffers_wanted(); }
  void enter() { ++workers_inside_; }
  void leave() { --workers_inside_; }
  bool quiet() const { return workers_inside_ == 0; }
  bool idle() const { return workers_inside_ == 0 && in_flight_ == 0; }

  // Fails the job with Status::closed, unless it is complete; quiet on return.
  void cancel();

 protected:
  using Lock = std::unique_lock<std::mutex>;

  virtual bool complete() const = 0;  // with the mutex, as the next three
  virtual void drop_queued() = 0;     // give back buffers that nobody uses
  virtual uint64_t buffers_left() const = 0;
  virtual uint64_t buffers_wanted() const = 0;
  virtual void drop_files() = 0;  // called once, when retired, without the mutex

  bool failed() const { return !error_.ok(); }
  // Cheap and without the mutex: stop between two pieces.
  bool stopped() const { return stopped_.load(std::memory_order_relaxed); }
  // With the mutex, as the next four: the only function that changes the state of a block. It gives
  // the buffer back of one that is over, and fails its CHECK where kFollows forbids the change.
  void move(BlockState& block, Stage to);
  void drop_if_queued(BlockState& block);
  // A block that goes no further: the job has failed, or it fails now with this status.
  void drop(BlockState& block, const Status& status = {});
  // A buffer for a block, if there is one that this job may take.
  bool borrow(BlockState& block);

  // Starts a transfer for a block, or drops the block if the job has failed. When the transfer has
  // ended, `transferred` is called with the mutex.
  void transfer(IoRequest request, uint64_t block);
  virtual void transferred(uint64_t block, Status status) = 0;
  virtual BlockState& block_state(uint64_t block) = 0;

  // Waits until predicate() or the deadline; returns predicate(). Throws the error of a job that
  // has failed and is quiet.
  template <class Predicate>
  bool wait(Deadline deadline, Predicate predicate);
  void wake_all();
  int slot(Lease lease) const { return shared_->slots[lease.index]; }

  const std::shared_ptr<Shared> shared_;
  const uint64_t block_bytes_;

 private:
  friend struct Shared;

  void end_transfer(uint64_t block, Status status) noexcept;  // a transfer

  Status error_;
  std::atomic<bool> stopped_{false};
  int workers_inside_ = 0;
  int in_flight_ = 0;
  uint64_t held_ = 0;            // buffers
  bool dropping_files_ = false;  // the engine: it lets go of its files
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
