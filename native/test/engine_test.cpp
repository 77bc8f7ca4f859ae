// The engine under load, over every Fs: saves and restores at once, external fills, cancellation,
// faults. Meant to be run under the thread and address sanitizers, too.
#include "engine.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <random>

#include "folder.h"
#include "fs_sim.h"
#include "fs_threads.h"
#include "fs_uring.h"
#include "state.h"
#include "test.h"

using namespace statehold;
using statehold::test::empty_all;
using statehold::test::fill_all;
using statehold::test::Folder;
using statehold::test::kMemory;
using statehold::test::skip;
using statehold::test::State;

namespace {

constexpr uint64_t kBlockBytes = 16 << 10;
constexpr uint64_t kBufferBytes = 64 << 10;
constexpr uint64_t kBufferCount = 4;

std::vector<uint64_t> save(Engine& engine, Fs& fs, const std::string& path, State& state) {
  const auto job = engine.write(state.write_request(kBlockBytes));
  job->attach(must(fs.open_write(path, state.bytes(), false)));
  fill_all(engine, *job, state);
  EXPECT(job->wait_eager(std::nullopt));
  EXPECT(job->wait_written(std::nullopt));
  job->finish();
  return job->checksums();
}

void restore(Engine& engine, const std::string& path, const std::vector<uint64_t>& sums,
             State& state) {
  const auto job = engine.read(state.read_request(path, sums, kBlockBytes));
  empty_all(engine, *job, state);
  EXPECT(job->wait_done(std::nullopt));
}

// One trainer: saves, damages its memory, restores, compares.
void round_trips(Engine& engine, Fs& fs, const std::string& folder, uint64_t seed, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    State state(seed * 1000 + static_cast<uint64_t>(round), round % 2 == 1);
    const auto original = state.arrays;
    const std::string path = folder + "/" + std::to_string(seed) + "-" + std::to_string(round);
    const std::vector<uint64_t> sums = save(engine, fs, path, state);
    for (auto& array : state.arrays) std::ranges::fill(array, std::byte{0xee});
    restore(engine, path, sums, state);
    EXPECT(state.arrays == original);
    must(fs.unlink(path));
  }
}

// One trainer that saves a state again: unchanged, and then changed at random places. The second
// file is opened where the bytes are not the expected ones, and only there.
void comparisons(Engine& engine, Fs& fs, const std::string& folder, uint64_t seed, int rounds) {
  std::mt19937_64 random(seed);
  for (int round = 0; round < rounds; ++round) {
    State state(seed * 1000 + static_cast<uint64_t>(round), round % 2 == 1);
    const std::string path = folder + "/" + std::to_string(seed) + "-" + std::to_string(round);
    const std::vector<uint64_t> sums = save(engine, fs, path, state);
    bool changed = false;
    for (auto& array : state.arrays) {
      if (round % 3 == 0 || array.empty() || random() % 2 == 0) continue;
      array[random() % array.size()] ^= std::byte{1};
      changed = true;
    }
    const auto original = state.arrays;
    WriteRequest request = state.write_request(kBlockBytes);
    request.expected = sums;
    const auto job = engine.write(std::move(request));
    std::thread filler([&] { guarded([&] { fill_all(engine, *job, state); }).ok(); });
    EXPECT(job->wait_compared(std::nullopt));
    EXPECT(job->refuted() == changed);
    if (changed) {
      job->attach(must(fs.open_write(path + "-2", state.bytes(), false)),
                  must(fs.open_read(path, false)));
    }
    EXPECT(job->wait_written(std::nullopt));
    filler.join();
    EXPECT(job->checksums() == state.checksums(kBlockBytes));
    if (changed) {
      job->finish();
      for (auto& array : state.arrays) std::ranges::fill(array, std::byte{0xee});
      restore(engine, path + "-2", job->checksums(), state);
      EXPECT(state.arrays == original);
      must(fs.unlink(path + "-2"));
    }
    must(fs.unlink(path));
  }
}

