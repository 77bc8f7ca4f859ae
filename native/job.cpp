// job: contract in job.h.
#include "job.h"

#include <stdexcept>

namespace statehold {

void Shared::release(Lease lease) {
  pool.release(lease);
  runnable.notify_all();
}

void Shared::fail_all(const Status& status) {
  for (const auto& job : jobs) job->fail(status);
}

void Shared::drop_retired() {
  std::erase_if(jobs, [](const auto& job) {
    if (!job->retired()) return false;
    job->drop_files();
    return true;
  });
}

Job::Job(std::shared_ptr<Shared> shared, uint64_t block_bytes)
    : shared_(std::move(shared)), block_bytes_(block_bytes) {
  if (block_bytes == 0 || block_bytes % kPageBytes != 0 ||
      shared_->memory->buffer_bytes() % block_bytes != 0) {
    throw std::invalid_argument("block_bytes must be a multiple of 4096 that divides buffer_bytes");
  }
}

void Job::fail(const Status& status) {
  CHECK(!status.ok());
  if (failed() || complete()) return;
  error_ = status;
  stopped_.store(true, std::memory_order_relaxed);
  drop_queued();
  wake_all();
}

bool Job::retired() const { return idle() && (failed() || complete()); }

void Job::cancel() {
  Lock lock(shared_->mutex);
  fail(Status::closed("a transfer"));
  shared_->changed.wait(lock, [this] { return quiet(); });
  shared_->drop_retired();
}

void Job::transfer(IoRequest request, uint64_t block) {
  request.done = [self = shared_from_this(), block](Status status) {
    const Lock lock(self->shared_->mutex);
    --self->in_flight_;
    const Status internal = guarded([&] { self->landed(block, std::move(status)); });
    if (!internal.ok()) {
      self->shared_->poison = internal;
      self->shared_->fail_all(internal);
    }
    self->shared_->drop_retired();
    self->wake_all();
  };
  {
    const Lock lock(shared_->mutex);
    ++in_flight_;
  }
  shared_->fs->submit(std::move(request));
}

void Job::wake_all() {
  shared_->runnable.notify_all();
  shared_->changed.notify_all();
}

}  // namespace statehold
