// ranges_job: contract in ranges_job.h.
#include "ranges_job.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "copy.h"

namespace statehold {
namespace {

constexpr uint64_t kFileBytesMax = uint64_t{1} << 62;

bool is_aligned(uint64_t value) { return value % kPageBytes == 0; }

std::string name_of(uint64_t first, uint64_t last) {
  const std::string begin = " range " + std::to_string(first);
  return first == last ? begin : begin + " to " + std::to_string(last);
}

[[noreturn]] void refuse(uint64_t range, const std::string& why) {
  throw std::invalid_argument("range " + std::to_string(range) + ": " + why);
}

}  // namespace

RangesJob::RangesJob(const std::shared_ptr<Shared>& shared, RangesRequest request)
    : Job(shared, request.client, shared->memory->buffer_bytes()),
      kind_(request.kind),
      ranges_(std::move(request.ranges)),
      verified_(request.verified),
      transfer_bytes_(std::max(request.transfer_bytes, shared->memory->buffer_bytes())),
      staged_(request.staged),
      paths_(std::move(request.paths)),
      files_(std::move(request.files)) {
  paths_.resize(files_.size(), 0);
  for (uint64_t range = 0; range < ranges_.size(); ++range) check(range);
  check_overlaps();
  progress_.resize(ranges_.size());
  sums_.resize(ranges_.size());
  for (uint64_t range = 0; range < ranges_.size(); ++range) make_blocks(range);
  for (uint64_t block = 0; block < blocks_.size(); ++block) {
    (blocks_[block].straight ? straight_queue_ : cold_queue_).push_back(block);
  }
  is_hashed_on_the_way_.resize(ranges_.size());
  for (const Block& block : blocks_) {
    if (!staged_ || block.straight) continue;
    for (uint64_t range = block.range; range <= block.last_range; ++range) {
      is_hashed_on_the_way_[range] = progress_[range].blocks_left == 1 ? 1 : 0;
    }
  }
  for (uint64_t range = 0; range < ranges_.size() && !is_read() && !verified_; ++range) {
    is_hashed_on_the_way_[range] = 0;
    progress_[range].hashed = progress_[range].blocks_left > 0;
  }
  ranges_left_ = unreturned_ = ranges_.size();
  for (uint64_t range = 0; range < ranges_.size(); ++range) {
    const bool is_later = is_read() && progress_[range].blocks_left > 0;
    const bool is_due = !is_later && !progress_[range].hashed;
    if (is_due && is_hashed_on_the_way_[range] == 0) hash_queue_.push_back(range);
  }
}

void RangesJob::check(uint64_t index) const {
  const Range& range = ranges_[index];
  if (range.file >= files_.size() || files_[range.file] == nullptr) {
    refuse(index, "there is no such file");
  }
  const File& file = *files_[range.file];
  if (file.mapped()) refuse(index, "its file is memory");
  if (range.bytes > kFileBytesMax || range.offset > kFileBytesMax) {
    refuse(index, "it is beyond the end of any file");
  }
  if (range.bytes > 0 && range.memory == nullptr) refuse(index, "it has no memory");
  if (!is_read() && file.direct() && !is_aligned(range.offset)) {
    refuse(index, "in a file that is written directly, it must begin at a multiple of 4096");
  }
}

// Two ranges must not be written at one place: in a file, or in memory when they are read.
void RangesJob::check_overlaps() const {
  struct Place {
    const void* file;  // none: in memory
    uint64_t begin;
    uint64_t end;
    uint64_t range;
  };
  std::vector<Place> places;
  places.reserve(ranges_.size());
  for (uint64_t index = 0; index < ranges_.size(); ++index) {
    const Range& range = ranges_[index];
    if (range.bytes == 0) continue;
    const void* file = is_read() ? nullptr : files_[range.file].get();
    const uint64_t begin = is_read() ? reinterpret_cast<uintptr_t>(range.memory) : range.offset;
    places.push_back({file, begin, begin + range.bytes, index});
  }
  std::ranges::sort(places, {}, [](const Place& p) {
    return std::tuple(reinterpret_cast<uintptr_t>(p.file), p.begin, p.range);
  });
  for (size_t i = 1; i < places.size(); ++i) {
    const Place& before = places[i - 1];
    if (before.file != places[i].file || before.end <= places[i].begin) continue;
    refuse(places[i].range, "it overlaps range " + std::to_string(before.range));
  }
}

void RangesJob::make_blocks(uint64_t index) {
  const Range& range = ranges_[index];
  for (uint64_t at = range.offset; at < range.end();) {
    Block block;
    block.range = block.last_range = index;
    block.begin = at;
    block.end = at = cut(range, at);
    block.straight = goes_straight(block);
    stats_.copied_bytes += block.straight ? 0 : block.bytes();
    if (!goes_on(block)) {
      blocks_.push_back(block);
      ++progress_[index].blocks_left;
      continue;
    }
    Block& before = blocks_.back();
    progress_[index].blocks_left += before.last_range == index ? 0 : 1;
    before.last_range = index;
    before.end = block.end;
  }
  stats_.bytes += range.bytes;
}

// Where the block ends that begins at `at`. In a staged job it goes on to the end of the range if
// a buffer has room for that.
uint64_t RangesJob::cut(const Range& range, uint64_t at) const {
  const uint64_t buffer_bytes = shared_->memory->buffer_bytes();
  if (!staged_ || !is_aligned(at)) {
    return std::min(range.end(), align_down(at, buffer_bytes) + buffer_bytes);
  }
  const uint64_t room = room_behind(range, at);
  const bool fits_there = range.end() - at <= room;
  const bool fits_nowhere = range.bytes > buffer_bytes;
  return std::min(range.end(),
                  at + (room > 0 && (fits_there || fits_nowhere) ? room : buffer_bytes));
}

// In the buffer of the newest block, if `at` is its end.
uint64_t RangesJob::room_behind(const Range& range, uint64_t at) const {
  if (blocks_.empty()) return 0;
  const Block& before = blocks_.back();
  const bool is_behind = file_of(before) == files_[range.file] && before.end == at;
  const uint64_t buffer_bytes = shared_->memory->buffer_bytes();
  return is_behind && before.bytes() < buffer_bytes ? buffer_bytes - before.bytes() : 0;
}

// Whether it can be a part of the newest block.
bool RangesJob::goes_on(const Block& block) const {
  if (blocks_.empty()) return false;
  const Block& before = blocks_.back();
  if (before.straight != block.straight || before.end != block.begin ||
      file_of(before) != file_of(block)) {
    return false;
  }
  const uint64_t bytes = block.end - before.begin;
  if (!block.straight) {
    return staged_ && is_aligned(before.begin) && is_aligned(block.begin) &&
           bytes <= shared_->memory->buffer_bytes();
  }
  return memory_of(before) + before.bytes() == memory_of(block) && bytes <= transfer_bytes_;
}

bool RangesJob::goes_straight(const Block& block) const {
  if (!file_of(block)->direct()) return true;
  if (staged_) return false;
  const auto address = reinterpret_cast<uintptr_t>(memory_of(block));
  return is_aligned(block.begin) && is_aligned(block.end) && is_aligned(address);
}

std::byte* RangesJob::memory_of(const Block& block) const {
  const Range& range = ranges_[block.range];
  return range.memory + (block.begin - range.offset);
}

const std::shared_ptr<File>& RangesJob::file_of(const Block& block) const {
  return files_[ranges_[block.range].file];
}

bool RangesJob::wait_done(Deadline deadline) {
  return wait(deadline, [this]() REQUIRES(engine_mutex) { return complete(); });
}

std::vector<uint64_t> RangesJob::next_done(Deadline deadline) {
  std::vector<uint64_t> done;
  wait(deadline, [&]() REQUIRES(engine_mutex) {
    if (done.empty()) {
      done.swap(done_);
      unreturned_ -= done.size();
    }
    return !done.empty() || unreturned_ == 0;
  });
  return done;
}

uint64_t RangesJob::unreturned() {
  const Lock lock(shared_->mutex());
  return unreturned_;
}

std::vector<uint64_t> RangesJob::checksums() {
  const Lock lock(shared_->mutex());
  if (!complete()) throw std::invalid_argument("checksums are there after wait()");
  return sums_;
}

// Hashing is last: the disk should have something to do meanwhile.
bool RangesJob::take(Priority priority, Work& work) {
  if (failed()) return false;
  if (priority == Priority::finish) return take_queued(unload_queue_, kUnload, work);
  if (priority != (is_read() ? Priority::read : Priority::fill)) return false;
  if (take_start(work)) return true;
  if (hash_queue_.empty()) return false;
  work = {shared_from_this(), kHash, hash_queue_.front()};
  hash_queue_.pop_front();
  return true;
}

bool RangesJob::take_start(Work& work) {
  if (take_queued(straight_queue_, kStart, work)) return true;
  if (cold_queue_.empty() || !borrow(blocks_[cold_queue_.front()])) return false;
  return take_queued(cold_queue_, kStart, work);
}

bool RangesJob::take_queued(std::deque<uint64_t>& queue, int kind, Work& work) {
  if (queue.empty()) return false;
  move(blocks_[queue.front()], Stage::working);
  work = {shared_from_this(), kind, queue.front()};
  queue.pop_front();
  return true;
}

void RangesJob::run(const Work& work) {
  switch (static_cast<Kind>(work.kind)) {
    case kStart:
      return start(work.block);
    case kUnload:
      return unload(work.block);
    case kHash:
      return hash(work.block);
  }
  CHECK(false);  // no such kind
}

// The thread that works on a block reads what it needs without the mutex: nobody else changes it
// meanwhile.
void RangesJob::start(uint64_t index) {
  const Block& block = blocks_[index];
  IoRequest request;
  request.kind = kind_;
  {
    const Lock lock(shared_->mutex());
    if (failed()) return drop(blocks_[index]);
    if (block.buffered() && !is_read()) charge(block.bytes());
    request.file = file_of(block);
  }
  const bool by_pages = request.file->direct();
  request.offset = by_pages ? align_down(block.begin, kPageBytes) : block.begin;
  request.bytes = block.end - request.offset;
  request.bytes_min = request.bytes;
  if (by_pages) request.bytes = align_up(request.bytes, kPageBytes);
  if (!is_read()) request.bytes_min = request.bytes;
  if (block.buffered()) {
    if (!is_read()) {
      const std::vector<uint64_t> sums = copy(block);
      const Lock lock(shared_->mutex());
      copied(block, sums);
    }
    request.memory = shared_->address(block.lease);
    request.slot = slot(block.lease);
  } else {
    request.memory = memory_of(block);
  }
  transfer(std::move(request), index, paths_[ranges_[block.range].file]);
}

std::vector<uint64_t> RangesJob::copy(const Block& block) const {
  std::vector<uint64_t> sums;
  for (uint64_t range = block.range; range <= block.last_range; ++range) {
    sums.push_back(copy(block, range));
  }
  if (is_read()) return sums;
  std::byte* end = shared_->address(block.lease) + block.bytes();
  std::memset(end, 0, align_up(block.bytes(), kPageBytes) - block.bytes());
  return sums;
}

// In parts that stay in the processor's cache until they are hashed.
uint64_t RangesJob::copy(const Block& block, uint64_t index) const {
  const Range& range = ranges_[index];
  const uint64_t begin = std::max(block.begin, range.offset);
  const uint64_t end = std::min(block.end, range.end());
  const uint64_t skipped = is_read() ? block.begin % kPageBytes : 0;
  std::byte* buffer = shared_->address(block.lease) + skipped + (begin - block.begin);
  std::byte* memory = range.memory + (begin - range.offset);
  std::byte* to = is_read() ? memory : buffer;
  const std::byte* from = is_read() ? buffer : memory;
  if (is_hashed_on_the_way_[index] == 0) {
    if (begin < end) std::memcpy(to, from, end - begin);
    return 0;
  }
  // Past the caches, which keep the buffers then: a disk of a virtual machine fills them by copies.
  if (is_read()) return copy_hashed_nontemporal(from, end - begin, to);
  Xxh3 hash;
  for (uint64_t at = 0; at < end - begin; at += kCacheBytes) {
    const uint64_t bytes = std::min(kCacheBytes, end - begin - at);
    std::memcpy(to + at, from + at, bytes);
    hash.update(to + at, bytes);
  }
  return hash.digest();
}

void RangesJob::copied(const Block& block, const std::vector<uint64_t>& sums) {
  for (uint64_t i = 0; i < sums.size() && !failed(); ++i) {
    const uint64_t range = block.range + i;
    if (is_hashed_on_the_way_[range] != 0) hashed(range, sums[i]);
  }
}

void RangesJob::transferred(uint64_t index, Status status) {
  Block& block = blocks_[index];
  if (!status.ok()) status.operation += name_of(block.range, block.last_range);
  if (failed() || !status.ok()) return drop(block, status);
  if (!is_read() || !block.buffered()) return block_done(block);
  move(block, Stage::loaded);
  unload_queue_.push_back(index);
}

void RangesJob::unload(uint64_t index) {
  Block& block = blocks_[index];
  const std::vector<uint64_t> sums = copy(block);
  const Lock lock(shared_->mutex());
  charge(block.bytes());
  copied(block, sums);
  if (failed()) return drop(block);
  block_done(block);
}

// The engine wakes all threads after this, as after every transfer and every work.
void RangesJob::block_done(Block& block) {
  move(block, Stage::done);
  for (uint64_t range = block.range; range <= block.last_range; ++range) {
    if (ranges_[range].bytes == 0) continue;  // between two of the block's, and part of none
    CHECK(progress_[range].blocks_left > 0);
    if (--progress_[range].blocks_left > 0) continue;
    if (is_read() && is_hashed_on_the_way_[range] == 0) hash_queue_.push_back(range);
    finish_if_done(range);
  }
}

void RangesJob::hash(uint64_t index) {
  const Range& range = ranges_[index];
  const uint64_t sum = xxh3_64(range.memory, range.bytes);
  const Lock lock(shared_->mutex());
  charge(range.bytes);
  if (!failed()) hashed(index, sum);
}

void RangesJob::hashed(uint64_t index, uint64_t sum) {
  const Range& range = ranges_[index];
  sums_[index] = sum;
  progress_[index].hashed = true;
  if (is_read() && verified_ && sum != range.sum) {
    return fail(Status::mismatched(files_[range.file]->path(),
                                   {index, 0, range.offset, range.end(), range.sum, sum}));
  }
  finish_if_done(index);
}

void RangesJob::finish_if_done(uint64_t range) {
  const Progress& progress = progress_[range];
  if (!progress.hashed || progress.blocks_left > 0) return;
  CHECK(ranges_left_ > 0);
  done_.push_back(range);  // first: where it throws, the job is not complete, and can fail
  --ranges_left_;
}

void RangesJob::drop_queued() {
  for (Block& block : blocks_) drop_if_queued(block);
  for (auto* queue : {&straight_queue_, &cold_queue_, &unload_queue_, &hash_queue_}) queue->clear();
}

void RangesJob::drop_files() {
  std::vector<std::shared_ptr<File>> dropped;
  const Lock lock(shared_->mutex());
  dropped.swap(files_);
}

}  // namespace statehold
