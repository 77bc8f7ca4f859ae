// engine: contract in engine.h.
#include "engine.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace statehold {
namespace {

// On Linux, nice() is per thread. The trainer goes on while its state is copied: with few
// processors it should not be the one that waits, and a copy that wakes up should not push it
// aside. When the trainer itself waits for the copy, the processors are free: this costs nothing.
constexpr int kNiceness = 5;

// More than processors address; sums and products of sizes below it do not overflow.
constexpr uint64_t kMemoryBytesMax = uint64_t{1} << 46;

void yield_to_trainer() { static_cast<void>(!::nice(kNiceness)); }

std::shared_ptr<Shared> make_shared_state(const EngineOptions& options) {
  if (options.buffer_bytes == 0 || options.buffer_bytes % kPageBytes != 0) {
    throw std::invalid_argument("buffer_bytes must be a positive multiple of 4096");
  }
  if (options.buffer_bytes > kMemoryBytesMax || options.staging_bytes > kMemoryBytesMax) {
    throw std::invalid_argument("staging_bytes and buffer_bytes are at most 2**46");
  }
  if (options.copy_threads < 1) throw std::invalid_argument("copy_threads must be at least 1");
  const uint64_t count = (options.staging_bytes + options.buffer_bytes - 1) / options.buffer_bytes;
  return std::make_shared<Shared>(std::max<uint64_t>(count, 2), options.buffer_bytes,
                                  options.clients);
}

uint64_t steady_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::nanoseconds(now).count());
}

}  // namespace

Engine::Engine(std::shared_ptr<Fs> fs, const EngineOptions& options)
    : shared_(make_shared_state(options)) {
  shared_->disk.set_depth(fs->depth());
  shared_->fs = std::move(fs);
  shared_->now_ns = options.now_ns ? options.now_ns : steady_ns;
  shared_->slots.resize(shared_->memory->count(), -1);
  threads_ = options.copy_threads + 1;
  try {
    populator_ = std::thread([this] { populate(); });
    for (int i = 0; i < options.copy_threads; ++i) workers_.emplace_back([this] { work(); });
  } catch (...) {  // no more threads to be had
    close();
    throw;
  }
}

Engine::~Engine() { close(); }

void Engine::populate() noexcept {
  yield_to_trainer();
  uint64_t last_asked = 0;
  const Status status = guarded([&] {
    for (uint32_t index = 0; index < shared_->memory->count(); ++index) {
      if (!wait_to_populate(last_asked)) return;
      populate(index);
    }
  });
  const Lock lock(shared_->mutex());
  if (!status.ok()) shared_->poison_with(status);
  --threads_;
  shared_->changed.notify_all();
}

void Engine::populate(uint32_t index) {
  std::byte* buffer = shared_->memory->buffer(index);
  shared_->memory->populate(index);
  const int slot = shared_->fs->register_buffer(buffer, shared_->memory->buffer_bytes());
  const Lock lock(shared_->mutex());
  ++done_;
  shared_->slots[index] = slot;
  shared_->pool.add(index);
  shared_->runnable.notify_all();
}

bool Engine::wait_to_populate(uint64_t& last_asked) {
  Lock lock(shared_->mutex());
  while (!stopping_ && !wants_one_more()) {
    found_nothing(last_asked);
    shared_->changed.wait(lock);
  }
  return !stopping_;
}

constexpr uint64_t kBuffersAhead = 4;

// While jobs run, only on demand: a restore from the page cache needs no buffer at all, and
// faulting them in would take a processor from it.
bool Engine::wants_one_more() {
  note_demand();
  const BufferPool& pool = shared_->pool;
  if (shared_->jobs.empty()) return pool.free_count() + pool.lent_count() < wanted_at_once_;
  return pool.free_count() < std::min(wanted_now(), kBuffersAhead);
}

// What jobs would take now, but no more of it than their clients may hold.
uint64_t Engine::wanted_now() const {
  uint64_t wanted = 0;
  for (uint32_t client = 0; client < shared_->clients.size(); ++client) {
    uint64_t held = 0;
    uint64_t of_client = 0;
    for (const auto& job : shared_->jobs) {
      if (job->client() != client) continue;
      held += job->held();
      of_client += job->wants_now();
    }
    wanted += std::min(of_client, shared_->buffers_max(client) - held);
  }
  return wanted;
}

void Engine::note_demand() {
  const uint64_t wanted = shared_->pool.lent_count() + wanted_now();
  wanted_at_once_ = std::min(std::max(wanted_at_once_, wanted), shared_->memory->count());
}

void Engine::check_open() {
  if (stopping_) throw Failure(Status::closed("start of a transfer"));
  must(shared_->poison);
}

void Engine::start(std::shared_ptr<Job> job) {
  Lock lock(shared_->mutex());
  check_open();
  shared_->jobs.push_back(std::move(job));
  note_demand();
  shared_->runnable.notify_all();
  shared_->changed.notify_all();  // the populator may go on
  shared_->drop_retired(lock);    // a job with nothing to do is over
}

std::shared_ptr<WriteJob> Engine::write(WriteRequest request) {
  auto job = std::make_shared<WriteJob>(shared_, std::move(request));
  start(job);
  return job;
}

std::shared_ptr<ReadJob> Engine::read(ReadRequest request) {
  auto job = std::make_shared<ReadJob>(shared_, std::move(request));
  start(job);
  return job;
}

std::shared_ptr<RangesJob> Engine::ranges(RangesRequest request) {
  auto job = std::make_shared<RangesJob>(shared_, std::move(request));
  start(job);
  return job;
}

