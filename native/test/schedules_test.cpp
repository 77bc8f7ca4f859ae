// Seeded schedules: several users share one engine with few buffers, on the simulated disk, and
// all of them have to end, with the right bytes, checksums and no buffer missing. Some of them are
// one client of the engine, and some are clients of their own. They behave as
// the Python side does: saves are served in the order of their starts by one thread that copies and
// one that opens files and commits, a save gets its file only when the one before it has ended, and
// nobody who holds a buffer waits for another one.
//
//   STATEHOLD_SCHEDULES=10000   how many seeds (default 100)
//   STATEHOLD_SCHEDULE=17       the first seed (default 0)
//
// A schedule that does not end within a minute ends the program, and says which seed it was.
#include <unistd.h>

#include <cstdlib>
#include <deque>
#include <functional>
#include <thread>

#include "fs_sim.h"
#include "state.h"
#include "test.h"

using namespace statehold;
using namespace statehold::test;

namespace {

constexpr uint64_t kBufferBytes = 16 << 10;
constexpr uint64_t kSavesInFlightMax = 2;

uint64_t number_from_env(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// Ends the program if it is not gone in time: threads that are stuck cannot be ended otherwise.
class Watchdog {
 public:
  explicit Watchdog(uint64_t seed) : thread_([this, seed] { watch(seed); }) {}
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

 private:
  void watch(uint64_t seed) {
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, std::chrono::minutes(1), [this] { return over_; })) return;
    std::printf("FAIL  schedule %llu does not end\n", static_cast<unsigned long long>(seed));
    std::fflush(stdout);
    ::_exit(1);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  std::thread thread_;
};

class Event {
 public:
  void set() {
    {
      const std::lock_guard lock(mutex_);
      is_set_ = true;
    }
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return is_set_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_set_ = false;
};

struct World {
  std::mt19937_64 random;
  bool has_faults;
  std::vector<ClientOptions> clients;
  std::shared_ptr<SimFs> fs;
  std::unique_ptr<Engine> engine;
  uint64_t block_bytes;
  std::mutex mutex;
  Status failure;  // guarded by mutex

  explicit World(uint64_t seed)
      : random(seed),
        has_faults(random() % 3 == 0),
        clients(1 + random() % 3),
        fs(std::make_shared<SimFs>(SimOptions{.seed = seed, .short_io = 0.2, .slow = 0.1})),
        block_bytes(random() % 2 == 0 ? kPageBytes : kBufferBytes) {
    must(fs->mkdir("run"));
    uint64_t buffers = random() % 3 == 0 ? 0 : random() % 6;
    for (ClientOptions& each : clients) {
      each = {1 + random() % 2, 1 + random() % 4};
      buffers += each.reserved_buffers;
    }
    const auto threads = static_cast<int>(1 + random() % 3);
    engine = std::make_unique<Engine>(
        fs, EngineOptions{buffers * kBufferBytes, kBufferBytes, threads, clients});
  }

  uint32_t client_of(uint64_t seed) const { return static_cast<uint32_t>(seed % clients.size()); }

  void let_transfers_fail(uint64_t seed) {
    if (!has_faults) return;
    fs->disk().set_faults({.seed = seed, .short_io = 0.2, .eio = 0.02, .slow = 0.1});
  }

  // Of a thread that cannot throw.
  void report(const Status& status) {
    const std::lock_guard lock(mutex);
    if (failure.ok()) failure = status;
  }

  // All jobs have left the engine, and every buffer is back.
  void check_that_all_is_back() {
    const std::shared_ptr<Shared>& shared = engine->shared();
    Lock lock(shared->mutex());
    while (!shared->jobs.empty()) shared->changed.wait(lock);
    EXPECT(shared->pool.lent_count() == 0);
    EXPECT(shared->poison.ok());
    lock.unlock();
    must(std::move(failure));
  }
};

// A thread that does what it is given, in order, as Python's executors do.
class Serial {
 public:
  explicit Serial(World& world) : world_(world), thread_([this] { serve(); }) {}
  ~Serial() {
    give(nullptr);
    thread_.join();
  }

