// job: contract in job.h.
#include "job.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace statehold {

Shared::Shared(uint64_t buffer_count, uint64_t buffer_bytes,
               std::vector<ClientOptions> client_table)
    : clients((check_clients(client_table, buffer_count), std::move(client_table))),
      memory(std::make_shared<StagingMemory>(buffer_count, buffer_bytes)),
      pool(buffer_count),
      workers(clients),
      disk(clients),
      moved(clients.size()),
      holdings_(clients.size()) {
  for (uint32_t client = 0; client < clients.size(); ++client) {
    disk.set_buffers(client, buffers_max(client));
  }
}

uint64_t Shared::buffers_max(uint32_t client) const {
  uint64_t max = pool.count() + clients[client].reserved_buffers;
  for (const ClientOptions& each : clients) max -= each.reserved_buffers;
  return max;
}

bool Shared::leaves_older_jobs_their_part(const Job& job) const {
  const uint64_t limit = buffers_max(job.client());
  uint64_t held_by_younger = 0;
  for (const auto& each : jobs) {
    if (each->client() == job.client()) held_by_younger += each->held();
  }
  for (const auto& older : jobs) {
    if (older.get() == &job) break;
    if (older->client() != job.client()) continue;
    held_by_younger -= older->held();
    if (!leaves_older_its_part(limit, older->may_need(), held_by_younger)) return false;
  }
  return true;
}

bool Shared::leaves_clients_their_claims(const Job& job) {
  const Job* oldest_needy = nullptr;  // of the job's client
  std::ranges::fill(holdings_, Holdings());
  for (const auto& each : jobs) {
    holdings_[each->client()].add(each->held(), each->may_need());
    const bool is_needy = each->client() == job.client() && each->may_need() > 0;
    if (is_needy && oldest_needy == nullptr) oldest_needy = each.get();
  }
  uint64_t claimed = 0;
  for (uint32_t client = 0; client < clients.size(); ++client) {
    const uint64_t reserved = clients[client].reserved_buffers;
    const Holdings& of_client = holdings_[client];
    claimed += client == job.client()
                   ? of_client.claim_with_one_more(reserved, &job == oldest_needy)
                   : of_client.claim(reserved);
  }
  return claimed <= pool.count();
}

std::optional<Lease> Shared::lend(const Job& job) {
  if (!leaves_older_jobs_their_part(job) || !leaves_clients_their_claims(job)) return std::nullopt;
  return pool.acquire_nowait();
}

void Shared::release(Lease lease) {
  pool.release(lease);
  runnable.notify_all();
}

std::optional<Transfer> Shared::next_transfer() noexcept {
  std::optional<Transfer> next;
  const Status internal = guarded([&] {
    mutex().assert_held();
    next = disk.start(now_ns());
  });
  if (!internal.ok()) poison_with(internal);
  return next;
}

void Shared::transfer_ended(uint32_t client, uint32_t path, bool buffered) noexcept {
  const Status internal = guarded([&] {
    mutex().assert_held();
    disk.ended(client, path, buffered);
  });
  if (!internal.ok()) poison_with(internal);
}

void Shared::start_transfers(Lock& lock) noexcept {
  if (starting_) return;  // that thread looks again before it stops
  starting_ = true;
  while (std::optional<Transfer> next = next_transfer()) {
    std::shared_ptr<Job> job = std::move(next->job);
    lock.unlock();
    const Status status = guarded([&] { fs->submit(std::move(next->request)); });
    if (status.ok()) job.reset();  // may be the last owner, of files too
    lock.lock();
    if (status.ok()) continue;
    transfer_ended(next->client, next->path, next->buffered);
    job->ended(next->block, copy_of(status));  // not accepted, so nobody else will say it
  }
  starting_ = false;
  // A worker that looked in between, or before a limit was raised, sleeps too long.
  if (disk.due_ns() != DiskQueue::kNever) runnable.notify_all();
}

void Shared::fail_all(const Status& status) noexcept {
  for (const auto& job : jobs) job->fail(status);
}

void Shared::poison_with(const Status& status) noexcept {
  if (poison.ok()) poison = copy_of(status);
  fail_all(status);
}

