// read_job: contract in read_job.h.
#include "read_job.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <utility>

#include "checksum.h"

namespace statehold {
namespace {

// Needed ranges closer than this are read as one. One that is no longer than this goes with its
// neighbours, whether shared or not: a scalar that all ranks have does not make megabytes shared.
constexpr uint64_t kGapBytesMax = uint64_t{128} << 10;
// Announced to the page cache before they are read: much more than a fast device has in flight.
constexpr uint64_t kAheadBytes = uint64_t{64} << 20;

}  // namespace

ReadJob::ReadJob(std::shared_ptr<Shared> shared, ReadRequest request)
    : Job(std::move(shared), request.client, request.block_bytes),
      path_(request.path),
      segments_(std::move(request.segments)),
      sums_(std::move(request.sums)) {
  if (request.paths.size() != request.file_bytes.size()) {
    throw std::invalid_argument("as many file sizes as files are needed");
  }
  for (size_t i = 0; i < request.paths.size(); ++i) {
    sources_.push_back({std::move(request.paths[i]), request.file_bytes[i]});
  }
  check_segments(sums_.size());
  make_blocks();
  rotate_to(request.first_segment);
  order_sources();
}

void ReadJob::check_segments(size_t sum_count) {
  uint64_t sums = 0;
  for (size_t i = 0; i < segments_.size(); ++i) {
    Segment& segment = segments_[i];
    const bool fits = segment.file < sources_.size() && segment.begin <= segment.end &&
                      segment.end <= sources_[segment.file].bytes;
    if (!fits) throw std::invalid_argument("a segment does not lie inside its file");
    const auto order = [](const Segment& s) { return std::pair(s.file, s.begin); };
    if (i > 0 && order(segments_[i - 1]) > order(segment)) {
      throw std::invalid_argument("segments must be sorted by file and begin");
    }
    segment.first_sum = sums;
    sums += piece_count(segment, block_bytes_);
    stats_.bytes += segment.end - segment.begin;
  }
  if (sums != sum_count) throw std::invalid_argument("one checksum per piece is needed");
}

void ReadJob::make_blocks() {
  const uint64_t window_bytes = shared_->memory->buffer_bytes();
  // Windows of a file, in order; each lists the segments that have bytes in it.
  std::map<std::pair<uint32_t, uint64_t>, std::vector<uint64_t>> windows;
  for (uint64_t s = 0; s < segments_.size(); ++s) {
    const Segment& segment = segments_[s];
    if (segment.empty()) continue;
    const uint64_t last = (segment.end - 1) / window_bytes;
    for (uint64_t w = segment.begin / window_bytes; w <= last; ++w) {
      windows[{segment.file, w}].push_back(s);
    }
  }
  for (const auto& [key, members] : windows) {
    const uint64_t window_begin = key.second * window_bytes;
    bool first = true;
    for (const uint64_t s : members) {
      const uint64_t begin = std::max(segments_[s].begin, window_begin);
      const uint64_t end = std::min(segments_[s].end, window_begin + window_bytes);
      if (first || !joins(s, begin, end)) blocks_.push_back({{}, key.first, begin});
      first = false;
      add_to_blocks(s, begin, end);
    }
  }
  blocks_left_ = unlent_blocks_ = blocks_.size();
  for (const Block& block : blocks_) ready_left_ += block.external ? 1 : 0;
}

// Whether the segment's range belongs into the last block.
bool ReadJob::joins(uint64_t segment, uint64_t begin, uint64_t end) const {
  const Block& block = blocks_.back();
  if (begin > block.end + kGapBytesMax) return false;
  const bool both_long = block.is_long && end - begin > kGapBytesMax;
  return !both_long || segments_[segment].shared == block.shared;
}

// To the last one, where the segment's range begins inside it or close behind it.
void ReadJob::add_to_blocks(uint64_t segment, uint64_t begin, uint64_t end) {
  Block& block = blocks_.back();
  CHECK(begin >= block.begin);
  const bool is_long = end - begin > kGapBytesMax;
  if (block.segments.empty() || (is_long && !block.is_long)) {
    block.shared = segments_[segment].shared;
  }
  block.is_long |= is_long;
  block.segments.push_back(segment);
  block.wanted_bytes += end - std::min(end, std::max(begin, block.end));
  block.end = std::max(block.end, end);
  block.external |= segments_[segment].external;
}

// Processes that read the same files begin at different places, each waiting for the device where
// no other does.
void ReadJob::rotate_to(uint64_t segment) {
  if (segment > 0 && segment >= segments_.size()) {
    throw std::invalid_argument("first_segment: no such segment");
  }
  // An empty segment is in no block; the next one stands for it.
  const auto first = std::ranges::find_if(
      blocks_, [&](const Block& block) { return block.segments.back() >= segment; });
  if (first != blocks_.end()) std::ranges::rotate(blocks_, first);
}

// As their first blocks are; those without blocks are last.
void ReadJob::order_sources() {
  std::vector<bool> is_listed(sources_.size(), false);
  const auto list = [&](uint32_t file) {
    if (!is_listed[file]) opening_order_.push_back(file);
    is_listed[file] = true;
  };
  for (const Block& block : blocks_) {
    ++sources_[block.file].blocks_left;
    list(block.file);
  }
  for (uint32_t file = 0; file < sources_.size(); ++file) list(file);
}

bool ReadJob::wait_done(Deadline deadline) {
  return wait(deadline, [this]() REQUIRES(engine_mutex) { return complete(); });
}

std::optional<Ready> ReadJob::next_ready(Deadline deadline) {
  std::optional<Ready> ready;
  wait(deadline, [&]() REQUIRES(engine_mutex) {
    if (!ready && !offer_queue_.empty()) {
      const uint64_t index = offer_queue_.front();
      ready = Ready{index, blocks_[index].lease, external_pieces(blocks_[index])};
      offer_queue_.pop_front();  // no memory is needed from here on
      move(blocks_[index], Stage::lent);
      --ready_left_;
    }
    return ready.has_value() || ready_left_ == 0;
  });
  return ready;
}

void ReadJob::release(const Ready& ready) {
  Lock lock(shared_->mutex());
  CHECK(ready.block < blocks_.size());
  Block& block = blocks_[ready.block];
  CHECK(block.stage == Stage::lent);
  CHECK(block.lease.generation == ready.lease.generation);
  failed() ? drop(block) : finished(block);
  shared_->drop_retired(lock);
}

uint64_t ReadJob::ready_left() {
  const Lock lock(shared_->mutex());
  return ready_left_;
}

ReadStats ReadJob::stats() {
  const Lock lock(shared_->mutex());
  return stats_;
}

bool ReadJob::take(Priority priority, Work& work) {
  if (failed()) return false;
  if (priority == Priority::read) return take_read(work);
  if (priority != Priority::finish || verify_queue_.empty()) return false;
  work = {shared_from_this(), kVerify, verify_queue_.front()};
  verify_queue_.pop_front();
  move(blocks_[work.block], Stage::working);
  return true;
}

bool ReadJob::take_read(Work& work) {
  if (!checked_) {
    if (checking_) return false;
    checking_ = true;
    work = {shared_from_this(), kCheck, 0};
    return true;
  }
  if (take_cold(work) || take_open(work)) return true;
  if (next_block_ == blocks_.size() || !sources_[blocks_[next_block_].file].buffered) return false;
  work = {shared_from_this(), kStart, next_block_++};
  move(blocks_[work.block], Stage::working);
  return true;
}

// The next file, if not too many are open: their last blocks make room for it.
bool ReadJob::take_open(Work& work) {
  if (next_source_ == opening_order_.size() || open_sources_ >= open_sources_max_) return false;
  const uint32_t file = opening_order_[next_source_];
  if (sources_[file].blocks_left == 0) return false;  // nor has any behind it
  ++next_source_;
  ++open_sources_;
  work = {shared_from_this(), kOpen, file};
  return true;
}

bool ReadJob::take_cold(Work& work) {
  if (cold_queue_.empty()) return false;
  work = {shared_from_this(), kRead, cold_queue_.front()};
  if (!borrow(blocks_[work.block])) return false;
  --unlent_blocks_;
  cold_queue_.pop_front();
  move(blocks_[work.block], Stage::working);
  return true;
}

void ReadJob::run(const Work& work) {
  switch (static_cast<Kind>(work.kind)) {
    case kCheck:
      return check_sources();
    case kOpen:
      return open_again(work.block);
    case kStart:
      return start(work.block);
    case kRead:
      return read_to_buffer(work.block);
    case kVerify:
      return verify(work.block);
  }
  CHECK(false);  // no such kind
}

// Looks at all, and keeps as many open as may be at once.
void ReadJob::check_sources() {
  const uint64_t open_max = std::max<uint64_t>(shared_->fs->files_at_once(), 2);
  Status status;
  uint64_t kept = 0;
  for (const uint32_t file : opening_order_) {
    Source& source = sources_[file];
    const bool is_kept = kept < open_max && source.blocks_left > 0;
    Result<Files> opened = open(source, is_kept);
    status = opened.status;
    if (!status.ok() || stopped()) break;
    if (!is_kept) continue;
    static_cast<Files&>(source) = std::move(opened.value);
    ++kept;
  }
  const Lock lock(shared_->mutex());
  open_sources_ = next_source_ = kept;
  open_sources_max_ = open_max;
  checked_ = status.ok();
  if (!checked_) fail(status);
  wake_all();
}

// A file that was closed when all were checked.
void ReadJob::open_again(uint64_t file) {
  std::vector<Files> read;
  {
    const Lock lock(shared_->mutex());
    read.swap(read_);
  }
  read.clear();
  Result<Files> opened = open(sources_[file], true);
  const Lock lock(shared_->mutex());
  if (!opened.ok()) {
    fail(opened.status);
  } else if (!failed()) {
    static_cast<Files&>(sources_[file]) = std::move(opened.value);
  }
  wake_all();
}

// for_blocks: in every way in which a block may be read.
Result<ReadJob::Files> ReadJob::open(const Source& source, bool for_blocks) const {
  Result<std::shared_ptr<File>> buffered = shared_->fs->open_read(source.path, false);
  if (!buffered.ok()) return {buffered.status, {}};
  const Result<uint64_t> size = buffered.value->size_bytes();
  if (!size.ok()) return {size.status, {}};
  if (size.value != source.bytes) {
    const std::string expected = std::to_string(source.bytes);
    return {Status::truncated("open (" + expected + " bytes expected)", source.path, size.value),
            {}};
  }
  Files files{std::move(buffered.value), nullptr, nullptr};
  if (!for_blocks) return {{}, std::move(files)};
  Result<std::shared_ptr<File>> direct = shared_->fs->open_read(source.path, true);
  if (direct.ok()) files.direct = std::move(direct.value);
  Result<std::shared_ptr<File>> view = shared_->fs->open_view(source.path, source.bytes);
  if (view.ok()) files.view = std::move(view.value);
  return {{}, std::move(files)};
}

void ReadJob::start(uint64_t index) {
  Block& block = blocks_[index];
  const Source& source = sources_[block.file];
  if (block.shared) read_ahead(index);
  const uint64_t bytes = block.end - block.begin;
  block.viewed = source.view != nullptr && source.view->view_is_fast(block.begin, bytes);
  block.cached = block.shared || block.viewed || source.buffered->cached(block.begin, bytes);
  const bool in_place = block.cached && !block.external;
  const Status status = in_place ? read_in_place(block) : Status{};
  const Lock lock(shared_->mutex());
  if (in_place) charge(block.wanted_bytes);
  if (failed() || !status.ok()) return drop(block, status);
  if (in_place) {
    stats_.cached_bytes += block.wanted_bytes;
    --unlent_blocks_;
    return finished(block);
  }
  move(block, Stage::cold);
  cold_queue_.push_back(index);
  wake_all();
}

// Announces every shared block of an open file once: this one, and those whose turn is soon.
void ReadJob::read_ahead(uint64_t index) {
  const uint64_t count = 1 + kAheadBytes / shared_->memory->buffer_bytes();
  std::vector<std::pair<std::shared_ptr<File>, const Block*>> soon;
  {
    const Lock lock(shared_->mutex());
    const uint64_t end = std::min(index + count, blocks_.size());
    for (uint64_t b = std::max(announced_blocks_, index); b < end; ++b) {
      const Source& source = sources_[blocks_[b].file];
      if (blocks_[b].shared && source.buffered) soon.emplace_back(source.buffered, &blocks_[b]);
    }
    announced_blocks_ = std::max(announced_blocks_, end);
  }
  for (const auto& [file, block] : soon) {
    if (!stopped()) file->read_ahead(block->begin, block->end - block->begin);
  }
}

Status ReadJob::read_in_place(const Block& block) {
  for (const uint64_t s : block.segments) {
    const Segment& segment = segments_[s];
    Status status;
    for_each_piece(segment, block.begin, block.end, block_bytes_,
                   [&](uint64_t sum, uint64_t begin, uint64_t end) {
                     if (stopped() || !status.ok()) return;
                     status = read_piece(block, segment, sum, begin, end);
                   });
    if (!status.ok()) return status;
  }
  return {};
}

Status ReadJob::read_piece(const Block& block, const Segment& segment, uint64_t sum, uint64_t begin,
                           uint64_t end) {
  thread_local std::vector<std::byte> scratch;
  const Source& source = sources_[segment.file];
  const auto index = static_cast<uint64_t>(&segment - segments_.data());
  const bool wanted = segment.place.address != nullptr;
  const bool straight = wanted && segment.place.contiguous();
  if (straight && block.viewed) {
    std::byte* to = segment.place.address + (begin - segment.begin);
    const uint64_t got =
        copy_hashed_nontemporal(source.view->view().data() + begin, end - begin, to);
    return compare(index, sum, begin, end, got);
  }
  const uint64_t unit = wanted && !straight ? kStridedBytes : kCacheBytes;
  if (!straight && scratch.size() < unit) scratch.resize(unit);
  Xxh3 hash;
  for (uint64_t at = begin; at < end;) {
    const uint64_t bytes = std::min(unit, end - at);
    const uint64_t offset = at - segment.begin;
    std::byte* to = straight ? segment.place.address + offset : scratch.data();
    if (Status status = source.buffered->read(to, bytes, at); !status.ok()) return status;
    hash.update(to, bytes);
    if (wanted && !straight) scatter(to, segment.place, offset, offset + bytes);
    at += bytes;
  }
  return compare(index, sum, begin, end, hash.digest());
}

Status ReadJob::compare(uint64_t segment, uint64_t sum, uint64_t begin, uint64_t end,
                        uint64_t got) const {
  if (got == sums_[sum]) return {};
  const uint64_t piece = sum - segments_[segment].first_sum;
  return Status::mismatched(sources_[segments_[segment].file].path,
                            {segment, piece, begin, end, sums_[sum], got});
}

const std::shared_ptr<File>& ReadJob::file_for_buffer(const Block& block) const {
  const Source& source = sources_[block.file];
  return source.direct ? source.direct : source.buffered;
}

// The file offset of the buffer's first byte.
uint64_t ReadJob::buffer_base(const Block& block) const {
  return align_down(block.begin, kPageBytes);
}

void ReadJob::read_to_buffer(uint64_t index) {
  const Block& block = blocks_[index];
  if (block.cached) return verify(index);  // which reads, too: many workers copy at once
  const std::shared_ptr<File>& file = file_for_buffer(block);
  IoRequest request;
  request.kind = IoRequest::Kind::read;
  request.offset = buffer_base(block);
  request.bytes_min = block.end - request.offset;
  request.bytes = file->direct() ? align_up(request.bytes_min, kPageBytes) : request.bytes_min;
  CHECK(request.bytes <= shared_->memory->buffer_bytes());
  {
    const Lock lock(shared_->mutex());
    if (failed()) return drop(blocks_[index]);
    request.memory = shared_->address(block.lease);
    request.slot = slot(block.lease);
    request.file = file;
    (file->direct() ? stats_.direct_bytes : stats_.cached_bytes) += block.end - block.begin;
  }
  transfer(std::move(request), index, path_);
}

void ReadJob::transferred(uint64_t index, Status status) {
  Block& block = blocks_[index];
  if (failed() || !status.ok()) return drop(block, status);
  move(block, Stage::loaded);
  verify_queue_.push_back(index);
}

void ReadJob::verify(uint64_t index) {
  Block& block = blocks_[index];
  const Status status = verify_and_scatter(block);
  const Lock lock(shared_->mutex());
  charge(block.wanted_bytes);
  if (failed() || !status.ok()) return drop(block, status);
  if (block.cached) stats_.cached_bytes += block.wanted_bytes;
  if (!block.external) return finished(block);
  move(block, Stage::offered);
  offer_queue_.push_back(index);
  wake_all();
}

// From the page cache, or from where the file lies in memory; in parts that stay in the processor's
// cache until they are hashed.
Status ReadJob::read_hashed(const Block& block, uint64_t begin, uint64_t end, std::byte* to,
                            uint64_t& hash) const {
  const Source& source = sources_[block.file];
  if (block.viewed) {
    hash = copy_hashed_nontemporal(source.view->view().data() + begin, end - begin, to);
    return {};
  }
  Xxh3 hashed;
  for (uint64_t at = begin; at < end;) {
    const uint64_t bytes = std::min<uint64_t>(kCacheBytes, end - at);
    std::byte* part = to + (at - begin);
    if (Status status = source.buffered->read(part, bytes, at); !status.ok()) return status;
    hashed.update(part, bytes);
    at += bytes;
  }
  hash = hashed.digest();
  return {};
}

// Piece by piece: what was just verified is placed while it is in the cache.
Status ReadJob::verify_and_scatter(const Block& block) const {
  std::byte* buffer = shared_->address(block.lease);
  Status status;
  for (const uint64_t s : block.segments) {
    const Segment& segment = segments_[s];
    const bool placed = !segment.external && segment.place.address != nullptr;
    for_each_piece(segment, block.begin, block.end, block_bytes_,
                   [&](uint64_t sum, uint64_t begin, uint64_t end) {
                     if (stopped() || !status.ok()) return;
                     std::byte* data = buffer + (begin - buffer_base(block));
                     uint64_t hash = 0;
                     if (block.cached) {
                       status = read_hashed(block, begin, end, data, hash);
                     } else {
                       hash = xxh3_64(data, end - begin);
                     }
                     if (status.ok()) status = compare(s, sum, begin, end, hash);
                     if (!status.ok() || !placed) return;
                     scatter(data, segment.place, begin - segment.begin, end - segment.begin);
                   });
  }
  return status;
}

std::vector<BufferPiece> ReadJob::external_pieces(const Block& block) const {
  std::vector<BufferPiece> pieces;
  for (const uint64_t s : block.segments) {
    const Segment& segment = segments_[s];
    if (!segment.external) continue;
    const uint64_t begin = std::max(segment.begin, block.begin);
    const uint64_t end = std::min(segment.end, block.end);
    pieces.push_back({s, begin - segment.begin, begin - buffer_base(block), end - begin});
  }
  return pieces;
}

void ReadJob::finished(Block& block) {
  CHECK(blocks_left_ > 0);
  move(block, Stage::done);
  --blocks_left_;
  Source& source = sources_[block.file];
  if (--source.blocks_left == 0) {
    --open_sources_;
    read_.push_back(std::exchange(static_cast<Files&>(source), {}));
  }
  wake_all();
}

void ReadJob::drop_queued() {
  for (Block& block : blocks_) drop_if_queued(block);
  for (auto* queue : {&verify_queue_, &offer_queue_, &cold_queue_}) queue->clear();
}

void ReadJob::drop_files() {
  std::vector<Source> dropped;
  std::vector<Files> read;
  const Lock lock(shared_->mutex());
  dropped.swap(sources_);
  read.swap(read_);
}

}  // namespace statehold
