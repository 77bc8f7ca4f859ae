// disk_queue: transfers of an engine that wait until they may start.
//
// At most `depth` transfers are under way, and on each path at most three quarters of the buffers
// that a client may have: a disk that serves many requests at once ends them at once, too, and then
// has nothing to do until their buffers are copied. Of those that wait, the next one is of the
// client whose turn it is (shares.h). A client's transfers start in the order in which they came,
// on each path for itself: one that its path's limit (path_limits.h) or those three quarters hold
// back does not hold back the others.
//
// Invariants: a transfer that was pushed leaves the queue once, by start() or by drop(). While
// fewer than `depth` are under way, only limits and buffers make a transfer wait.
// Not synchronised: the engine's mutex guards it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <list>
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
  bool buffered = false;  // from a buffer, or into one
  IoRequest request;
};

constexpr uint64_t buffers_under_way_max(uint64_t buffers) { return buffers - buffers / 4; }

class DiskQueue {
 public:
  static constexpr uint64_t kNever = std::numeric_limits<uint64_t>::max();

  struct Waiting {
    uint64_t number;
    Transfer transfer;
  };
  using Lane = std::list<Waiting>;  // of one client on one path; never empty

  explicit DiskQueue(const std::vector<ClientOptions>& clients)
      : shares_(clients),
        waiting_(clients.size()),
        buffers_max_(clients.size(), kNever),
        buffers_under_way_(clients.size()) {}

  void set_depth(uint64_t depth) { depth_ = depth; }
  // How many buffers the client may have.
  void set_buffers(uint32_t client, uint64_t buffers) {
    buffers_max_[client] = buffers_under_way_max(buffers);
  }
  PathLimits& limits() { return limits_; }

  // If it throws (bad_alloc), the transfer is not in the queue.
  void push(Transfer transfer) {
    Lane one;
    auto& lanes = waiting_[transfer.client];
    const uint32_t path = transfer.path;
    one.push_back({next_number_++, std::move(transfer)});
    Lane& lane = lanes[path];
    lane.splice(lane.end(), one);
  }

  // The next one, which is under way from now on until ended().
  std::optional<Transfer> start(uint64_t now_ns) {
    std::optional<Transfer> started;
    due_ns_ = kNever;
    if (under_way_ >= depth_) return started;
    shares_.next([&](uint32_t client) {
      auto& lanes = waiting_[client];
      const auto lane = first_allowed(client, now_ns);
      if (lane == lanes.end()) return false;
      started = std::move(lane->second.front().transfer);
      lane->second.pop_front();
      if (lane->second.empty()) lanes.erase(lane);
      shares_.charge(client, std::max(started->request.bytes, Shares::kLeastCharge));
      limits_.charge(started->path, client, started->request.bytes, now_ns);
      ++under_way_;
      if (started->buffered) ++buffers_under_way_[client][started->path];
      return true;
    });
    return started;
  }

  // When start() said no: the moment from which on only a limit that will have passed by then
  // would have made it say no.
  uint64_t due_ns() const { return due_ns_; }

  void ended(uint32_t client, uint32_t path, bool buffered) {
    CHECK(under_way_ > 0);
    --under_way_;
    if (!buffered) return;
    CHECK(buffers_under_way_[client][path] > 0);
    --buffers_under_way_[client][path];
  }

  // Takes the transfers of a job out; returns them. Needs no memory: a job is cancelled when there
  // is none, too.
  Lane drop(const Job& job) noexcept {
    Lane dropped;
    for (auto& lanes : waiting_) {
      for (auto& [path, lane] : lanes) {
        for (auto at = lane.begin(); at != lane.end();) {
          const auto each = at++;
          if (each->transfer.job.get() == &job) dropped.splice(dropped.end(), lane, each);
        }
      }
      std::erase_if(lanes, [](const auto& entry) { return entry.second.empty(); });
    }
    return dropped;
  }

  uint64_t paths(uint32_t client) const { return waiting_[client].size(); }

  uint64_t waiting(uint32_t client) const {
    uint64_t count = 0;
    for (const auto& [path, lane] : waiting_[client]) count += lane.size();
    return count;
  }

 private:
  using Lanes = std::map<uint32_t, Lane>;  // by path

  Lanes::iterator first_allowed(uint32_t client, uint64_t now_ns) {
    Lanes& lanes = waiting_[client];
    auto first = lanes.end();
    for (auto at = lanes.begin(); at != lanes.end(); ++at) {
      const uint64_t buffers = buffers_under_way_[client][at->first];
      if (at->second.front().transfer.buffered && buffers >= buffers_max_[client]) continue;
      const uint64_t allowed_ns = limits_.allowed_at_ns(at->first, client);
      if (allowed_ns > now_ns) {
        due_ns_ = std::min(due_ns_, allowed_ns);
      } else if (first == lanes.end() || at->second.front().number < first->second.front().number) {
        first = at;
      }
    }
    return first;
  }

  Shares shares_;
  PathLimits limits_;
  std::vector<Lanes> waiting_;                                   // by client
  std::vector<uint64_t> buffers_max_;                            // by client, on one path
  std::vector<std::map<uint32_t, uint64_t>> buffers_under_way_;  // by client and path
  uint64_t depth_ = 1;
  uint64_t under_way_ = 0;
  uint64_t next_number_ = 0;
  uint64_t due_ns_ = kNever;
};

}  // namespace statehold
