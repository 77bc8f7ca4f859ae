// fs: the seam. Every effect on storage goes through this class; the engine above it knows no
// system call, and the same conformance suite runs over all implementations: io_uring
// (fs_uring.h), threads (fs_threads.h) and sim (fs_sim.h, in memory).
//
// Paths are plain strings. Their last name is never followed if it is a symbolic link: what must be
// a file has to be a regular one (else Status::irregular), and a link to a directory is no
// directory. Only sync_dir goes where a link leads. Nothing here retries, deletes or renames on its
// own initiative.
// All functions may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "status.h"

namespace statehold {

// O_DIRECT transfers have offset, length and memory aligned to this.
inline constexpr uint64_t kPageBytes = 4096;

constexpr uint64_t align_down(uint64_t bytes, uint64_t unit) { return bytes / unit * unit; }
constexpr uint64_t align_up(uint64_t bytes, uint64_t unit) {
  return align_down(bytes + unit - 1, unit);
}

// An open data file. Requests in flight share the ownership, so that a descriptor number is never
// reused under a transfer that is still queued; the last owner closes it.
class File {
 public:
  File(std::string path, bool direct) : path_(std::move(path)), direct_(direct) {}
  virtual ~File() = default;
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const { return path_; }
  // Transfers bypass the page cache and must be aligned to kPageBytes.
  bool direct() const { return direct_; }

  virtual Result<uint64_t> size_bytes() = 0;
  virtual Status truncate(uint64_t bytes) = 0;
  // Data and size are durable on return; the name is not (Fs::sync_dir).
  virtual Status sync() = 0;
  // Blocking and whole: fewer than `bytes` available is Status::truncated. Not for direct files.
  virtual Status read(std::byte* memory, uint64_t bytes, uint64_t offset) = 0;
  // True when every page of the range is in the page cache; false when unknown.
  virtual bool cached(uint64_t offset, uint64_t bytes) = 0;
  // Advice: the range is about to be read. Starts to fill the page cache, where the system can, and
  // does not wait for it. Not for direct files.
  virtual void read_ahead(uint64_t offset, uint64_t bytes) = 0;
  // Closes it for all owners. Only when no transfer is in flight, and nothing else is called after.
  virtual void close() = 0;

  // Of a file that is memory (Fs::open_mapped, Fs::open_view): its bytes, as long as somebody owns
  // the File. What is stored in `memory` is written: it outlives the process, not the power.
  virtual bool mapped() const { return false; }  // for writing
  virtual std::span<std::byte> memory() { return {}; }
  virtual std::span<const std::byte> view() const { return {}; }
  // Whether a range of the view is read faster where it lies than through `read`.
  virtual bool view_is_fast(uint64_t /*begin*/, uint64_t /*bytes*/) const { return false; }
  // Makes a range of `memory` present, so that no copy pays for page faults; nothing else.
  virtual Status populate(uint64_t /*begin*/, uint64_t /*bytes*/) { return {}; }

 private:
  const std::string path_;
  const bool direct_;
};

// One transfer between memory and a file. Once `submit` has accepted it, `done` is called exactly
// once, with no lock of the Fs held: on a thread of the Fs, or in `submit` if the transfer could
// not be started. It must neither throw nor block on another transfer. Memory and file must stay
// valid until then.
struct IoRequest {
  enum class Kind : uint8_t { read, write };

  Kind kind = Kind::read;
  std::shared_ptr<File> file;
  std::byte* memory = nullptr;
  uint64_t bytes = 0;
  // A read is complete with this many: a direct read of a file's tail asks for whole pages.
  uint64_t bytes_min = 0;
  uint64_t offset = 0;
  int slot = -1;  // of the registered buffer that `memory` lies in, or -1
  std::function<void(Status)> done;

  // Kept by the Fs.
  uint64_t bytes_done = 0;
  int tries = 0;                    // since it last got on
  Status refusal;                   // why it could not be started
  std::unique_ptr<IoRequest> next;  // in a queue

  // What the next system call has to transfer.
  std::byte* next_memory() const { return memory + bytes_done; }
  uint64_t next_offset() const { return offset + bytes_done; }
  uint32_t next_bytes() const;
};

enum class Progress : uint8_t { again, finished };

// The only function that looks at the result of a transfer (bytes, or -errno): error, nothing,
// short, full. `again` means: issue the rest; `finished` that `status` is final. An interruption is
// tried again, but not for ever: a file system may give no other answer.
Progress apply_result(IoRequest& request, int64_t result, Status& status);

// Calls `done`.
void call_done(IoRequest& request, Status status) noexcept;

struct DirEntry {
  std::string name;
  bool is_dir = false;
};

class Fs {
 public:
  virtual ~Fs() = default;

