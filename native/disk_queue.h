// disk_queue: transfers of an engine that wait until they may start.
//
// At most `depth` transfers are under way. Of those that wait, the next one is of the client whose
// turn it is (shares.h). A client's transfers start in the order in which they came, on each path
// for itself: one that its path's limit holds back (path_limits.h) does not hold back the others.
//
// Invariants: a transfer that was pushed leaves the queue once, by start() or by drop(). While
// fewer than `depth` are under way, only limits make a transfer wait.
// Not synchronised: the engine's mutex guards it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "check.h"
#include "clients.h"
#include "fs.h"
#include "path_limits.h"
#include "shares.h"

namespace statehold {

class Job;

struct Transfer {
  std::shared_ptr<Job> job;
  uint64_t block = 0;  // of the job
  uint32_t client = 0;
  uint32_t path = 0;
  IoRequest request;
};

class DiskQueue {
 public:
  static constexpr uint64_t kNever = std::numeric_limits<uint64_t>::max();

  explicit DiskQueue(const std::vector<ClientOptions>& clients)
      : shares_(clients), waiting_(clients.size()) {}

  void set_depth(uint64_t depth) { depth_ = depth; }
  PathLimits& limits() { return limits_; }

  // If it throws (bad_alloc), the transfer is not in the queue.
  void push(Transfer transfer) {
    const uint64_t number = next_number_++;
    waiting_[transfer.client][transfer.path].push_back({number, std::move(transfer)});
  }

  // The next one, which is under way from now on until ended().
  std::optional<Transfer> start(uint64_t now_ns) {
    std::optional<Transfer> started;
    due_ns_ = kNever;
    if (under_way_ >= depth_) return started;
    shares_.next([&](uint32_t client) {
      Lane* lane = first_allowed(client, now_ns);
      if (lane == nullptr) return false;
      started = std::move(lane->front().transfer);
      lane->pop_front();
      shares_.charge(client, started->request.bytes);
      limits_.charge(started->path, client, started->request.bytes, now_ns);
      ++under_way_;
      return true;
    });
    return started;
  }

  // When start() said no: the moment from which on only a limit that will have passed by then
  // would have made it say no.
  uint64_t due_ns() const { return due_ns_; }

  void ended() {
    CHECK(under_way_ > 0);
    --under_way_;
  }

  // Takes the transfers of a job out; returns them.
  std::vector<Transfer> drop(const Job& job) {
    std::vector<Transfer> dropped;
    for (auto& lanes : waiting_) {
      for (auto& [path, lane] : lanes) {
        for (Waiting& each : lane) {
          if (each.transfer.job.get() == &job) dropped.push_back(std::move(each.transfer));
        }
        std::erase_if(lane, [](const Waiting& each) { return each.transfer.job == nullptr; });
      }
    }
    return dropped;
  }

  uint64_t waiting(uint32_t client) const {
    uint64_t count = 0;
    for (const auto& [path, lane] : waiting_[client]) count += lane.size();
    return count;
  }

 private:
  struct Waiting {
    uint64_t number;
    Transfer transfer;
  };
  using Lane = std::deque<Waiting>;  // of one client on one path

  Lane* first_allowed(uint32_t client, uint64_t now_ns) {
    Lane* first = nullptr;
    for (auto& [path, lane] : waiting_[client]) {
      if (lane.empty()) continue;
      const uint64_t allowed_ns = limits_.allowed_at_ns(path, client);
      if (allowed_ns > now_ns) {
        due_ns_ = std::min(due_ns_, allowed_ns);
      } else if (first == nullptr || lane.front().number < first->front().number) {
        first = &lane;
      }
    }
    return first;
  }

  Shares shares_;
  PathLimits limits_;
  std::vector<std::map<uint32_t, Lane>> waiting_;  // by client, by path
  uint64_t depth_ = 1;
  uint64_t under_way_ = 0;
  uint64_t next_number_ = 0;
  uint64_t due_ns_ = kNever;
};

}  // namespace statehold
