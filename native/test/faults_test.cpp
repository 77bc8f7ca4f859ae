// What is thrown on a native thread, and what io_uring refuses: the process goes on, every job and
// every transfer ends, close() returns. A child runs what would otherwise end or hang this process.
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <future>
#include <new>
#include <thread>

#include "folder.h"
#include "fs_sim.h"
#include "fs_threads.h"
#include "fs_uring.h"
#include "state.h"
#include "test.h"

using namespace statehold;
using namespace statehold::test;

namespace {

constexpr uint64_t kBufferBytes = 16 << 10;
constexpr unsigned kDeadlineS = 60;

// Which allocation of the process fails, counted from when it was set: 1 is the next one.
std::atomic<long> failing_allocation{0};

bool fails_now() {
  long left = failing_allocation.load(std::memory_order_relaxed);
  while (left > 0 && !failing_allocation.compare_exchange_weak(left, left - 1)) {
  }
  return left == 1;
}

// Runs `body` in a child, within a deadline; fails unless it returns.
void in_child(const std::function<void()>& body) {
  std::fflush(stdout);
  const pid_t child = ::fork();
  EXPECT(child >= 0);
  if (child == 0) {
    ::alarm(kDeadlineS);
    const Status status = guarded(body);
    if (!status.ok()) std::printf("in the child: %s\n", status.operation.c_str());
    std::fflush(stdout);
    ::_exit(status.ok() ? 0 : 1);
  }
  int how = 0;
  EXPECT(::waitpid(child, &how, 0) == child);
  if (WIFSIGNALED(how)) std::printf("the child ended by signal %d\n", WTERMSIG(how));
  EXPECT(WIFEXITED(how) && WEXITSTATUS(how) == 0);
}

// A simulated disk with hooks, which may throw.
class HookedFs final : public Fs {
 public:
  HookedFs() : fs_(std::make_shared<SimFs>(SimOptions{})) { must(fs_->mkdir("run")); }

  std::function<void()> on_submit = [] {};
  std::function<void()> on_register = [] {};
  std::function<void()> on_file_dropped = [] {};

  std::string backend() const override { return fs_->backend(); }
  Status mkdir(const std::string& path) override { return fs_->mkdir(path); }
  Status rename(const std::string& a, const std::string& b) override { return fs_->rename(a, b); }
  Status exchange(const std::string& a, const std::string& b) override {
    return fs_->exchange(a, b);
  }
  Status link(const std::string& a, const std::string& b) override { return fs_->link(a, b); }
  Status unlink(const std::string& path) override { return fs_->unlink(path); }
  Status rmdir(const std::string& path) override { return fs_->rmdir(path); }
  Result<std::vector<DirEntry>> listdir(const std::string& path) override {
    return fs_->listdir(path);
  }
  Result<int64_t> stat_bytes(const std::string& path) override { return fs_->stat_bytes(path); }
  Result<bool> is_dir(const std::string& path) override { return fs_->is_dir(path); }
  Status sync_dir(const std::string& path) override { return fs_->sync_dir(path); }
  Status write_file(const std::string& path, std::string_view data) override {
    return fs_->write_file(path, data);
  }
  Result<std::string> read_file(const std::string& path, uint64_t bytes_max) override {
    return fs_->read_file(path, bytes_max);
  }
  Result<std::shared_ptr<File>> open_write(const std::string& path, uint64_t bytes,
                                           bool reuse) override {
    return hooked(fs_->open_write(path, bytes, reuse));
  }
  Result<std::shared_ptr<File>> open_read(const std::string& path, bool direct) override {
    return hooked(fs_->open_read(path, direct));
  }
  bool can_reuse(const std::string& path) override { return fs_->can_reuse(path); }
  void submit(IoRequest request) override {
    on_submit();
    fs_->submit(std::move(request));
  }
  int register_buffer(std::byte*, uint64_t) override {
    on_register();
    return -1;
  }
  void close() override { fs_->close(); }

 private:
  Result<std::shared_ptr<File>> hooked(Result<std::shared_ptr<File>> opened) {
    if (!opened.ok()) return opened;
    File* file = opened.value.get();
    const auto drop = [this, owner = std::move(opened.value)](File*) mutable {
      on_file_dropped();
      owner.reset();
    };
    return {{}, std::shared_ptr<File>(file, drop)};
  }

