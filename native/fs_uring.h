// fs_uring: the data plane through io_uring; the ring itself is ring.h.
//
// One ring. Submissions come from any thread under one mutex; one reaper thread takes completions,
// copies their results out before marking them seen, and calls back without the mutex. `depth`
// bounds the transfers in flight, the rest wait in a queue of our own. A short transfer is resumed
// in the slot it already has, so resuming never waits for depth.
// A transfer that the kernel does not take fails: after a quarter of a second where memory is short
// (EAGAIN, EBUSY), else at once, and so does every later one.
#pragma once

#include <memory>
#include <string>

#include "fs.h"

namespace statehold {

// Fails with the errno of ring creation where the kernel, a sysctl or seccomp refuses io_uring
// (ENOSYS when built without io_uring).
Result<std::shared_ptr<Fs>> open_uring(int depth);

// What to do about that errno, for a person.
std::string uring_hint(int error);

}  // namespace statehold
