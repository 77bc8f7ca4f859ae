// Five clients at once on one engine and one simulated disk: a save, a restore, a promotion through
// Python, offload reads and offload writes. Each gets its share of the disk and of the processors,
// and none waits longer than the others' shares take.
//
// The disk is slow: it does one transfer at a time, and the next one only when every client has
// one waiting. So who is served is the engine's choice alone, and not a matter of timing.
//
//   STATEHOLD_SHARINGS=50   how many seeds (default 5)
#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <numeric>
#include <span>
#include <thread>

#include "fs_sim.h"
#include "state.h"
#include "test.h"

using namespace statehold;
using namespace statehold::test;

namespace {

constexpr uint64_t kBufferBytes = 16 << 10;
constexpr uint64_t kBlocks = 240;  // of each client: nobody runs out while shares are counted
constexpr int kCounted = 200;
constexpr uint32_t kClients = 5;

uint64_t number_from_env(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// Holds transfers back until the test lets one or all of them through. The client is the file's
// name.
class SlowDisk final : public SimFs {
 public:
  using SimFs::SimFs;

  uint64_t depth() const override { return 1; }

  void submit(IoRequest request) override {
    {
      const std::lock_guard lock(mutex_);
      if (!is_open_) {
        waiting_ = std::move(request);
        arrived_.notify_all();
        return;
      }
    }
    SimFs::submit(std::move(request));
  }

  // The client whose transfer it was.
  uint32_t let_one_through() {
    std::unique_lock lock(mutex_);
    arrived_.wait(lock, [this] { return waiting_.has_value(); });
    IoRequest request = *std::exchange(waiting_, std::nullopt);
    lock.unlock();
    const auto client = static_cast<uint32_t>(request.file->path().back() - '0');
    SimFs::submit(std::move(request));
    return client;
  }

  void open() {
    std::optional<IoRequest> last;
    {
      const std::lock_guard lock(mutex_);
      is_open_ = true;
      last.swap(waiting_);
    }
    if (last) SimFs::submit(std::move(*last));
  }

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::optional<IoRequest> waiting_;
  bool is_open_ = false;
};

std::string path_of(uint32_t client) { return "run/" + std::to_string(client); }

State state_of_blocks(uint64_t seed) {
  State state(seed, false);
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(kBlocks * kBufferBytes - state.header.size());
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  state.set_arrays({std::move(bytes)});
  return state;
}

// Aligned memory of ranges, one for each buffer.
struct Ranges {
  std::vector<std::byte> memory = std::vector<std::byte>(kBlocks * kBufferBytes + kPageBytes);
  std::byte* data =
      memory.data() + (kPageBytes - reinterpret_cast<uintptr_t>(memory.data()) % kPageBytes);

  RangesRequest request(IoRequest::Kind kind, std::shared_ptr<File> file, uint32_t client) {
    RangesRequest made;
    made.kind = kind;
    made.files = {std::move(file)};
    made.client = client;
    for (uint64_t i = 0; i < kBlocks; ++i) {
      std::byte* at = data + i * kBufferBytes;
      made.ranges.push_back({0, i * kBufferBytes, kBufferBytes, at, xxh3_64(at, kBufferBytes)});
    }
    return made;
  }
};

// Weights in any order; every client has few buffers of its own, and there are few more.
struct Mix {
  std::vector<ClientOptions> clients;
  uint64_t weight_sum = 0;

  explicit Mix(uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<uint64_t> weights = {6, 4, 3, 2, 1};
    std::ranges::shuffle(weights, random);
    for (const uint64_t weight : weights) clients.push_back({2 + random() % 3, weight});
    weight_sum = std::accumulate(weights.begin(), weights.end(), uint64_t{0});
  }

  double share(uint32_t client) const {
    return static_cast<double>(clients[client].weight) / static_cast<double>(weight_sum);
  }
  EngineOptions options(uint64_t more_buffers) const {
    uint64_t buffers = more_buffers;
    for (const ClientOptions& each : clients) buffers += each.reserved_buffers;
    return {buffers * kBufferBytes, kBufferBytes, 2, clients};
  }
};

// False when it has not come true within a minute.
template <class Predicate>
bool wait_for(Lock& lock, Predicate predicate) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!predicate() && std::chrono::steady_clock::now() < deadline) {
    lock.unlock();
    std::this_thread::yield();
    lock.lock();
  }
  return predicate();
}

