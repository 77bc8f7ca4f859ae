// Clients of an engine, each part by itself: whose turn it is, what a limit lets through, in which
// order transfers start, who may take a buffer.
#include "clients.h"

#include <map>
#include <random>

#include "disk_queue.h"
#include "fs_sim.h"
#include "job.h"
#include "lending.h"
#include "path_limits.h"
#include "shares.h"
#include "test.h"

using namespace statehold;

namespace {

constexpr uint64_t kSecondNs = 1'000'000'000;
constexpr uint64_t kNow = 1000 * kSecondNs;

std::vector<ClientOptions> weights(std::initializer_list<uint64_t> each) {
  std::vector<ClientOptions> clients;
  for (const uint64_t weight : each) clients.push_back({1, weight});
  return clients;
}

Transfer transfer(uint32_t client, uint64_t bytes, uint32_t path = 0, uint64_t block = 0) {
  Transfer made;
  made.client = client;
  made.path = path;
  made.block = block;
  made.request.bytes = bytes;
  return made;
}

// Starts and ends `count` transfers; returns the clients in that order.
std::vector<uint32_t> served(DiskQueue& queue, int count, uint64_t now_ns = kNow) {
  std::vector<uint32_t> clients;
  for (int i = 0; i < count; ++i) {
    const std::optional<Transfer> next = queue.start(now_ns);
    if (!next) break;
    clients.push_back(next->client);
    queue.ended(next->client, next->path, next->buffered);
  }
  return clients;
}

}  // namespace

// -- shares ---------------------------------------------------------------------------------------

TEST(clients_that_always_want_get_their_shares) {
  const std::vector<ClientOptions> clients = weights({8, 4, 2, 1, 1});
  Shares shares(clients);
  std::mt19937_64 random(1);
  std::vector<double> served(5);
  for (int turn = 1; turn <= 20'000; ++turn) {
    shares.next([&](uint32_t client) {
      const uint64_t bytes = 1 + random() % 100;
      served[client] += static_cast<double>(bytes);
      shares.charge(client, bytes);
      return true;
    });
    // The invariant of shares.h, at every moment.
    for (size_t a = 0; a < 5; ++a) {
      for (size_t b = 0; b < 5; ++b) {
        const auto [weight_a, weight_b] = std::pair(clients[a].weight, clients[b].weight);
        const double apart =
            served[a] / static_cast<double>(weight_a) - served[b] / static_cast<double>(weight_b);
        EXPECT(apart <= 100.0 / static_cast<double>(weight_a) + 1e-6);
      }
    }
  }
}

TEST(an_idle_client_saves_up_no_turns) {
  Shares shares(weights({1, 1}));
  const auto serve_first_only = [&](uint32_t client) {
    if (client == 1) return false;
    shares.charge(0, 100);
    return true;
  };
  for (int i = 0; i < 1000; ++i) EXPECT(shares.next(serve_first_only));
  std::map<uint32_t, int> turns;
  for (int i = 0; i < 10; ++i) {
    shares.next([&](uint32_t client) {
      ++turns[client];
      shares.charge(client, 100);
      return true;
    });
  }
  EXPECT(turns[0] >= 4 && turns[1] <= 6);
}

TEST(when_nobody_wants_nobody_is_served) {
  Shares shares(weights({1, 5}));
  EXPECT(!shares.next([](uint32_t) { return false; }));
}

// -- limits ---------------------------------------------------------------------------------------