void Shared::drop_retired(Lock& lock) {
  const auto is_over = [](const auto& job) REQUIRES(engine_mutex) {
    return job->retired() && !job->dropping_files_;
  };
  while (true) {
    const auto at = std::ranges::find_if(jobs, is_over);
    if (at == jobs.end()) return;
    (*at)->dropping_files_ = true;
    lock.unlock();
    (*at)->drop_files();
    lock.lock();
    (*at)->dropping_files_ = false;
    (*at)->moved_on_.notify_all();
    std::shared_ptr<Job> job = std::move(*at);
    jobs.erase(at);
    changed.notify_all();
    lock.unlock();
    job.reset();
    lock.lock();
  }
}

Job::Job(std::shared_ptr<Shared> shared, uint32_t client, uint64_t block_bytes)
    : shared_(std::move(shared)), block_bytes_(block_bytes), client_(client) {
  if (client >= shared_->clients.size()) throw std::invalid_argument("there is no such client");
  if (block_bytes == 0 || block_bytes % kPageBytes != 0 ||
      shared_->memory->buffer_bytes() % block_bytes != 0) {
    throw std::invalid_argument("block_bytes must be a multiple of 4096 that divides buffer_bytes");
  }
}

void Job::fail(const Status& status) noexcept {
  if (failed() || complete()) return;
  error_ = status.ok() ? Status::invariant("no error") : copy_of(status);
  stopped_.store(true, std::memory_order_relaxed);
  const Status internal = guarded([this] {
    shared_->mutex().assert_held();
    drop_queued();
    drop_transfers();
  });
  if (!internal.ok()) shared_->poison_with(internal);
  wake_all();
}

bool Job::retired() const { return idle() && (failed() || complete()); }

void Job::cancel() {
  Lock lock(shared_->mutex());
  fail(Status::closed("a transfer"));
  while (!quiet()) moved_on_.wait(lock);
  shared_->drop_retired(lock);
  while (dropping_files_) moved_on_.wait(lock);  // on another thread
}

void Job::move(BlockState& block, Stage to) {
  CHECK(follows(block.stage, to));
  if (is_over(to) && block.buffered()) give_back(block);
  block.stage = to;
}

void Job::give_back(BlockState& block) {
  CHECK(held_ > 0);
  shared_->release(std::exchange(block.lease, {}));
  --held_;
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

void Job::transfer(IoRequest request, uint64_t block, uint32_t path) {
  request.done = [self = shared_from_this(), block, path, kind = request.kind,
                  bytes = request.bytes](Status status) {
    self->end_transfer(block, path, kind, bytes, std::move(status));
  };
  Lock lock(shared_->mutex());
  BlockState& state = block_state(block);
  if (failed()) return drop(state);
  shared_->disk.push(
      {shared_from_this(), block, client_, path, state.buffered(), std::move(request)});
  move(state, Stage::moving);
  ++in_flight_;
  shared_->start_transfers(lock);
}

void Job::end_transfer(uint64_t block, uint32_t path, IoRequest::Kind kind, uint64_t bytes,
                       Status status) noexcept {
  Lock lock(shared_->mutex());
  shared_->transfer_ended(client_, path, block_state(block).buffered());
  ClientStats& moved = shared_->moved[client_];
  if (status.ok())
    (kind == IoRequest::Kind::read ? moved.read_bytes : moved.written_bytes) += bytes;
  ended(block, std::move(status));
  shared_->start_transfers(lock);
  shared_->drop_retired(lock);
}

void Job::ended(uint64_t block, Status status) noexcept {
  --in_flight_;
  const Status internal = guarded([&] {
    shared_->mutex().assert_held();
    transferred(block, std::move(status));
  });
  if (!internal.ok()) shared_->poison_with(internal);
  wake_all();
}

void Job::drop_transfers() {
  for (const DiskQueue::Waiting& dropped : shared_->disk.drop(*this)) {
    ended(dropped.transfer.block, Status::closed("a transfer"));
  }
}

void Job::wake_all() {
  shared_->runnable.notify_all();
  moved_on_.notify_all();
}

}  // namespace statehold
