// ranges_job: ranges of several files that stay open, into memory or out of it, each with its
// checksum.
//
// A range is cut into blocks where its file's offsets are multiples of a buffer. Blocks that go
// straight are one, up to `transfer_bytes`, where they lie side by side in the file and in memory:
// a disk moves a few large requests faster than many small ones. Per block:
//   straight       free -> moving between the file and the caller's memory -> done
//   else, reading  free -> read into a buffer -> copied into the caller's memory -> done
//   else, writing  free -> copied into a buffer -> written -> done
// A block goes straight where its file allows: always if the file is not direct, and if offset,
// length and memory are multiples of a page. A job that is `staged` moves nothing straight in a
// direct file: a disk that gets one request for each page of memory is slow where these pages are
// small, and buffers are huge pages. There, ranges side by side in a file share a buffer, wherever
// their memory is.
// A range is hashed in the caller's memory, all of it by one worker: when it has arrived, or while
// it is written, if it is verified. In a staged job, a range that one buffer holds is hashed while
// it is copied. It is done when all its blocks are done and it is hashed, and its checksum is the
// one that was given (reading).
//
// Invariants:
// - The job owns memory and ranges until it is done, or has failed and is quiet, which it is only
//   when all its transfers have ended: a write that lands later could destroy what the next job
//   writes there. A caller that changes memory while it is written gets a checksum of other bytes.
// - Nothing is written outside a range, except zeros in the rest of its last page in a direct file.
//   So there a range begins on a page of its own.
// - Memory that was read into is right only when its range is done: a failure leaves anything.
// - No two ranges of a job are written at one place: the constructor compares the ranges of each
//   File, and the memory of reads. It cannot see that two Files are one file on disk; callers do
//   not write one file through two.
// - The job never closes, syncs or cuts a file.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "checksum.h"
#include "job.h"

namespace statehold {

struct Range {
  uint32_t file = 0;    // index into the files
  uint64_t offset = 0;  // in the file
  uint64_t bytes = 0;
  std::byte* memory = nullptr;
  uint64_t sum = 0;  // reading, if it is verified: what its XXH3-64 has to be

  uint64_t end() const { return offset + bytes; }
};

struct RangesRequest {
  IoRequest::Kind kind = IoRequest::Kind::read;
  std::vector<std::shared_ptr<File>> files;
  std::vector<uint32_t> paths;  // by file, for limits (path_limits.h); none: all are on path 0
  std::vector<Range> ranges;
  // Reading: whether a range that differs from its sum fails. Writing: whether ranges are hashed;
  // the checksums of those that are not are zeros.
  bool verified = true;
  uint32_t client = 0;
  uint64_t transfer_bytes = 0;  // of a block that goes straight; less than a buffer means a buffer
  bool staged = false;          // whether all of a direct file goes through buffers
};

struct RangesStats {
  uint64_t bytes = 0;         // of all ranges
  uint64_t copied_bytes = 0;  // of those, what goes through buffers
};

class RangesJob final : public Job {
 public:
  // Throws std::invalid_argument, which names the range, when the request cannot be served.
  RangesJob(const std::shared_ptr<Shared>& shared, RangesRequest request);

  // Every range is done.
  bool wait_done(Deadline deadline);
  // The ranges that have become done since the last call, in that order; waits until there is one.
  // Empty: the deadline passed, or all have been returned.
  std::vector<uint64_t> next_done(Deadline deadline);
  uint64_t unreturned();  // ranges that next_done has not returned yet
  // By range. Throws std::invalid_argument before the job is done.
  std::vector<uint64_t> checksums();
  RangesStats stats() const { return stats_; }

  bool quiet() const override REQUIRES(engine_mutex) { return idle(); }
  bool take(Priority priority, Work& work) override REQUIRES(engine_mutex);
  void run(const Work& work) override;

 private:
  enum Kind : uint8_t { kStart, kUnload, kHash };