// A transfer of a byte takes time, too: a flood of them holds nobody up for long.
TEST(small_transfers_do_not_starve_large_ones) {
  DiskQueue queue(weights({1, 1}));
  constexpr uint64_t kLarge = 1 << 20;
  for (int i = 0; i < 10'000; ++i) queue.push(transfer(0, 1));
  for (int i = 0; i < 2; ++i) queue.push(transfer(1, kLarge));
  const std::vector<uint32_t> clients = served(queue, 200);
  EXPECT(std::ranges::count(clients, 1U) == 2);
}

TEST(clocks_that_ran_for_years_still_count_small_charges) {
  Shares shares(weights({1, 1000}));
  shares.charge(0, uint64_t{1} << 50);
  shares.charge(1, uint64_t{1000} << 50);
  std::vector<int> turns(2);
  for (int i = 0; i < 10'000; ++i) {
    shares.next([&](uint32_t client) {
      ++turns[client];
      shares.charge(client, 4);
      return true;
    });
  }
  EXPECT(turns[0] >= 9);
}

TEST(a_queue_forgets_paths_that_nothing_waits_for) {
  DiskQueue queue(weights({1}));
  for (uint32_t path = 0; path < 1000; ++path) queue.push(transfer(0, 4096, path));
  EXPECT(served(queue, 1000).size() == 1000);
  EXPECT(queue.paths(0) == 0);
}

TEST(a_limit_that_takes_longer_than_time_lasts_is_a_limit) {
  PathLimits limits;
  limits.set(0, 0, 1, kNow);
  limits.charge(0, 0, uint64_t{1} << 40, kNow);
  EXPECT(limits.allowed_at_ns(0, 0) >= uint64_t{1} << 62);
  limits.set(1, 0, uint64_t{1} << 40, kNow);
  limits.charge(1, 0, uint64_t{1} << 43, kNow);
  limits.set(1, 0, 1, kNow);
  EXPECT(limits.allowed_at_ns(1, 0) >= uint64_t{1} << 62);
}

TEST(a_limit_lets_through_exactly_its_bytes) {
  PathLimits limits;
  limits.set(3, 0, 1000, kNow);
  EXPECT(limits.allowed_at_ns(3, 0) == kNow);
  limits.charge(3, 0, 500, kNow);
  EXPECT(limits.allowed_at_ns(3, 0) == kNow + kSecondNs / 2);
  limits.charge(3, 0, 1000, kNow + kSecondNs / 2);
  EXPECT(limits.allowed_at_ns(3, 0) == kNow + kSecondNs / 2 + kSecondNs);
  EXPECT(limits.allowed_at_ns(3, 1) == 0);  // another client
  EXPECT(limits.allowed_at_ns(2, 0) == 0);  // another path
}

TEST(a_limit_of_every_client_counts_them_together) {
  PathLimits limits;
  limits.set(0, kEveryClient, 1000, kNow);
  limits.charge(0, 4, 1000, kNow);
  EXPECT(limits.allowed_at_ns(0, 1) == kNow + kSecondNs);
  limits.set(0, 1, 100, kNow + kSecondNs);
  limits.charge(0, 1, 1000, kNow + kSecondNs);  // books both
  EXPECT(limits.allowed_at_ns(0, 1) == kNow + 11 * kSecondNs);
  EXPECT(limits.allowed_at_ns(0, 2) == kNow + 2 * kSecondNs);
}

TEST(lost_time_is_made_up_for_only_a_little) {
  PathLimits limits;
  limits.set(0, 0, 1000, kNow);
  const uint64_t late = kNow + 100 * kSecondNs;
  limits.charge(0, 0, 1000, late);
  EXPECT(limits.allowed_at_ns(0, 0) == late + kSecondNs - PathLimits::kCatchUpNs);
}

TEST(a_limit_that_changes_counts_what_is_booked_anew) {
  PathLimits limits;
  limits.set(0, 0, 1000, kNow);
  limits.charge(0, 0, 4000, kNow);
  limits.set(0, 0, 2000, kNow + 2 * kSecondNs);  // half has passed; the rest goes twice as fast
  EXPECT(limits.allowed_at_ns(0, 0) == kNow + 3 * kSecondNs);
  limits.set(0, 0, 0, kNow);
  EXPECT(limits.allowed_at_ns(0, 0) == 0);
}

// -- the queue of the disk ------------------------------------------------------------------------

TEST(transfers_start_by_weight) {
  DiskQueue queue(weights({3, 1}));
  for (int i = 0; i < 100; ++i) queue.push(transfer(i % 2 == 0 ? 0 : 1, 4096));
  const std::vector<uint32_t> first = served(queue, 40);
  EXPECT(std::ranges::count(first, 0U) == 30);
  EXPECT(served(queue, 100).size() == 60);  // all, once one client has no more
}

TEST(transfers_of_a_client_start_in_order) {
  DiskQueue queue(weights({1}));
  for (uint64_t i = 0; i < 10; ++i) queue.push(transfer(0, 100, i % 3, i));
  for (uint64_t i = 0; i < 10; ++i) {
    EXPECT(queue.start(kNow)->block == i);
    queue.ended(0, 0, false);
  }
}

TEST(no_more_than_the_depth_are_under_way) {
  DiskQueue queue(weights({1}));
  queue.set_depth(2);
  for (int i = 0; i < 3; ++i) queue.push(transfer(0, 100));
  EXPECT(queue.start(kNow) && queue.start(kNow));
  EXPECT(!queue.start(kNow));
  EXPECT(queue.due_ns() == DiskQueue::kNever);  // the end of one is what it waits for
  queue.ended(0, 0, false);
  EXPECT(queue.start(kNow));
}

// The others are being copied meanwhile. What has no buffer does not wait for one.
TEST(a_quarter_of_the_buffers_of_a_client_is_not_under_way_on_a_path) {
  DiskQueue queue(weights({1, 1}));
  queue.set_depth(64);
  queue.set_buffers(0, 8);
  const auto push = [&](uint32_t client, uint32_t path, bool buffered) {
    Transfer made = transfer(client, 100, path);
    made.buffered = buffered;
    queue.push(std::move(made));
  };
  const auto started = [&] {
    int count = 0;
    while (queue.start(kNow)) ++count;
    return count;
  };
  for (int i = 0; i < 8; ++i) push(0, 0, true);
  EXPECT(started() == 6);
  for (int i = 0; i < 8; ++i) push(0, 1, false);
  EXPECT(started() == 8);
  for (int i = 0; i < 8; ++i) push(0, 2, true);
  EXPECT(started() == 6);  // the path before holds back no other
  for (int i = 0; i < 8; ++i) push(1, 0, true);
  EXPECT(started() == 8);  // of another client
  queue.ended(0, 1, false);
  EXPECT(started() == 0);
  queue.ended(0, 2, true);
  EXPECT(started() == 1);
  EXPECT(queue.due_ns() == DiskQueue::kNever);
}

TEST(a_limited_path_holds_back_no_other) {
  DiskQueue queue(weights({1}));
  queue.limits().set(7, 0, 100, kNow);
  for (uint64_t i = 0; i < 3; ++i) queue.push(transfer(0, 100, 7, i));
  queue.push(transfer(0, 100, 8, 3));
  EXPECT(queue.start(kNow)->block == 0);
  queue.ended(0, 0, false);
  EXPECT(queue.start(kNow)->block == 3);
  queue.ended(0, 0, false);
  EXPECT(!queue.start(kNow));
  EXPECT(queue.due_ns() == kNow + kSecondNs);
  EXPECT(!queue.start(kNow + kSecondNs - 1));
  EXPECT(queue.start(kNow + kSecondNs)->block == 1);
  queue.ended(0, 0, false);
  EXPECT(!queue.start(kNow + kSecondNs));
  EXPECT(queue.due_ns() == kNow + 2 * kSecondNs);
}

// -- buffers --------------------------------------------------------------------------------------

// The rules of lending.h on jobs that are only numbers: however jobs of all clients come, take and
// give back, the claims fit, and the oldest job of each client gets a buffer when it has none.
TEST(the_oldest_job_of_every_client_gets_a_buffer) {
  struct Counted {
    uint32_t client;
    uint64_t held;
    uint64_t may_need;
  };
  for (uint64_t seed = 0; seed < 300; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<ClientOptions> clients(1 + random() % 5);
    uint64_t count = random() % 6;
    for (ClientOptions& each : clients) count += each.reserved_buffers = 1 + random() % 3;
    std::vector<Counted> jobs;  // oldest first
    const auto limit = [&](uint32_t client) {
      uint64_t max = count + clients[client].reserved_buffers;
      for (const ClientOptions& each : clients) max -= each.reserved_buffers;
      return max;
    };
    const auto lent = [&] {
      uint64_t sum = 0;
      for (const Counted& job : jobs) sum += job.held;
      return sum;
    };
    const auto may_take = [&](size_t index) {
      const Counted& job = jobs[index];
      for (size_t older = 0; older < index; ++older) {
        if (jobs[older].client != job.client) continue;
        uint64_t younger = 0;
        for (size_t i = older + 1; i < jobs.size(); ++i) {
          younger += jobs[i].client == job.client ? jobs[i].held : 0;
        }
        if (!leaves_older_its_part(limit(job.client), jobs[older].may_need, younger)) return false;
      }
      uint64_t claimed = 0;
      for (uint32_t client = 0; client < clients.size(); ++client) {
        Holdings holdings;
        bool is_oldest_needy = false;
        bool any_needy = false;
        for (size_t i = 0; i < jobs.size(); ++i) {
          if (jobs[i].client != client) continue;
          holdings.add(jobs[i].held, jobs[i].may_need);
          if (jobs[i].may_need > 0 && !std::exchange(any_needy, true)) is_oldest_needy = i == index;
        }
        const uint64_t reserved = clients[client].reserved_buffers;
        claimed += client == job.client ? holdings.claim_with_one_more(reserved, is_oldest_needy)
                                        : holdings.claim(reserved);
      }
      return claimed <= count;
    };
    for (int step = 0; step < 300; ++step) {
      if (jobs.size() < 8 && random() % 3 == 0) {
        jobs.push_back({static_cast<uint32_t>(random() % clients.size()), 0, 1 + random() % 20});
      }
      if (jobs.empty()) continue;
      const size_t index = random() % jobs.size();
      Counted& job = jobs[index];
      if (random() % 4 != 0) {
        if (job.may_need > 0 && lent() < count && may_take(index)) {
          ++job.held;
          --job.may_need;
        }
      } else if (job.held > 0) {
        --job.held;
      } else if (job.may_need == 0) {
        jobs.erase(jobs.begin() + static_cast<ptrdiff_t>(index));
      }
      for (uint32_t client = 0; client < clients.size(); ++client) {
        const auto oldest = std::ranges::find(jobs, client, &Counted::client);
        if (oldest == jobs.end() || oldest->held > 0 || oldest->may_need == 0) continue;
        EXPECT(lent() < count);
        EXPECT(may_take(static_cast<size_t>(oldest - jobs.begin())));
      }
    }
  }
}

TEST(tables_of_clients_that_cannot_be_served_are_refused) {
  EXPECT_THROWS(std::invalid_argument, check_clients({}, 4));
  EXPECT_THROWS(std::invalid_argument, check_clients({{0, 1}}, 4));
  EXPECT_THROWS(std::invalid_argument, check_clients({{1, 0}}, 4));
  EXPECT_THROWS(std::invalid_argument, check_clients({{3, 1}, {2, 1}}, 4));
  check_clients({{3, 1}, {1, 1}}, 4);
}

TEST_MAIN
