// job: contract in job.h.
#include "job.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "lending.h"

namespace statehold {

std::optional<Lease> Shared::lend(const Job& job) {
  uint64_t held_by_younger = 0;
  for (const auto& each : jobs) held_by_younger += each->held();
  for (const auto& older : jobs) {
    if (older.get() == &job) break;
    held_by_younger -= older->held();
    if (!leaves_reserve(pool.count(), older->may_need(), held_by_younger)) return std::nullopt;
  }
  const std::optional<Lease> lease = pool.acquire_nowait();
  if (lease) changed.notify_all();  // the populator keeps some free ahead of demand
  return lease;
}

void Shared::release(Lease lease) {
  pool.release(lease);
  runnable.notify_all();
}

void Shared::fail_all(const Status& status) noexcept {
  for (const auto& job : jobs) job->fail(status);
}

void Shared::poison_with(const Status& status) noexcept {
  if (poison.ok()) poison = copy_of(status);
  fail_all(status);
}

void Shared::drop_retired(Lock& lock) {
  const auto is_over = [](const auto& job) { return job->retired() && !job->dropping_files_; };
  while (true) {
    const auto at = std::ranges::find_if(jobs, is_over);
    if (at == jobs.end()) return;
    (*at)->dropping_files_ = true;
    lock.unlock();
    (*at)->drop_files();
    lock.lock();
    (*at)->dropping_files_ = false;
    std::shared_ptr<Job> job = std::move(*at);
    jobs.erase(at);
    changed.notify_all();
    lock.unlock();
    job.reset();
    lock.lock();
  }
}

Job::Job(std::shared_ptr<Shared> shared, uint64_t block_bytes)
    : shared_(std::move(shared)), block_bytes_(block_bytes) {
  if (block_bytes == 0 || block_bytes % kPageBytes != 0 ||
      shared_->memory->buffer_bytes() % block_bytes != 0) {
    throw std::invalid_argument("block_bytes must be a multiple of 4096 that divides buffer_bytes");
  }
}

void Job::fail(const Status& status) noexcept {
  if (failed() || complete()) return;
  error_ = status.ok() ? Status::invariant("no error") : copy_of(status);
  stopped_.store(true, std::memory_order_relaxed);
  const Status internal = guarded([this] { drop_queued(); });
  if (!internal.ok()) shared_->poison_with(internal);
  wake_all();
}

bool Job::retired() const { return idle() && (failed() || complete()); }

void Job::cancel() {
  Lock lock(shared_->mutex);
  fail(Status::closed("a transfer"));
  shared_->changed.wait(lock, [this] { return quiet(); });
  shared_->drop_retired(lock);
  shared_->changed.wait(lock, [this] { return !dropping_files_; });  // on another thread
}

void Job::move(BlockState& block, Stage to) {
  CHECK(follows(block.stage, to));
  if (is_over(to) && block.buffered()) {
    CHECK(held_ > 0);
    shared_->release(std::exchange(block.lease, {}));
    --held_;
  }
  block.stage = to;
}

void Job::drop_if_queued(BlockState& block) {
  if (is_queued(block.stage)) move(block, Stage::dropped);
}

void Job::drop(BlockState& block, const Status& status) {
  move(block, Stage::dropped);
  if (!status.ok()) fail(status);
}

bool Job::borrow(BlockState& block) {
  CHECK(!block.buffered());
  const std::optional<Lease> lease = shared_->lend(*this);
  if (!lease) return false;
  block.lease = *lease;
  ++held_;
  return true;
}

void Job::transfer(IoRequest request, uint64_t block) {
  request.done = [self = shared_from_this(), block](Status status) {
    self->end_transfer(block, std::move(status));
  };
  {
    const Lock lock(shared_->mutex);
    if (failed()) return drop(block_state(block));
    move(block_state(block), Stage::moving);
    ++in_flight_;
  }
  const Status status = guarded([&] { shared_->fs->submit(std::move(request)); });
  if (!status.ok())
    end_transfer(block, copy_of(status));  // not accepted, so nobody else will say it
}

void Job::end_transfer(uint64_t block, Status status) noexcept {
  Lock lock(shared_->mutex);
  --in_flight_;
  const Status internal = guarded([&] { transferred(block, std::move(status)); });
  if (!internal.ok()) shared_->poison_with(internal);
  wake_all();
  shared_->drop_retired(lock);
}

void Job::wake_all() {
  shared_->runnable.notify_all();
  shared_->changed.notify_all();
}

}  // namespace statehold