// Of every array, as one chunk: half of its elements in reverse order, all from the page cache.
void box_round_trips(Engine& engine, Fs& fs, const std::string& folder, uint64_t seed, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    State state(seed * 1000 + static_cast<uint64_t>(round), false);
    state.set_arrays(state.arrays);
    const auto original = state.arrays;
    const std::string path = folder + "/" + std::to_string(seed) + "-" + std::to_string(round);
    ReadRequest request = state.read_request(path, save(engine, fs, path, state), kBlockBytes);
    request.first_segment = static_cast<uint64_t>(round) % request.segments.size();
    for (size_t i = 0; i < state.arrays.size(); ++i) {
      auto& array = state.arrays[i];
      const auto bytes = static_cast<int64_t>(array.size());
      array.assign(array.size() / 2, std::byte{0xee});
      Segment& segment = request.segments[i + 1];
      segment.shared = round % 3 != 0;
      segment.place.address = array.data() + array.size() - 1;
      if (array.empty()) segment.place.address = nullptr;
      segment.place.strides.emplace(1, ChunkBox{{bytes}, {bytes / 4}, {bytes / 2}},
                                    std::vector<int64_t>{-1});
    }
    const auto job = engine.read(std::move(request));
    EXPECT(job->wait_done(std::nullopt));
    for (size_t i = 0; i < original.size(); ++i) {
      const auto low = original[i].begin() + static_cast<int64_t>(original[i].size() / 4);
      EXPECT(std::equal(state.arrays[i].rbegin(), state.arrays[i].rend(), low));
    }
    must(fs.unlink(path));
  }
}

// Into files that are memory: attached from the start, later or in the middle, and written again
// with the mapping they have.
void mapped_round_trips(Engine& engine, Fs& fs, const std::string& folder, uint64_t seed,
                        int rounds) {
  const std::string path = folder + "/mapped-" + std::to_string(seed);
  std::shared_ptr<File> file;
  for (int round = 0; round < rounds; ++round) {
    State state(seed * 1000 + static_cast<uint64_t>(round), round % 2 == 1);
    const auto original = state.arrays;
    file = must(fs.open_mapped(path, state.bytes(), round > 0, std::move(file)));
    WriteRequest request = state.write_request(kBlockBytes);
    if (round % 3 == 0) request.file = file;
    const auto job = engine.write(std::move(request));
    if (round % 3 == 1) job->wait_copied(std::chrono::steady_clock::now());
    if (round % 3 != 0) job->attach(file);
    fill_all(engine, *job, state);
    EXPECT(job->wait_written(std::nullopt));
    job->finish();
    for (auto& array : state.arrays) std::ranges::fill(array, std::byte{0xee});
    restore(engine, path, job->checksums(), state);
    EXPECT(state.arrays == original);
  }
}

// The file is unmapped at once, as far as this thread is concerned.
void mapped_cancellations(Engine& engine, Fs& fs, const std::string& folder, int rounds) {
  std::mt19937_64 random(8);
  for (int round = 0; round < rounds; ++round) {
    State state(random(), round % 2 == 1);
    const std::string path = folder + "/mapped-cancelled";
    WriteRequest request = state.write_request(kBlockBytes);
    request.file = must(fs.open_mapped(path, state.bytes(), round > 0, nullptr));
    const auto job = engine.write(std::move(request));
    job->wait_copied(std::chrono::steady_clock::now() + std::chrono::microseconds(random() % 500));
    job->cancel();
  }
}

// Starts jobs and cancels them at any moment; memory is freed right after.
void cancellations(Engine& engine, Fs& fs, const std::string& folder, int rounds) {
  std::mt19937_64 random(7);
  for (int round = 0; round < rounds; ++round) {
    State state(random(), false);
    const std::string path = folder + "/cancelled-" + std::to_string(round);
    const auto job = engine.write(state.write_request(kBlockBytes));
    if (random() % 2 == 0) job->attach(must(fs.open_write(path, state.bytes(), false)));
    const auto soon = std::chrono::steady_clock::now() + std::chrono::microseconds(random() % 500);
    job->wait_copied(soon);
    job->cancel();
  }
}

// A state of so many buffers, all of it one array.
State state_of(uint64_t buffers) {
  State state(1, false);
  state.header.clear();
  state.set_arrays({std::vector<std::byte>(buffers * kBufferBytes)});
  return state;
}

void run_together(std::vector<std::function<void()>> bodies) {
  std::vector<std::thread> threads;
  std::vector<Status> results(bodies.size());
  for (size_t i = 0; i < bodies.size(); ++i) {
    threads.emplace_back([&, i] { results[i] = guarded(bodies[i]); });
  }
  for (std::thread& thread : threads) thread.join();
  for (Status& result : results) must(std::move(result));
}

void stress(const std::shared_ptr<Fs>& fs, const std::string& folder, int rounds) {
  Engine engine(fs, {kBufferCount * kBufferBytes, kBufferBytes, 3});
  run_together({
      [&] { round_trips(engine, *fs, folder, 1, rounds); },
      [&] { round_trips(engine, *fs, folder, 2, rounds); },
      [&] { box_round_trips(engine, *fs, folder, 3, 2 * rounds); },
      [&] { cancellations(engine, *fs, folder, 20 * rounds); },
      [&] { comparisons(engine, *fs, folder, 4, 2 * rounds); },
  });
  engine.close();
}