  void give(std::function<void()> task) {
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_all();
  }

 private:
  void serve() {
    while (true) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      if (!task) return;
      if (const Status status = guarded(task); !status.ok()) world_.report(status);
    }
  }

  World& world_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::thread thread_;
};

void pause(uint64_t choice) {
  if (choice % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(choice % 400));
}

// Moves every buffer that is lent; waits for the next one only while holding none.
template <class Lent, class Take, class Move, class GiveBack>
void relay(uint64_t hold_max, Take&& take, Move&& move, GiveBack&& give_back) {
  std::deque<Lent> held;
  const auto land = [&] {
    give_back(held.front());
    held.pop_front();
  };
  try {
    while (true) {
      const Deadline now = std::chrono::steady_clock::now();
      std::optional<Lent> lent;
      if (held.size() < hold_max) lent = take(held.empty() ? std::nullopt : now);
      if (lent) {
        move(*lent);
        held.push_back(std::move(*lent));
      } else if (!held.empty()) {
        land();
      } else {
        return;
      }
    }
  } catch (...) {
    while (!held.empty()) land();
    throw;
  }
}

// -- saves ----------------------------------------------------------------------------------------

struct Save {
  enum class End : uint8_t { commits, gets_no_file, is_cancelled };

  State state;
  std::string image;
  std::vector<uint64_t> sums;
  std::string path;
  std::shared_ptr<WriteJob> job;
  uint64_t choice = 0;
  bool is_attached = false;  // from the start
  End end = End::commits;
  Event staged;
  Event ended;

  Save(World& world, std::mt19937_64& random, std::string name)
      : state(random(), random() % 2 == 0, random() % 2 == 0 ? 20'000 : 60'000),
        image(state.image()),
        sums(state.checksums(world.block_bytes)),
        path(std::move(name)),
        choice(random()) {
    // Eager and external bytes in every mixture, all of a state included.
    const uint64_t eager = random() % 4;
    for (size_t i = 0; i < state.eager.size(); ++i) {
      state.eager[i] = eager == 0 || (eager < 3 && random() % 3 == 0);
    }
    if (random() % 8 == 0) end = End::gets_no_file;
    if (random() % 8 == 0) end = End::is_cancelled;
  }
};

// One trainer with its two threads.
class Saver {
 public:
  Saver(World& world, uint64_t seed)
      : world_(world),
        random_(seed),
        name_(std::to_string(seed)),
        client_(world.client_of(seed)),
        stager_(world),
        committer_(world) {}

  void run() {
    const uint64_t count = 1 + random_() % 4;
    for (uint64_t i = 0; i < count; ++i) {
      const auto save =
          std::make_shared<Save>(world_, random_, "run/" + name_ + "-" + std::to_string(i));
      if (saves_.size() >= kSavesInFlightMax)
        saves_[saves_.size() - kSavesInFlightMax]->ended.wait();
      if (!start(save)) continue;
      saves_.push_back(save);
      stager_.give([this, save] { stage(*save); });
      committer_.give([this, save] { commit(*save); });
      finish_call(*save);
    }
    for (const auto& save : saves_) save->ended.wait();
  }

 private:
  std::shared_ptr<File> open(Save& save) {
    return must(world_.fs->open_write(save.path, save.image.size(), false));
  }

  // False: the call fails before it hands the job over.
  bool start(const std::shared_ptr<Save>& save) {
    WriteRequest request = save->state.write_request(world_.block_bytes);
    request.client = client_;
    if (random_() % 6 == 0) request.file = open(*save);
    save->is_attached = request.file != nullptr;
    save->job = world_.engine->write(std::move(request));
    if (random_() % 10 == 0) {
      save->job->cancel();
      return false;
    }
    return true;
  }

