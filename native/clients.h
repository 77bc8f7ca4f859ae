// clients: who uses an engine, in plain numbers. Python decides what a client stands for; a client
// is its index in the table that the engine was made with.
//
// Every client has at least one buffer of its own, so none can be starved of memory (lending.h).
// Processors and the disk are shared by weight where clients compete for them (shares.h), and all
// of them goes to the clients that are there where they do not.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

namespace statehold {

struct ClientOptions {
  uint64_t reserved_buffers = 1;
  uint64_t weight = 1;
};

// The number that `PathLimits` takes for all clients together.
inline constexpr uint32_t kEveryClient = UINT32_MAX;

// Of what a client has moved to and from storage. Files that are memory are moved by copying, so
// neither these counts nor limits and weights of the disk hold for them.
struct ClientStats {
  uint64_t buffers = 0;  // that it holds now
  uint64_t read_bytes = 0;
  uint64_t written_bytes = 0;
};

// Throws std::invalid_argument for a table that no engine of `buffer_count` buffers can serve.
inline void check_clients(const std::vector<ClientOptions>& clients, uint64_t buffer_count) {
  if (clients.empty()) throw std::invalid_argument("an engine needs at least one client");
  uint64_t left = buffer_count;
  for (const ClientOptions& client : clients) {
    if (client.weight == 0) throw std::invalid_argument("the weight of a client is at least 1");
    if (client.reserved_buffers == 0) {
      throw std::invalid_argument("a client needs at least one buffer of its own");
    }
    if (client.reserved_buffers > left) {
      throw std::invalid_argument("the clients reserve more buffers than the staging memory has");
    }
    left -= client.reserved_buffers;
  }
}

}  // namespace statehold