  virtual std::string backend() const = 0;         // "io_uring", "threads" or "sim"
  virtual std::string note() const { return {}; }  // why not io_uring, and what would help

  virtual Status mkdir(const std::string& path) = 0;
  virtual Status rename(const std::string& from, const std::string& to) = 0;
  virtual Status exchange(const std::string& a, const std::string& b) = 0;  // atomically
  // A second name, `to`, for a file. EXDEV, EPERM, EMLINK or EOPNOTSUPP where there can be none.
  virtual Status link(const std::string& from, const std::string& to) = 0;
  virtual Status unlink(const std::string& path) = 0;
  virtual Status rmdir(const std::string& path) = 0;
  virtual Result<std::vector<DirEntry>> listdir(const std::string& path) = 0;  // sorted by name
  // -1 when there is no such path; 0 for a directory.
  virtual Result<int64_t> stat_bytes(const std::string& path) = 0;
  virtual Result<bool> is_dir(const std::string& path) = 0;
  // Makes creations, renames and removals in this directory durable.
  virtual Status sync_dir(const std::string& path) = 0;

  // A file with several names may be part of several steps, so nothing here writes it again:
  // write_file, and open_write and open_mapped with `reuse`, refuse it with EMLINK.
  //
  // Small files as a whole. write_file creates the file or replaces what is in it, keeping
  // the blocks that it has, and syncs data, not the name.
  virtual Status write_file(const std::string& path, std::string_view data) = 0;
  virtual Result<std::string> read_file(const std::string& path, uint64_t bytes_max) = 0;

  // Opens for writing with `bytes` allocated (rounded up to a page for direct files): direct where
  // the file system allows. A fresh file must not exist yet; `reuse` keeps the extents of one
  // that does, because overwriting them is much faster than allocating. A failure takes no room:
  // there is no fresh file then, and one that was to grow has the size that it had.
  virtual Result<std::shared_ptr<File>> open_write(const std::string& path, uint64_t bytes,
                                                   bool reuse) = 0;
  // direct: fails with EINVAL where the file system refuses O_DIRECT. Status::missing on ENOENT.
  virtual Result<std::shared_ptr<File>> open_read(const std::string& path, bool direct) = 0;
  // How many files one reader should have open at the same time: a process has few descriptors.
  virtual uint64_t files_at_once() const { return 64; }
  // True when overwriting this file can hurt nobody: regular, ours, one name, not open or mapped.
  virtual bool can_reuse(const std::string& path) = 0;

  // Files that are memory. Refused with EOPNOTSUPP where a file's pages are not the file itself:
  // there an error of the device would be a SIGBUS. A simulated disk is a disk: it refuses.
  //
  // open_write, mapped, and all of it allocated: storing in it cannot fail. `kept` (or null) is a
  // mapped file from before: if it is the file at `path`, and this its last owner, its mapping
  // goes on, for setting one up costs as much as filling it.
  virtual Result<std::shared_ptr<File>> open_mapped(const std::string& path, uint64_t bytes,
                                                    bool reuse, const std::shared_ptr<File>& kept);
  // can_reuse of a file that this process has mapped: nobody but the owner of `kept` has it.
  virtual bool can_reuse_kept(const std::string&, const std::shared_ptr<File>&) { return false; }
  // For reading as memory. Another size than `bytes` is Status::truncated, and reading is safe only
  // as long as nobody cuts the file.
  virtual Result<std::shared_ptr<File>> open_view(const std::string& path, uint64_t bytes);

  // How many transfers it has under way at once; who submits more has them queued.
  virtual uint64_t depth() const { return 32; }
  // Starts a transfer, or queues it when the depth is reached; reads go before writes. Never
  // blocks on other transfers. After close, `done` gets Status::closed. If it throws (bad_alloc),
  // the transfer was not accepted, and `done` is never called.
  virtual void submit(IoRequest request) = 0;
  // Announces memory used by many transfers; returns its slot, or -1 (no advantage, no harm).
  virtual int register_buffer(std::byte*, uint64_t) { return -1; }
  virtual void unregister_buffer(int) {}

  // Waits for the transfers in flight and stops the threads. Idempotent, and two may call it at
  // once: each returns when all that is done.
  virtual void close() = 0;
};

}  // namespace statehold
