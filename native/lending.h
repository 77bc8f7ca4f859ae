// lending: which job may take a staging buffer. The two rules that keep every mix of jobs going.
//
// Jobs belong to clients (clients.h). Each client has at least one buffer reserved; what nobody has
// reserved is common.
//
// Rule 1, inside a client: a job gets a buffer only if this leaves every older job of the client
// that may still need buffers its part: the younger ones then hold at most `limit - part`. The
// limit is what the client may hold at most: all buffers less what the other clients have reserved.
//
// Rule 2, between clients: a job gets a buffer only if the claims of all clients then are at most
// `count`. The claim of a client is the largest of
// - what it has reserved,
// - what its jobs hold,
// - what the jobs younger than its oldest needy job hold, and one more. (Needy: it may still need
//   buffers.)
//
// A buffer comes back by itself when a worker is done with it, when its transfer completes, or when
// Python gives it back. Three things keep it longer, and only Python ends them: a copied block
// waits until its job has a file (WriteJob::attach), and a block that Python has to fill or empty
// waits until Python asks for it (next_fill, next_ready). What callers promise: each of the three
// comes for a job at the latest when all jobs of its client that were started before it have
// ended, whatever other jobs do; and who holds buffers (Fill, Ready) gives them back without
// waiting for another one. A limit (path_limits.h) delays a transfer, and does not stop it. Nor
// does a path that has three quarters of a client's buffers under way (disk_queue.h): one of these
// ends, and then the next one starts.
//
// Why every job of every client then ends, whatever the other clients do. The claims are at most
// `count` at any time: only taking a buffer raises a claim, and rule 2 checks it there. A new job
// is the youngest, so it makes a claim of at most one, which is reserved; and what a job may need
// never grows: one that compares (write_job.h) counts what it may copy or read again. Now take the
// oldest job of a client that has not ended.
// - Nothing that it waits for in Python depends on a job that has not ended, so its own buffers
//   come back.
// - If it is needy and holds no buffer, its client's claim has room for one: the younger jobs hold
//   at least one less than the claim, and nobody is older. So rule 2 does not refuse it, and rule
//   1 refuses nobody who is the oldest.
// - There is a buffer to take. All clients hold at most what they claim, and this one holds less
//   than it claims. So one is free, still to be faulted in, or its holder has ended and it comes
//   back.
// It gets its buffers one after the other, and ends; then the next one is the oldest.
//
// The part of an older job is a quarter of the limit, not one, so that it does not crawl when a
// younger one fills all it may.
#pragma once

#include <algorithm>
#include <cstdint>

namespace statehold {

constexpr uint64_t part_of_older(uint64_t limit, uint64_t may_need) {
  return std::min(may_need, std::max<uint64_t>(1, limit / 4));
}

// Rule 1 for one older job. `held_by_younger`: what all jobs of the client that are younger than
// that one hold now.
constexpr bool leaves_older_its_part(uint64_t limit, uint64_t may_need, uint64_t held_by_younger) {
  return held_by_younger + 1 + part_of_older(limit, may_need) <= limit;
}

// What the jobs of one client hold and need now, oldest job first.
class Holdings {
 public:
  void add(uint64_t held, uint64_t may_need) {
    held_ += held;
    if (is_needy_) held_by_younger_ += held;
    is_needy_ = is_needy_ || may_need > 0;
  }

  uint64_t held() const { return held_; }
  uint64_t claim(uint64_t reserved) const {
    return std::max({reserved, held_, is_needy_ ? held_by_younger_ + 1 : 0});
  }
  // The same once one of its jobs has taken one more. `is_oldest_needy`: that job is it.
  uint64_t claim_with_one_more(uint64_t reserved, bool is_oldest_needy) const {
    const uint64_t by_younger = held_by_younger_ + (is_oldest_needy ? 0 : 1);
    return std::max({reserved, held_ + 1, is_needy_ ? by_younger + 1 : 0});
  }

 private:
  uint64_t held_ = 0;
  uint64_t held_by_younger_ = 0;  // than the oldest needy job
  bool is_needy_ = false;
};

}  // namespace statehold