void Engine::check_client(uint32_t client) const {
  if (client < shared_->clients.size()) return;
  throw std::invalid_argument("there is no such client");
}

void Engine::set_limit(uint32_t path, std::optional<uint32_t> client, uint64_t bytes_per_s) {
  if (client) check_client(*client);
  Lock lock(shared_->mutex());
  check_open();
  shared_->disk.limits().set(path, client.value_or(kEveryClient), bytes_per_s, shared_->now_ns());
  shared_->start_transfers(lock);
}

ClientStats Engine::stats_of(uint32_t client) {
  check_client(client);
  const Lock lock(shared_->mutex());
  ClientStats stats = shared_->moved[client];
  for (const auto& job : shared_->jobs) {
    if (job->client() == client) stats.buffers += job->held();
  }
  return stats;
}

void Engine::work() noexcept {
  yield_to_trainer();
  Lock lock(shared_->mutex());
  uint64_t last_asked = 0;
  while (true) {
    start_due_transfers(lock);
    if (wants_one_more()) shared_->changed.notify_all();  // the populator
    Work work;
    bool is_picked = false;
    const Status status = guarded([&] {
      shared_->mutex().assert_held();
      is_picked = pick(work);
    });
    if (!status.ok()) {
      shared_->poison_with(status);
    } else if (is_picked) {
      run(std::move(work), lock);
    } else if (stopping_) {
      return;
    } else {
      found_nothing(last_asked);
      wait_for_work(lock);
    }
  }
}

// A thread that settle() has asked says once that it has looked.
void Engine::found_nothing(uint64_t& last_asked) {
  if (last_asked == asked_) return;
  last_asked = asked_;
  ++found_nothing_;
  shared_->changed.notify_all();
}

// What one thread does may be work for another that has looked before: then all are asked again.
void Engine::settle(bool all_buffers) {
  Lock lock(shared_->mutex());
  if (all_buffers) wanted_at_once_ = shared_->memory->count();
  bool is_settled = false;
  while (!is_settled && !stopping_) {
    const uint64_t done_before = done_;
    found_nothing_ = 0;
    ++asked_;
    shared_->runnable.notify_all();
    shared_->changed.notify_all();
    while (found_nothing_ < threads_ && !stopping_) shared_->changed.wait(lock);
    is_settled = done_ == done_before;
  }
}

// What a limit held back is started by the worker that looks next, and none sleeps beyond that.
void Engine::start_due_transfers(Lock& lock) {
  const uint64_t due_ns = shared_->disk.due_ns();
  if (due_ns != DiskQueue::kNever && due_ns <= shared_->now_ns()) shared_->start_transfers(lock);
}

void Engine::wait_for_work(Lock& lock) {
  constexpr std::chrono::nanoseconds at_least = std::chrono::microseconds(100);
  constexpr uint64_t at_most_ns = 3'600'000'000'000;  // then it looks again
  const uint64_t due_ns = shared_->disk.due_ns();
  if (due_ns == DiskQueue::kNever) return shared_->runnable.wait(lock);
  const uint64_t now_ns = shared_->now_ns();
  const std::chrono::nanoseconds left(due_ns > now_ns ? std::min(due_ns - now_ns, at_most_ns) : 0);
  shared_->runnable.wait_until(lock, std::chrono::steady_clock::now() + std::max(left, at_least));
}

bool Engine::pick(Work& work) {
  if (!shared_->poison.ok()) return false;
  return shared_->workers.next([&](uint32_t client) {
    shared_->mutex().assert_held();
    if (!pick_of(client, work)) return false;
    shared_->workers.charge(client, Shares::kLeastCharge);  // its bytes are charged when they moved
    return true;
  });
}

bool Engine::pick_of(uint32_t client, Work& work) {
  for (const Priority priority : {Priority::finish, Priority::read, Priority::eager, Priority::lend,
                                  Priority::seal, Priority::fill}) {
    for (const auto& job : shared_->jobs) {
      if (job->client() != client || job->retired()) continue;  // its files are gone, or they go
      if (job->take(priority, work)) return true;
    }
  }
  return false;
}

void Engine::run(Work work, Lock& lock) {
  work.job->enter();
  lock.unlock();
  const Status status = guarded([&] { work.job->run(work); });
  lock.lock();
  work.job->leave();
  ++done_;
  if (!status.ok()) shared_->poison_with(status);
  shared_->drop_retired(lock);
  lock.unlock();
  work.job.reset();  // may be the last owner, of files too
  lock.lock();
}

void Engine::close() {
  {
    Lock lock(shared_->mutex());
    if (std::exchange(stopping_, true)) {
      while (!closed_) shared_->changed.wait(lock);
      return;
    }
    shared_->fail_all(Status::closed("a transfer"));
    shared_->drop_retired(lock);
    shared_->runnable.notify_all();
    shared_->changed.notify_all();
    while (!shared_->jobs.empty()) shared_->changed.wait(lock);
  }
  for (std::thread& worker : workers_) worker.join();
  if (populator_.joinable()) populator_.join();
  for (const int slot : shared_->slots) shared_->fs->unregister_buffer(slot);
  std::shared_ptr<Fs> fs;
  {
    const Lock lock(shared_->mutex());
    fs = std::move(shared_->fs);
  }
  fs.reset();  // may be the last owner, and joins threads
  const Lock lock(shared_->mutex());
  if (shared_->pool.lent_count() == 0) shared_->memory->discard();
  closed_ = true;
  shared_->changed.notify_all();
}

}  // namespace statehold
