// fs_uring: contract in fs_uring.h.
//
// Facts relied on:
// - Work that the kernel hands to its own threads is cancelled when the submitting thread exits;
//   apply_result() re-issues on ECANCELED.
// - Registered buffers count against RLIMIT_MEMLOCK without CAP_IPC_LOCK; refusal only costs speed.
// - The completion queue has twice the entries of the submission queue, so `depth` plus one wake-up
//   cannot overflow it.
// - Where io_uring_enter fails, the kernel has taken no entry. It can come to fail in a ring that
//   has worked: a profile that forbids it is put on the process, or somebody closes all
//   descriptors. What the kernel took before that completes all the same, in memory shared with it.
#include "fs_uring.h"

#include <cerrno>
#include <system_error>

#ifdef STATEHOLD_HAVE_URING

#include <sys/uio.h>

#include <array>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include "fs_posix.h"
#include "io_queue.h"
#include "mutex.h"
#include "ring.h"

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
  using Taken = std::array<Ring::Completion, 16>;

  void reap() noexcept;
  void wait_for_completion();
  size_t take_completions(Taken& taken);
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
  Ring ring_;
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
  const int error = ring_.open(static_cast<unsigned>(depth_ + 1));
  if (error != 0) return error;
  if (ring_.register_table(kSlots)) {
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
  Ring::Entry* entry = ring_.next_entry(reinterpret_cast<uint64_t>(&request));
  if (entry == nullptr) return refused(EAGAIN);  // full of what the kernel did not take
  Ring::make_transfer(*entry, is_read, fd, memory, bytes, offset, request.slot);
  const int error = submit_entries();
  if (error == 0) return {};
  Ring::make_nothing(*entry, 0);  // it stays in the queue, so it must not be a transfer
  return refused(error);
}

int UringFs::submit_entries() {
  for (int tries = 1;; ++tries) {
    const int error = ring_.submit();
    if (ring_.not_taken() == 0) return 0;
    if (error != 0 && !is_transient(error)) return broken_ = error;
    if (tries == kTriesMax) return error != 0 ? error : EAGAIN;
    if (error != 0) std::this_thread::sleep_for(kBetweenTries);
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
  Taken taken;
  while (!drained()) {
    wait_for_completion();
    const size_t count = take_completions(taken);
    for (size_t i = 0; i < count; ++i) {
      // 0: a wake-up, or a transfer that was withdrawn.
      if (taken[i].user_data == 0) continue;
      auto* request = reinterpret_cast<IoRequest*>(taken[i].user_data);
      complete(std::unique_ptr<IoRequest>(request), taken[i].result);
    }
  }
}

void UringFs::wait_for_completion() {
  const int error = ring_.wait(kLookAgainS);
  if (error == 0 || error == ETIME || is_transient(error)) return;
  std::this_thread::sleep_for(kBetweenTries);  // completions can still be seen, not waited for
}

size_t UringFs::take_completions(Taken& taken) {
  // The kernel orders a completion after its submission; the mutex says so to a race detector.
  const Lock lock(mutex_);
  return ring_.take(taken.data(), taken.size());
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
  if (!ring_.update_table(index, range)) return -1;
  free_slots_.pop_back();
  return slot;
}

void UringFs::unregister_buffer(int slot) {
  const Lock lock(mutex_);
  if (closed_ || slot < 0) return;
  const iovec nothing{nullptr, 0};
  const auto index = static_cast<unsigned>(slot);
  if (!ring_.update_table(index, nothing)) return;
  free_slots_.push_back(slot);
}

void UringFs::wake_reaper() {
  if (ring_.next_entry(0) == nullptr) return;  // it looks by itself, too
  static_cast<void>(submit_entries());         // likewise
}

void UringFs::close() {
  {
    const Lock lock(mutex_);
    if (!std::exchange(closed_, true) && reaper_.joinable()) wake_reaper();
  }
  std::call_once(closing_, [this] {
    if (reaper_.joinable()) reaper_.join();
    ring_.close();
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
      return reason + "it needs Linux 5.19 or later and a statehold built with io_uring";
    case ENOMEM:
      return reason + "raise the limit of locked memory (ulimit -l)";
    case EMFILE:
      return reason + "raise the limit of open files (ulimit -n)";
    default:
      return reason + "see io_uring_setup(2)";
  }
}

}  // namespace statehold