  struct Block : BlockState {
    uint64_t range = 0;       // the first one that it has bytes of
    uint64_t last_range = 0;  // and the last one
    uint64_t begin = 0;       // in the file
    uint64_t end = 0;
    bool straight = false;

    uint64_t bytes() const { return end - begin; }
  };

  struct Progress {  // of a range
    uint64_t blocks_left = 0;
    bool hashed = false;
  };

  bool is_read() const { return kind_ == IoRequest::Kind::read; }
  void check(uint64_t range) const REQUIRES(engine_mutex);
  void check_overlaps() const REQUIRES(engine_mutex);
  void make_blocks(uint64_t range) REQUIRES(engine_mutex);
  uint64_t cut(const Range& range, uint64_t at) const REQUIRES(engine_mutex);
  uint64_t room_behind(const Range& range, uint64_t at) const REQUIRES(engine_mutex);
  bool goes_on(const Block& block) const REQUIRES(engine_mutex);
  bool goes_straight(const Block& block) const REQUIRES(engine_mutex);
  std::byte* memory_of(const Block& block) const;
  const std::shared_ptr<File>& file_of(const Block& block) const REQUIRES(engine_mutex);

  bool take_start(Work& work) REQUIRES(engine_mutex);
  bool take_queued(std::deque<uint64_t>& queue, int kind, Work& work) REQUIRES(engine_mutex);
  void start(uint64_t index);
  // Between the memory of its ranges and its buffer; the checksums of those that are hashed so.
  std::vector<uint64_t> copy(const Block& block) const;
  uint64_t copy(const Block& block, uint64_t range) const;
  void copied(const Block& block, const std::vector<uint64_t>& sums) REQUIRES(engine_mutex);
  void unload(uint64_t index);
  void hash(uint64_t range);
  void block_done(Block& block) REQUIRES(engine_mutex);
  void hashed(uint64_t range, uint64_t sum) REQUIRES(engine_mutex);
  void finish_if_done(uint64_t range) REQUIRES(engine_mutex);

  bool complete() const override REQUIRES(engine_mutex) { return ranges_left_ == 0; }
  BlockState& block_state(uint64_t block) override { return blocks_[block]; }
  void drop_queued() override REQUIRES(engine_mutex);
  uint64_t buffers_left() const override REQUIRES(engine_mutex) { return cold_queue_.size(); }
  uint64_t buffers_wanted() const override REQUIRES(engine_mutex) { return cold_queue_.size(); }
  void drop_files() override;
  void transferred(uint64_t block, Status status) override REQUIRES(engine_mutex);

  const IoRequest::Kind kind_;
  const std::vector<Range> ranges_;
  const bool verified_;
  const uint64_t transfer_bytes_;
  const bool staged_;
  std::vector<uint32_t> paths_;  // by file
  RangesStats stats_;

  std::vector<Block> blocks_;  // by range, in order; each is of who its state says (block.h)
  std::vector<char> is_hashed_on_the_way_;  // by range; as made, from the constructor's end on
  std::vector<Progress> progress_ GUARDED_BY(engine_mutex);  // by range
  std::vector<std::shared_ptr<File>> files_ GUARDED_BY(engine_mutex);
  std::vector<uint64_t> sums_ GUARDED_BY(engine_mutex);           // by range
  std::deque<uint64_t> straight_queue_ GUARDED_BY(engine_mutex);  // blocks to start
  std::deque<uint64_t> cold_queue_ GUARDED_BY(engine_mutex);  // blocks to start that need a buffer
  std::deque<uint64_t> unload_queue_
      GUARDED_BY(engine_mutex);                               // blocks to copy out of their buffers
  std::deque<uint64_t> hash_queue_ GUARDED_BY(engine_mutex);  // ranges
  std::vector<uint64_t> done_ GUARDED_BY(engine_mutex);       // ranges, for next_done
  uint64_t ranges_left_ GUARDED_BY(engine_mutex) = 0;
  uint64_t unreturned_ GUARDED_BY(engine_mutex) = 0;
};

}  // namespace statehold