  const std::shared_ptr<SimFs> fs_;
};

// A job that throws at a chosen call.
class ThrowingJob final : public Job {
 public:
  enum class Where : uint8_t { take, drop_queued };

  ThrowingJob(std::shared_ptr<Shared> shared, Where where)
      : Job(std::move(shared), 0, kPageBytes), where_(where) {}

  bool take(Priority, Work&) override {
    CHECK(where_ != Where::take);
    return false;
  }
  void run(const Work&) override {}
  void wait_done() {
    wait(std::nullopt, [] { return false; });
  }

 private:
  bool complete() const override { return false; }
  void drop_queued() override { CHECK(where_ != Where::drop_queued); }
  uint64_t buffers_left() const override { return 0; }
  uint64_t buffers_wanted() const override { return 0; }
  void drop_files() override {}
  void transferred(uint64_t, Status) override {}
  BlockState& block_state(uint64_t) override { return block_; }

  BlockState block_;
  const Where where_;
};

// A state of several buffers.
State some_state() {
  State state(3, false);
  state.set_arrays({std::vector<std::byte>(5 * kBufferBytes, std::byte{7})});
  return state;
}

Code code_of_wait(const std::function<void()>& wait) {
  try {
    wait();
  } catch (const Failure& failure) {
    return failure.status.code;
  }
  return Code::ok;
}

// A save through an Fs whose hook throws fails with that, and the engine can be closed.
void save_while_it_throws(std::function<void()> HookedFs::* hook) {
  const auto fs = std::make_shared<HookedFs>();
  std::atomic<int> thrown = 0;
  (*fs).*hook = [&thrown] {
    ++thrown;
    throw std::runtime_error("thrown by the test");
  };
  Engine engine(fs, {3 * kBufferBytes, kBufferBytes, 2});
  State state = some_state();
  const auto job = engine.write(state.write_request(kPageBytes));
  job->attach(must(fs->open_write("run/f", state.bytes(), false)));
  EXPECT(code_of_wait([&] { job->wait_written(std::nullopt); }) == Code::invariant);
  EXPECT(thrown > 0);
  engine.close();
  const Lock lock(engine.shared()->mutex());
  EXPECT(engine.shared()->jobs.empty());
}

// Whether another thread can take the mutex soon: the calling one does not hold it.
bool is_free(Mutex& mutex) {
  bool taken = false;
  std::thread([&] {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (!taken && std::chrono::steady_clock::now() < end) {
      taken = mutex.try_lock();
      std::this_thread::yield();
    }
    if (taken) mutex.unlock();
  }).join();
  return taken;
}

// Jobs that end in every way, and the last owner of their files is a thread of the engine.
void drop_files_in_every_way() {
  const auto fs = std::make_shared<HookedFs>();
  Engine engine(fs, {3 * kBufferBytes, kBufferBytes, 2});
  std::atomic<int> dropped = 0;
  std::atomic<int> dropped_with_mutex = 0;
  fs->on_file_dropped = [&] {
    ++dropped;
    if (!is_free(engine.shared()->mutex())) ++dropped_with_mutex;
  };
  State state = some_state();
  const auto start = [&](const std::string& path) {
    const auto job = engine.write(state.write_request(kPageBytes));
    job->attach(must(fs->open_write(path, state.bytes(), false)));
    return job;
  };
  const auto job = start("run/written");
  job->wait_written(std::nullopt);
  job->finish();
  start("run/cancelled")->cancel();
  std::vector<uint64_t> sums = job->checksums();
  const auto read = [&] {
    engine.read(state.read_request("run/written", sums, kPageBytes))->wait_done(std::nullopt);
  };
  read();
  sums.back() ^= 1;
  EXPECT(code_of_wait(read) == Code::mismatch);
  static_cast<void>(start("run/closed"));
  engine.close();
  fs->close();           // its thread may be the last owner
  EXPECT(dropped >= 7);  // a read opens a file twice
  EXPECT(dropped_with_mutex == 0);
}

void start_throwing(ThrowingJob::Where where) {
  Engine engine(std::make_shared<SimFs>(SimOptions{}), {2 * kBufferBytes, kBufferBytes, 2});
  State state = some_state();
  const auto other = engine.write(state.write_request(kPageBytes));
  const auto job = std::make_shared<ThrowingJob>(engine.shared(), where);
  engine.start(job);
  if (where == ThrowingJob::Where::drop_queued) job->cancel();
  EXPECT(code_of_wait([&] { other->wait_written(std::nullopt); }) == Code::invariant);
  EXPECT(code_of_wait([&] { job->wait_done(); }) != Code::ok);
  EXPECT_THROWS(Failure, engine.write(state.write_request(kPageBytes)));
  engine.close();
}

bool has_uring(const char* name) {
  const Result<std::shared_ptr<Fs>> fs = open_uring(3);
  if (!fs.ok()) std::printf("skip  %s: %s\n", name, uring_hint(fs.status.error).c_str());
  return fs.ok();
}

// A transfer that no file system can make, for a CHECK fails: it has no bytes.
IoRequest impossible(Fs& fs, const std::string& folder, std::vector<Status>& told) {
  IoRequest request;
  request.kind = IoRequest::Kind::write;
  request.file = must(fs.open_write(folder + "/f", kPageBytes, false));
  request.done = [&told](Status status) { told.push_back(std::move(status)); };
  return request;
}

void refuse_the_impossible(const std::shared_ptr<Fs>& fs, const std::string& folder) {
  std::vector<Status> told;
  fs->submit(impossible(*fs, folder, told));
  fs->close();
  EXPECT(told.size() == 1);
  EXPECT(told[0].code == Code::invariant);
}

void end_in_spite_of_done(const std::shared_ptr<Fs>& fs, const std::string& folder) {
  std::vector<Status> told;
  int thrown = 0;
  IoRequest request = impossible(*fs, folder, told);
  request.done = [&thrown](const Status&) {
    ++thrown;
    throw std::runtime_error("against the contract");
  };
  fs->submit(std::move(request));
  fs->close();
  EXPECT(thrown == 1);
}

// While a callback is under way, two threads close: neither returns before it has returned.
void close_twice(const std::shared_ptr<Fs>& fs, const std::string& folder) {
  std::promise<void> go_on;
  std::atomic<bool> is_over = false;
  IoRequest request;
  request.kind = IoRequest::Kind::write;
  request.file = must(fs->open_write(folder + "/f", kPageBytes, false));
  alignas(kPageBytes) static std::byte page[kPageBytes] = {};
  request.memory = page;
  request.bytes = request.bytes_min = kPageBytes;
  request.done = [&](const Status&) {
    go_on.get_future().wait();
    is_over = true;
  };
  fs->submit(std::move(request));
  std::array<std::future<bool>, 2> closed;
  for (auto& each : closed) {
    each = std::async(std::launch::async, [&] {
      fs->close();
      return is_over.load();
    });
  }
  static_cast<void>(closed[1].wait_for(std::chrono::milliseconds(20)));  // both are in it by then
  go_on.set_value();
  for (auto& each : closed) EXPECT(each.get());
}

// From now on io_uring_enter fails with this errno, for all threads of the process.
void refuse_io_uring_enter(int error) {
  const auto refuse = SECCOMP_RET_ERRNO | static_cast<uint32_t>(error);
  sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_enter, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, refuse),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{std::size(code), code};
  EXPECT(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
  EXPECT(::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0);
}

void save_while_enter_fails(int error) {
  const Folder folder;
  const std::shared_ptr<Fs> fs = must(open_uring(3));
  Engine engine(fs, {3 * kBufferBytes, kBufferBytes, 2});
  State state = some_state();
  for (int round = 0; round < 2; ++round) {
    const std::string path = folder.path + "/" + std::to_string(round);
    const auto job = engine.write(state.write_request(kPageBytes));
    const Code code = code_of_wait([&] {
      job->attach(must(fs->open_write(path, state.bytes(), false)));
      job->wait_written(std::nullopt);
      job->finish();
    });
    EXPECT(code == (round == 0 ? Code::ok : Code::io));
    if (round == 0) refuse_io_uring_enter(error);
  }
  engine.close();
  fs->close();
}

// As Python does it: the buffer comes back, also where it could not be filled.
void move_outside(Engine& engine, WriteJob& job, State& state) {
  while (const std::optional<Fill> fill = job.next_fill(std::nullopt)) {
    const Status status = guarded([&] {
      fill_one(engine, *fill, state);
      job.filled(*fill);
    });
    if (status.ok()) continue;
    job.cancel();
    job.filled(*fill);
    throw Failure(status);
  }
}

void move_outside(Engine& engine, ReadJob& job, State& state) {
  while (const std::optional<Ready> ready = job.next_ready(std::nullopt)) {
    empty_one(engine, *ready, state);
    job.release(*ready);
  }
}

// A save, a read of it and a cancelled save; of all they do, on whatever thread, the n-th
// allocation fails. False: there are not so many.
bool work_without_memory(long failing, bool is_external) {
  const auto fs = std::make_shared<SimFs>(SimOptions{});
  must(fs->mkdir("run"));
  State state = some_state();
  state.external.assign(1, is_external);
  Engine engine(fs, {2 * kBufferBytes, kBufferBytes, 2});
  failing_allocation = failing;
  const Status status = guarded([&] {
    const auto file = must(fs->open_write("run/f", state.bytes(), false));
    const auto job = engine.write(state.write_request(kPageBytes));
    job->attach(file);
    move_outside(engine, *job, state);
    job->wait_written(std::nullopt);
    job->finish();
    const auto read = engine.read(state.read_request("run/f", job->checksums(), kPageBytes));
    move_outside(engine, *read, state);
    read->wait_done(std::nullopt);
    engine.write(state.write_request(kPageBytes))->cancel();
  });
  engine.close();
  fs->close();
  const bool has_failed = failing_allocation.exchange(0) == 0;
  EXPECT(has_failed || status.ok());
  EXPECT(status.ok() || status.error == ENOMEM);
  const Lock lock(engine.shared()->mutex());
  // A poisoned engine lends no more.
  EXPECT(!engine.shared()->poison.ok() || engine.shared()->pool.lent_count() == 0);
  return has_failed;
}

}  // namespace

