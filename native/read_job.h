// read_job: segments of files into memory, verified.
//
// What is needed of every file is cut into blocks that fit a buffer. Per block:
//   in memory, in huge pages -> copied from there into place past the caches, hashed on the way
//   in the page cache, or shared -> read straight into place, hashed while in the processor's cache
//   the same, with external parts -> read into a buffer by the worker that hashes it on the way
//             -> scattered into place -> external parts copied by Python -> buffer released
//   otherwise -> read directly into a buffer -> verified -> scattered into place
//             -> (external parts copied by Python) -> buffer released
// Shared blocks are announced to the page cache some blocks ahead, so that the device is busy
// though workers read one block each, and processes that read the same file have the device do it
// once. Blocks are taken in the order of the files, cyclically from `first_segment`.
//
// A piece is verified whole, also where only a box of it is placed (copy.h). A segment may begin or
// end inside a chunk, but only where a piece does: its checksums are those of its pieces.
// No byte of a destination changes before every file has been opened and has the right size. Where
// there are more than the process may well have open, each is opened again when its blocks are due,
// and closed after the last one: who has saved on many ranks reads with few descriptors. In the
// direct path no byte changes before its block is verified; in the other paths a bad piece has
// overwritten its own place when the job fails.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "job.h"

namespace statehold {

struct ReadRequest {
  std::vector<std::string> paths;
  std::vector<uint64_t> file_bytes;
  uint64_t block_bytes = 0;
  std::vector<Segment> segments;  // by (file, begin); they may overlap; no address: verify only
  std::vector<uint64_t> sums;     // per piece, segments in order
  uint64_t first_segment = 0;
  uint32_t client = 0;
  uint32_t path = 0;  // of the files, for limits (path_limits.h)
};

// A verified block whose external parts wait for Python in its buffer.
struct Ready {
  uint64_t block = 0;
  Lease lease;
  std::vector<BufferPiece> pieces;
};

// Of the files, what was read counts once however many segments want it, and a block that the file
// system has read into a buffer counts with the gaps between its segments (not with the padding to
// pages).
struct ReadStats {
  uint64_t bytes = 0;         // asked for: the sum over the segments
  uint64_t cached_bytes = 0;  // read through the page cache, whether they were in it or not
  uint64_t direct_bytes = 0;  // read past it
};

class ReadJob final : public Job {
 public:
  // Throws std::invalid_argument when the request contradicts itself.
  ReadJob(std::shared_ptr<Shared> shared, ReadRequest request);

  // Everything is in place and verified, and every Ready was released.
  bool wait_done(Deadline deadline);
  // nullopt: the deadline passed, or ready_left() is 0.
  std::optional<Ready> next_ready(Deadline deadline);
  void release(const Ready& ready);
  uint64_t ready_left();  // blocks that next_ready has not handed out yet
  ReadStats stats();

  bool take(Priority priority, Work& work) override REQUIRES(engine_mutex);
  void run(const Work& work) override;

 private:
  enum Kind : uint8_t { kCheck, kOpen, kStart, kRead, kVerify };

  struct Block : BlockState {
    uint32_t file = 0;
    uint64_t begin = 0;  // file offsets: exactly what is needed
    uint64_t end = 0;
    std::vector<uint64_t> segments;  // those with bytes in here
    uint64_t wanted_bytes = 0;       // those that a segment covers, once each
    bool external = false;
    bool shared = false;   // as its first long range is, or its first
    bool is_long = false;  // has a range that decides that
    bool cached = false;   // known by the time it is read
    bool viewed = false;   // likewise; it is cached, too
  };

  struct Files {
    std::shared_ptr<File> buffered;  // null: it is not open
    std::shared_ptr<File> direct;    // null where the file system refuses
    std::shared_ptr<File> view;      // null where it does not lie in memory
  };

  struct Source : Files {
    Source(std::string given, uint64_t size) : path(std::move(given)), bytes(size) {}

