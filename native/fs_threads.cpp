// fs_threads: contract in fs_threads.h.
#include "fs_threads.h"

#include <unistd.h>

#include <cerrno>

namespace statehold {
namespace {

int64_t transfer(const IoRequest& request) {
  const int fd = static_cast<const PosixFile&>(*request.file).fd();
  const auto offset = static_cast<off_t>(request.next_offset());
  const ssize_t result = request.kind == IoRequest::Kind::read
                             ? ::pread(fd, request.next_memory(), request.next_bytes(), offset)
                             : ::pwrite(fd, request.next_memory(), request.next_bytes(), offset);
  return result < 0 ? -errno : result;
}

}  // namespace

ThreadsFs::ThreadsFs(int io_threads, std::string note) : note_(std::move(note)) {
  CHECK(io_threads >= 1);
  try {
    for (int i = 0; i < io_threads; ++i) threads_.emplace_back([this] { serve(); });
  } catch (...) {  // no more threads to be had
    close();
    throw;
  }
}

ThreadsFs::~ThreadsFs() { close(); }

void ThreadsFs::submit(IoRequest request) {
  auto owned = std::make_unique<IoRequest>(std::move(request));
  {
    const Lock lock(mutex_);
    if (!closed_) {
      queue_.push(std::move(owned));
      wake_.notify_one();
      return;
    }
  }
  call_done(*owned, Status::closed("transfer"));
}

void ThreadsFs::serve() noexcept {
  Lock lock(mutex_);
  while (true) {
    while (!closed_ && queue_.empty()) wake_.wait(lock);
    std::unique_ptr<IoRequest> request = queue_.pop();
    if (!request) return;  // closed, and everything accepted has been done
    lock.unlock();
    Status status;
    const Status internal = guarded([&] {
      while (apply_result(*request, transfer(*request), status) == Progress::again) {
      }
    });
    call_done(*request, internal.ok() ? std::move(status) : copy_of(internal));
    request.reset();
    lock.lock();
  }
}

void ThreadsFs::close() {
  {
    const Lock lock(mutex_);
    closed_ = true;
  }
  wake_.notify_all();
  std::call_once(closing_, [this] {
    for (std::thread& thread : threads_) thread.join();
  });
}

}  // namespace statehold