  // The rest of save(), and the next step: eager bytes change once it has returned, the others
  // once they are staged.
  void finish_call(Save& save) {
    const uint64_t choice = random_();
    try {
      save.job->wait_eager(std::nullopt);
    } catch (const Failure&) {
      return;
    }
    for (size_t i = 0; i < save.state.arrays.size(); ++i) {
      if (save.state.eager[i] && !save.state.external[i]) scribble(save.state.arrays[i]);
    }
    if (save.end == Save::End::is_cancelled) {
      pause(choice);
      save.job->cancel();
      for (size_t i = 0; i < save.state.arrays.size(); ++i) {  // quiet: they may be freed
        if (!save.state.external[i]) std::vector<std::byte>().swap(save.state.arrays[i]);
      }
    }
    if (choice % 3 == 0) save.staged.wait();
  }

  static void scribble(std::vector<std::byte>& array) { std::ranges::fill(array, std::byte{0xee}); }

  void stage(Save& save) {
    try {
      relay<Fill>(
          1 + save.choice % 3, [&](Deadline deadline) { return save.job->next_fill(deadline); },
          [&](const Fill& fill) { fill_one(*world_.engine, fill, save.state); },
          [&](const Fill& fill) { save.job->filled(fill); });
      save.job->wait_copied(std::nullopt);
    } catch (const Failure&) {
      save.job->cancel();
    }
    save.staged.set();
  }

  void commit(Save& save) {
    const Status status = guarded([&] { write(save); });
    if (!status.ok()) save.job->cancel();
    save.staged.wait();
    const Status checked = guarded([&] { check(save, status); });
    save.ended.set();
    must(checked);
  }

  void write(Save& save) {
    pause(save.choice / 7);
    if (save.end == Save::End::gets_no_file) throw Failure(Status::io(ENOSPC, "open", save.path));
    if (!save.is_attached) save.job->attach(open(save));
    save.job->wait_written(std::nullopt);
    save.staged.wait();
    save.job->finish();
  }

  void check(Save& save, const Status& status) {
    const bool must_succeed = save.end == Save::End::commits && !world_.has_faults;
    EXPECT(status.ok() || !must_succeed);
    EXPECT(status.ok() || status.code == Code::io || status.code == Code::closed);
    if (!status.ok()) return;
    EXPECT(save.job->checksums() == save.sums);
    const Result<std::string> data = world_.fs->read_file(save.path, save.image.size());
    EXPECT(data.ok());
    EXPECT(data.value == save.image);
  }

  World& world_;
  std::mt19937_64 random_;
  const std::string name_;
  const uint32_t client_;
  std::vector<std::shared_ptr<Save>> saves_;
  Serial stager_;
  Serial committer_;
};

// -- reads, and copies of files
// ---------------------------------------------------------------------

// A file that is there before anything fails.
struct Stored {
  State state;
  std::string path;
  std::vector<uint64_t> sums;

  Stored(World& world, uint64_t seed)
      : state(seed, false, 60'000),
        path("run/stored-" + std::to_string(seed)),
        sums(state.checksums(world.block_bytes)) {
    const auto job = world.engine->write(state.write_request(world.block_bytes));
    job->attach(must(world.fs->open_write(path, state.bytes(), false)));
    job->wait_written(std::nullopt);
    job->finish();
  }
};

class Reader {
 public:
  Reader(World& world, uint64_t seed)
      : world_(world), random_(seed), client_(world.client_of(seed)), stored_(world, seed) {}

  void run() {
    for (uint64_t i = 0, count = 1 + random_() % 4; i < count; ++i) {
      State state = stored_.state;
      const bool cancels = random_() % 5 == 0;
      const Status status = guarded([&] { read(state, cancels); });
      EXPECT(status.ok() || cancels || world_.has_faults);
      EXPECT(status.ok() || status.code == Code::io || status.code == Code::closed);
      if (status.ok()) EXPECT(state.arrays == stored_.state.arrays);
    }
  }