    std::string path;
    uint64_t bytes;
    uint64_t blocks_left = 0;
  };

  void check_segments(size_t sum_count) REQUIRES(engine_mutex);
  void make_blocks() REQUIRES(engine_mutex);
  void rotate_to(uint64_t segment);
  void order_sources();
  bool joins(uint64_t segment, uint64_t begin, uint64_t end) const;
  void add_to_blocks(uint64_t segment, uint64_t begin, uint64_t end);

  bool take_read(Work& work) REQUIRES(engine_mutex);
  bool take_cold(Work& work) REQUIRES(engine_mutex);
  bool take_open(Work& work) REQUIRES(engine_mutex);
  void check_sources();
  void open_again(uint64_t file);
  Result<Files> open(const Source& source, bool for_blocks) const;
  void start(uint64_t index);
  void read_ahead(uint64_t index);
  void read_to_buffer(uint64_t index);
  void verify(uint64_t index);
  Status read_in_place(const Block& block);
  Status read_piece(const Block& block, const Segment& segment, uint64_t sum, uint64_t begin,
                    uint64_t end);
  Status compare(uint64_t segment, uint64_t sum, uint64_t begin, uint64_t end, uint64_t got) const;
  Status verify_and_scatter(const Block& block) const;
  Status read_hashed(const Block& block, uint64_t begin, uint64_t end, std::byte* to,
                     uint64_t& hash) const;
  uint64_t buffer_base(const Block& block) const;
  const std::shared_ptr<File>& file_for_buffer(const Block& block) const;
  std::vector<BufferPiece> external_pieces(const Block& block) const;
  void finished(Block& block) REQUIRES(engine_mutex);

  bool complete() const override REQUIRES(engine_mutex) { return checked_ && blocks_left_ == 0; }
  void drop_queued() override REQUIRES(engine_mutex);
  uint64_t buffers_left() const override REQUIRES(engine_mutex) { return unlent_blocks_; }
  uint64_t buffers_wanted() const override REQUIRES(engine_mutex) { return cold_queue_.size(); }
  void drop_files() override;
  void transferred(uint64_t block, Status status) override REQUIRES(engine_mutex);
  BlockState& block_state(uint64_t block) override { return blocks_[block]; }

  const uint32_t path_;
  std::vector<Source> sources_;  // each has its files before its first block starts, until its last
  std::vector<uint32_t> opening_order_;  // of sources
  std::vector<Segment> segments_;
  std::vector<uint64_t> sums_;
  std::vector<Block> blocks_;  // each is of who its state says (block.h)

  bool checking_ GUARDED_BY(engine_mutex) = false;
  bool checked_ GUARDED_BY(engine_mutex) = false;
  uint64_t next_source_ GUARDED_BY(engine_mutex) = 0;  // in the order of opening
  uint64_t open_sources_ GUARDED_BY(engine_mutex) = 0;
  uint64_t open_sources_max_ GUARDED_BY(engine_mutex) = 0;
  std::vector<Files> read_ GUARDED_BY(engine_mutex);  // to be closed, without the mutex
  uint64_t next_block_ GUARDED_BY(engine_mutex) = 0;
  uint64_t announced_blocks_ GUARDED_BY(engine_mutex) = 0;      // to the page cache
  std::deque<uint64_t> cold_queue_ GUARDED_BY(engine_mutex);    // need a buffer
  std::deque<uint64_t> verify_queue_ GUARDED_BY(engine_mutex);  // to verify
  std::deque<uint64_t> offer_queue_ GUARDED_BY(engine_mutex);   // for next_ready
  uint64_t blocks_left_ GUARDED_BY(engine_mutex) = 0;
  uint64_t unlent_blocks_ GUARDED_BY(engine_mutex) =
      0;  // that have no buffer, and may yet need one
  uint64_t ready_left_ GUARDED_BY(engine_mutex) = 0;
  ReadStats stats_ GUARDED_BY(engine_mutex);
};

}  // namespace statehold
