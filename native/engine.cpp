// engine: contract in engine.h.
#include "engine.h"

#include <unistd.h>

#include <algorithm>
#include <stdexcept>

namespace statehold {
namespace {

// On Linux, nice() is per thread. The trainer goes on while its state is copied: with few
// processors it should not be the one that waits, and a copy that wakes up should not push it
// aside. When the trainer itself waits for the copy, the processors are free: this costs nothing.
constexpr int kNiceness = 5;

void yield_to_trainer() { static_cast<void>(!::nice(kNiceness)); }

std::shared_ptr<Shared> make_shared_state(const EngineOptions& options) {
  if (options.buffer_bytes == 0 || options.buffer_bytes % kPageBytes != 0) {
    throw std::invalid_argument("buffer_bytes must be a positive multiple of 4096");
  }
  if (options.copy_threads < 1) throw std::invalid_argument("copy_threads must be at least 1");
  const uint64_t count = (options.staging_bytes + options.buffer_bytes - 1) / options.buffer_bytes;
  return std::make_shared<Shared>(std::max<uint64_t>(count, 2), options.buffer_bytes);
}

}  // namespace

Engine::Engine(std::shared_ptr<Fs> fs, const EngineOptions& options)
    : shared_(make_shared_state(options)) {
  shared_->fs = std::move(fs);
  shared_->slots.resize(shared_->memory->count(), -1);
  try {
    populator_ = std::thread([this] { populate(); });
    for (int i = 0; i < options.copy_threads; ++i) workers_.emplace_back([this] { work(); });
  } catch (...) {  // no more threads to be had
    close();
    throw;
  }
}

Engine::~Engine() { close(); }

void Engine::populate() {
  yield_to_trainer();
  for (uint32_t index = 0; index < shared_->memory->count(); ++index) {
    if (!wait_to_populate()) return;
    shared_->memory->populate(index);
    const int slot = shared_->fs->register_buffer(shared_->memory->buffer(index),
                                                  shared_->memory->buffer_bytes());
    const std::lock_guard lock(shared_->mutex);
    shared_->slots[index] = slot;
    shared_->pool.add(index);
    shared_->runnable.notify_all();
  }
}

constexpr uint64_t kBuffersAhead = 4;

// While jobs run, only on demand: a restore from the page cache needs no buffer at all, and
// faulting them in would take a processor from it.
bool Engine::wait_to_populate() {
  std::unique_lock lock(shared_->mutex);
  shared_->changed.wait(lock, [&] {
    const bool wanted = std::ranges::any_of(shared_->jobs, &Job::wants_buffers);
    return stopping_ || shared_->jobs.empty() ||
           (wanted && shared_->pool.free_count() < kBuffersAhead);
  });
  return !stopping_;
}

void Engine::check_open() {
  if (stopping_) throw Failure(Status::closed("start of a transfer"));
  must(shared_->poison);
}

template <class SomeJob>
std::shared_ptr<SomeJob> Engine::start(std::shared_ptr<SomeJob> job) {
  const std::lock_guard lock(shared_->mutex);
  check_open();
  shared_->jobs.push_back(job);
  shared_->runnable.notify_all();
  shared_->changed.notify_all();  // the populator may go on
  return job;
}

std::shared_ptr<WriteJob> Engine::write(WriteRequest request) {
  return start(std::make_shared<WriteJob>(shared_, std::move(request)));
}

std::shared_ptr<ReadJob> Engine::read(ReadRequest request) {
  return start(std::make_shared<ReadJob>(shared_, std::move(request)));
}

void Engine::work() {
  yield_to_trainer();
  std::unique_lock lock(shared_->mutex);
  while (true) {
    Work work;
    if (pick(work)) {
      run(std::move(work), lock);
    } else if (stopping_) {
      return;
    } else {
      shared_->runnable.wait(lock);
    }
  }
}

bool Engine::pick(Work& work) {
  for (const Rank rank : {Rank::settle, Rank::read, Rank::eager, Rank::fill}) {
    for (const auto& job : shared_->jobs) {
      if (job->take(rank, work)) return true;
    }
  }
  return false;
}

void Engine::run(Work work, std::unique_lock<std::mutex>& lock) {
  work.job->enter();
  lock.unlock();
  const Status status = guarded([&] { work.job->run(work); });
  lock.lock();
  work.job->leave();
  if (!status.ok()) {
    shared_->poison = status;
    shared_->fail_all(status);
  }
  shared_->drop_retired();
  shared_->changed.notify_all();
}

void Engine::close() {
  {
    std::unique_lock lock(shared_->mutex);
    if (std::exchange(stopping_, true)) {
      shared_->changed.wait(lock, [this] { return closed_; });
      return;
    }
    shared_->fail_all(Status::closed("a transfer"));
    shared_->drop_retired();
    shared_->runnable.notify_all();
    shared_->changed.notify_all();
    shared_->changed.wait(lock, [this] { return shared_->jobs.empty(); });
  }
  for (std::thread& worker : workers_) worker.join();
  if (populator_.joinable()) populator_.join();
  for (const int slot : shared_->slots) shared_->fs->unregister_buffer(slot);
  const std::lock_guard lock(shared_->mutex);
  shared_->fs.reset();
  closed_ = true;
  shared_->changed.notify_all();
}

}  // namespace statehold
