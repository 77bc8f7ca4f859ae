// engine: moves ranges between memory and files through a bounded set of staging buffers.
//
// Owns the buffers, the threads that copy and verify, and one that faults the buffers in. Knows
// nothing of steps, manifests or tensors. Any number of jobs run at once; one that fails disturbs
// no other. Workers look for work of the client whose turn it is (shares.h), there by Priority
// (job.h), oldest job first. Transfers start in the order of disk_queue.h. No mix of jobs can stop:
// lending.h says why.
//
// Buffers are faulted in when jobs need them: while jobs run, a few ahead of demand; while none
// runs, as many as were wanted at once before. A process that saves little stays small.
//
// Whatever is thrown on one of its threads poisons the engine: all jobs fail with it, new ones are
// refused, close() works. No thread ends by it.
#pragma once

#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "ranges_job.h"
#include "read_job.h"
#include "write_job.h"

namespace statehold {

struct EngineOptions {
  uint64_t staging_bytes = 0;  // rounded up to whole buffers, at least two
  uint64_t buffer_bytes = uint64_t{16} << 20;
  int copy_threads = 2;
  std::vector<ClientOptions> clients = {{}};
  std::function<uint64_t()> now_ns = {};  // none: a steady clock
};

class Engine {
 public:
  // Throws std::invalid_argument for impossible options.
  Engine(std::shared_ptr<Fs> fs, const EngineOptions& options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // All throw Failure when closed or poisoned. All work happens on the engine's threads.
  std::shared_ptr<WriteJob> write(WriteRequest request);
  std::shared_ptr<ReadJob> read(ReadRequest request);
  std::shared_ptr<RangesJob> ranges(RangesRequest request);
  void start(std::shared_ptr<Job> job);  // of any kind, made with shared()

  // From now on, what starts on a path for a client, or for all clients together, is at most so
  // much; 0 lifts the limit. Throws std::invalid_argument for a client that there is not.
  void set_limit(uint32_t path, std::optional<uint32_t> client, uint64_t bytes_per_s);
  ClientStats stats_of(uint32_t client);  // throws as set_limit

  const std::shared_ptr<Shared>& shared() const { return shared_; }

  // Kept mapped while somebody holds it, even after close.
  std::shared_ptr<StagingMemory> memory() const { return shared_->memory; }

  // Returns once no thread of the engine finds anything to do: nothing moves until somebody calls,
  // or a transfer ends. For tests in which simulated ranks take turns; one caller at a time.
  // all_buffers: while there are no jobs yet, have all of the memory faulted in. Then no job gets
  // by chance a buffer sooner or later.
  void settle(bool all_buffers = false);

  // Fails the jobs that are not complete, waits until nothing moves any more, joins the threads.
  // Buffers still lent to Python are no longer waited for. If there are none, the staging memory
  // gives its pages back. Idempotent.
  void close();

 private:
  void work() noexcept;
  bool pick(Work& work) REQUIRES(engine_mutex);
  bool pick_of(uint32_t client, Work& work) REQUIRES(engine_mutex);
  void start_due_transfers(Lock& lock REQUIRES(engine_mutex));
  void wait_for_work(Lock& lock REQUIRES(engine_mutex));
  void run(Work work, Lock& lock REQUIRES(engine_mutex));
  void populate() noexcept;
  void populate(uint32_t index);
  bool wait_to_populate(uint64_t& last_asked);  // false: stop
  void found_nothing(uint64_t& last_asked) REQUIRES(engine_mutex);
  bool wants_one_more() REQUIRES(engine_mutex);
  uint64_t wanted_now() const REQUIRES(engine_mutex);
  void note_demand() REQUIRES(engine_mutex);
  void check_open() REQUIRES(engine_mutex);
  void check_client(uint32_t client) const;

  const std::shared_ptr<Shared> shared_;
  bool stopping_ GUARDED_BY(engine_mutex) = false;
  bool closed_ GUARDED_BY(engine_mutex) = false;
  uint64_t wanted_at_once_ GUARDED_BY(engine_mutex) = 0;  // buffers, at most so far
  // Of settle(): how often it has asked all threads to look for work, how many of them have found
  // none since, how many there are, and how much they have done.
  uint64_t asked_ GUARDED_BY(engine_mutex) = 0;
  int found_nothing_ GUARDED_BY(engine_mutex) = 0;
  int threads_ GUARDED_BY(engine_mutex) = 0;
  uint64_t done_ GUARDED_BY(engine_mutex) = 0;
  std::vector<std::thread> workers_;
  std::thread populator_;
};

}  // namespace statehold
