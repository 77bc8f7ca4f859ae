// write_job: contract in write_job.h.
#include "write_job.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "checksum.h"

namespace statehold {

WriteJob::WriteJob(std::shared_ptr<Shared> shared, WriteRequest request)
    : Job(std::move(shared), request.client, request.block_bytes),
      file_bytes_(request.file_bytes),
      buffer_bytes_(shared_->memory->buffer_bytes()),
      path_(request.path),
      start_(std::chrono::steady_clock::now()),
      header_(std::move(request.header)),
      expected_(std::move(request.expected)) {
  Segment header;
  header.end = header_.size();
  header.place.address = reinterpret_cast<std::byte*>(header_.data());
  segments_.reserve(request.segments.size() + 1);
  segments_.push_back(std::move(header));
  std::ranges::move(request.segments, std::back_inserter(segments_));
  check_tiling();
  uint64_t sum_count = 0;
  for (Segment& segment : segments_) {
    segment.first_sum = sum_count;
    sum_count += piece_count(segment, block_bytes_);
  }
  sums_.resize(sum_count);
  if (!expected_.empty() && (expected_.size() != sum_count || request.file != nullptr)) {
    throw std::invalid_argument("expected is for all pieces, of a job without a file");
  }
  make_blocks();
  if (request.file) adopt(request.file);
}

void WriteJob::check_tiling() const {
  uint64_t at = 0;
  for (const Segment& segment : segments_) {
    if (segment.begin != at || segment.end < segment.begin) {
      throw std::invalid_argument("segments must follow each other without gap or overlap");
    }
    at = segment.end;
  }
  if (at != file_bytes_) throw std::invalid_argument("segments must end where the file ends");
}

void WriteJob::make_blocks() {
  blocks_.resize((file_bytes_ + buffer_bytes_ - 1) / buffer_bytes_);
  uint64_t segment = 0;
  for (uint64_t index = 0; index < blocks_.size(); ++index) {
    Block& block = blocks_[index];
    while (segments_[segment].end <= block_begin(index)) ++segment;
    block.first_segment = segment;
    block.last_segment = segment;
    bool has_own = false;
    while (block.last_segment < segments_.size() &&
           segments_[block.last_segment].begin < block_end(index)) {
      const Segment& overlapping = segments_[block.last_segment++];
      block.eager |= overlapping.eager && !overlapping.empty();
      block.external |= overlapping.external && !overlapping.empty();
      has_own |= !overlapping.external && !overlapping.empty();
    }
    (block.eager ? eager_queue_ : has_own ? fill_queue_ : lend_queue_).push_back(index);
    eager_left_ += block.eager ? 1 : 0;
    fills_left_ += block.external ? 1 : 0;
  }
  externals_queued_ = fills_left_;
  sources_left_ = copies_left_ = writes_left_ = blocks_.size();
  stats_.bytes = file_bytes_;
  stats_.blocks = blocks_.size();
}

uint64_t WriteJob::block_end(uint64_t block) const {
  return std::min(block_begin(block) + buffer_bytes_, file_bytes_);
}

uint64_t WriteJob::elapsed_ns() const {
  const auto elapsed = std::chrono::steady_clock::now() - start_;
  return static_cast<uint64_t>(std::chrono::nanoseconds(elapsed).count());
}

void WriteJob::attach(std::shared_ptr<File> file, std::shared_ptr<File> before) {
  const Lock lock(shared_->mutex());
  if (failed()) return;  // the next wait says why
  CHECK(!finished_);
  CHECK(expected_.empty() == (before == nullptr));
  CHECK(before == nullptr || !before->direct());
  adopt(file);
  before_ = std::move(before);
  wake_all();
}

void WriteJob::adopt(std::shared_ptr<File>& file) {
  CHECK(file_ == nullptr);
  if (file->mapped()) {
    const std::span<std::byte> memory = file->memory();
    if (memory.size() != file_bytes_) {
      throw Failure(Status::truncated("attach", file->path(), memory.size()));
    }
    memory_ = memory.data();
  }
  file_ = std::move(file);
}

bool WriteJob::wait_eager(Deadline deadline) {
  return wait(deadline, [this]() REQUIRES(engine_mutex) { return eager_left_ == 0; });
}

bool WriteJob::wait_copied(Deadline deadline) {
  return wait(deadline, [this]() REQUIRES(engine_mutex) { return sources_left_ == 0; });
}

bool WriteJob::wait_compared(Deadline deadline) {
  return wait(deadline, [this]() REQUIRES(engine_mutex) { return refuted_ || copies_left_ == 0; });
}

bool WriteJob::refuted() {
  const Lock lock(shared_->mutex());
  return refuted_;
}

bool WriteJob::wait_written(Deadline deadline) {
  return wait(deadline, [this]() REQUIRES(engine_mutex) { return writes_left_ == 0; });
}

void WriteJob::finish() {
  std::shared_ptr<File> file;
  wait(std::chrono::steady_clock::now(), [] { return true; });  // raises the error of the job
  {
    const Lock lock(shared_->mutex());
    if (abandoned_) throw Failure(Status::closed("a transfer"));
    CHECK(writes_left_ == 0);
    CHECK(!finished_);
    CHECK(file_ != nullptr);
    finished_ = true;
    file = std::move(file_);
  }
  if (file->mapped()) {
    const uint64_t bytes = must(file->size_bytes());
    if (bytes != file_bytes_) throw Failure(Status::truncated("finish", file->path(), bytes));
    return;
  }
  const bool padded = file->direct() && file_bytes_ % kPageBytes != 0;
  if (padded) must(file->truncate(file_bytes_));
  must(file->sync());
  file->close();
}

void WriteJob::cancel() {
  Job::cancel();
  std::shared_ptr<File> file;
  const Lock lock(shared_->mutex());
  if (!complete() || memory_ != nullptr || file_ == nullptr) return;
  file = std::move(file_);
  abandoned_ = true;
}

std::vector<uint64_t> WriteJob::checksums() {
  const Lock lock(shared_->mutex());
  if (copies_left_ > 0) throw std::invalid_argument("checksums are there after wait_written()");
  return sums_;
}

std::optional<Fill> WriteJob::next_fill(Deadline deadline) {
  std::optional<Fill> fill;
  wait(deadline, [&]() REQUIRES(engine_mutex) {
    if (!fill && !offer_queue_.empty()) {
      const uint64_t index = offer_queue_.front();
      fill = Fill{index, blocks_[index].lease, external_pieces(blocks_[index], index)};
      offer_queue_.pop_front();  // no memory is needed from here on
      move(blocks_[index], Stage::lent);
      --fills_left_;
    }
    return fill.has_value() || fills_left_ == 0;
  });
  return fill;
}

void WriteJob::filled(const Fill& fill, bool is_there) {
  const Lock lock(shared_->mutex());
  CHECK(fill.block < blocks_.size());
  Block& block = blocks_[fill.block];
  CHECK(block.stage == Stage::lent);
  CHECK(block.lease.generation == fill.lease.generation);
  CHECK(!is_there || segments_[block.first_segment].external);
  if (failed()) {
    drop(block);
  } else {
    seal_queue_.push_back(fill.block);  // may throw: then the buffer is still lent
    move(block, Stage::filled);
    block.is_there = is_there;
    gathered();
  }
  wake_all();
}

uint64_t WriteJob::fills_left() {
  const Lock lock(shared_->mutex());
  return fills_left_;
}

WriteStats WriteJob::stats() {
  const Lock lock(shared_->mutex());
  return stats_;
}

bool WriteJob::take(Priority priority, Work& work) {
  if (failed()) return false;
  switch (priority) {
    case Priority::finish:
      return file_ && take_queued(write_queue_, kWrite, work);
    case Priority::eager:
      return take_fill(eager_queue_, work);
    case Priority::lend:
      return take_fill(lend_queue_, work);
    case Priority::seal:
      return take_queued(seal_queue_, kSeal, work);
    case Priority::fill:
      return take_fill(fill_queue_, work) || take_again(work);
    case Priority::read:
      return false;
  }
  return false;
}

bool WriteJob::take_queued(std::deque<uint64_t>& queue, int kind, Work& work) {
  if (queue.empty()) return false;
  move(blocks_[queue.front()], Stage::working);
  work = {shared_from_this(), kind, queue.front()};
  queue.pop_front();
  return true;
}

bool WriteJob::take_fill(std::deque<uint64_t>& queue, Work& work) {
  if (queue.empty()) return false;
  Block& block = blocks_[queue.front()];
  if (memory_ != nullptr && !block.external) {
    block.to = memory_ + block_begin(queue.front());
  } else {
    if (!borrow(block)) return false;
    block.to = shared_->address(block.lease);
  }
  externals_queued_ -= block.external ? 1 : 0;
  return take_queued(queue, kFill, work);
}

bool WriteJob::take_again(Work& work) {
  if (!refuted_ || before_ == nullptr || same_queue_.empty()) return false;
  Block& block = blocks_[same_queue_.front()];
  if (!borrow(block)) return false;
  block.to = shared_->address(block.lease);
  return take_queued(same_queue_, kReadAgain, work);
}

void WriteJob::run(const Work& work) {
  switch (static_cast<Kind>(work.kind)) {
    case kFill:
      return fill(work.block);
    case kSeal:
      return seal(work.block);
    case kWrite:
      return write(work.block);
    case kReadAgain:
      return read_again(work.block);
  }
  CHECK(false);  // no such kind
}

namespace {

// The part of a segment in [base, end), if its tensor has strides: as a whole, because a piece of a
// transposed tensor has but a short part of each row of memory.
bool gather_strided(const Segment& segment, uint64_t base, uint64_t end, std::byte* to) {
  if (segment.place.contiguous()) return false;
  const uint64_t begin = std::max(segment.begin, base);
  const uint64_t stop = std::max(begin, std::min(segment.end, end));
  segment.place.strides->gather(segment.place.address, begin - segment.begin, stop - segment.begin,
                                to + (begin - base));
  return true;
}

}  // namespace

bool WriteJob::move_pieces(const Block& block, uint64_t index, bool external) {
  const auto gather = block.buffered() ? gather_hashed : gather_hashed_nontemporal;
  const uint64_t base = block_begin(index);
  for (uint64_t s = block.first_segment; s < block.last_segment; ++s) {
    const Segment& segment = segments_[s];
    if (segment.external != external) continue;
    const bool there = external || gather_strided(segment, base, block_end(index), block.to);
    for_each_piece(segment, base, block_end(index), block_bytes_,
                   [&](uint64_t sum, uint64_t begin, uint64_t end) {
                     if (stopped()) return;
                     std::byte* to = block.to + (begin - base);
                     sums_[sum] = there ? xxh3_64(to, end - begin)
                                        : gather(segment.place, begin - segment.begin,
                                                 end - segment.begin, to);
                   });
  }
  return !stopped();
}

// The stage says that no one else touches the block, so it is read without the mutex here.
void WriteJob::fill(uint64_t index) {
  const Block& block = blocks_[index];
  const uint64_t bytes = block_end(index) - block_begin(index);
  Status status;
  if (!block.buffered()) status = file_->populate(block_begin(index), bytes);
  if (status.ok() && move_pieces(block, index, false) && block.buffered()) {
    std::memset(block.to + bytes, 0, align_up(bytes, kPageBytes) - bytes);
  }
  const Lock lock(shared_->mutex());
  charge(bytes);
  if (failed() || !status.ok()) return drop(blocks_[index], status);
  if (block.eager) --eager_left_;
  if (!block.external) {
    gathered();
    return copied(index);
  }
  move(blocks_[index], Stage::offered);
  offer_queue_.push_back(index);
  wake_all();
}

void WriteJob::seal(uint64_t index) {
  move_pieces(blocks_[index], index, true);
  const Lock lock(shared_->mutex());
  charge(block_end(index) - block_begin(index));
  if (failed()) return drop(blocks_[index]);
  copied(index);
}

// Blocks until the bytes are there, as no other work does: a rare case, and most often they are in
// the page cache.
void WriteJob::read_again(uint64_t index) {
  const Block& block = blocks_[index];
  const uint64_t bytes = block_end(index) - block_begin(index);
  Status status = before_->read(block.to, bytes, block_begin(index));
  if (status.ok()) status = check_again(block, index);
  std::memset(block.to + bytes, 0, align_up(bytes, kPageBytes) - bytes);
  const Lock lock(shared_->mutex());
  charge(bytes);
  if (failed() || !status.ok()) return drop(blocks_[index], status);
  move(blocks_[index], Stage::copied);
  write_queue_.push_back(index);
  wake_all();
}

Status WriteJob::check_again(const Block& block, uint64_t index) {
  const uint64_t base = block_begin(index);
  for (uint64_t s = block.first_segment; s < block.last_segment; ++s) {
    Status status;
    for_each_piece(segments_[s], base, block_end(index), block_bytes_,
                   [&](uint64_t sum, uint64_t begin, uint64_t end) {
                     const uint64_t got = xxh3_64(block.to + (begin - base), end - begin);
                     if (got == expected_[sum] || !status.ok()) return;
                     const uint64_t piece = sum - segments_[s].first_sum;
                     status = Status::mismatched(before_->path(),
                                                 {s, piece, begin, end, expected_[sum], got});
                   });
    if (!status.ok()) return status;
  }
  return {};
}

bool WriteJob::is_as_expected(uint64_t index) const {
  const Block& block = blocks_[index];
  bool same = true;
  for (uint64_t s = block.first_segment; s < block.last_segment; ++s) {
    for_each_piece(segments_[s], block_begin(index), block_end(index), block_bytes_,
                   [&](uint64_t sum, uint64_t, uint64_t) { same &= sums_[sum] == expected_[sum]; });
  }
  return same;
}

// Nobody needs the bytes of the block, unless another block has others than expected.
void WriteJob::set_aside(uint64_t index) {
  same_queue_.push_back(index);
  give_back(blocks_[index]);
  move(blocks_[index], Stage::cold);
  if (copies_left_ > 0) return;
  for (const uint64_t same : same_queue_) written(blocks_[same]);
  same_queue_.clear();
}

void WriteJob::gathered() {
  CHECK(sources_left_ > 0);
  if (--sources_left_ == 0) stats_.copy_ns = elapsed_ns();
}

void WriteJob::copied(uint64_t index) {
  Block& block = blocks_[index];
  CHECK(copies_left_ > 0);
  --copies_left_;
  if (is_comparing() && is_as_expected(index)) {
    set_aside(index);
    return wake_all();
  }
  refuted_ = !expected_.empty();
  if (block.buffered() && !block.is_there) {
    move(block, Stage::copied);
    write_queue_.push_back(index);
  } else {
    if (stats_.first_write_ns == 0) stats_.first_write_ns = elapsed_ns();
    written(block);
  }
  wake_all();
}

void WriteJob::written(Block& block) {
  CHECK(writes_left_ > 0);
  move(block, Stage::done);
  if (--writes_left_ == 0) stats_.write_ns = elapsed_ns();
}

void WriteJob::write(uint64_t index) {
  IoRequest request;
  {
    const Lock lock(shared_->mutex());
    const Block& block = blocks_[index];
    if (failed()) return drop(blocks_[index]);
    if (stats_.first_write_ns == 0) stats_.first_write_ns = elapsed_ns();
    request.file = file_;
    request.memory = shared_->address(block.lease);
    request.slot = slot(block.lease);
  }
  if (request.file->mapped()) {
    Status status = store(index, request.memory);
    const Lock lock(shared_->mutex());
    charge(block_end(index) - block_begin(index));
    transferred(index, std::move(status));
    return wake_all();
  }
  const uint64_t bytes = block_end(index) - block_begin(index);
  request.kind = IoRequest::Kind::write;
  request.bytes = request.file->direct() ? align_up(bytes, kPageBytes) : bytes;
  request.bytes_min = request.bytes;
  request.offset = block_begin(index);
  transfer(std::move(request), index, path_);
}

Status WriteJob::store(uint64_t index, const std::byte* buffer) {
  const uint64_t bytes = block_end(index) - block_begin(index);
  Status status = file_->populate(block_begin(index), bytes);
  if (status.ok()) copy_nontemporal(buffer, bytes, memory_ + block_begin(index));
  return status;
}

void WriteJob::transferred(uint64_t index, Status status) {
  if (failed() || !status.ok()) return drop(blocks_[index], status);
  written(blocks_[index]);
}

void WriteJob::drop_queued() {
  for (Block& block : blocks_) drop_if_queued(block);
  for (auto* queue : {&eager_queue_, &lend_queue_, &fill_queue_, &offer_queue_, &seal_queue_,
                      &write_queue_, &same_queue_}) {
    queue->clear();
  }
}

// A complete file stays open for finish(). One that is memory is left to the job's last owner,
// which may have more to do with it.
void WriteJob::drop_files() {
  std::shared_ptr<File> file;
  std::shared_ptr<File> before;
  const Lock lock(shared_->mutex());
  before = std::move(before_);
  if (failed() && memory_ == nullptr) file = std::move(file_);
}

// While it compares, every block may need a buffer once more. So the number never grows.
uint64_t WriteJob::buffers_left() const {
  return (is_comparing() ? copies_left_ : uncopied()) + same_queue_.size();
}

uint64_t WriteJob::buffers_wanted() const {
  return uncopied() + (is_comparing() ? 0 : same_queue_.size());
}

// Blocks that get a buffer to be copied.
uint64_t WriteJob::uncopied() const {
  if (memory_ != nullptr) return externals_queued_;
  return eager_queue_.size() + lend_queue_.size() + fill_queue_.size();
}

std::vector<BufferPiece> WriteJob::external_pieces(const Block& block, uint64_t index) const {
  std::vector<BufferPiece> pieces;
  for (uint64_t s = block.first_segment; s < block.last_segment; ++s) {
    const Segment& segment = segments_[s];
    const uint64_t begin = std::max(segment.begin, block_begin(index));
    const uint64_t end = std::min(segment.end, block_end(index));
    if (!segment.external || begin >= end) continue;
    pieces.push_back({s, begin - segment.begin, begin - block_begin(index), end - begin});
  }
  return pieces;
}

}  // namespace statehold