// Not inlined: a compiler that sees through one of them takes it for mismatched.
[[gnu::noinline]] void* operator new(size_t bytes) {
  if (fails_now()) throw std::bad_alloc();
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

TEST(submit_throws) {
  in_child([] { save_while_it_throws(&HookedFs::on_submit); });
}

TEST(register_buffer_throws) {
  in_child([] { save_while_it_throws(&HookedFs::on_register); });
}

TEST(files_are_dropped_without_the_mutex) { in_child(drop_files_in_every_way); }

TEST(take_throws) {
  in_child([] { start_throwing(ThrowingJob::Where::take); });
}

TEST(giving_back_throws_while_failing) {
  in_child([] { start_throwing(ThrowingJob::Where::drop_queued); });
}

TEST(any_allocation_fails) {
  for (const bool is_external : {false, true}) {
    in_child([&] {
      long failing = 1;
      while (work_without_memory(failing, is_external)) {
        ++failing;
        ::alarm(kDeadlineS);  // for each of them
      }
      EXPECT(failing > 100);
    });
  }
}

TEST(two_close_at_once) {
  const Folder folder;
  const auto disk = std::make_shared<SimFs>(SimOptions{});
  must(disk->mkdir("run"));
  close_twice(disk, "run");
  close_twice(std::make_shared<ThreadsFs>(1, ""), folder.path);
  if (!has_uring("two_close_at_once")) return;
  const Folder other;
  close_twice(must(open_uring(3)), other.path);
}

TEST(an_impossible_transfer_fails_alone) {
  const Folder folder;
  in_child([&] { refuse_the_impossible(std::make_shared<ThreadsFs>(1, ""), folder.path); });
  if (!has_uring("an_impossible_transfer_fails_alone")) return;
  const Folder other;
  in_child([&] { refuse_the_impossible(must(open_uring(3)), other.path); });
}

TEST(done_throws) {
  const Folder folder;
  in_child([&] { end_in_spite_of_done(std::make_shared<ThreadsFs>(1, ""), folder.path); });
  if (!has_uring("done_throws")) return;
  const Folder other;
  in_child([&] { end_in_spite_of_done(must(open_uring(3)), other.path); });
}

TEST(io_uring_is_forbidden_while_running) {
  if (!has_uring("io_uring_is_forbidden_while_running")) return;
  in_child([] { save_while_enter_fails(EPERM); });
}

TEST(io_uring_has_no_memory) {
  if (!has_uring("io_uring_has_no_memory")) return;
  in_child([] { save_while_enter_fails(EAGAIN); });
}

TEST_MAIN