std::shared_ptr<Fs> sim(const SimOptions& options) {
  auto fs = std::make_shared<SimFs>(options);
  must(fs->mkdir("run"));
  return fs;
}

Code code_of(const Failure& failure) { return failure.status.code; }

}  // namespace

TEST(stress_sim) {
  const auto fs = sim({.seed = 1, .short_io = 0.4});
  stress(fs, "run", 15);
  EXPECT(static_cast<SimFs&>(*fs).disk().fired()["short"] > 0);
}

TEST(stress_threads) {
  const Folder folder;
  stress(std::make_shared<ThreadsFs>(3, ""), folder.path, 15);
}

TEST(stress_uring) {
  const Folder folder;
  Result<std::shared_ptr<Fs>> fs = open_uring(3);
  if (!fs.ok()) {
    std::printf("skip  stress_uring: %s\n", uring_hint(fs.status.error).c_str());
    return;
  }
  stress(fs.value, folder.path, 15);
}

TEST(stress_mapped) {
  const Folder folder(kMemory);
  if (!folder.is_memory()) return skip("stress_mapped");
  const auto fs = std::make_shared<ThreadsFs>(3, "");
  Engine engine(fs, {kBufferCount * kBufferBytes, kBufferBytes, 3});
  run_together({
      [&] { mapped_round_trips(engine, *fs, folder.path, 1, 40); },
      [&] { mapped_round_trips(engine, *fs, folder.path, 2, 40); },
      [&] { round_trips(engine, *fs, folder.path, 3, 10); },
      [&] { mapped_cancellations(engine, *fs, folder.path, 200); },
  });
  engine.close();
}

TEST(close_ends_mapped_jobs) {
  const Folder folder(kMemory);
  if (!folder.is_memory()) return skip("close_ends_mapped_jobs");
  const auto fs = std::make_shared<ThreadsFs>(1, "");
  Engine engine(fs, {kBufferCount * kBufferBytes, kBufferBytes, 2});
  State state(1, true);
  state.set_arrays({std::vector<std::byte>(kBlockBytes)}, true);  // nobody fills it
  WriteRequest request = state.write_request(kBlockBytes);
  request.file = must(fs->open_mapped(folder.path + "/f", state.bytes(), false, nullptr));
  const auto job = engine.write(std::move(request));
  engine.close();
  EXPECT_THROWS(Failure, job->wait_written(std::nullopt));
}

TEST(a_mapped_file_has_the_size_of_the_job) {
  const Folder folder(kMemory);
  if (!folder.is_memory()) return skip("a_mapped_file_has_the_size_of_the_job");
  const auto fs = std::make_shared<ThreadsFs>(1, "");
  Engine engine(fs, {kBufferCount * kBufferBytes, kBufferBytes, 2});
  State state(2, false);
  const std::string path = folder.path + "/f";
  const auto other = must(fs->open_mapped(path, state.bytes() + 1, false, nullptr));
  const auto job = engine.write(state.write_request(kBlockBytes));
  EXPECT_THROWS(Failure, job->attach(other));
  const auto file = must(fs->open_mapped(path, state.bytes(), true, nullptr));
  job->attach(file);
  EXPECT(job->wait_written(std::nullopt));
  must(file->truncate(state.bytes() - 1));
  EXPECT_THROWS(Failure, job->finish());
}

// With more blocks than there are buffers: nothing waits for a file until one block has changed.
TEST(what_is_as_expected_takes_no_buffer_for_long) {
  const auto fs = sim({.seed = 7});
  Engine engine(fs, {kBufferCount * kBufferBytes, kBufferBytes, 2});
  State state = state_of(5 * kBufferCount);
  const std::vector<uint64_t> sums = save(engine, *fs, "run/a", state);
  for (const uint64_t place : {uint64_t{0}, state.bytes() / 2, state.bytes() - 1}) {
    WriteRequest same = state.write_request(kBlockBytes);
    same.expected = sums;
    const auto unchanged = engine.write(std::move(same));
    EXPECT(unchanged->wait_written(std::nullopt));
    EXPECT(!unchanged->refuted());
    state.arrays[0][place] ^= std::byte{1};
    WriteRequest other = state.write_request(kBlockBytes);
    other.expected = sums;
    const auto changed = engine.write(std::move(other));
    EXPECT(changed->wait_compared(std::nullopt));
    EXPECT(changed->refuted());
    changed->attach(must(fs->open_write("run/b", state.bytes(), false)),
                    must(fs->open_read("run/a", false)));
    EXPECT(changed->wait_written(std::nullopt));
    changed->finish();
    EXPECT(must(fs->read_file("run/b", state.bytes())) == state.image());
    must(fs->unlink("run/b"));
    state.arrays[0][place] ^= std::byte{1};
  }
}

