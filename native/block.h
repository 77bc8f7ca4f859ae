// block: the states of a block of a job, of any kind, and which state may follow which.
//
// A block is what one buffer can hold. Its state says who has it, and only that one may move it on:
//
//   state     who has the block                           buffer
//   free      a queue: nothing has been done yet          no
//   working   a worker copies, hashes or looks at it      perhaps
//   cold      a queue: it waits for a buffer, or to be    no
//             left as it is
//   offered   a queue: it waits for Python                yes
//   lent      Python                                      yes
//   filled    a queue: Python has filled it               yes
//   copied    a queue: it waits for its file              yes
//   moving    the file system, or the queue of the disk   perhaps
//   loaded    a queue: its bytes are in the buffer        yes
//   done      nobody                                      no
//   dropped   nobody: its job has failed                  no
//
// Invariants: every change of a state goes through Job::move, which checks it against kFollows. A
// block that is done or dropped has given its buffer back, once, and never changes again.
#pragma once

#include <array>
#include <cstdint>

#include "buffers.h"

namespace statehold {

enum class Stage : uint8_t {
  free,
  working,
  cold,
  offered,
  lent,
  filled,
  copied,
  moving,
  loaded,
  done,
  dropped,
};

namespace stages {

template <class... Stages>
constexpr uint16_t set(Stages... stages) {
  return static_cast<uint16_t>((0 | ... | (1 << static_cast<int>(stages))));
}

// By the state that a block is in: the states that may follow.
inline constexpr std::array<uint16_t, 11> kFollows = {
    set(Stage::working, Stage::dropped),                            // free
    set(Stage::cold, Stage::offered, Stage::copied, Stage::moving,  // working
        Stage::done, Stage::dropped),                               //
    set(Stage::working, Stage::done, Stage::dropped),               // cold
    set(Stage::lent, Stage::dropped),                               // offered
    set(Stage::filled, Stage::done, Stage::dropped),                // lent
    set(Stage::working, Stage::dropped),                            // filled
    set(Stage::working, Stage::dropped),                            // copied
    set(Stage::loaded, Stage::done, Stage::dropped),                // moving
    set(Stage::working, Stage::dropped),                            // loaded
    0,                                                              // done
    0,                                                              // dropped
};

// In a queue of its job. When the job fails, these are dropped at once; whoever has one of the
// others drops it when giving it back.
inline constexpr uint16_t kQueued =
    set(Stage::free, Stage::cold, Stage::offered, Stage::filled, Stage::copied, Stage::loaded);

}  // namespace stages

constexpr bool follows(Stage from, Stage to) {
  return (stages::kFollows[static_cast<size_t>(from)] & stages::set(to)) != 0;
}
constexpr bool is_queued(Stage stage) { return (stages::kQueued & stages::set(stage)) != 0; }
constexpr bool is_over(Stage stage) { return stages::kFollows[static_cast<size_t>(stage)] == 0; }

// What every job knows of every block.
struct BlockState {
  Stage stage = Stage::free;
  Lease lease;  // generation 0: it has no buffer

  bool buffered() const { return lease.generation != 0; }
};

}  // namespace statehold
