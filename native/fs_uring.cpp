// fs_uring: contract in fs_uring.h.
//
// Facts relied on:
// - Work that the kernel hands to its own threads is cancelled when the submitting thread exits;
//   apply_result() re-issues on ECANCELED.
// - Registered buffers count against RLIMIT_MEMLOCK without CAP_IPC_LOCK; refusal only costs speed.
// - The completion queue has twice the entries of the submission queue, so `depth` plus one wake-up
//   cannot overflow it.
// - Where io_uring_enter fails, the kernel has taken no entry. It can come to fail in a ring that
// has
//   worked: a profile that forbids it is put on the process, or somebody closes all descriptors.
//   What the kernel took before that completes all the same, in memory shared with it.
#include "fs_uring.h"

#include <cerrno>
#include <system_error>

#ifdef STATEHOLD_HAVE_URING

#include <liburing.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include "fs_posix.h"
#include "io_queue.h"
#include "mutex.h"

namespace statehold {
namespace {

constexpr int kSlots = 4096;  // of the sparse table of registered buffers
// For an entry that the kernel does not take for want of memory: a quarter of a second.
constexpr int kTriesMax = 250;
constexpr auto kBetweenTries = std::chrono::milliseconds(1);
// How long close() may have to wait for the reaper when no wake-up can be submitted.
constexpr long long kLookAgainS = 1;

// Whether a system call that failed with this may succeed later.
bool is_transient(int error) { return error == EINTR || error == EAGAIN || error == EBUSY; }

class UringFs final : public PosixFs {
 public:
  explicit UringFs(int depth) : depth_(depth) {}
  ~UringFs() override { close(); }

  int open();
  std::string backend() const override { return "io_uring"; }
  uint64_t depth() const override { return static_cast<uint64_t>(depth_); }
  void submit(IoRequest request) override;
  int register_buffer(std::byte* memory, uint64_t bytes) override;
  void unregister_buffer(int slot) override;
  void close() override;

 private:
  struct Completion {
    IoRequest* request;  // null: a wake-up, or a transfer that was withdrawn
    int result;
  };

  void reap() noexcept;
  void wait_for_completion();
  size_t take_completions(std::array<Completion, 16>& taken);
  void complete(std::unique_ptr<IoRequest> request, int result);
  void fail_refused();
  bool drained();
  // False: the request is with those that are refused.
  bool issue(std::unique_ptr<IoRequest> request) noexcept REQUIRES(mutex_);
  void issue_pending() noexcept REQUIRES(mutex_);
  Status hand_over(IoRequest& request) REQUIRES(mutex_);
  void wake_reaper() REQUIRES(mutex_);
  // An errno: the kernel did not take the newest one.
  int submit_entries() REQUIRES(mutex_);

