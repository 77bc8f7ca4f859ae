// raw: contract in raw.h.
#include "raw.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "buffers.h"
#include "mutex.h"

namespace statehold {
namespace {

// Distinct buffers in flight; more would only measure first-touch of memory.
constexpr int kBuffersMax = 8;

// Moves a whole file through a few buffers, `depth` transfers at a time.
class RawRun {
 public:
  RawRun(Fs& fs, const RawOptions& options)
      : fs_(fs),
        options_(options),
        memory_(static_cast<uint64_t>(std::clamp(options.depth, 1, kBuffersMax)),
                options.buffer_bytes) {
    if (options.depth < 1) throw std::invalid_argument("depth must be at least 1");
    for (uint64_t i = 0; i < memory_.count(); ++i) {
      memory_.populate(i);
      std::memset(memory_.buffer(i), static_cast<int>(i + 1), options.buffer_bytes);
      slots_.push_back(fs.register_buffer(memory_.buffer(i), options.buffer_bytes));
    }
  }

  ~RawRun() {
    static_cast<void>(wait());
    for (const int slot : slots_) fs_.unregister_buffer(slot);
  }

  void transfer(IoRequest::Kind kind, const std::shared_ptr<File>& file, uint64_t file_bytes) {
    for (uint64_t offset = 0; offset < file_bytes; offset += options_.buffer_bytes) {
      const uint64_t index = offset / options_.buffer_bytes % memory_.count();
      IoRequest request;
      request.kind = kind;
      request.file = file;
      request.memory = memory_.buffer(index);
      request.slot = slots_[index];
      request.offset = offset;
      request.bytes_min = std::min(options_.buffer_bytes, file_bytes - offset);
      request.bytes = file->direct() ? align_up(request.bytes_min, kPageBytes) : request.bytes_min;
      request.done = [this](Status status) { transferred(std::move(status)); };
      start(std::move(request));
    }
    must(wait());
  }

 private:
  // The first error of all transfers.
  Status wait() {
    Lock lock(mutex_);
    while (in_flight_ > 0) changed_.wait(lock);
    return copy_of(error_);
  }

  void start(IoRequest request) {
    {
      Lock lock(mutex_);
      while (in_flight_ >= options_.depth) changed_.wait(lock);
      ++in_flight_;
    }
    const Status status = guarded([&] { fs_.submit(std::move(request)); });
    if (!status.ok()) transferred(status);  // not accepted
  }

  void transferred(Status status) {
    const Lock lock(mutex_);
    --in_flight_;
    if (!status.ok() && error_.ok()) error_ = std::move(status);
    changed_.notify_one();
  }

  Fs& fs_;
  const RawOptions options_;
  StagingMemory memory_;
  std::vector<int> slots_;
  Mutex mutex_;
  Condition changed_;
  int in_flight_ GUARDED_BY(mutex_) = 0;
  Status error_ GUARDED_BY(mutex_);
};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

double raw_write_seconds(Fs& fs, const std::string& path, uint64_t file_bytes, bool reuse,
                         const RawOptions& options) {
  RawRun run(fs, options);
  const auto start = std::chrono::steady_clock::now();
  const std::shared_ptr<File> file = must(fs.open_write(path, file_bytes, reuse));
  run.transfer(IoRequest::Kind::write, file, file_bytes);
  if (file_bytes % kPageBytes != 0) must(file->truncate(file_bytes));
  must(file->sync());
  return seconds_since(start);
}

double raw_read_seconds(Fs& fs, const std::string& path, const RawOptions& options) {
  RawRun run(fs, options);
  const auto start = std::chrono::steady_clock::now();
  Result<std::shared_ptr<File>> direct = fs.open_read(path, true);
  const std::shared_ptr<File> file = direct.ok() ? direct.value : must(fs.open_read(path, false));
  run.transfer(IoRequest::Kind::read, file, must(file->size_bytes()));
  return seconds_since(start);
}

}  // namespace statehold
