// write_job: one file, from memory through buffers to storage.
//
// The file is cut into blocks of one buffer each. Per block:
//   free -> copied into a buffer and hashed -> (external parts filled by Python -> hashed)
//        -> written -> done (block.h)
// A block that Python finds in the file (a copy that goes on where one has ended) is not written.
//
// A request may say which checksums the bytes are expected to have: those of a file that is there
// already. As long as no block has others, the buffer of a block is given back once it is hashed.
// If all blocks have them, the job is complete without a file. With the first block that has
// others, it becomes a write like any other: that block and all later ones are written, and those
// before are read again from the file that is there, whose bytes they are. So memory is read once,
// and no more buffers are held than for any write. Per block:
//   free -> copied and hashed -> cold -> done
//                                     -> read again and hashed -> written -> done
//
// Blocks with eager segments are copied first. Blocks that Python fills alone are lent as soon as
// there are buffers, before others are hashed: what they wait for is a device, and no worker. All
// bytes count as copied once they are in buffers; those from Python are hashed later, so nobody
// who only wants to change the sources waits for that. Copying starts at once, writing when a file
// is attached. Checksums are of the bytes in the buffers, which are the bytes written.
//
// A file that is memory (File::mapped) needs no buffers. Per block:
//   free -> copied into the file and hashed on the way, which is written
// Only blocks with external parts, and those copied before the file was attached, go through a
// buffer and are copied from there. The job's share keeps the file mapped until the job is gone.
#pragma once

#include <deque>
#include <map>
#include <string>
#include <vector>

#include "job.h"

namespace statehold {

struct WriteRequest {
  uint64_t file_bytes = 0;
  uint64_t block_bytes = 0;
  std::string header;
  std::vector<Segment> segments;   // after the header: in file order, without gaps; begin/end/place
  std::shared_ptr<File> file;      // attached before the first copy, or null
  std::vector<uint64_t> expected;  // of all pieces, the header's first; none: all is written
  uint32_t client = 0;
  uint32_t path = 0;  // of the file, for limits (path_limits.h)
};

// A block whose buffer waits for bytes that only Python can copy.
struct Fill {
  uint64_t block = 0;
  Lease lease;
  std::vector<BufferPiece> pieces;  // segment 0 is the header
};

struct WriteStats {
  uint64_t bytes = 0;
  uint64_t blocks = 0;
  uint64_t copy_ns = 0;         // start to the last byte in a buffer, or in the file
  uint64_t first_write_ns = 0;  // start to the first write handed to the Fs
  uint64_t write_ns = 0;        // start to the last write completed
};

class WriteJob final : public Job {
 public:
  // Throws std::invalid_argument when the segments do not tile the file, when not as many checksums
  // are expected as there are pieces, or with a file; and as attach.
  WriteJob(std::shared_ptr<Shared> shared, WriteRequest request);

  // `before`: the file that has the expected bytes, open for reading and not direct; null if none
  // are expected. Throws Failure when a file that is memory has another size.
  void attach(std::shared_ptr<File> file, std::shared_ptr<File> before = nullptr);
  // It is known whether all blocks have the expected bytes: one has others, or all are copied.
  bool wait_compared(Deadline deadline);
  bool refuted();  // a block has others
  // Every eager byte that the engine itself copies is copied; not those that Python fills in.
  bool wait_eager(Deadline deadline);
  // Nobody reads the sources any more; checksums may still be unknown.
  bool wait_copied(Deadline deadline);
  bool wait_written(Deadline deadline);
  // After wait_written: exact size, durable, closed. A file that is memory has all it can have; its
  // size is checked, and its other owners go on.
  void finish();
  // As any job. A complete one lets go of its file, too, and finish() throws from then on.
  void cancel() override;
  std::vector<uint64_t> checksums();  // throws std::invalid_argument before all is hashed
  // nullopt: the deadline passed, or fills_left() is 0.
  std::optional<Fill> next_fill(Deadline deadline);
  // Returns the buffer. After a failure that is all it does. `is_there`: the file holds these bytes
  // already, and all of the block is in them: it is hashed as any other, and not written.
  void filled(const Fill& fill, bool is_there = false);
  uint64_t fills_left();  // blocks that next_fill has not handed out yet
  WriteStats stats();

  bool take(Priority priority, Work& work) override REQUIRES(engine_mutex);
  void run(const Work& work) override;

 private:
  enum Kind : uint8_t { kFill, kSeal, kWrite, kReadAgain };

  struct Block : BlockState {    // without a buffer, it goes straight into the file
    uint64_t first_segment = 0;  // of those that overlap the block
    uint64_t last_segment = 0;   // exclusive
    bool eager = false;
    bool external = false;
    bool is_there = false;    // in the file, before it was attached
    std::byte* to = nullptr;  // where it is copied to
  };

