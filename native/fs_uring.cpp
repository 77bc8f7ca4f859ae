// fs_uring: contract in fs_uring.h.
//
// Facts relied on:
// - Work that the kernel hands to its own threads is cancelled when the submitting thread exits;
//   settle() re-issues on ECANCELED.
// - Registered buffers count against RLIMIT_MEMLOCK without CAP_IPC_LOCK; refusal only costs speed.
// - The completion queue has twice the entries of the submission queue, so `depth` plus one wake-up
//   cannot overflow it.
#include "fs_uring.h"

#include <cerrno>
#include <cstring>

#ifdef STATEHOLD_HAVE_URING

#include <liburing.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <thread>
#include <vector>

#include "fs_posix.h"
#include "io_queue.h"

namespace statehold {
namespace {

constexpr int kSlots = 4096;  // of the sparse table of registered buffers

class UringFs final : public PosixFs {
 public:
  explicit UringFs(int depth) : depth_(depth) {}
  ~UringFs() override { close(); }

  int open();
  std::string backend() const override { return "io_uring"; }
  void submit(IoRequest request) override;
  int register_buffer(std::byte* memory, uint64_t bytes) override;
  void unregister_buffer(int slot) override;
  void close() override;

 private:
  struct Completion {
    IoRequest* request;  // null: wake up, we are closing
    int result;
  };

  void reap();
  size_t take_completions(std::array<Completion, 16>& taken);
  void complete(IoRequest* raw, int result);
  void issue(std::unique_ptr<IoRequest> request);  // mutex_ held
  void issue_pending();                            // mutex_ held
  void wake_reaper();                              // mutex_ held
  void submit_entries();                           // mutex_ held
  bool drained();