// The bytes that were as expected come from a file that has others by now.
TEST(damage_in_the_file_before_is_found) {
  const auto fs = sim({.seed = 8});
  // One thread: the first block is compared before the last one. A block that is compared after a
  // difference was found is written from memory, and needs no file.
  Engine engine(fs, {kBufferCount * kBufferBytes, kBufferBytes, 1});
  State state = state_of(2 * kBufferCount);
  WriteRequest request = state.write_request(kBlockBytes);
  request.expected = save(engine, *fs, "run/a", state);
  must(static_cast<SimFs&>(*fs).disk().corrupt("run/a", 5, 1));
  state.arrays[0].back() ^= std::byte{1};
  const auto job = engine.write(std::move(request));
  EXPECT(job->wait_compared(std::nullopt));
  job->attach(must(fs->open_write("run/b", state.bytes(), false)),
              must(fs->open_read("run/a", false)));
  try {
    job->wait_written(std::nullopt);
    EXPECT(false);
  } catch (const Failure& failure) {
    EXPECT(code_of(failure) == Code::mismatch);
    EXPECT(failure.status.path == "run/a");
  }
}

TEST(failures_stay_in_their_job) {
  const auto fs = sim({.seed = 3, .eio = 0.02});
  Engine engine(fs, {kBufferCount * kBufferBytes, kBufferBytes, 2});
  int failed = 0;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    State state(seed, false);
    const std::string path = "run/" + std::to_string(seed);
    try {
      restore(engine, path, save(engine, *fs, path, state), state);
    } catch (const Failure& failure) {
      EXPECT(code_of(failure) == Code::io);
      ++failed;
    }
  }
  EXPECT(failed > 0);
  EXPECT(failed < 60);
}

TEST(close_ends_everything) {
  for (int round = 0; round < 20; ++round) {
    const auto fs = sim({.seed = 4});
    auto engine =
        std::make_unique<Engine>(fs, EngineOptions{kBufferCount * kBufferBytes, kBufferBytes, 2});
    State state(static_cast<uint64_t>(round), true);
    const auto job = engine->write(state.write_request(kBlockBytes));
    const auto other = engine->write(state.write_request(kBlockBytes));
    other->attach(must(fs->open_write("run/x", state.bytes(), false)));
    if (round % 2 == 0) engine->close();
    engine.reset();
    if (state.arrays.empty()) continue;
    EXPECT_THROWS(Failure, job->wait_written(std::nullopt));
  }
}

namespace {

uint64_t populated(Engine& engine) {
  const Lock lock(engine.shared()->mutex());
  return engine.shared()->pool.free_count() + engine.shared()->pool.lent_count();
}

}  // namespace

TEST(small_jobs_fault_little_in) {
  const auto fs = sim({.seed = 5});
  Engine engine(fs, {16 * kBufferBytes, kBufferBytes, 2});
  EXPECT(populated(engine) == 0);
  State small = state_of(1);
  for (int round = 0; round < 50; ++round) {
    save(engine, *fs, "run/small-" + std::to_string(round), small);
    EXPECT(populated(engine) == 1);
  }
}

namespace {

bool is_resident(const std::byte* page) {
  unsigned char resident = 0;
  EXPECT(::mincore(const_cast<std::byte*>(page), kPageBytes, &resident) == 0);
  return (resident & 1) != 0;
}

}  // namespace

TEST(close_gives_the_pages_of_the_staging_memory_back_unless_a_buffer_is_lent) {
  for (const bool is_lent : {false, true}) {
    const auto fs = sim({.seed = 5});
    Engine engine(fs, {4 * kBufferBytes, kBufferBytes, 2});
    const std::shared_ptr<StagingMemory> memory = engine.memory();
    State state = state_of(4);
    save(engine, *fs, "run/large", state);
    EXPECT(is_resident(memory->buffer(0)));
    if (is_lent) {
      const Lock lock(engine.shared()->mutex());
      EXPECT(engine.shared()->pool.acquire_nowait().has_value());
    }
    engine.close();
    EXPECT(is_resident(memory->buffer(0)) == is_lent);
  }
}