  const int depth_;
  io_uring ring_{};
  bool ring_open_ = false;
  Mutex mutex_;  // also of the submission side of the ring
  IoQueue pending_ GUARDED_BY(mutex_);
  // Could not be started: `done` is still to be called, without the mutex.
  IoList refused_ GUARDED_BY(mutex_);
  int in_flight_ GUARDED_BY(mutex_) = 0;  // taken by the kernel, up to the return of `done`
  int broken_ GUARDED_BY(mutex_) = 0;     // an errno: the ring takes no more transfers
  bool closed_ GUARDED_BY(mutex_) = false;
  std::vector<int> free_slots_ GUARDED_BY(mutex_);
  std::thread reaper_;
  std::once_flag closing_;
};

int UringFs::open() {
  const int result =
      io_uring_queue_init(static_cast<unsigned>(depth_ + 1), &ring_, IORING_SETUP_CLAMP);
  if (result < 0) return -result;
  ring_open_ = true;
  if ((ring_.features & IORING_FEAT_EXT_ARG) == 0) return ENOSYS;  // waiting would submit
  if (io_uring_register_buffers_sparse(&ring_, kSlots) == 0) {
    const Lock lock(mutex_);
    for (int slot = kSlots - 1; slot >= 0; --slot) free_slots_.push_back(slot);
  }
  reaper_ = std::thread([this] { reap(); });
  return 0;
}

void UringFs::submit(IoRequest request) {
  auto owned = std::make_unique<IoRequest>(std::move(request));
  {
    const Lock lock(mutex_);
    if (closed_) {
      owned->refusal = Status::closed("transfer");
      refused_.push(std::move(owned));
    } else {
      pending_.push(std::move(owned));
      issue_pending();
    }
  }
  fail_refused();
}

void UringFs::issue_pending() noexcept {
  while (in_flight_ < depth_ && !pending_.empty()) {
    if (issue(pending_.pop())) ++in_flight_;
  }
}

bool UringFs::issue(std::unique_ptr<IoRequest> request) noexcept {
  request->refusal = guarded([&] {
    mutex_.assert_held();
    must(hand_over(*request));
  });
  if (!request->refusal.ok()) {
    refused_.push(std::move(request));
    return false;
  }
  static_cast<void>(request.release());  // the kernel's, until its completion
  return true;
}

Status UringFs::hand_over(IoRequest& request) {
  const int fd = static_cast<const PosixFile&>(*request.file).fd();
  std::byte* memory = request.next_memory();
  const uint32_t bytes = request.next_bytes();
  const uint64_t offset = request.next_offset();
  const bool is_read = request.kind == IoRequest::Kind::read;
  const auto refused = [&](int error) {
    return Status::io(error, "hand a transfer to io_uring", request.file->path(),
                      static_cast<int64_t>(offset));
  };
  if (broken_ != 0) return refused(broken_);
  io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
  if (sqe == nullptr) return refused(EAGAIN);  // full of what the kernel did not take
  if (request.slot >= 0 && is_read) {
    io_uring_prep_read_fixed(sqe, fd, memory, bytes, offset, request.slot);
  } else if (request.slot >= 0) {
    io_uring_prep_write_fixed(sqe, fd, memory, bytes, offset, request.slot);
  } else if (is_read) {
    io_uring_prep_read(sqe, fd, memory, bytes, offset);
  } else {
    io_uring_prep_write(sqe, fd, memory, bytes, offset);
  }
  io_uring_sqe_set_data(sqe, &request);
  const int error = submit_entries();
  if (error == 0) return {};
  io_uring_prep_nop(sqe);  // it stays in the queue, so it must not be a transfer
  io_uring_sqe_set_data(sqe, nullptr);
  return refused(error);
}

int UringFs::submit_entries() {
  for (int tries = 1;; ++tries) {
    const int result = io_uring_submit(&ring_);
    if (io_uring_sq_ready(&ring_) == 0) return 0;
    if (result < 0 && !is_transient(-result)) return broken_ = -result;
    if (tries == kTriesMax) return result < 0 ? -result : EAGAIN;
    if (result < 0) std::this_thread::sleep_for(kBetweenTries);
  }
}

// Fails what could not be started. Its callback may submit the next request, on this thread.
void UringFs::fail_refused() {
  while (true) {
    std::unique_ptr<IoRequest> request;
    {
      const Lock lock(mutex_);
      request = refused_.pop();
    }
    if (!request) return;
    call_done(*request, copy_of(request->refusal));
  }
}

void UringFs::reap() noexcept {
  std::array<Completion, 16> taken;
  while (!drained()) {
    wait_for_completion();
    const size_t count = take_completions(taken);
    for (size_t i = 0; i < count; ++i) {
      if (taken[i].request == nullptr) continue;
      complete(std::unique_ptr<IoRequest>(taken[i].request), taken[i].result);
    }
  }
}

void UringFs::wait_for_completion() {
  io_uring_cqe* first = nullptr;
  __kernel_timespec limit{kLookAgainS, 0};
  const int error = -io_uring_wait_cqe_timeout(&ring_, &first, &limit);
  if (error <= 0 || error == ETIME || is_transient(error)) return;
  std::this_thread::sleep_for(kBetweenTries);  // completions can still be seen, not waited for
}

size_t UringFs::take_completions(std::array<Completion, 16>& taken) {
  // The kernel orders a completion after its submission; the mutex says so to a race detector.
  const Lock lock(mutex_);
  std::array<io_uring_cqe*, 16> cqes;
  const unsigned count = io_uring_peek_batch_cqe(&ring_, cqes.data(), cqes.size());
  for (unsigned i = 0; i < count; ++i) {
    taken[i] = {static_cast<IoRequest*>(io_uring_cqe_get_data(cqes[i])), cqes[i]->res};
  }
  io_uring_cq_advance(&ring_, count);
  return count;
}

void UringFs::complete(std::unique_ptr<IoRequest> request, int result) {
  Status status;
  Progress progress = Progress::finished;
  const Status internal = guarded([&] { progress = apply_result(*request, result, status); });
  const bool again = internal.ok() && progress == Progress::again;
  if (!again) {
    call_done(*request, internal.ok() ? std::move(status) : copy_of(internal));
    request.reset();
  }
  {
    const Lock lock(mutex_);
    if (again && issue(std::move(request))) return;
    --in_flight_;
    issue_pending();
  }
  fail_refused();
}

bool UringFs::drained() {
  const Lock lock(mutex_);
  return closed_ && in_flight_ == 0 && pending_.empty();
}

int UringFs::register_buffer(std::byte* memory, uint64_t bytes) {
  const Lock lock(mutex_);
  if (closed_ || free_slots_.empty()) return -1;
  const int slot = free_slots_.back();
  const iovec range{memory, bytes};
  const auto index = static_cast<unsigned>(slot);
  if (io_uring_register_buffers_update_tag(&ring_, index, &range, nullptr, 1) != 1) return -1;
  free_slots_.pop_back();
  return slot;
}

void UringFs::unregister_buffer(int slot) {
  const Lock lock(mutex_);
  if (closed_ || slot < 0) return;
  const iovec nothing{nullptr, 0};
  const auto index = static_cast<unsigned>(slot);
  if (io_uring_register_buffers_update_tag(&ring_, index, &nothing, nullptr, 1) != 1) return;
  free_slots_.push_back(slot);
}

void UringFs::wake_reaper() {
  io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
  if (sqe == nullptr) return;  // it looks by itself, too
  io_uring_prep_nop(sqe);
  io_uring_sqe_set_data(sqe, nullptr);
  static_cast<void>(submit_entries());  // likewise
}

void UringFs::close() {
  {
    const Lock lock(mutex_);
    if (!std::exchange(closed_, true) && reaper_.joinable()) wake_reaper();
  }
  std::call_once(closing_, [this] {
    if (reaper_.joinable()) reaper_.join();
    if (ring_open_) io_uring_queue_exit(&ring_);
  });
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
      "io_uring is not available (" + std::generic_category().message(error) + "): ";
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
