// path_limits: how fast clients may move bytes on paths. A path is a number that Python gives to a
// directory or a device.
//
// A limit holds for one client on one path, or for every client on it together. A transfer may
// start when each limit that holds for it allows it, and then books the time that its bytes take.
//
// Invariant: in any span of time, what starts under a limit is at most what the limit allows in
// that span and in kCatchUpNs more, and one transfer.
//
// What waits for a limit keeps its buffer: a client whose writes to one path are held back may have
// none left for another path. Give each path a client of its own if both need full speed.
//
// The time is the caller's, so that tests are exact. Not synchronised: the engine's mutex guards
// it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "clients.h"

namespace statehold {

class PathLimits {
 public:
  // How much of lost time may be made up for: a worker that looks late must not make a limit lower.
  static constexpr uint64_t kCatchUpNs = 50'000'000;

  // From now on; bytes_per_s of 0 lifts a limit.
  void set(uint32_t path, uint32_t client, uint64_t bytes_per_s, uint64_t now_ns) {
    const auto at = std::ranges::find_if(
        limits_, [&](const Limit& l) { return l.path == path && l.client == client; });
    if (at == limits_.end()) {
      if (bytes_per_s > 0) limits_.push_back({path, client, bytes_per_s, now_ns});
    } else if (bytes_per_s == 0) {
      limits_.erase(at);
    } else {
      // What was booked and has not passed yet takes another time now.
      const auto left_ns = static_cast<double>(std::max(at->free_at_ns, now_ns) - now_ns);
      const double slower = static_cast<double>(at->bytes_per_s) / static_cast<double>(bytes_per_s);
      at->bytes_per_s = bytes_per_s;
      at->free_at_ns = after(now_ns, left_ns * slower);
    }
  }

  // The moment from which a transfer may start.
  uint64_t allowed_at_ns(uint32_t path, uint32_t client) const {
    uint64_t at_ns = 0;
    for (const Limit& limit : limits_) {
      if (limit.holds(path, client)) at_ns = std::max(at_ns, limit.free_at_ns);
    }
    return at_ns;
  }

  void charge(uint32_t path, uint32_t client, uint64_t bytes, uint64_t now_ns) {
    for (Limit& limit : limits_) {
      if (!limit.holds(path, client)) continue;
      const uint64_t earliest_ns = now_ns > kCatchUpNs ? now_ns - kCatchUpNs : 0;
      const double takes_s = static_cast<double>(bytes) / static_cast<double>(limit.bytes_per_s);
      limit.free_at_ns = after(std::max(limit.free_at_ns, earliest_ns), takes_s * 1e9);
    }
  }

 private:
  // Centuries are enough: beyond them the sum would wrap.
  static uint64_t after(uint64_t at_ns, double takes_ns) {
    constexpr uint64_t kMost = uint64_t{1} << 62;
    const uint64_t takes =
        takes_ns < static_cast<double>(kMost) ? static_cast<uint64_t>(takes_ns) : kMost;
    return std::min(at_ns, kMost) + takes;
  }

  struct Limit {
    uint32_t path;
    uint32_t client;  // or kEveryClient
    uint64_t bytes_per_s;
    uint64_t free_at_ns;  // the bytes that were booked have passed by then

    bool holds(uint32_t on_path, uint32_t of_client) const {
      return path == on_path && (client == kEveryClient || client == of_client);
    }
  };

  std::vector<Limit> limits_;
};

}  // namespace statehold