 private:
  void read(State& state, bool cancels) {
    for (size_t i = 0; i < state.arrays.size(); ++i) {
      state.external[i] = !state.reversed[i] && random_() % 3 == 0;
      std::ranges::fill(state.arrays[i], std::byte{0xee});
    }
    ReadRequest request = state.read_request(stored_.path, stored_.sums, world_.block_bytes);
    for (Segment& segment : request.segments) segment.shared = random_() % 4 == 0;
    request.first_segment = random_() % request.segments.size();
    request.client = client_;
    const auto job = world_.engine->read(std::move(request));
    pause(random_());
    if (cancels) job->cancel();
    relay<Ready>(
        1 + random_() % 3, [&](Deadline deadline) { return job->next_ready(deadline); },
        [&](const Ready& ready) { empty_one(*world_.engine, ready, state); },
        [&](const Ready& ready) { job->release(ready); });
    job->wait_done(std::nullopt);
  }

  World& world_;
  std::mt19937_64 random_;
  const uint32_t client_;
  Stored stored_;
};

// Files whose bytes all come through Python, one buffer at a time, as copies to other levels do.
class Copier {
 public:
  Copier(World& world, uint64_t seed)
      : world_(world), random_(seed), name_(std::to_string(seed)), client_(world.client_of(seed)) {}

  void run() {
    for (uint64_t i = 0, count = 1 + random_() % 3; i < count; ++i) {
      State state(random_(), false, 60'000);
      state.set_arrays(state.arrays, true);
      const std::string path = "run/copy-" + name_ + "-" + std::to_string(i);
      const Status status = guarded([&] { copy(state, path); });
      EXPECT(status.ok() || world_.has_faults);
      EXPECT(status.ok() || status.code == Code::io);
    }
  }

 private:
  void copy(State& state, const std::string& path) {
    WriteRequest request = state.write_request(world_.block_bytes);
    request.client = client_;
    const auto job = world_.engine->write(std::move(request));
    job->attach(must(world_.fs->open_write(path, state.bytes(), false)));
    fill_all(*world_.engine, *job, state);
    job->wait_written(std::nullopt);
    job->finish();
    EXPECT(job->checksums() == state.checksums(world_.block_bytes));
    EXPECT(must(world_.fs->read_file(path, state.bytes())) == state.image());
  }

  World& world_;
  std::mt19937_64 random_;
  const std::string name_;
  const uint32_t client_;
};

// Ranges of one file that stays open: written, read back into other memory, in any alignment.
class Ranger {
 public:
  Ranger(World& world, uint64_t seed)
      : world_(world),
        random_(seed),
        client_(world.client_of(seed)),
        path_("run/ranges-" + std::to_string(seed)),
        writer_(must(world.fs->open_write(path_, kSlots * kSlotBytes, false))),
        reader_(must(world.fs->open_read(path_, random_() % 2 == 0))) {}

  void run() {
    for (uint64_t i = 0, count = 1 + random_() % 4; i < count; ++i) {
      const bool cancels = random_() % 4 == 0;
      const Status status = guarded([&] { move(cancels); });
      EXPECT(status.ok() || cancels || world_.has_faults);
      EXPECT(status.ok() || status.code == Code::io || status.code == Code::closed);
    }
  }

 private:
  static constexpr uint64_t kSlots = 8;
  static constexpr uint64_t kSlotBytes = 2 * kBufferBytes;

  struct Memory {
    std::vector<std::byte> bytes = std::vector<std::byte>(kSlots * kSlotBytes + 2 * kPageBytes);

    std::byte* slot(uint64_t index, uint64_t lead) {
      const auto begin = reinterpret_cast<uintptr_t>(bytes.data());
      return bytes.data() + (align_up(begin, kPageBytes) - begin) + index * kSlotBytes + lead;
    }
  };

  RangesRequest request(IoRequest::Kind kind, Memory& memory, uint64_t lead) {
    RangesRequest made{kind, {kind == IoRequest::Kind::read ? reader_ : writer_}};
    made.client = client_;
    made.staged = is_packed_;
    uint64_t end = 0;
    for (uint64_t slot = 0; slot < kSlots; ++slot) {
      const uint64_t begin = is_packed_ ? end : slot * kSlotBytes;
      made.ranges.push_back({0, begin, sizes_[slot], memory.slot(slot, lead), sums_[slot]});
      end = align_up(begin + sizes_[slot], kPageBytes);
    }
    return made;
  }