// Lets transfers through, each when all clients have one waiting; returns whose they were.
std::vector<uint32_t> serve(SlowDisk& disk, Shared& shared, int count) {
  std::vector<uint32_t> served;
  while (static_cast<int>(served.size()) < count) {
    Lock lock(shared.mutex());
    const auto all_wait = [&] {
      for (uint32_t client = 0; client < kClients; ++client) {
        if (shared.disk.waiting(client) == 0) return false;
      }
      return true;
    };
    EXPECT(wait_for(lock, all_wait));
    lock.unlock();
    served.push_back(disk.let_one_through());
  }
  return served;
}

void check_shares(const Mix& mix, const std::vector<uint32_t>& served) {
  for (uint32_t client = 0; client < kClients; ++client) {
    const auto count = static_cast<double>(std::ranges::count(served, client));
    const double got = count / static_cast<double>(served.size()) / mix.share(client);
    EXPECT(got > 0.9 && got < 1.1);
    // The longest that it waited, in transfers of others: what their shares are, and one each.
    double longest = 0;
    double waited = 0;
    for (const uint32_t each : served) {
      waited = each == client ? 0 : waited + 1;
      longest = std::max(longest, waited);
    }
    EXPECT(longest <= 1 / mix.share(client) + kClients);
  }
}

void run_mix(uint64_t seed) {
  const Mix mix(seed);
  const auto disk = std::make_shared<SlowDisk>(SimOptions{.seed = seed, .short_io = 0.2});
  must(disk->mkdir("run"));
  State saved = state_of_blocks(seed + 1), stored = state_of_blocks(seed + 2);
  State promoted = state_of_blocks(seed + 3);
  promoted.set_arrays(promoted.arrays, true);
  Ranges offloaded, updated;
  for (std::byte& b : offloaded.memory) b = static_cast<std::byte>(seed * 7 + 1);
  const std::vector<uint64_t> sums = stored.checksums(kPageBytes);
  must(disk->write_file(path_of(1), stored.image()));
  must(disk->write_file(path_of(3),
                        {reinterpret_cast<const char*>(offloaded.data), kBlocks * kBufferBytes}));

  Engine engine(disk, mix.options(seed % 8));
  const auto save = [&](State& state, uint32_t client) {
    WriteRequest request = state.write_request(kPageBytes);
    request.file = must(disk->open_write(path_of(client), state.bytes(), false));
    request.client = client;
    return engine.write(std::move(request));
  };
  const auto saving = save(saved, 0);
  State restored = stored;
  for (auto& array : restored.arrays) std::ranges::fill(array, std::byte{0});
  ReadRequest read = restored.read_request(path_of(1), sums, kPageBytes);
  read.client = 1;
  const auto restoring = engine.read(std::move(read));
  const auto promoting = save(promoted, 2);
  RangesRequest in =
      offloaded.request(IoRequest::Kind::read, must(disk->open_read(path_of(3), true)), 3);
  std::ranges::fill(offloaded.memory, std::byte{0});
  const auto reading = engine.ranges(std::move(in));
  const auto writing = engine.ranges(
      updated.request(IoRequest::Kind::write,
                      must(disk->open_write(path_of(4), kBlocks * kBufferBytes, false)), 4));
  std::thread python([&] { fill_all(engine, *promoting, promoted); });

  std::vector<uint32_t> served;
  const Status status = guarded([&] { served = serve(*disk, *engine.shared(), kCounted); });
  disk->open();
  python.join();
  must(status);
  saving->wait_written(std::nullopt);
  restoring->wait_done(std::nullopt);
  promoting->wait_written(std::nullopt);
  reading->wait_done(std::nullopt);
  writing->wait_done(std::nullopt);
  saving->finish();
  promoting->finish();
  check_shares(mix, served);
  EXPECT(must(disk->read_file(path_of(0), saved.bytes())) == saved.image());
  EXPECT(restored.arrays == stored.arrays);
  EXPECT(must(disk->read_file(path_of(2), promoted.bytes())) == promoted.image());
  EXPECT(std::ranges::all_of(std::span(offloaded.data, kBlocks * kBufferBytes), [&](std::byte b) {
    return b == static_cast<std::byte>(seed * 7 + 1);
  }));
  for (uint32_t client = 0; client < kClients; ++client) {
    const ClientStats stats = engine.stats_of(client);
    EXPECT(stats.buffers == 0);
    // The simulated disk has some of what is restored in its page cache.
    EXPECT(stats.read_bytes + stats.written_bytes >= (client == 1 ? 1 : kBlocks) * kBufferBytes);
  }
}

