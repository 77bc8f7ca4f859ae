// fs_threads: the data plane by pread/pwrite on a few threads. Used where io_uring is refused, and
// as the plain reference in tests. The number of threads bounds the transfers in flight.
#pragma once

#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "fs_posix.h"
#include "io_queue.h"
#include "mutex.h"

namespace statehold {

class ThreadsFs final : public PosixFs {
 public:
  ThreadsFs(int io_threads, std::string note);
  ~ThreadsFs() override;

  std::string backend() const override { return "threads"; }
  std::string note() const override { return note_; }
  uint64_t depth() const override { return threads_.size(); }
  void submit(IoRequest request) override;
  void close() override;

 private:
  void serve() noexcept;

  const std::string note_;
  Mutex mutex_;
  Condition wake_;
  IoQueue queue_ GUARDED_BY(mutex_);
  bool closed_ GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
  std::once_flag closing_;
};

}  // namespace statehold