  void check_tiling() const;
  void make_blocks() REQUIRES(engine_mutex);
  void adopt(std::shared_ptr<File>& file)
      REQUIRES(engine_mutex);  // or before anybody knows the job
  uint64_t block_begin(uint64_t block) const { return block * buffer_bytes_; }
  uint64_t block_end(uint64_t block) const;
  bool take_fill(std::deque<uint64_t>& queue, Work& work) REQUIRES(engine_mutex);
  bool take_queued(std::deque<uint64_t>& queue, int kind, Work& work) REQUIRES(engine_mutex);
  bool take_again(Work& work) REQUIRES(engine_mutex);
  void fill(uint64_t index);
  void seal(uint64_t index);
  void read_again(uint64_t index);
  Status check_again(const Block& block, uint64_t index);
  void write(uint64_t index);
  Status store(uint64_t index, const std::byte* buffer);  // into a file that is memory
  // Copies (or, for external ones, only hashes) the pieces of a block; false when stopped.
  bool move_pieces(const Block& block, uint64_t index, bool external);
  void gathered() REQUIRES(engine_mutex);
  void copied(uint64_t index) REQUIRES(engine_mutex);
  bool is_comparing() const REQUIRES(engine_mutex) { return !expected_.empty() && !refuted_; }
  bool is_as_expected(uint64_t index) const;
  void set_aside(uint64_t index) REQUIRES(engine_mutex);
  void written(Block& block) REQUIRES(engine_mutex);
  std::vector<BufferPiece> external_pieces(const Block& block, uint64_t index) const;
  uint64_t elapsed_ns() const;

  bool complete() const override REQUIRES(engine_mutex) { return writes_left_ == 0; }
  void drop_queued() override REQUIRES(engine_mutex);
  uint64_t buffers_left() const override REQUIRES(engine_mutex);
  uint64_t buffers_wanted() const override REQUIRES(engine_mutex);
  uint64_t uncopied() const REQUIRES(engine_mutex);
  void drop_files() override;
  void transferred(uint64_t block, Status status) override REQUIRES(engine_mutex);
  BlockState& block_state(uint64_t block) override { return blocks_[block]; }

  const uint64_t file_bytes_;
  const uint64_t buffer_bytes_;
  const uint32_t path_;
  const std::chrono::steady_clock::time_point start_;
  std::string header_;
  std::vector<Segment> segments_;  // the header is the first
  std::vector<uint64_t> sums_;     // each written by one worker, before its block counts as copied
  const std::vector<uint64_t> expected_;
  std::vector<Block> blocks_;  // each is of who its state says (block.h)

  std::shared_ptr<File> file_;    // set with the mutex, before a block needs it
  std::shared_ptr<File> before_;  // the same
  std::byte* memory_ = nullptr;   // of the file, when it is memory
  std::deque<uint64_t> eager_queue_ GUARDED_BY(engine_mutex);  // to copy
  std::deque<uint64_t> lend_queue_ GUARDED_BY(engine_mutex);   // Python fills all of it
  std::deque<uint64_t> fill_queue_ GUARDED_BY(engine_mutex);   // to copy
  std::deque<uint64_t> offer_queue_ GUARDED_BY(engine_mutex);  // for next_fill
  std::deque<uint64_t> seal_queue_ GUARDED_BY(engine_mutex);   // filled by Python, to hash
  std::deque<uint64_t> write_queue_ GUARDED_BY(engine_mutex);  // to write, once attached
  std::deque<uint64_t> same_queue_ GUARDED_BY(engine_mutex);   // to read again, once refuted
  bool refuted_ GUARDED_BY(engine_mutex) = false;
  uint64_t eager_left_ GUARDED_BY(engine_mutex) = 0;
  uint64_t sources_left_ GUARDED_BY(engine_mutex) = 0;  // blocks that are not copied yet
  uint64_t copies_left_ GUARDED_BY(engine_mutex) = 0;   // blocks that are not copied and hashed yet
  uint64_t writes_left_ GUARDED_BY(engine_mutex) = 0;
  uint64_t fills_left_ GUARDED_BY(engine_mutex) = 0;
  uint64_t externals_queued_ GUARDED_BY(engine_mutex) =
      0;  // blocks to copy that need a buffer whatever the file is
  bool finished_ GUARDED_BY(engine_mutex) = false;
  bool abandoned_ GUARDED_BY(engine_mutex) = false;
  WriteStats stats_ GUARDED_BY(engine_mutex);
};

}  // namespace statehold