  void end(RangesJob& job, bool cancels) {
    pause(random_());
    if (cancels) job.cancel();
    std::vector<uint64_t> told;
    while (true) {
      const std::vector<uint64_t> done = job.next_done(std::nullopt);
      if (done.empty()) break;
      told.insert(told.end(), done.begin(), done.end());
    }
    EXPECT(told.size() == kSlots);
    job.wait_done(std::nullopt);
  }

  void move(bool cancels) {
    Memory from;
    Memory into;
    const uint64_t lead = random_() % 2 == 0 ? 0 : random_() % kPageBytes;
    is_packed_ = random_() % 2 == 0;
    for (std::byte& b : from.bytes) b = static_cast<std::byte>(random_());
    sizes_.clear();
    for (uint64_t slot = 0; slot < kSlots; ++slot) {
      const uint64_t bytes = random_() % kSlotBytes;
      sizes_.push_back(random_() % 2 == 0 ? bytes : align_down(bytes, kPageBytes));
    }
    sums_.assign(kSlots, 0);
    const auto writing = world_.engine->ranges(request(IoRequest::Kind::write, from, lead));
    end(*writing, cancels);
    sums_ = writing->checksums();
    const auto reading = world_.engine->ranges(request(IoRequest::Kind::read, into, 0));
    end(*reading, random_() % 8 == 0 && cancels);
    for (uint64_t slot = 0; slot < kSlots; ++slot) {
      EXPECT(std::equal(from.slot(slot, lead), from.slot(slot, lead) + sizes_[slot],
                        into.slot(slot, 0)));
    }
  }

  World& world_;
  std::mt19937_64 random_;
  const uint32_t client_;
  const std::string path_;
  const std::shared_ptr<File> writer_;
  const std::shared_ptr<File> reader_;
  std::vector<uint64_t> sizes_ = {};
  std::vector<uint64_t> sums_ = {};
  bool is_packed_ = false;  // side by side in the file, and through buffers
};

// -- schedules
// --------------------------------------------------------------------------------------

std::function<void()> user(World& world, uint64_t kind, uint64_t seed) {
  const auto runs = [](auto made) { return [made] { made->run(); }; };
  switch (kind % 5) {
    case 0:
      return runs(std::make_shared<Reader>(world, seed));
    case 1:
      return runs(std::make_shared<Copier>(world, seed));
    case 2:
      return runs(std::make_shared<Ranger>(world, seed));
    default:
      return runs(std::make_shared<Saver>(world, seed));
  }
}

void run_schedule(uint64_t seed) {
  const Watchdog watchdog(seed);
  World world(seed);
  std::vector<std::function<void()>> users = {user(world, 3, world.random())};
  for (uint64_t i = 0, others = 1 + world.random() % 3; i < others; ++i) {
    const uint64_t kind = world.random();
    users.push_back(user(world, kind, world.random()));
  }
  world.let_transfers_fail(seed);
  std::vector<std::thread> threads;
  for (const auto& run : users) {
    threads.emplace_back([&world, run] {
      if (const Status status = guarded(run); !status.ok()) world.report(status);
    });
  }
  for (std::thread& thread : threads) thread.join();
  users.clear();
  world.check_that_all_is_back();
  world.engine->close();
}

}  // namespace

TEST(every_job_of_every_schedule_ends) {
  const uint64_t first = number_from_env("STATEHOLD_SCHEDULE", 0);
  const uint64_t count = number_from_env("STATEHOLD_SCHEDULES", 100);
  for (uint64_t seed = first; seed < first + count; ++seed) {
    if (const Status status = guarded([&] { run_schedule(seed); }); !status.ok()) {
      std::printf("schedule %llu: %s\n", static_cast<unsigned long long>(seed),
                  status.operation.c_str());
      throw Failure(status);
    }
  }
}

TEST_MAIN
