// shares: which client is served next, so that each gets its share.
//
// Every client has a clock, which a charge advances by bytes / weight. The client whose clock is
// behind all others is asked first. One that has nothing to serve is passed over, and its clock is
// set to that of the client that was served instead: nobody saves up turns while idle.
//
// Invariants, for clients that always have something to serve:
// - Their clocks differ by at most one charge / weight: a clock runs ahead only by the charge that
//   its client got when it was behind. So what two clients have been charged, each divided by its
//   weight, differs by at most the largest charge / weight, however long they run.
// - A client is served at the latest when every other clock has passed its own, so each of the
//   others gets at most its share and one more charge before it: nobody starves.
//
// The unit is a byte. A charge of nothing would be served for ever, so whoever charges adds the
// cost of a small thing (kLeastCharge).
//
// Not synchronised: the engine's mutex guards it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "clients.h"

namespace statehold {

class Shares {
 public:
  explicit Shares(const std::vector<ClientOptions>& clients) {
    for (uint32_t client = 0; client < clients.size(); ++client) {
      order_.push_back(client);
      clocks_.push_back({0, static_cast<double>(clients[client].weight)});
    }
  }

  // Asks the clients with `serve`, who is behind first, until one says that it was served.
  template <class Serve>
  bool next(Serve&& serve) {
    std::ranges::sort(order_, {}, [this](uint32_t c) { return std::pair(clocks_[c].time, c); });
    set_back();
    for (size_t i = 0; i < order_.size(); ++i) {
      const double now = clocks_[order_[i]].time;
      if (!serve(order_[i])) continue;
      for (size_t idle = 0; idle < i; ++idle) clocks_[order_[idle]].time = now;
      return true;
    }
    return false;
  }

  void charge(uint32_t client, uint64_t bytes) {
    clocks_[client].time += static_cast<double>(bytes) / clocks_[client].weight;
  }

  // What a transfer, or a piece of work, costs at least: it takes time however few its bytes are.
  static constexpr uint64_t kLeastCharge = 16 << 10;

 private:
  // Clocks that have grown large lose small charges.
  void set_back() {
    constexpr double kLarge = 1e12;
    const double least = clocks_[order_.front()].time;
    if (least < kLarge) return;
    for (Clock& clock : clocks_) clock.time -= least;
  }

  struct Clock {
    double time;  // bytes / weight
    double weight;
  };

  std::vector<Clock> clocks_;    // by client
  std::vector<uint32_t> order_;  // of clients
};

}  // namespace statehold
