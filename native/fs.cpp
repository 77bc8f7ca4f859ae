// fs: the part of the seam that all implementations share. Contract in fs.h.
#include "fs.h"

#include <algorithm>
#include <cerrno>

namespace statehold {
namespace {

constexpr int kTriesMax = 10'000;  // of a transfer that does not get on

// Whether a transfer that ended with this may get on when it is issued again.
// ECANCELED: the thread that issued the transfer has exited; we never cancel one ourselves.
bool is_transient(int64_t result) {
  return result == -EINTR || result == -EAGAIN || result == -ECANCELED;
}

const char* name_of(IoRequest::Kind kind) {
  return kind == IoRequest::Kind::read ? "read" : "write";
}

Status not_memory(const std::string& path) {
  return Status::io(EOPNOTSUPP, "map (its file system is not in memory)", path);
}

}  // namespace

Result<std::shared_ptr<File>> Fs::open_mapped(const std::string& path, uint64_t, bool,
                                              const std::shared_ptr<File>&) {
  return {not_memory(path), {}};
}

Result<std::shared_ptr<File>> Fs::open_view(const std::string& path, uint64_t) {
  return {not_memory(path), {}};
}

uint32_t IoRequest::next_bytes() const {
  constexpr uint64_t call_bytes_max = uint64_t{1}
                                      << 30;  // the kernel's own limit is just below 2^31
  CHECK(bytes_done < bytes);
  return static_cast<uint32_t>(std::min(bytes - bytes_done, call_bytes_max));
}

Progress apply_result(IoRequest& request, int64_t result, Status& status) {
  const bool is_read = request.kind == IoRequest::Kind::read;
  if (is_transient(result) && ++request.tries < kTriesMax) return Progress::again;
  const auto at = static_cast<int64_t>(request.next_offset());
  if (result < 0) {
    status = Status::io(static_cast<int>(-result), name_of(request.kind), request.file->path(), at);
    return Progress::finished;
  }
  CHECK(static_cast<uint64_t>(result) <= request.bytes - request.bytes_done);
  const uint64_t total = request.bytes_done + static_cast<uint64_t>(result);
  if (total == request.bytes || (is_read && total >= request.bytes_min)) {
    request.bytes_done = total;
    status = {};
    return Progress::finished;
  }
  // Short. A direct transfer can only go on from a page boundary, so part of it may be repeated.
  const uint64_t resume = request.file->direct() ? align_down(total, kPageBytes) : total;
  if (resume > request.bytes_done) {
    request.bytes_done = resume;
    request.tries = 0;
    return Progress::again;
  }
  status = is_read ? Status::truncated("read", request.file->path(), request.offset + total)
                   : Status::io(EIO, "write", request.file->path(), at);
  return Progress::finished;
}

void call_done(IoRequest& request, Status status) noexcept {
  // A throw is against its contract. The caller knows of it, and the threads serve others, too.
  static_cast<void>(guarded([&] { request.done(std::move(status)); }));
}

}  // namespace statehold