// What a job wanted is there for the next one, also where this one did with less.
TEST(large_jobs_have_their_buffers_next_time) {
  const auto fs = sim({.seed = 6});
  Engine engine(fs, {16 * kBufferBytes, kBufferBytes, 2});
  State large = state_of(9);
  save(engine, *fs, "run/large", large);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (populated(engine) < 9 && std::chrono::steady_clock::now() < end) {
    std::this_thread::yield();
  }
  EXPECT(populated(engine) == 9);
}

// More than one piece of advice covers.
TEST(read_ahead_fills_the_page_cache) {
  const Folder folder;
  const std::string path = folder.path + "/file";
  const auto fs = std::make_shared<ThreadsFs>(1, "");
  const std::string data(9 << 20, 'x');
  must(fs->write_file(path, data));
  const int descriptor = ::open(path.c_str(), O_RDONLY);
  EXPECT(::posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED) == 0);
  ::close(descriptor);
  const auto file = must(fs->open_read(path, false));
  if (file->cached(kPageBytes, data.size() - kPageBytes)) return;  // never out of memory here
  file->read_ahead(kPageBytes, data.size() - kPageBytes);
  const bool ahead = file->cached(kPageBytes, data.size() - kPageBytes);
  std::string copy(data.size(), ' ');
  must(file->read(reinterpret_cast<std::byte*>(copy.data()), copy.size(), 0));
  if (!file->cached(0, data.size())) return;  // the kernel does not tell
  EXPECT(ahead);
  EXPECT(copy == data);
}

// A job without work, whose files take as long to close as every worker takes to look for work.
class Closing final : public Job {
 public:
  explicit Closing(Engine& engine) : Job(engine.shared(), 0, kBlockBytes), engine_(engine) {}

  bool take(Priority, Work&) override {
    ++asked;
    return false;
  }
  void run(const Work&) override {}

  std::atomic<int> asked = 0;
  std::atomic<int> asked_too_late = 0;

 private:
  bool complete() const override { return true; }
  void drop_queued() override {}
  uint64_t buffers_left() const override { return 0; }
  uint64_t buffers_wanted() const override { return 0; }
  void drop_files() override {
    asked = 0;
    engine_.settle();
    asked_too_late = asked.load();
  }
  void transferred(uint64_t, Status) override {}
  BlockState& block_state(uint64_t) override { return block_; }

  Engine& engine_;
  BlockState block_;
};

// Its files are gone by then, and what it would offer is in none of them.
TEST(a_job_that_is_over_is_not_asked_for_work) {
  Engine engine(std::make_shared<SimFs>(SimOptions{}),
                {kBufferCount * kBufferBytes, kBufferBytes, 3});
  const auto job = std::make_shared<Closing>(engine);
  Lock lock(engine.shared()->mutex());
  engine.shared()->jobs.push_back(job);
  engine.shared()->drop_retired(lock);
  EXPECT(job->asked_too_late == 0);
  EXPECT(engine.shared()->jobs.empty());
}

TEST(all_buffers_are_there_before_the_first_job_of_a_test) {
  Engine engine(std::make_shared<SimFs>(SimOptions{}), {9 * kBufferBytes, kBufferBytes, 1});
  engine.settle();
  EXPECT(populated(engine) == 0);
  engine.settle(true);
  EXPECT(populated(engine) == 9);
}

// All that the disk waits for is known once the engine has settled: each time the same.
TEST(a_held_disk_moves_only_when_it_is_told_to) {
  std::vector<std::string> before;
  for (int round = 0; round < 50; ++round) {
    SimOptions options;
    options.seed = 1;
    const auto fs = std::make_shared<SimFs>(options);
    fs->hold();
    Engine engine(fs, {kBufferCount * kBufferBytes, kBufferBytes, 1});
    State state(1, false);
    const auto job = engine.write(state.write_request(kBlockBytes));
    engine.settle();
    EXPECT(fs->waiting().empty());
    job->attach(must(fs->open_write("/x", state.bytes(), false)));
    std::vector<std::string> transfers;
    for (engine.settle(); !fs->waiting().empty(); engine.settle()) {
      EXPECT(!job->wait_written(std::chrono::steady_clock::now()));
      const std::vector<std::string> waiting = fs->waiting();
      transfers.insert(transfers.end(), waiting.begin(), waiting.end());
      fs->complete(waiting.size() - 1);
    }
    EXPECT(job->wait_written(std::chrono::steady_clock::now()));
    EXPECT(!transfers.empty());
    EXPECT(round == 0 || transfers == before);
    before = transfers;
    EXPECT_THROWS(std::out_of_range, fs->complete(0));
  }
}

TEST_MAIN
