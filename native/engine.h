// engine: moves ranges between memory and files through a bounded set of staging buffers.
//
// Owns the buffers, the threads that copy and verify, and one that faults the buffers in. Knows
// nothing of steps, manifests or tensors. Any number of jobs run at once; one that fails disturbs
// no other. Workers look for work in this order (Rank): settle what has landed, start reads, fill
// eager blocks, fill other blocks; oldest job first.
#pragma once

#include <memory>
#include <thread>
#include <vector>

#include "read_job.h"
#include "write_job.h"

namespace statehold {

struct EngineOptions {
  uint64_t staging_bytes = 0;  // rounded up to whole buffers, at least two
  uint64_t buffer_bytes = uint64_t{16} << 20;
  int copy_threads = 2;
};

class Engine {
 public:
  // Throws std::invalid_argument for impossible options.
  Engine(std::shared_ptr<Fs> fs, const EngineOptions& options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Both throw Failure when closed or poisoned. All work happens on the engine's threads.
  std::shared_ptr<WriteJob> write(WriteRequest request);
  std::shared_ptr<ReadJob> read(ReadRequest request);

  // Kept mapped while somebody holds it, even after close.
  std::shared_ptr<StagingMemory> memory() const { return shared_->memory; }

  // Fails the jobs that are not complete, waits until nothing moves any more, joins the threads.
  // Buffers still lent to Python are no longer waited for. Idempotent.
  void close();

 private:
  void work();
  bool pick(Work& work);
  void run(Work work, std::unique_lock<std::mutex>& lock);
  void populate();
  bool wait_to_populate();  // false: stop
  template <class SomeJob>
  std::shared_ptr<SomeJob> start(std::shared_ptr<SomeJob> job);
  void check_open();

  const std::shared_ptr<Shared> shared_;
  bool stopping_ = false;  // guarded by Shared::mutex, as is closed_
  bool closed_ = false;
  std::vector<std::thread> workers_;
  std::thread populator_;
};

}  // namespace statehold