// -- processors -----------------------------------------------------------------------------------

// Work without end, at one priority.
class Busy final : public Job {
 public:
  Busy(std::shared_ptr<Shared> shared, uint32_t client, Priority priority,
       std::vector<uint32_t>& order)
      : Job(std::move(shared), client, kPageBytes), priority_(priority), order_(order) {}

  bool take(Priority priority, Work& work) override {
    if (failed() || priority != priority_) return false;
    work = {shared_from_this(), 0, 0};
    return true;
  }
  void run(const Work&) override {
    const Lock lock(shared_->mutex());
    if (order_.size() == kCounted) return fail(Status::closed("the test"));
    order_.push_back(client());
    charge(kBufferBytes);
  }
  void wait_over() {
    wait(std::nullopt, [] { return false; });
  }

 private:
  bool complete() const override { return false; }
  void drop_queued() override {}
  uint64_t buffers_left() const override { return 0; }
  uint64_t buffers_wanted() const override { return 0; }
  void drop_files() override {}
  void transferred(uint64_t, Status) override {}
  BlockState& block_state(uint64_t) override { return block_; }

  const Priority priority_;
  std::vector<uint32_t>& order_;  // of the clients served
  BlockState block_;
};

}  // namespace

TEST(five_clients_get_their_shares_of_the_disk) {
  const uint64_t count = number_from_env("STATEHOLD_SHARINGS", 5);
  for (uint64_t seed = 0; seed < count; ++seed) run_mix(seed);
}

// Whatever the priority of their work is: that counts inside a client only.
TEST(five_clients_get_their_shares_of_the_processors) {
  const Mix mix(1);
  EngineOptions options = mix.options(0);
  options.copy_threads = 1;  // so that the order is the engine's
  Engine engine(std::make_shared<SimFs>(SimOptions{}), options);
  std::vector<uint32_t> order;
  std::vector<std::shared_ptr<Busy>> jobs;
  constexpr std::array priorities = {Priority::finish, Priority::read, Priority::eager,
                                     Priority::fill, Priority::fill};
  {
    const Lock lock(engine.shared()->mutex());  // all of them start at once
    for (uint32_t client = 0; client < kClients; ++client) {
      jobs.push_back(std::make_shared<Busy>(engine.shared(), client, priorities[client], order));
      engine.shared()->jobs.push_back(jobs.back());
    }
    engine.shared()->runnable.notify_all();
  }
  for (const auto& job : jobs) EXPECT_THROWS(Failure, job->wait_over());
  check_shares(mix, order);
}

// A limit goes by the clock of the engine, and by nothing else.
TEST(a_limit_lets_through_what_the_clock_allows) {
  constexpr uint64_t second_ns = 1'000'000'000;
  const auto fs = std::make_shared<SimFs>(SimOptions{});
  must(fs->mkdir("run"));
  std::atomic<uint64_t> now_ns = second_ns;
  EngineOptions options{4 * kBufferBytes, kBufferBytes, 2};
  options.now_ns = [&] { return now_ns.load(); };
  Engine engine(fs, options);
  engine.set_limit(0, std::nullopt, 10 * kBufferBytes);
  Ranges ranges;
  const auto job = engine.ranges(ranges.request(
      IoRequest::Kind::write, must(fs->open_write(path_of(0), kBlocks * kBufferBytes, false)), 0));
  Shared& shared = *engine.shared();
  for (uint64_t blocks = 1; blocks <= 20; ++blocks) {
    Lock lock(shared.mutex());
    const uint64_t bytes = blocks * kBufferBytes;
    EXPECT(wait_for(lock, [&] { return shared.moved[0].written_bytes >= bytes; }));
    EXPECT(shared.moved[0].written_bytes == bytes);
    now_ns += second_ns / 10;
    shared.runnable.notify_all();
  }
  engine.set_limit(0, std::nullopt, 0);
  job->wait_done(std::nullopt);
}

TEST_MAIN