  const int depth_;
  io_uring ring_{};
  std::mutex mutex_;  // the submission side and everything below
  IoQueue pending_;
  int in_flight_ = 0;
  bool closed_ = false;
  bool ring_open_ = false;
  std::vector<int> free_slots_;
  std::thread reaper_;
};

int UringFs::open() {
  const int result =
      io_uring_queue_init(static_cast<unsigned>(depth_ + 1), &ring_, IORING_SETUP_CLAMP);
  if (result < 0) return -result;
  ring_open_ = true;
  if (io_uring_register_buffers_sparse(&ring_, kSlots) == 0) {
    for (int slot = kSlots - 1; slot >= 0; --slot) free_slots_.push_back(slot);
  }
  reaper_ = std::thread([this] { reap(); });
  return 0;
}

void UringFs::submit(IoRequest request) {
  {
    const std::lock_guard lock(mutex_);
    if (!closed_) {
      pending_.push(std::move(request));
      issue_pending();
      return;
    }
  }
  request.done(Status::closed("transfer"));
}

void UringFs::issue_pending() {
  while (in_flight_ < depth_ && !pending_.empty()) {
    ++in_flight_;
    issue(std::make_unique<IoRequest>(pending_.pop()));
  }
}

void UringFs::issue(std::unique_ptr<IoRequest> request) {
  const int fd = static_cast<const PosixFile&>(*request->file).fd();
  io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
  CHECK(sqe != nullptr);  // every issue is submitted at once, so the queue is empty here
  std::byte* memory = request->next_memory();
  const uint32_t bytes = request->next_bytes();
  const uint64_t offset = request->next_offset();
  const bool is_read = request->kind == IoRequest::Kind::read;
  if (request->slot >= 0 && is_read) {
    io_uring_prep_read_fixed(sqe, fd, memory, bytes, offset, request->slot);
  } else if (request->slot >= 0) {
    io_uring_prep_write_fixed(sqe, fd, memory, bytes, offset, request->slot);
  } else if (is_read) {
    io_uring_prep_read(sqe, fd, memory, bytes, offset);
  } else {
    io_uring_prep_write(sqe, fd, memory, bytes, offset);
  }
  io_uring_sqe_set_data(sqe, request.release());
  submit_entries();
}

void UringFs::submit_entries() {
  while (io_uring_sq_ready(&ring_) > 0) {
    // EINTR, or EAGAIN for want of kernel memory: the entry stays in the queue, so try again.
    if (io_uring_submit(&ring_) < 0) std::this_thread::yield();
  }
}

void UringFs::reap() {
  std::array<Completion, 16> taken;
  while (!drained()) {
    io_uring_cqe* first = nullptr;
    if (io_uring_wait_cqe(&ring_, &first) < 0) continue;  // EINTR
    const size_t count = take_completions(taken);
    for (size_t i = 0; i < count; ++i) {
      if (taken[i].request != nullptr) complete(taken[i].request, taken[i].result);
    }
  }
}

size_t UringFs::take_completions(std::array<Completion, 16>& taken) {
  // The kernel orders a completion after its submission; the mutex says so to a race detector.
  const std::lock_guard lock(mutex_);
  std::array<io_uring_cqe*, 16> cqes;
  const unsigned count = io_uring_peek_batch_cqe(&ring_, cqes.data(), cqes.size());
  for (unsigned i = 0; i < count; ++i) {
    taken[i] = {static_cast<IoRequest*>(io_uring_cqe_get_data(cqes[i])), cqes[i]->res};
  }
  io_uring_cq_advance(&ring_, count);
  return count;
}

void UringFs::complete(IoRequest* raw, int result) {
  std::unique_ptr<IoRequest> request(raw);
  Status status;
  const Status internal = guarded([&] {
    if (settle(*request, result, status) == Progress::finished) return;
    const std::lock_guard lock(mutex_);
    issue(std::move(request));
  });
  if (!request) return;  // on its way again
  request->done(internal.ok() ? std::move(status) : internal);
  request.reset();
  const std::lock_guard lock(mutex_);
  --in_flight_;
  issue_pending();
}

bool UringFs::drained() {
  const std::lock_guard lock(mutex_);
  return closed_ && in_flight_ == 0 && pending_.empty();
}

int UringFs::register_buffer(std::byte* memory, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (closed_ || free_slots_.empty()) return -1;
  const int slot = free_slots_.back();
  const iovec range{memory, bytes};
  const auto index = static_cast<unsigned>(slot);
  if (io_uring_register_buffers_update_tag(&ring_, index, &range, nullptr, 1) != 1) return -1;
  free_slots_.pop_back();
  return slot;
}

void UringFs::unregister_buffer(int slot) {
  const std::lock_guard lock(mutex_);
  if (closed_ || slot < 0) return;
  const iovec nothing{nullptr, 0};
  const auto index = static_cast<unsigned>(slot);
  if (io_uring_register_buffers_update_tag(&ring_, index, &nothing, nullptr, 1) != 1) return;
  free_slots_.push_back(slot);
}

void UringFs::wake_reaper() {
  io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
  CHECK(sqe != nullptr);
  io_uring_prep_nop(sqe);
  io_uring_sqe_set_data(sqe, nullptr);
  submit_entries();
}

void UringFs::close() {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true) || !ring_open_) return;
    if (reaper_.joinable()) wake_reaper();
  }
  if (reaper_.joinable()) reaper_.join();
  io_uring_queue_exit(&ring_);
}

}  // namespace

Result<std::shared_ptr<Fs>> open_uring(int depth) {
  auto fs = std::make_shared<UringFs>(depth);
  const int error = fs->open();
  if (error != 0) return {Status::io(error, "set up io_uring", {})};
  return {{}, std::move(fs)};
}

}  // namespace statehold

#else

namespace statehold {

Result<std::shared_ptr<Fs>> open_uring(int) { return {Status::io(ENOSYS, "set up io_uring", {})}; }

}  // namespace statehold

#endif

namespace statehold {

std::string uring_hint(int error) {
  const std::string reason =
      std::string("io_uring is not available (") + std::strerror(error) + "): ";
  switch (error) {
    case EPERM:
    case EACCES:
      return reason +
             "allow it with sysctl kernel.io_uring_disabled=0, or with a container seccomp profile "
             "that permits io_uring_setup, io_uring_enter and io_uring_register";
    case ENOSYS:
      return reason + "it needs Linux 5.19 or later and a statehold built with liburing";
    case ENOMEM:
      return reason + "raise the limit of locked memory (ulimit -l)";
    case EMFILE:
      return reason + "raise the limit of open files (ulimit -n)";
    default:
      return reason + "see io_uring_setup(2)";
  }
}

}  // namespace statehold
