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
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "block.h"
#include "buffers.h"
#include "clients.h"
#include "disk_queue.h"
#include "fs.h"
#include "lending.h"
#include "mutex.h"
#include "segment.h"
#include "shares.h"

namespace statehold {

class Job;

// Workers look for work in this order. `finish`: blocks that are ready to be written, or verified.
// `lend`: blocks that Python fills alone. They cost a worker nothing, and a device is idle until it
// has them, so they come before `seal`: blocks that Python has filled, to hash.
enum class Priority : uint8_t { finish, read, eager, lend, seal, fill };

struct Work {
  std::shared_ptr<Job> job;
  int kind = 0;  // the job's own
  uint64_t block = 0;
};

// An engine and its jobs share one mutex (Shared::mutex). The analysis compares names and cannot
// know that they do, so all of them say this name for it. There is no such object.
extern Mutex engine_mutex;

// What the engine and its jobs share; outlives the engine while a job is still referenced.
struct Shared {
  // Throws std::invalid_argument as check_clients.
  Shared(uint64_t buffer_count, uint64_t buffer_bytes, std::vector<ClientOptions> client_table);

  Mutex& mutex() RETURNS_MUTEX(engine_mutex) { return mutex_; }

  Condition runnable;  // for workers: take() may succeed now
  Condition changed;   // for the engine: the populator, settle() and close()
  const std::vector<ClientOptions> clients;
  std::shared_ptr<StagingMemory> memory;
  std::shared_ptr<Fs> fs;  // reset when the engine is closed and all threads are gone
  // Per buffer: where the Fs has registered it, or -1. Written once, before the buffer is lent.
  std::vector<int> slots;
  BufferPool pool GUARDED_BY(engine_mutex);
  std::list<std::shared_ptr<Job>> jobs GUARDED_BY(engine_mutex);  // not retired yet, oldest first
  Shares workers GUARDED_BY(engine_mutex);                        // whose work a worker does next
  DiskQueue disk GUARDED_BY(engine_mutex);
  std::vector<ClientStats> moved GUARDED_BY(engine_mutex);    // by client
  Status poison GUARDED_BY(engine_mutex);                     // not ok: every job fails with it
  std::function<uint64_t()> now_ns GUARDED_BY(engine_mutex);  // what limits go by

  std::byte* address(Lease lease) const { return memory->buffer(lease.index); }
  // The most that a client may hold: what the others have not reserved.
  uint64_t buffers_max(uint32_t client) const REQUIRES(engine_mutex);
  std::optional<Lease> lend(const Job& job) REQUIRES(engine_mutex);  // by the rules of lending.h
  void release(Lease lease) REQUIRES(engine_mutex);
  // Hands over the transfers that may start now, without the mutex.
  void start_transfers(Lock& lock REQUIRES(engine_mutex)) noexcept;
  void transfer_ended(uint32_t client, uint32_t path, bool buffered) noexcept
      REQUIRES(engine_mutex);
  void fail_all(const Status& status) noexcept REQUIRES(engine_mutex);
  void poison_with(const Status& status) noexcept REQUIRES(engine_mutex);
  // Jobs that are over leave the engine, without the mutex while they close their files.
  void drop_retired(Lock& lock REQUIRES(engine_mutex));

 private:
  std::optional<Transfer> next_transfer() noexcept REQUIRES(engine_mutex);
  bool leaves_older_jobs_their_part(const Job& job) const REQUIRES(engine_mutex);
  bool leaves_clients_their_claims(const Job& job) REQUIRES(engine_mutex);

  Mutex mutex_;
  // By client; kept because it needs memory.
  std::vector<Holdings> holdings_ GUARDED_BY(engine_mutex);
  bool starting_ GUARDED_BY(engine_mutex) = false;  // a thread hands transfers over, for all
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

