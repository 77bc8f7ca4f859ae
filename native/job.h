// job: what a write and a read have in common, and what they share with the engine.
//
// A job is a state machine. Under Shared::mutex it offers units of work (take), which the engine's
// workers run without the mutex (run). A job never blocks a worker: what needs a buffer is only
// offered when it gets one (lending.h).
//
// After the first failure (or cancel) a job offers nothing more, and its transfers leave the queue
// of the disk. It is quiet once no worker is in it; a job of ranges also waits for its transfers,
// which touch the caller's memory and files. A wait that raises does so only then. Other transfers
// may still be under way; their buffers come back when those have ended.
//
// No system call is made with the mutex held: a job that is over lets go of its files without it.
// Nothing that is thrown on a native thread leaves it: doubts about ourselves (a failed CHECK, no
// memory where that cannot be undone) poison the engine, which fails every job with that error.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "block.h"
#include "buffers.h"
#include "clients.h"
#include "disk_queue.h"
#include "fs.h"
#include "lending.h"
#include "segment.h"
#include "shares.h"

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

  // Throws std::invalid_argument as check_clients.
  Shared(uint64_t buffer_count, uint64_t buffer_bytes, std::vector<ClientOptions> client_table);

  std::mutex mutex;
  std::condition_variable runnable;  // for workers: take() may succeed now
  std::condition_variable changed;   // for waits: a job has moved on
  const std::vector<ClientOptions> clients;
  std::shared_ptr<StagingMemory> memory;
  std::shared_ptr<Fs> fs;                // reset when the engine is closed and all threads are gone
  std::vector<int> slots;                // per buffer: where the Fs has registered it, or -1
  BufferPool pool;                       // guarded by mutex, as all below
  std::list<std::shared_ptr<Job>> jobs;  // not retired yet, oldest first
  Shares workers;                        // whose work a worker does next
  DiskQueue disk;
  std::vector<ClientStats> moved;    // by client
  Status poison;                     // not ok: every job fails with it
  std::function<uint64_t()> now_ns;  // what limits go by

  std::byte* address(Lease lease) const { return memory->buffer(lease.index); }
  // The most that a client may hold: what the others have not reserved.
  uint64_t buffers_max(uint32_t client) const;
  std::optional<Lease> lend(const Job& job);  // by the rules of lending.h
  void release(Lease lease);
  // Hands over the transfers that may start now, without the mutex.
  void start_transfers(Lock& lock);
  void fail_all(const Status& status) noexcept;
  void poison_with(const Status& status) noexcept;
  // Jobs that are over leave the engine, without the mutex while they close their files.
  void drop_retired(Lock& lock);

 private:
  bool leaves_older_jobs_their_part(const Job& job) const;
  bool leaves_clients_their_claims(const Job& job);

  std::vector<Holdings> holdings_;  // by client; kept because it needs memory
  bool starting_ = false;           // a thread hands transfers over, for all
};

// nullopt waits for ever.
using Deadline = std::optional<std::chrono::steady_clock::time_point>;

class Job : public std::enable_shared_from_this<Job> {
 public:
  // Throws std::invalid_argument for an impossible block size, or a client that there is not.
  Job(std::shared_ptr<Shared> shared, uint32_t client, uint64_t block_bytes);
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
  uint32_t client() const { return client_; }
  uint64_t held() const { return held_; }
  // Buffers that it may still take: never grows. And those that it would take now.
  uint64_t may_need() const { return failed() ? 0 : buffers_left(); }
  uint64_t wants_now() const { return failed() ? 0 : buffers_wanted(); }
  void enter() { ++workers_inside_; }
  void leave() { --workers_inside_; }
  // Nothing touches what is the caller's.
  virtual bool quiet() const { return workers_inside_ == 0; }
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

  // A worker has copied or hashed so much for the job.
  void charge(uint64_t bytes) { shared_->workers.charge(client_, bytes); }

  // Queues a transfer for a block, or drops the block if the job has failed. When the transfer has
  // ended, `transferred` is called with the mutex.
  void transfer(IoRequest request, uint64_t block, uint32_t path);
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

  void end_transfer(uint64_t block, IoRequest::Kind kind, uint64_t bytes, Status status) noexcept;
  void ended(uint64_t block, Status status) noexcept;  // with the mutex, as the next
  void drop_transfers();

  const uint32_t client_;
  Status error_;
  std::atomic<bool> stopped_{false};
  int workers_inside_ = 0;
  int in_flight_ = 0;            // transfers, those in the queue of the disk too
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
