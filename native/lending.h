// lending: which job may take a staging buffer. The one rule that keeps every mix of jobs going.
//
// Rule: a job gets a buffer only if this leaves every older job that may still need buffers its
// reserve: jobs younger than it hold at most `count - reserve(count, what it may need)` buffers.
//
// A buffer comes back by itself when a worker is done with it, when its transfer completes, or when
// Python gives it back. Three things keep it longer, and only Python ends them: a copied block
// waits until its job has a file (WriteJob::attach), and a block that Python has to fill or empty
// waits until Python asks for it (next_fill, next_ready). What callers promise: each of the three
// comes for a job at the latest when all jobs that were started before it have ended, whatever
// younger jobs do; and who holds buffers (Fill, Ready) gives them back without waiting for another
// one.
//
// Why every job then ends, however few buffers there are. Take the oldest job that has not ended.
// - Nothing that it waits for in Python depends on a job that has not ended, so its own buffers
//   come back, and so do the last ones of jobs that have ended.
// - If it needs a buffer, the younger jobs together hold at most count - 1: the rule held for each
//   of them when it took one, and what a job may need never grows. So at least one buffer is free,
//   still to be faulted in, or one of those that come back.
// - No job is older, so the rule never refuses it. The younger ones cannot take that buffer.
// It gets its buffers one after the other, and ends; then the next one is the oldest.
//
// The reserve is a quarter of all buffers, not one, so that an older job does not crawl when a
// younger one fills all it may.
#pragma once

#include <algorithm>
#include <cstdint>

namespace statehold {

constexpr uint64_t buffers_reserved(uint64_t count, uint64_t may_need) {
  return std::min(may_need, std::max<uint64_t>(1, count / 4));
}

// Whether a job may take one more, as far as one older job is concerned. `held_by_younger`: what
// all jobs younger than that one hold now.
constexpr bool leaves_reserve(uint64_t count, uint64_t may_need, uint64_t held_by_younger) {
  return held_by_younger + 1 + buffers_reserved(count, may_need) <= count;
}

}  // namespace statehold