  // For the engine: offers work of this priority. Never called of a job that is retired.
  virtual bool take(Priority priority, Work& work) REQUIRES(engine_mutex) = 0;
  // For the engine. Without the mutex; throws only CheckFailed and bad_alloc.
  virtual void run(const Work& work) = 0;
  void fail(const Status& status) noexcept REQUIRES(engine_mutex);
  bool retired() const REQUIRES(engine_mutex);
  uint32_t client() const { return client_; }
  uint64_t held() const REQUIRES(engine_mutex) { return held_; }
  // Buffers that it may still take: never grows. And those that it would take now.
  uint64_t may_need() const REQUIRES(engine_mutex) { return failed() ? 0 : buffers_left(); }
  uint64_t wants_now() const REQUIRES(engine_mutex) { return failed() ? 0 : buffers_wanted(); }
  void enter() REQUIRES(engine_mutex) { ++workers_inside_; }
  void leave() REQUIRES(engine_mutex) {
    --workers_inside_;
    moved_on_.notify_all();
  }
  // Nothing touches what is the caller's.
  virtual bool quiet() const REQUIRES(engine_mutex) { return workers_inside_ == 0; }
  bool idle() const REQUIRES(engine_mutex) { return workers_inside_ == 0 && in_flight_ == 0; }

  // Fails the job with Status::closed, unless it is complete; quiet on return.
  virtual void cancel();

 protected:
  virtual bool complete() const REQUIRES(engine_mutex) = 0;
  virtual void drop_queued() REQUIRES(engine_mutex) = 0;  // give back buffers that nobody uses
  virtual uint64_t buffers_left() const REQUIRES(engine_mutex) = 0;
  virtual uint64_t buffers_wanted() const REQUIRES(engine_mutex) = 0;
  virtual void drop_files() = 0;  // called once, when retired, without the mutex

  bool failed() const REQUIRES(engine_mutex) { return !error_.ok(); }
  // Cheap and without the mutex: stop between two pieces.
  bool stopped() const { return stopped_.load(std::memory_order_relaxed); }
  // The only function that changes the state of a block. It gives the buffer back of one that is
  // over, and fails its CHECK where kFollows forbids the change.
  void move(BlockState& block, Stage to) REQUIRES(engine_mutex);
  void drop_if_queued(BlockState& block) REQUIRES(engine_mutex);
  // A block that goes no further: the job has failed, or it fails now with this status.
  void drop(BlockState& block, const Status& status = {}) REQUIRES(engine_mutex);
  // The buffer of a block that goes on without one.
  void give_back(BlockState& block) REQUIRES(engine_mutex);
  // A buffer for a block, if there is one that this job may take.
  bool borrow(BlockState& block) REQUIRES(engine_mutex);

  // A worker has copied or hashed so much for the job.
  void charge(uint64_t bytes) REQUIRES(engine_mutex) { shared_->workers.charge(client_, bytes); }

  // Queues a transfer for a block, or drops the block if the job has failed. When the transfer has
  // ended, `transferred` is called.
  void transfer(IoRequest request, uint64_t block, uint32_t path);
  virtual void transferred(uint64_t block, Status status) REQUIRES(engine_mutex) = 0;
  virtual BlockState& block_state(uint64_t block) = 0;

  // Waits until predicate() or the deadline; returns predicate(). Throws the error of a job that
  // has failed and is quiet. The predicate is called with the mutex.
  template <class Predicate>
  bool wait(Deadline deadline, Predicate predicate);
  void wake_all();  // the workers, and who waits for this job
  int slot(Lease lease) const { return shared_->slots[lease.index]; }

  const std::shared_ptr<Shared> shared_;
  const uint64_t block_bytes_;

 private:
  friend struct Shared;

  void end_transfer(uint64_t block, uint32_t path, IoRequest::Kind kind, uint64_t bytes,
                    Status status) noexcept;
  void ended(uint64_t block, Status status) noexcept REQUIRES(engine_mutex);
  void drop_transfers() REQUIRES(engine_mutex);

  const uint32_t client_;
  Status error_ GUARDED_BY(engine_mutex);
  std::atomic<bool> stopped_{false};
  int workers_inside_ GUARDED_BY(engine_mutex) = 0;
  int in_flight_ GUARDED_BY(engine_mutex) = 0;  // transfers, those in the queue of the disk too
  uint64_t held_ GUARDED_BY(engine_mutex) = 0;  // buffers
  bool dropping_files_ GUARDED_BY(engine_mutex) = false;  // the engine: it lets go of its files
  Condition moved_on_;
};

template <class Predicate>
bool Job::wait(Deadline deadline, Predicate predicate) {
  Lock lock(shared_->mutex());
  while (!(failed() ? quiet() : predicate())) {
    if (!deadline) {
      moved_on_.wait(lock);
    } else if (!moved_on_.wait_until(lock, *deadline)) {
      break;
    }
  }
  if (!failed()) return predicate();
  if (quiet()) throw Failure(error_);
  return false;
}

}  // namespace statehold
